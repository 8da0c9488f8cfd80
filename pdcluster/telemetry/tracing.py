"""Spans of sampled requests, exported over OTLP/gRPC.

Whether a request is sampled is decided in plain code, and its spans are made after the fact, with explicit times. So
the OpenTelemetry SDK costs unsampled requests nothing. It is imported only when tracing is on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pdcluster.core.errors import ConfigError
from pdcluster.core.trace_context import TraceContext
from pdcluster.core.version import VERSION
from pdcluster.settings.config import TracingConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import NonRecordingSpan

logger = logging.getLogger(__name__)

# Ended spans that wait for the collector. More are dropped, the oldest first.
MAX_WAITING = 4096
# Of a text on a span.
MAX_TEXT = 500
# For one export.
EXPORT_S = 5.0
# For what is left at the end.
CLOSE_S = 2.0

Attribute = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class TracedSpan:
    """A span that has ended.

    context: its own ids.
    parent: None for the root of a trace.
    start_s, end_s: on the clock of the process.
    error: why it failed; "" for a good end.
    follows: an earlier span that it repeats.
    """

    name: str
    context: TraceContext
    parent: TraceContext | None
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""
    is_server: bool = False
    follows: TraceContext | None = None


class SpanSink(Protocol):
    """Takes ended spans."""

    def record(self, span: TracedSpan) -> None: ...


class Tracer:
    """Implements SpanSink with the SDK. One thread records; a thread of the SDK exports.

    clock: what spans are timed by.
    wall: Unix seconds.
    """

    def __init__(
        self,
        provider: TracerProvider,
        exporter: SpanExporter,
        ids: NextIds,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._provider, self._exporter, self._ids = provider, exporter, ids
        self._tracer = provider.get_tracer("pdcluster", VERSION)
        self._clock, self._wall = clock, wall

    def record(self, span: TracedSpan) -> None:
        from opentelemetry import trace

        self._ids.next = span.context
        offset_s = self._wall() - self._clock()
        made = self._tracer.start_span(
            span.name,
            None if span.parent is None else trace.set_span_in_context(_outside(span.parent)),
            trace.SpanKind.SERVER if span.is_server else trace.SpanKind.INTERNAL,
            {name: _bounded(value) for name, value in span.attributes.items()},
            () if span.follows is None else (trace.Link(_outside(span.follows).get_span_context()),),
            start_time=_nanoseconds(span.start_s + offset_s),
        )
        if span.error:
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.error[:MAX_TEXT]))
        made.end(_nanoseconds(span.end_s + offset_s))

    def close(self) -> None:
        """Export what waits, within CLOSE_S. Idempotent."""
        flushing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        flushing.join(CLOSE_S)
        if flushing.is_alive():
            logger.warning("the last spans did not reach the collector within %g s and are lost", CLOSE_S)
            self._exporter.shutdown()


class NextIds:
    """Implements the SDK's IdGenerator: a span gets the ids that its record names.

    They were chosen, and sent to other processes, before the span is made.
    """

    def __init__(self) -> None:
        self.next = TraceContext(b"", b"")

    def generate_span_id(self) -> int:
        return int.from_bytes(self.next.span_id)

    def generate_trace_id(self) -> int:
        return int.from_bytes(self.next.trace_id)

    def is_trace_id_random(self) -> bool:
        return False


def open_tracer(
    config: TracingConfig,
    component: str,
    instance: str,
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Tracer | None:
    """The tracer of a process; None when tracing is off.

    component: node or router.
    instance: name of the process.
    Headers, certificates and timeouts are read from the environment, as the SDK documents them (OTEL_EXPORTER_OTLP_*).
    Raises ConfigError when the SDK is not installed.
    """
    if config.otlp is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ImportError as error:
        raise ConfigError(
            f"tracing.otlp is {config.otlp}, but OpenTelemetry is not installed ({error}); "
            "pip install 'pdcluster[otel]', or leave tracing.otlp out"
        ) from error
    resource = Resource.create(
        {
            "service.name": f"pdcluster-{component}",
            "service.instance.id": instance,
            "service.version": VERSION,
        }
    )
    ids, exporter = NextIds(), OTLPSpanExporter(config.otlp, timeout=EXPORT_S)
    provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=ids)  # type: ignore[arg-type]
    provider.add_span_processor(BatchSpanProcessor(exporter, MAX_WAITING))
    return Tracer(provider, exporter, ids, clock, wall)


def _outside(context: TraceContext) -> NonRecordingSpan:
    """A span that this process does not record."""
    from opentelemetry import trace

    return trace.NonRecordingSpan(
        trace.SpanContext(
            int.from_bytes(context.trace_id),
            int.from_bytes(context.span_id),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
    )


def _bounded(value: Attribute) -> Attribute:
    return value[:MAX_TEXT] if isinstance(value, str) else value


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
