"""One request followed through real processes: its trace at a collector, and its lines in every log."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from otlp_receiver import ReceivedSpan, Receiver, receiving
from processes import PATIENT, Up, running

from pdcluster.client import Client
from pdcluster.rpc import admin_pb2, admin_pb2_grpc

pytestmark = pytest.mark.timeout(300)

NUM_OUTPUT = 3000
# What nobody may find in a log.
PROMPT, KEY, CLUSTER_KEY = "zebra crossing 4711", "sk-" + secrets.token_hex(16), secrets.token_hex(32)


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def up(collector: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    patch = pytest.MonkeyPatch()
    patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.json"
    tenants.write_text(json.dumps({"zoo": {"keys": [KEY]}}))
    with running(
        "--prefill=1", "--decode=2", f"--otlp={collector.address}", "--log-requests", "--log-level=debug", *PATIENT,
        "--log-format=json", "--set=router.mode=remote", f"--set=router.tenants={tenants}",
        *(f"--set={section}.security.cluster_key={CLUSTER_KEY}" for section in ("bootstrap", "node", "router")),
    ) as up:  # fmt: skip
        up.client.headers["authorization"] = f"Bearer {KEY}"
        patch.undo()
        yield up


def traceparent(flags: str) -> tuple[str, str, str]:
    """A caller's header, its trace and its span."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{flags}", trace_id, span_id


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return sorted((each for each in spans if each.span.name == name), key=lambda each: each.span.start_time_unix_nano)


def pdctl(up: Up, *words: str) -> str:
    argv = [sys.executable, "-m", "pdcluster_router.pdctl", "--admin", up.admin, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120.0, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def drain_decode_node(up: Up) -> None:
    """The one that the only request decodes on, at once."""
    with grpc.insecure_channel(up.admin) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        (request,) = admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=30.0).requests
        list(admin.Drain(admin_pb2.DrainRequest(node=request.decode, deadline_s=0.0), timeout=60.0))


