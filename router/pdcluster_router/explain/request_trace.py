"""What the choices of a traced request did at the router, as spans below its root.

Nodes put their own spans below an attempt's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdcluster.core.trace_context import TraceContext
from pdcluster.telemetry.tracing import Attribute
from pdcluster_router.core.generation import Done, Generation
from pdcluster_router.core.tracing import RequestTrace
from pdcluster_router.policy.base import DecisionRecord

# Shorter waits for a node get no span.
WAIT_S = 0.001


@dataclass(slots=True)
class AttemptTrace:
    """The running attempt."""

    number: int
    context: TraceContext
    began: float
    attributes: dict[str, Attribute]
    # The attempt that it repeats.
    follows: TraceContext | None


@dataclass(slots=True)
class ChoiceTrace:
    """One choice of a traced request.

    began: when it came to the dispatcher.
    """

    trace: RequestTrace
    request: str
    began: float
    _attempt: AttemptTrace | None = None
    _last: TraceContext | None = None
    _num_attempts: int = field(default=0)

    @classmethod
    def of(cls, trace: RequestTrace, generation: Generation, began: float) -> ChoiceTrace:
        trace.note(_attributes_of(generation))
        return cls(trace, generation.request, began)

    def placed(self, decision: DecisionRecord, asked: float, now: float, weights: str = "") -> bytes:
        """An attempt begins. Returns its context for nodes. weights: label of those it runs with."""
        if now - asked >= WAIT_S:
            self._queued(asked, now)
        self._num_attempts += 1
        context = self.trace.new_context()
        attributes: dict[str, Attribute] = {
            "pdcluster.request": self.request,
            "pdcluster.attempt": self._num_attempts,
            "pdcluster.mode": decision.mode,
            "pdcluster.policy": decision.policy,
            "pdcluster.decode": decision.decode,
        }
        if weights:
            attributes["pdcluster.weights"] = weights
        if decision.prefill is not None:
            attributes["pdcluster.prefill"] = decision.prefill
        self._attempt = AttemptTrace(self._num_attempts, context, now, attributes, self._last)
        return context.pack()

    def failed(self, now: float, why: str) -> None:
        """The running attempt failed; another one may follow."""
        self._end_attempt(now, why)

    def done(self, done: Done, num_output: int, now: float) -> None:
        if self._attempt is not None:
            self._attempt.attributes |= {"pdcluster.tokens": num_output, "pdcluster.decode": done.route.decode or ""}
            for name in ("queue_s", "prefill_s", "transfer_s", "exposed_s", "ttft_s", "decode_s"):
                seconds = getattr(done.timeline, name)
                if seconds is not None:
                    self._attempt.attributes[f"pdcluster.timeline.{name}"] = seconds
        self.trace.note({"gen_ai.usage.cache_read.input_tokens": done.cached_tokens})
        self.trace.note_end(done.reason, num_output)
        self._end_attempt(now, "")

    def ended(self, now: float, error: str | None, why: str) -> None:
        """It has its answer, or nobody waits for one. error: its code."""
        if self._attempt is None and not self._num_attempts:
            self._queued(self.began, now)
        self._end_attempt(now, "" if error in (None, "cancelled") else why)
        if error is not None and error != "cancelled":
            self.trace.note_error(error, why)

    def _queued(self, start: float, end: float) -> None:
        self.trace.below("queue", self.trace.new_context(), start, end, {"pdcluster.request": self.request})

    def _end_attempt(self, now: float, why: str) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        self._last = attempt.context
        self.trace.below(
            f"attempt {attempt.number}", attempt.context, attempt.began, now, attempt.attributes, why, attempt.follows
        )


def _attributes_of(generation: Generation) -> dict[str, Attribute]:
    sampling = generation.sampling
    known: dict[str, Attribute | None] = {
        "gen_ai.provider.name": "pdcluster",
        "gen_ai.request.model": generation.model,
        "gen_ai.response.model": generation.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": len(generation.token_ids),
        "pdcluster.tenant": generation.standing.tenant,
    }
    return {name: value for name, value in known.items() if value is not None}
