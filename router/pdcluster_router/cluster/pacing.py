"""What a node's cost model and its load together say about the next seconds there. Values and arithmetic; `view` says
where they come from."""

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

# Half a cost model made of what a node measured itself and what is typical of its cluster, each by how sure it is.
# Arithmetic only.
#
# Nodes are taken to be within DIFFER of each other, nine times of ten, in each coefficient; what a node knows of its
# own is in its error bars
# (`cost.CostError`). The best guess by both is the usual one for two normal estimates. So a node that ran three short
# prompts believes its own
# measurement for short prompts, and the cluster's for long ones.

Vector = NDArray[np.float64]

DIFFER = 0.5
# Blends that are kept: they change with a node's report or with what is typical, and are asked for with every request.
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
    """`typical` where a node's report has numbers that cannot be weighed: each is allowed, but not beside the
    others."""
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
    )  # the size of what both found to be 0
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


# Steps of a kind before a node's own fit is taken for typical.
MIN_SAMPLES = 8

# Steps of a kind before it is believed alone, whatever is typical.
SURE_SAMPLES = 64

# Of a step by which nodes are compared; where they differ, they mostly differ in all steps alike.
USUAL_TOKENS, USUAL_ROWS = 1024, 8

Half = TypeVar("Half", PrefillCost, DecodeCost)


class NodeWork(msgspec.Struct, frozen=True, gc=False):
    """What is on a node: prompt work still to be computed, rows that decode or will, the KV that these attend to, the
    gap between their tokens lately (0: not known)."""

    prefill_tokens: int
    prefill_pairs: int
    rows: int
    context_tokens: int
    itl_s: float = 0.0


class NodePacing(msgspec.Struct, frozen=True):
    """backlog_s: seconds of prompt work, were it alone; stretch: how much longer prompts take because decode rows share
    their steps; tpot_s: between two tokens of a row while no prompt is computed; itl_s: between two tokens as it was
    lately, prompts and all, or tpot_s where that is longer; prompt_step_s: while prompts are computed beside the rows,
    a full chunk in each step, as far behind their beginnings as those that wait now, or, while none does, as prompts
    are that are as long as what rows attend to."""

    prefill: PrefillCost
    decode: DecodeCost
    rows: float
    context_tokens: float
    backlog_s: float
    stretch: float
    tpot_s: float
    itl_s: float
    prompt_step_s: float

    @property
    def wait_s(self) -> float:
        """Until a prompt that comes now is begun."""
        return self.backlog_s * self.stretch

    def row_s(self, context_tokens: float) -> float:
        """What one more row adds to every step."""
        return self.decode.row_s + self.decode.context_s * context_tokens

    def gap_s(self, new: float, cached: float) -> float:
        """The longest pause between tokens of running rows while `new` prompt tokens are computed."""
        chunk = min(new, self.prefill.chunk_tokens) if self.prefill.chunk_tokens else new
        return self.prefill.seconds(chunk, cached + new - chunk) + self.decode.added_s(self.rows, self.context_tokens)

    def paused_s(self, new: float, cached: float) -> float:
        """What each running row loses while `new` tokens of a prompt are computed."""
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
    """Tokens that a token of the prompts there attends to, on average."""
    if work.prefill_tokens > 0:
        return work.prefill_pairs / work.prefill_tokens
    return work.context_tokens / work.rows / 2 if work.rows > 0 else 0.0


def is_known(cost: NodeCost) -> bool:
    """Whether both halves were fitted to enough of the node's own steps."""
    if cost.prefill.samples >= SURE_SAMPLES and cost.decode.samples >= SURE_SAMPLES:
        return True  # as after a minute
    return _is_sure(cost.prefill) and _is_sure(cost.decode)


def completed(cost: NodeCost | None, typical: NodeCost | None) -> NodeCost | None:
    """`cost`, with what the node knows too little of itself taken from `typical`, by how sure both are; None when that
    is missing too."""
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
    """Without error bars that is told from the number of steps alone."""
    return half.samples >= (SURE_SAMPLES if _has_bars(half) else MIN_SAMPLES)


def _has_bars(half: PrefillCost | DecodeCost) -> bool:
    return half.samples > 0 and half.error.spread > 0.0


def typical_cost(costs: list[NodeCost]) -> NodeCost | None:
    """Each half from a node that ran many steps of it; None when there is a half that nobody ran often enough."""
    prefill = _middle([cost.prefill for cost in costs], lambda half: half.seconds(USUAL_TOKENS))
    decode = _middle([cost.decode for cost in costs], lambda half: half.seconds(USUAL_ROWS, USUAL_ROWS * USUAL_TOKENS))
    return NodeCost(prefill, decode) if prefill is not None and decode is not None else None


def _middle(halves: Sequence[Half], usual_s: Callable[[Half], float]) -> Half | None:
    """Of those that ran most steps, the one in the middle by what a usual step takes. How many a node ran is its own
    claim, which nobody can check: beyond what makes a fit sure more of them count for nothing, so that no single node
    says what is typical where three are sure. Of two it is the slower one."""
    most = min(max((half.samples for half in halves), default=0), SURE_SAMPLES)
    if most < MIN_SAMPLES:
        return None
    sure = sorted((half for half in halves if half.samples >= most), key=usual_s)
    return sure[len(sure) // 2]
