"""What became of each leg of a request on this node: a log line where the operator asks for them, spans where it is
traced.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdcluster.core.trace_context import SPAN_BYTES, TraceContext
from pdcluster.telemetry.log import requests
from pdcluster.telemetry.tracing import Attribute, SpanSink, TracedSpan


@dataclass(frozen=True, slots=True)
class LegStage:
    """A part of a leg's life, on the node's clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    # Why it failed; "" for a good end.
    error: str = ""


@dataclass(frozen=True, slots=True)
class EndedStages:
    """An ended leg.

    attempt: the leg's number in the request.
    trace: Work.trace.
    end: why it ended.
    has_failed: on this node, rather than being cancelled or done.
    """

    leg: str
    request: str
    attempt: int
    trace: bytes
    stages: Sequence[LegStage]
    end: str
    has_failed: bool


class LegRecorder:
    """Owned by the node loop's thread.

    spans: None: nothing is traced.
    """

    def __init__(self, node: str, spans: SpanSink | None = None) -> None:
        self._node = node
        self._spans = spans

    def wants(self, trace: bytes) -> bool:
        """Whether an ended leg is worth describing."""
        return (self._spans is not None and bool(trace)) or requests.is_on()

    def ended(self, leg: EndedStages) -> None:
        if requests.is_on():
            seconds = {f"{stage.name}_s": round(stage.end_s - stage.start_s, 6) for stage in leg.stages}
            trace = leg.trace and TraceContext.unpack(leg.trace).trace_id.hex()
            requests.info(
                f"the {leg.leg} leg ended",
                request=leg.request, leg=leg.attempt, trace=trace or None, why=leg.end, **seconds,
            )  # fmt: skip
        if self._spans is not None and leg.trace:
            self._trace(self._spans, leg)

    def _trace(self, spans: SpanSink, leg: EndedStages) -> None:
        parent = TraceContext.unpack(leg.trace)
        own = {"pdcluster.node": self._node, "pdcluster.request": leg.request, "pdcluster.leg": leg.leg}
        for number, stage in enumerate(leg.stages):
            is_last = number == len(leg.stages) - 1
            attributes = {**own, **stage.attributes, **({"pdcluster.end": leg.end} if is_last else {})}
            context = TraceContext(parent.trace_id, secrets.token_bytes(SPAN_BYTES))
            error = stage.error or (leg.end if is_last and leg.has_failed else "")
            spans.record(TracedSpan(stage.name, context, parent, stage.start_s, stage.end_s, attributes, error))
