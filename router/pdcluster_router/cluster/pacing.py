"""What a node's cost model and load predict for its next seconds. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import msgspec
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


class NodeWork(msgspec.Struct, frozen=True, gc=False):
    """The work on a node."""

    # Prompt tokens still to be computed, and the (query, key) pairs that they need.
    prefill_tokens: int
    prefill_pairs: int
    # Rows that decode or will.
    rows: int
    # Tokens of KV that the rows attend to.
    context_tokens: int
    # The recent gap between tokens of a row; 0: unknown.
    itl_s: float = 0.0


class NodePacing(msgspec.Struct, frozen=True):
    """A node's predicted pace over its next seconds."""

    prefill: PrefillCost
    decode: DecodeCost
    rows: float
    context_tokens: float
    # Seconds of prompt work, if computed alone.
    backlog_s: float
    # Factor by which prompts take longer because decode rows share their steps.
    stretch: float
    # Between two tokens of a row while no prompt is computed.
    tpot_s: float
    # Between two tokens of a row lately, prompts included; tpot_s where that is longer.
    itl_s: float
    # A step with the rows and a full chunk of a prompt. The chunk is as deep in its prompt as the waiting ones are on
    # average. While none waits, prompts as long as the rows' contexts are assumed.
    prompt_step_s: float

    @property
    def wait_s(self) -> float:
        """Seconds until a new prompt begins."""
        return self.backlog_s * self.stretch

    def row_s(self, context_tokens: float) -> float:
        """Seconds that one more row adds to every step."""
        return self.decode.row_s + self.decode.context_s * context_tokens

    def gap_s(self, new: float, cached: float) -> float:
        """The longest gap between tokens of running rows while `new` prompt tokens are computed."""
        chunk = min(new, self.prefill.chunk_tokens) if self.prefill.chunk_tokens else new
        return self.prefill.seconds(chunk, cached + new - chunk) + self.decode.added_s(self.rows, self.context_tokens)

    def paused_s(self, new: float, cached: float) -> float:
        """Seconds that each running row loses while `new` tokens of a prompt are computed."""
        steps = max(new / self.prefill.chunk_tokens, 1.0) if self.prefill.chunk_tokens else 1.0
        return max(self.prefill.seconds(new, cached) - steps * self.decode.fixed_s, 0.0)


def pace(cost: NodeCost, work: NodeWork) -> NodePacing:
    prefill, decode = cost.prefill, cost.decode
    added_s = decode.added_s(work.rows, work.context_tokens)
    chunk = prefill.chunk_tokens
    depth = max(_depth(work), chunk / 2)
    step_s = prefill.work_s(chunk, chunk * depth)
    return NodePacing(
        prefill,
        decode,
        work.rows,
        work.context_tokens,
        backlog_s=prefill.work_s(work.prefill_tokens, work.prefill_pairs),
        stretch=1.0 + added_s / step_s if step_s > 0 else 1.0,
        tpot_s=decode.fixed_s + added_s,
        itl_s=max(work.itl_s if work.rows else 0.0, decode.fixed_s + added_s),
        prompt_step_s=max(step_s, decode.fixed_s) + added_s,
    )


def _depth(work: NodeWork) -> float:
    """Tokens that a token of the waiting prompts attends to, on average."""
    if work.prefill_tokens > 0:
        return work.prefill_pairs / work.prefill_tokens
    return work.context_tokens / work.rows / 2 if work.rows > 0 else 0.0


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
