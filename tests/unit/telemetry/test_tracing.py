"""Spans as a collector gets them; tracing that is off costs no import; a collector that is not there holds nobody up."""

import subprocess
import sys
import time

import pytest
from otlp_receiver import receiving

from pdcluster.core.errors import ConfigError
from pdcluster.core.trace_context import TraceContext
from pdcluster.settings.config import TracingConfig
from pdcluster.telemetry import tracing
from pdcluster.telemetry.tracing import TracedSpan, open_tracer

TRACE = bytes(range(1, 17))
ROOT, CHILD, CALLER = (TraceContext(TRACE, bytes([number] * 8)) for number in (1, 2, 3))


def test_spans_have_the_ids_times_and_words_of_their_records() -> None:
    with receiving() as receiver:
        tracer = open_tracer(TracingConfig(receiver.address), "router", "router-7", lambda: 100.0, lambda: 1_000_100.0)
        assert tracer is not None
        tracer.record(TracedSpan("attempt 2", CHILD, ROOT, 101.0, 101.5, {"bytes": 7}, error="lost", follows=CALLER))
        tracer.record(TracedSpan("POST /x", ROOT, CALLER, 100.0, 102.0, {"text": "x" * 9999}, is_server=True))
        tracer.close()
        child, root = receiver.of(TRACE.hex(), 2)
    assert (root.service, root.instance) == ("pdcluster-router", "router-7")
    assert (child.span.span_id, child.span.parent_span_id) == (CHILD.span_id, ROOT.span_id)
    assert (root.span.span_id, root.span.parent_span_id) == (ROOT.span_id, CALLER.span_id)
    assert root.span.start_time_unix_nano == 1_000_100_000_000_000
    assert child.seconds == 0.5
    assert [link.span_id for link in child.span.links] == [CALLER.span_id]
    assert child.span.status.message == "lost"
    assert child.attributes == {"bytes": 7}
    assert len(str(root.attributes["text"])) == tracing.MAX_TEXT
    assert root.span.kind == root.span.SPAN_KIND_SERVER


def test_a_root_without_a_caller_has_no_parent() -> None:
    with receiving() as receiver:
        tracer = open_tracer(TracingConfig(receiver.address), "node", "n", time.monotonic, time.time)
        assert tracer is not None
        tracer.record(TracedSpan("root", ROOT, None, 1.0, 2.0))
        tracer.close()
        (root,) = receiver.of(TRACE.hex(), 1)
    assert root.span.parent_span_id == b""


def test_a_collector_that_is_not_there_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.2)
    tracer = open_tracer(TracingConfig("http://127.0.0.1:9"), "node", "n", time.monotonic, time.time)
    assert tracer is not None
    tracer.record(TracedSpan("lost", ROOT, None, 1.0, 2.0))
    began = time.monotonic()
    tracer.close()
    assert time.monotonic() - began < 10.0


def test_off_is_no_tracer() -> None:
    assert open_tracer(TracingConfig(), "node", "n", time.monotonic, time.time) is None


def test_a_missing_library_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'pdcluster\[otel\]'"):
        open_tracer(TracingConfig("http://127.0.0.1:4317"), "node", "n", time.monotonic, time.time)


@pytest.mark.parametrize(
    "module", ["pdcluster_router.process", "pdcluster_router.frontend.grpc", "pdcluster.node.server"]
)
def test_tracing_that_is_off_is_not_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60.0)
