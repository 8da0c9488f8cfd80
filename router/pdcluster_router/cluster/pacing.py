"""A node's cost model, completed by what is typical of the cluster. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.bounds import MAX_SECONDS
from pdcluster.cost.cost import CostError, DecodeCost, NodeCost, PrefillCost

# A node's own cost model, mixed with the cluster's typical one by how sure each is.
#
# Assumption: nodes differ by at most DIFFER in each coefficient, nine times of ten. What a node measured is as sure as
# its error bars (`pdcluster.cost.cost.CostError`). The estimate is the usual one from two normal estimates. So a node
# that ran three short prompts trusts its own fit for short prompts, and the cluster's for long ones.

Vector = NDArray[np.float64]

DIFFER = 0.5
# Mixed models in the cache. Each request reads them. They change only with a report or with the typical costs.
KEPT = 1024
TINY = 1e-6


@lru_cache(maxsize=KEPT)
def blended_prefill(own: PrefillCost, typical: PrefillCost) -> PrefillCost:
    if own == typical:
        return own
    fixed_s, token_s, pair_s = _blended(
        (own.fixed_s, own.token_s, own.pair_s),
        own.error,
        (typical.fixed_s, typical.token_s, typical.pair_s),
        typical.error,
    )
    return replace(own, fixed_s=fixed_s, token_s=token_s, pair_s=pair_s)


@lru_cache(maxsize=KEPT)
def blended_decode(own: DecodeCost, typical: DecodeCost) -> DecodeCost:
    if own == typical:
        return own
    fixed_s, row_s, context_s = _blended(
        (own.fixed_s, own.row_s, own.context_s),
        own.error,
        (typical.fixed_s, typical.row_s, typical.context_s),
        typical.error,
    )
    return replace(own, fixed_s=fixed_s, row_s=row_s, context_s=context_s)


def _blended(
    own: tuple[float, float, float], own_error: CostError, typical: tuple[float, float, float], typical_error: CostError
) -> tuple[float, float, float]:
    """The mixed coefficients; `typical` where valid numbers of a report cannot be combined."""
    mine, theirs = np.array(own), np.array(typical)
    try:
        with np.errstate(all="ignore"):
            found = _weighed(mine, _root(own_error), theirs, _root(typical_error))
    except np.linalg.LinAlgError:
        return typical
    if not (found <= MAX_SECONDS).all():
        return typical
    first, second, third = found.tolist()
    return first, second, third


def _weighed(mine: Vector, own_root: Vector, theirs: Vector, typical_root: Vector) -> Vector:
    largest = np.maximum(mine, theirs)
    errors = np.maximum(
        np.linalg.norm(own_root, axis=0), np.linalg.norm(typical_root, axis=0)
    )  # the scale where both coefficients are 0
    unit = np.maximum(np.where(largest > 0, largest, errors), np.finfo(float).tiny)
    differ = np.diag((DIFFER * theirs / unit) ** 2 + TINY) + _covariance(typical_root / unit)
    gain = np.linalg.solve(differ + _covariance(own_root / unit), differ).T
    found: Vector = np.maximum(theirs + unit * (gain @ ((mine - theirs) / unit)), 0.0)
    return found


def _root(error: CostError) -> Vector:
    a, b, c, d, e, f = error.root
    return np.array(((a, b, d), (0.0, c, e), (0.0, 0.0, f)))


def _covariance(root: Vector) -> Vector:
    covariance: Vector = root.T @ root
    return covariance


# Steps of a kind before a node's own fit may count as typical.
MIN_SAMPLES = 8

# Steps of a kind before a node's own fit is used alone, whatever is typical.
SURE_SAMPLES = 64

# The step by which nodes are compared. Nodes that differ there mostly differ alike in all steps.
USUAL_TOKENS, USUAL_ROWS = 1024, 8

Half = TypeVar("Half", PrefillCost, DecodeCost)


# Costs while no node of the cluster has measured its steps.
COLD = NodeCost(PrefillCost(0.0, 50e-6, 0.0, 0, 0), DecodeCost(0.0, 0.0, 0.0, 0))


def is_known(cost: NodeCost) -> bool:
    """Whether both halves were fitted to enough steps of the node itself."""
    if cost.prefill.samples >= SURE_SAMPLES and cost.decode.samples >= SURE_SAMPLES:
        return True  # as after a minute
    return _is_sure(cost.prefill) and _is_sure(cost.decode)


def completed(cost: NodeCost | None, typical: NodeCost | None) -> NodeCost | None:
    """`cost`, with the halves that the node ran too few steps of mixed with `typical`, or taken from it.

    None when such a half has no typical cost either.
    """
    if cost is None:
        return typical
    if is_known(cost) or typical is None:
        return cost if is_known(cost) else None
    prefill, decode = cost.prefill, cost.decode
    if not _is_sure(prefill):
        prefill = blended_prefill(prefill, typical.prefill) if _has_bars(prefill) else typical.prefill
    if not _is_sure(decode):
        decode = blended_decode(decode, typical.decode) if _has_bars(decode) else typical.decode
    return NodeCost(prefill, decode)


def _is_sure(half: PrefillCost | DecodeCost) -> bool:
    """Whether a half is used alone: after SURE_SAMPLES steps, or MIN_SAMPLES without error bars."""
    return half.samples >= (SURE_SAMPLES if _has_bars(half) else MIN_SAMPLES)


def _has_bars(half: PrefillCost | DecodeCost) -> bool:
    return half.samples > 0 and half.error.spread > 0.0


def typical_cost(costs: list[NodeCost]) -> NodeCost | None:
    """Typical costs, each half from a node that ran many such steps. None when no node ran enough of some half."""
    prefill = _middle([cost.prefill for cost in costs], lambda half: half.seconds(USUAL_TOKENS))
    decode = _middle([cost.decode for cost in costs], lambda half: half.seconds(USUAL_ROWS, USUAL_ROWS * USUAL_TOKENS))
    return NodeCost(prefill, decode) if prefill is not None and decode is not None else None


def _middle(halves: Sequence[Half], usual_s: Callable[[Half], float]) -> Half | None:
    """The median half by the time of a usual step, among those with most steps.

    The router cannot check a node's step count. So counts above SURE_SAMPLES weigh alike, and no single node decides
    where three have that many. Of two halves it is the slower one.
    """
    most = min(max((half.samples for half in halves), default=0), SURE_SAMPLES)
    if most < MIN_SAMPLES:
        return None
    sure = sorted((half for half in halves if half.samples >= most), key=usual_s)
    return sure[len(sure) // 2]
