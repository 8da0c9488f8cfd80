"""Traces at the router: who is sampled, which spans a request makes, and whose children they are."""

from array import array

import pytest
from request_scene import CLUSTERS, Scene, Setting
from scripted_cluster import FakeCluster

from pdcluster.core.messages import Sampling
from pdcluster.core.trace_context import TraceContext
from pdcluster.telemetry.tracing import TracedSpan
from pdcluster_router.core.generation import Done, Generation, RequestRoute, Timeline
from pdcluster_router.core.tracing import ASKED_PER_S, RequestTrace, Tracing
from pdcluster_router.explain.request_trace import ChoiceTrace
from pdcluster_router.policy.base import DecisionRecord
from pdcluster_router.policy.candidates import Candidates

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


class Spans(list[TracedSpan]):
    def record(self, span: TracedSpan) -> None:
        self.append(span)

    def named(self, name: str) -> TracedSpan:
        (found,) = [span for span in self if span.name == name]
        return found


def begin(spans: Spans, traceparent: str | None = None, *, share: float = 1.0) -> RequestTrace | None:
    return Tracing(spans, share, draw=lambda: 0.5).begin(traceparent, "POST /v1/completions", 10.0, "")


def choice(prefill: str | None = "prefill-0", decode: str = "decode-0") -> DecisionRecord:
    mode = "local" if prefill is None else "remote"
    return DecisionRecord("seconds", mode, prefill, decode, 3, Candidates(b"", (), True, (), 0), 0.0)


def generation(trace: RequestTrace) -> Generation:
    sampling = Sampling(max_tokens=9, seed=1, temperature=0.5)
    return Generation("r-0", "the-model", array("i", [1, 2, 3]), sampling, 60.0, trace=trace)


def done() -> Done:
    route = RequestRoute("remote", "prefill-0", "decode-1", "shm", 2, 2)
    return Done("length", None, 2, 2, route, Timeline(0.1, 0.2, 0.3, 0.0, 0.4, None, 0.5, 8, 4096, 0, 0.0))


def test_the_caller_decides_who_is_traced_and_else_the_share() -> None:
    spans = Spans()
    assert begin(spans, CALLER + "1", share=0.0) is not None
    assert begin(spans, CALLER + "0", share=1.0) is None
    assert begin(spans, None, share=0.51) is not None
    assert begin(spans, None, share=0.5) is None
    assert begin(spans, "nonsense", share=0.5) is None


@pytest.mark.parametrize(("key", "status"), [(None, 401), (b"Bearer nobody", 401), (b"Bearer large-key", 400)])
def test_who_has_no_key_may_not_ask_for_a_trace(key: bytes | None, status: int) -> None:
    spans = Spans()
    scene = Scene(FakeCluster(CLUSTERS["busy"]()), setting=Setting(has_tenants=True))
    scene.app.tracing = tracing = Tracing(spans, 0.0)
    headers = {b"traceparent": CALLER.encode() + b"1"} | ({} if key is None else {b"authorization": key})
    scene.ask(headers, prompt=[5], max_tokens=-1)
    assert scene.exchange.status == status
    assert len(spans) == (status != 401)
    asked = sum(tracing.begin(CALLER + "1", "POST /", scene.exchange.arrived, "large") is not None for _ in range(200))
    assert asked == ASKED_PER_S - len(spans)


def test_the_root_goes_on_with_the_callers_trace() -> None:
    spans = Spans()
    trace = begin(spans, CALLER + "1")
    assert trace is not None
    trace.end(11.0, {"http.response.status_code": 200})
    (root,) = spans
    assert trace.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent is not None
    assert root.parent.span_id.hex() == "b7ad6b7169203331"
    assert root.is_server
    assert (root.start_s, root.end_s, root.error) == (10.0, 11.0, "")


def test_a_retry_is_an_attempt_that_links_to_the_one_before() -> None:
    spans = Spans()
    trace = begin(spans)
    assert trace is not None
    of_choice = ChoiceTrace.of(trace, generation(trace), 10.0)
    first = of_choice.placed(choice(), 10.0, 10.2)
    of_choice.failed(10.5, "node decode-0 drains")
    second = of_choice.placed(choice(decode="decode-1"), 10.5, 10.5)
    of_choice.done(done(), 9, 11.0)
    of_choice.ended(11.0, None, "done")
    trace.end(11.1, {})
    assert [span.name for span in spans] == ["queue", "attempt 1", "attempt 2", "POST /v1/completions"]
    queue, one, two, root = spans
    assert {span.parent for span in (queue, one, two)} == {root.context}
    assert (one.context, two.context) == (TraceContext.unpack(first), TraceContext.unpack(second))
    assert (one.error, two.error) == ("node decode-0 drains", "")
    assert (one.follows, two.follows) == (None, one.context)
    assert (two.attributes["pdcluster.decode"], two.attributes["pdcluster.timeline.prefill_s"]) == ("decode-1", 0.2)
    told = {name: root.attributes[name] for name in root.attributes if name.startswith("gen_ai.")}
    assert told == {
        "gen_ai.provider.name": "pdcluster", "gen_ai.request.model": "the-model", "gen_ai.response.model": "the-model",
        "gen_ai.request.max_tokens": 9, "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 9, "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["length"],
    }  # fmt: skip


def test_a_request_that_never_found_a_node_has_its_wait_and_its_error() -> None:
    spans = Spans()
    trace = begin(spans)
    assert trace is not None
    ChoiceTrace.of(trace, generation(trace), 10.0).ended(40.0, "unavailable", "no node takes work")
    trace.end(40.0, {}, has_failed=True)
    assert (spans.named("queue").start_s, spans.named("queue").end_s) == (10.0, 40.0)
    root = spans.named("POST /v1/completions")
    assert (root.attributes["error.type"], root.error) == ("unavailable", "unavailable: no node takes work")


def test_a_client_that_leaves_is_no_error_of_the_attempt() -> None:
    spans = Spans()
    trace = begin(spans)
    assert trace is not None
    of_choice = ChoiceTrace.of(trace, generation(trace), 10.0)
    of_choice.placed(choice(None), 10.0, 10.0)
    of_choice.ended(12.0, "cancelled", "the client closed the connection")
    assert (spans.named("attempt 1").error, spans.named("attempt 1").end_s) == ("", 12.0)


def test_callers_that_ask_for_more_traces_than_the_bound_get_the_share() -> None:
    spans, traceparent = Spans(), "00-" + "1" * 32 + "-" + "2" * 16 + "-01"

    def num_traced(tracing: Tracing, now: float, tenant: str = "") -> int:
        traces = [tracing.begin(traceparent, "POST /v1/completions", now, tenant) for _ in range(1000)]
        return sum(trace is not None for trace in traces)

    asking = Tracing(spans, 0.0, draw=lambda: 0.5)
    assert num_traced(asking, 10.0) == ASKED_PER_S
    assert num_traced(asking, 10.25) == ASKED_PER_S / 4
    assert num_traced(Tracing(spans, 1.0, draw=lambda: 0.5), 10.0) == 1000
    assert num_traced(asking, 10.25, "other") == ASKED_PER_S / 2  # nobody takes the traces of others
    assert [num_traced(asking, 10.75, name) for name in ("", "other")] == [ASKED_PER_S / 4] * 2
    assert num_traced(asking, 12.0, "other") == ASKED_PER_S  # alone again
