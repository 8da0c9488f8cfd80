"""Records of explanations, for people and for JSON, and the numbers they are made from. Values only."""

from __future__ import annotations

import msgspec

from pdcluster_router.core.generation import Done, OutputWeights, Timeline
from pdcluster_router.policy.base import DecisionRecord, ShadowRecord
from pdcluster_router.policy.candidates import Candidate


class ExplainedDecision(msgspec.Struct, frozen=True):
    """One attempt's choice.

    at_s: since the request came.
    held_s: of these, in the hold queue.
    num_candidates: compared and rejected, kept or not.
    pull: the node that the first pull_tokens are fetched from.
    failed: why another attempt followed.
    is_estimated: predicted from gaps between the node's steps, not from its steps.
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
    candidates: list[Candidate]
    shadow: ShadowRecord | None = None
    pull: str | None = None
    pull_tokens: int = 0
    failed: str = ""
    is_estimated: bool = False


class NotedDecision(msgspec.Struct, frozen=True):
    """A decision of a request, and when it was made. See ExplainedDecision."""

    record: DecisionRecord
    at_s: float
    held_s: float
    failed: str = ""

    def explained(self) -> ExplainedDecision:
        record = self.record
        return ExplainedDecision(
            self.at_s, self.held_s, record.policy, record.mode, record.prefill, record.decode, record.num_tokens,
            record.ttft_s, record.tpot_s, record.estimate_s, record.candidates.num, record.candidates.read(),
            record.shadow, record.pull, record.pull_tokens, self.failed, record.is_estimated,
        )  # fmt: skip


class HitTokens(msgspec.Struct, frozen=True):
    achieved: int
    reachable: int
    ideal: int


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
    weights: tuple[OutputWeights, ...] = ()


def outcome_of(done: Done, num_output: int) -> RequestOutcome:
    route = done.route
    return RequestOutcome(
        done.reason, route.mode, route.prefill, route.decode, route.backend, done.attempts, done.cached_tokens,
        num_output, done.timeline, done.weights,
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
    decisions: list[ExplainedDecision] = []
    ttft_s: float | None = None
    attempts: int = 0
    error: str | None = None
    hindsight: Hindsight | None = None
    client_id: str = ""
    considered: ExplainedDecision | None = None
    why: str = ""
    outcome: RequestOutcome | None = None
    trace: str = ""
