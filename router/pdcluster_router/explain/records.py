"""Records of explanations, for people and for JSON, and the numbers they are made from. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from pdcluster.cost.cost import CostError
from pdcluster_router.core.generation import Done, Timeline

# Candidates kept per leg, the best first, and as many rejected ones.
MAX_CANDIDATES = 16


class CandidateRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One candidate.

    terms: add up to cost, in the policy's own measure.
    ttft_s: the estimate in seconds; None for a decode leg.
    rejected_by: the rule that removed it.
    ttft_error_s: error bar of ttft_s on usual work (9 of 10 are within); None: unknown.
    """

    node: str
    leg: str
    cached_tokens: int = 0
    cost: float = 0.0
    terms: dict[str, float] = {}
    ttft_s: float | None = None
    rejected_by: str = ""
    ttft_error_s: float | None = None


class ShadowRecord(msgspec.Struct, frozen=True):
    policy: str
    mode: str
    prefill: str | None
    decode: str
    agrees: bool


class DecisionRecord(msgspec.Struct, frozen=True):
    """One attempt's choice.

    at_s: since the request came.
    held_s: of these, in the hold queue.
    num_candidates: compared and rejected, kept or not.
    pull: the node that the first pull_tokens are fetched from.
    failed: why another attempt followed.
    """

    at_s: float
    held_s: float
    policy: str
    mode: str
    prefill: str | None
    decode: str
    num_tokens: int
    predicted_ttft_s: float | None
    predicted_tpot_s: float | None
    estimated_ttft_s: float
    num_candidates: int
    candidates: list[CandidateRecord]
    shadow: ShadowRecord | None = None
    pull: str | None = None
    pull_tokens: int = 0
    failed: str = ""


class Weighed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A candidate as numbers: the fields of its record, with terms but not their names."""

    node: str
    leg: str
    cached_tokens: int
    cost: float
    values: tuple[float, ...]
    ttft_s: float | None
    rejected_by: str
    spread: float | None = None
    doubt: float = 0.0

    def told(self, names: tuple[str, ...]) -> CandidateRecord:
        terms = dict(zip(names, self.values, strict=False))  # a rejected candidate has no terms
        error_s = (
            None
            if self.ttft_s is None or self.spread is None
            else self.ttft_s * CostError(self.spread, self.doubt).share
        )
        return CandidateRecord(
            self.node, self.leg, self.cached_tokens, self.cost, terms, self.ttft_s, self.rejected_by, error_s
        )


class Decided(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A decision as numbers.

    names: of the terms of each leg.
    """

    at_s: float
    held_s: float
    policy: str
    mode: str
    prefill: str | None
    decode: str
    num_tokens: int
    predicted_ttft_s: float | None
    predicted_tpot_s: float | None
    estimated_ttft_s: float
    num_candidates: int
    candidates: tuple[Weighed, ...]
    shadow: ShadowRecord | None
    pull: str | None
    pull_tokens: int
    names: dict[str, tuple[str, ...]]
    failed: str = ""

    def told(self) -> DecisionRecord:
        fields = {name: getattr(self, name) for name in DecisionRecord.__struct_fields__}
        fields["candidates"] = [each.told(self.names.get(each.leg, ())) for each in self.candidates]
        return DecisionRecord(**fields)


class HitTokens(msgspec.Struct, frozen=True):
    achieved: int
    reachable: int
    ideal: int


# The fields of HitTokens.
Hit = tuple[int, int, int]
NO_HIT: Hit = 0, 0, 0


class Hindsight(msgspec.Struct, frozen=True):
    """What is known once the first token came.

    ttft_s: since the decision.
    best: the candidate estimated fastest of all others; None without one.
    error_s: ttft_s minus the prediction.
    """

    ttft_s: float
    error_s: float
    regret_s: float
    best: str | None
    best_ttft_s: float | None
    hit: HitTokens | None


# The fields of Hindsight.
Judged = tuple[float, float, float, str | None, float | None, Hit | None]


class RequestOutcome(msgspec.Struct, frozen=True):
    """How a request ended well, as its client is told in `usage.pdcluster`."""

    finish: str
    mode: str
    prefill: str | None
    decode: str | None
    transfer: str
    attempts: int
    cached_tokens: int
    output_tokens: int
    timeline: Timeline


def outcome_of(done: Done, num_output: int) -> RequestOutcome:
    route = done.route
    return RequestOutcome(
        done.reason, route.mode, route.prefill, route.decode, route.backend, done.attempts, done.cached_tokens,
        num_output, done.timeline,
    )  # fmt: skip


class Explanation(msgspec.Struct, omit_defaults=True):
    """One request.

    client_id: the client's name for it.
    arrived: Unix seconds.
    error, why: the error that it ended with.
    considered: what would have been done with a waiting request when it was last scored.
    hindsight: of the decision that brought the first token.
    trace: id of its trace; "" where it has none.
    """

    request: str
    arrived: float
    tenant: str = ""
    priority: int = 0
    decisions: list[DecisionRecord] = []
    ttft_s: float | None = None
    attempts: int = 0
    error: str | None = None
    hindsight: Hindsight | None = None
    client_id: str = ""
    considered: DecisionRecord | None = None
    why: str = ""
    outcome: RequestOutcome | None = None
    trace: str = ""


class Noted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request as numbers: the fields of its explanation."""

    request: str
    arrived: float
    tenant: str
    priority: int
    decisions: tuple[Decided, ...]
    ttft_s: float | None
    attempts: int
    error: str | None
    hindsight: Judged | None
    client_id: str
    considered: Decided | None
    why: str
    outcome: RequestOutcome | None = None
    trace: str = ""

    def told(self) -> Explanation:
        fields = {name: getattr(self, name) for name in Explanation.__struct_fields__}
        fields["decisions"] = [decided.told() for decided in self.decisions]
        fields["considered"] = None if self.considered is None else self.considered.told()
        if self.hindsight is not None:
            ttft_s, error_s, regret_s, best, best_ttft_s, hit = self.hindsight
            fields["hindsight"] = Hindsight(
                ttft_s, error_s, regret_s, best, best_ttft_s, None if hit is None else HitTokens(*hit)
            )
        return Explanation(**fields)


class ComparedNode(Protocol):
    """A candidate that a comparison read."""

    @property
    def leg(self) -> str: ...
    @property
    def cost(self) -> float: ...
    @property
    def rejected_by(self) -> str: ...


T = TypeVar("T", bound=ComparedNode)


def worth_keeping(candidates: Sequence[T], num_nodes: int) -> Sequence[T]:
    """The candidates worth keeping: the best of each leg and some rejected ones; all, while there are few."""
    if num_nodes <= MAX_CANDIDATES or len(candidates) <= MAX_CANDIDATES:
        return candidates
    counts: dict[tuple[str, bool], int] = {}
    kept = []
    for candidate in sorted(candidates, key=lambda c: (bool(c.rejected_by), c.cost)):
        group = candidate.leg, bool(candidate.rejected_by)
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= MAX_CANDIDATES:
            kept.append(candidate)
    return kept
