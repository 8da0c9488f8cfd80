"""Traces of requests: who is traced, and the root span of each API request.

`explain.request_trace` puts the spans of its choices below it. Spans are made when they end; only their ids are chosen
before.
"""

from __future__ import annotations

import random
import secrets
from collections import OrderedDict
from collections.abc import Callable

from pdcluster.core.trace_context import SPAN_BYTES, TRACE_BYTES, TraceContext, parse
from pdcluster.telemetry.tracing import Attribute, SpanSink, TracedSpan

# Traces that callers may ask for beyond the share, per second. Tenants that ask have equal parts of them.
ASKED_PER_S = 100.0
# Who asked for none so long has its whole part again.
ASKING_S = 1.0


class Tracing:
    """Decides which requests are traced: as their caller says, else a share of them. Callers that ask for more than
    ASKED_PER_S get the share, so that no client decides what the collector has to take.

    share: 0 to 1.
    draw: a random number from 0 to 1.
    """

    def __init__(self, spans: SpanSink, share: float, draw: Callable[[], float] = random.random) -> None:
        self._spans, self._share, self._draw = spans, share, draw
        # Of tenants that asked: what was left to each, and when. The last to ask is last.
        self._asking: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def begin(self, traceparent: str | None, name: str, arrived: float, tenant: str) -> RequestTrace | None:
        """The trace of a request that came; None where it is not sampled.

        tenant: whose key it has. Without one it may not ask.
        arrived: on the dispatcher's clock.
        """
        found = None if traceparent is None else parse(traceparent)
        if found is None:
            if self._draw() >= self._share:
                return None
            return RequestTrace(self._spans, secrets.token_bytes(TRACE_BYTES), None, name, arrived)
        parent, is_sampled = found
        if not is_sampled or not (self._may_ask(tenant, arrived) or self._draw() < self._share):
            return None
        return RequestTrace(self._spans, parent.trace_id, parent, name, arrived)

    def _may_ask(self, tenant: str, now: float) -> bool:
        """Take one of the traces that callers may ask for."""
        asking = self._asking
        while asking and now - next(iter(asking.values()))[1] > ASKING_S:
            asking.popitem(last=False)
        part = ASKED_PER_S / (len(asking) + (tenant not in asking))
        left, at = asking.pop(tenant, (part, now))
        left = min(left + max(now - at, 0.0) * part, part)
        may = left >= 1.0
        asking[tenant] = (left - may, max(now, at))
        return may


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

    def note_end(self, reason: str, num_output: int) -> None:
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