def stream_drained_once(up: Up, headers: dict[str, str]) -> dict[str, object]:
    """An answer of two attempts: the node that decoded it first was drained. Returns its usage."""
    body = {
        "model": up.model, "prompt": PROMPT * 20, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage: dict[str, object] = {}
    drain: threading.Thread | None = None
    with up.client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        for number, line in enumerate(each for each in reply.iter_lines() if each.startswith("data: {")):
            if number == 3:
                drain = threading.Thread(target=drain_decode_node, args=(up,))
                drain.start()
            usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    assert drain is not None
    drain.join(60.0)
    return usage


def test_a_retried_request_is_one_trace_over_both_nodes(up: Up, collector: Receiver) -> None:
    header, trace_id, caller = traceparent("01")
    usage = stream_drained_once(up, {"traceparent": header, "x-request-id": "followed"})
    route = usage["pdcluster"]
    assert isinstance(route, dict)
    assert route["attempts"] == 2, up.output()
    spans = collector.of(trace_id, 13, beside={"parked"})
    by_id = {each.span.span_id: each for each in spans}
    (root,) = [each for each in spans if each.span.parent_span_id not in by_id]
    assert root.span.parent_span_id.hex() == caller
    assert (root.span.name, root.service) == ("POST /v1/completions", "pdcluster-router")
    one, two = (named(spans, f"attempt {number}")[0] for number in (1, 2))
    assert {one.span.parent_span_id, two.span.parent_span_id} == {root.span.span_id}
    assert [link.span_id for link in two.span.links] == [one.span.span_id]
    assert one.span.status.code == one.span.status.STATUS_CODE_ERROR
    first, second = (
        {
            each.span.name: each
            for each in spans
            if each.span.parent_span_id == attempt.span.span_id and each.span.name != "parked"
        }
        for attempt in (one, two)
    )
    assert set(first) == set(second) == {"queue", "prefill", "transfer", "reserve", "decode"}
    for below, attempt in ((first, one), (second, two)):
        prefill, decode = attempt.attributes["pdcluster.prefill"], attempt.attributes["pdcluster.decode"]
        assert {name: each.instance for name, each in below.items()} == {
            "queue": prefill, "prefill": prefill, "transfer": prefill, "reserve": decode, "decode": decode,
        }  # fmt: skip
    assert int(str(second["transfer"].attributes["pdcluster.transfer.bytes"])) > 0
    # The drain may end the first attempt before its writer read that the KV was committed: then it counts as failed.
    moved, status = first["transfer"].attributes.get("pdcluster.transfer.bytes"), first["transfer"].span.status
    assert int(str(moved or 0)) > 0 or status.code == status.STATUS_CODE_ERROR
    assert first["decode"].instance != second["decode"].instance
    check_times(root, two, second, route)


def check_times(
    root: ReceivedSpan, last: ReceivedSpan, below: dict[str, ReceivedSpan], route: dict[str, object]
) -> None:
    """The spans of the attempt that came to the end tell what the answer's own timeline tells."""
    timeline = route["timeline"]
    assert isinstance(timeline, dict)
    assert {name: below[name].seconds for name in ("queue", "prefill", "transfer", "decode")} == pytest.approx(
        {name: timeline[f"{name}_s"] for name in ("queue", "prefill", "transfer", "decode")}, abs=0.002
    )
    assert below["transfer"].attributes["pdcluster.transfer.bytes"] == timeline["transfer_bytes"]
    for span in (last, *below.values()):
        assert span.span.start_time_unix_nano >= root.span.start_time_unix_nano - 5_000_000
        assert span.span.end_time_unix_nano <= root.span.end_time_unix_nano + 5_000_000
    assert root.attributes["gen_ai.usage.output_tokens"] == NUM_OUTPUT


def test_the_same_id_leads_through_explain_and_every_log(up: Up, collector: Receiver) -> None:
    header, trace_id, _ = traceparent("01")
    answer = up.complete(PROMPT, 8)  # traced, since the router samples all that nobody decided about
    up.client.post("/v1/completions", json={"model": up.model, "prompt": PROMPT, "max_tokens": 4},
                   headers={"traceparent": header, "x-request-id": "asked-by-zoo"})  # fmt: skip
    (explained,) = json.loads(pdctl(up, "explain", "asked-by-zoo", "-o", "json"))
    assert explained["trace"] == trace_id
    request = explained["request"]
    assert trace_id in pdctl(up, "explain", request)
    wanted = {"router", "prefill-0", explained["outcome"]["decode"]}
    found = wait_for_lines(up, request, wanted)
    assert {(line["process"], line["event"]) for line in found} >= {
        ("router", "a request was placed"), ("router", "a request ended"), ("prefill-0", "the prefill leg ended"),
        (explained["outcome"]["decode"], "the decode leg ended"),
    }  # fmt: skip
    assert {line["trace"] for line in found} == {trace_id}
    assert answer["id"]


def wait_for_lines(up: Up, request: str, processes: set[str]) -> list[dict[str, str]]:
    deadline = time.monotonic() + 30.0
    while True:
        parsed = [json.loads(line) for line in up.lines if line.startswith("{")]
        found = [line for line in parsed if line.get("request") == request]
        if {line["process"] for line in found} >= processes:
            return found
        assert time.monotonic() < deadline, f"{processes - {line['process'] for line in found}} wrote nothing"
        time.sleep(0.1)


def test_grpc_goes_on_with_a_callers_trace(up: Up, collector: Receiver) -> None:
    header, trace_id, caller = traceparent("01")
    with Client(up.grpc, api_key=KEY) as client:
        assert list(client.generate(PROMPT, max_tokens=4, headers={"traceparent": header}))
    spans = collector.of(trace_id, 7)
    (root,) = named(spans, "pdcluster.v1.Inference/Generate")
    assert root.span.parent_span_id.hex() == caller
    assert root.attributes["rpc.response.status_code"] == "OK"
    assert {each.service for each in spans} == {"pdcluster-router", "pdcluster-node"}


def test_a_caller_who_does_not_sample_is_not_traced(up: Up, collector: Receiver) -> None:
    header, trace_id, _ = traceparent("00")
    up.client.post("/v1/completions", json={"model": up.model, "prompt": PROMPT}, headers={"traceparent": header})
    sampled, other, _ = traceparent("01")
    up.client.post("/v1/completions", json={"model": up.model, "prompt": PROMPT}, headers={"traceparent": sampled})
    collector.of(other, 7)
    assert not [each for each in collector.spans if each.trace_id == trace_id]


def test_a_refused_request_has_its_error(up: Up, collector: Receiver) -> None:
    header, trace_id, _ = traceparent("01")
    reply = up.client.post("/v1/completions", content=b"{", headers={"traceparent": header,
                                                                     "content-type": "application/json"})  # fmt: skip
    assert reply.status_code == 400
    (root,) = collector.of(trace_id, 1)
    assert root.attributes["http.response.status_code"] == 400


def test_no_log_has_a_prompt_or_a_key(up: Up) -> None:
    """Even at level debug, and after requests that failed."""
    up.client.post("/v1/completions", json={"model": "no such", "prompt": PROMPT})
    up.client.post("/v1/completions", json={"model": up.model, "prompt": [PROMPT, 7]})
    up.client.post("/v1/chat/completions", json={"messages": [{"role": PROMPT, "content": PROMPT}]})
    assert len(up.lines) > 10
    output = up.output()
    for secret in (PROMPT, KEY, CLUSTER_KEY):
        assert secret not in output
