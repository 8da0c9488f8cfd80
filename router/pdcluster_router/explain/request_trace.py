"""Traces of requests: one root span for each API request, and below it what its choices did at the router.

Nodes put their own spans below an attempt's. Spans are made when they end; only their ids are chosen before.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster.core.messages import FinishReason
from pdcluster.core.trace_context import SPAN_BYTES, TRACE_BYTES, TraceContext, parse
from pdcluster.telemetry.tracing import Attribute, SpanSink, TracedSpan
from pdcluster_router.core.generation import Done, Generation
from pdcluster_router.policy.base import DecisionRecord

# Shorter waits for a node get no span.
WAIT_S = 0.001


class Tracing:
    """Decides which requests are traced: as their caller says, else a share of them.

    share: 0 to 1.
    draw: a random number from 0 to 1.
    """

    def __init__(self, spans: SpanSink, share: float, draw: Callable[[], float] = random.random) -> None:
        self._spans, self._share, self._draw = spans, share, draw

    def begin(self, traceparent: str | None, name: str, arrived: float) -> RequestTrace | None:
        """The trace of a request that came; None where it is not sampled.

        arrived: on the dispatcher's clock.
        """
        found = None if traceparent is None else parse(traceparent)
        if found is None:
            if self._draw() >= self._share:
                return None
            return RequestTrace(self._spans, secrets.token_bytes(TRACE_BYTES), None, name, arrived)
        parent, is_sampled = found
        if not is_sampled:
            return None
        return RequestTrace(self._spans, parent.trace_id, parent, name, arrived)


class RequestTrace:
    """One API request. Owned by the router's event loop."""

    def __init__(
        self,
        spans: SpanSink,
        trace_id: bytes,
        parent: TraceContext | None,
        name: str,
        arrived: float,
    ) -> None:
        self.spans = spans
        self._context = TraceContext(trace_id, secrets.token_bytes(SPAN_BYTES))
        self._parent, self._name, self._arrived = parent, name, arrived
        self._attributes: dict[str, Attribute] = {}
        self._finish_reasons: list[str] = []
        self._num_output = 0
        self._error = ""

    @property
    def trace_id(self) -> str:
        """As people read it, 32 hexadecimal digits."""
        return self._context.trace_id.hex()

    def new_context(self) -> TraceContext:
        return TraceContext(self._context.trace_id, secrets.token_bytes(SPAN_BYTES))

    def below(
        self, name: str, context: TraceContext, start_s: float, end_s: float, attributes: dict[str, Attribute],
        error: str = "", follows: TraceContext | None = None,
    ) -> None:  # fmt: skip
        """A child of the root has ended."""
        self.spans.record(TracedSpan(name, context, self._context, start_s, end_s, attributes, error, follows=follows))

    def note(self, attributes: dict[str, Attribute]) -> None:
        """What the front door knows."""
        self._attributes |= attributes

    def note_generation(self, generation: Generation) -> None:
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
        self._attributes |= {name: value for name, value in known.items() if value is not None}

    def note_end(self, reason: FinishReason, num_output: int) -> None:
        """A choice ended well."""
        self._finish_reasons.append(reason)
        self._num_output += num_output

    def note_error(self, code: str, why: str) -> None:
        self._attributes["error.type"] = code
        self._error = f"{code}: {why}"

    def end(self, now: float, attributes: dict[str, Attribute], *, has_failed: bool = False) -> None:
        """The answer is out, or nobody waits for it.

        attributes: what the front door knows now.
        has_failed: by the server's fault.
        """
        if self._finish_reasons:
            self._attributes["gen_ai.response.finish_reasons"] = self._finish_reasons
            self._attributes["gen_ai.usage.output_tokens"] = self._num_output
        error = self._error or ("the request failed" if has_failed else "")
        self.spans.record(
            TracedSpan(
                self._name, self._context, self._parent, self._arrived, now, {**self._attributes, **attributes},
                error, is_server=True,
            )
        )  # fmt: skip


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
        trace.note_generation(generation)
        return cls(trace, generation.request, began)

    def placed(self, decision: DecisionRecord, asked: float, now: float) -> bytes:
        """An attempt begins. Returns its context for nodes."""
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
