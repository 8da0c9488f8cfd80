"""What happens around the answers: clients that leave, stall or are too many, bugs behind the seam, readiness, metrics,
tokens, shutdown."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing

import httpx
import psutil
import pytest
from scripted_dispatcher import MAX_LEN, MODEL, TEXT, ScriptedDispatcher, Step, Wait, says, served, until

from pdcluster.core.errors import Cancelled, ConfigError, DeadlineExceeded, NodeLost, RequestStopped
from pdcluster_router.core.generation import Done, Generation, Running, Sink, TokenChunk
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.server import listening, router_metrics
from pdcluster_router.queueing.admission import refusal
from pdcluster_router.request.open_requests import OpenRequest, OpenRequests

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


def body(**changes: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "hi", **changes}


@pytest.fixture
def dispatcher() -> ScriptedDispatcher:
    return ScriptedDispatcher()


@pytest.fixture
async def client(dispatcher: ScriptedDispatcher) -> AsyncIterator[httpx.AsyncClient]:
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        yield client


def waits_forever(dispatcher: ScriptedDispatcher, after: str = "") -> None:
    never = asyncio.Event()
    dispatcher.script = lambda _: [*(says(after, "length") if after else []), Wait(never)]


async def opened(
    client: httpx.AsyncClient, payload: dict[str, object]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request sent by hand, so that its connection can be cut or left unread."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    data = json.dumps(payload).encode()
    writer.write(
        f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("after", ["", "some text"])
async def test_a_client_that_leaves_cancels_its_generations(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher, stream: bool, n: int, after: str
) -> None:
    waits_forever(dispatcher, after)
    _, writer = await opened(client, body(stream=stream, n=n, max_tokens=50))
    await until(lambda: len(dispatcher.started) == n)
    writer.close()
    await writer.wait_closed()
    await until(lambda: len(dispatcher.cancelled) == n)
    assert dispatcher.ended == []
    assert "pdcluster_client_disconnects_total 1.0" in (await client.get("/metrics")).text


async def test_a_client_that_leaves_does_not_disturb_another_on_the_same_server(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    gate = asyncio.Event()
    dispatcher.script = lambda _: [*says("a", "length"), Wait(gate), *says("b")]
    _, writer = await opened(client, body(stream=True))
    other = asyncio.create_task(client.post(PLAIN, json=body()))
    await until(lambda: len(dispatcher.started) == 2)
    writer.close()
    await until(lambda: len(dispatcher.cancelled) == 1)
    gate.set()
    assert (await other).json()["choices"][0]["text"] == "ab"


async def test_a_client_that_does_not_read_holds_bounded_memory_and_is_given_up(dispatcher: ScriptedDispatcher) -> None:
    produced = 0

    def endless(_: Generation) -> Iterator[Step]:
        nonlocal produced
        for step in itertools.cycle(says("word " * 20, "length")):
            produced += 1
            yield step

    dispatcher.script = endless
    dispatcher.max_len = 2**30
    async with (
        served(dispatcher, HttpSettings(stall_s=0.5)) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        _, writer = await opened(client, body(stream=True, max_tokens=2**29))
        await until(lambda: len(dispatcher.cancelled) == 1)
        stopped_at = produced
        await asyncio.sleep(0.05)
        assert produced == stopped_at
        assert (await client.get("/health")).status_code == 200
        writer.close()


class Cancellable(ScriptedDispatcher):
    """Lists what it runs, as the real one does, so that it can be cancelled. num_events: given to clients so far."""

    def __init__(self, num_tokens: int) -> None:
        words = (says("word " * 20, "length") * (num_tokens // 20))[:num_tokens]
        super().__init__(script=lambda _: [*words, Wait(asyncio.Event())], max_len=2**30)
        self.open = OpenRequests()
        self.num_events = 0

    def start(self, generation: Generation, sink: Sink) -> Running:
        running = super().start(generation, sink)

        def end(error: Cancelled) -> None:
            running.cancel(str(error))
            self.open.pop(generation.request, None)
            sink.on_error(error)

        self.open[generation.request] = lambda: OpenRequest(generation.request, MODEL, 1, 0.0, end)
        return running

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenChunk | Done, None]:
        async with aclosing(super().generate(generation)) as events:
            async for event in events:
                self.num_events += 1
                yield event

    async def until_nobody_reads(self) -> None:
        seen = -1
        while self.num_events != seen:
            seen = self.num_events
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_cancelled_request_whose_client_does_not_read_ends_at_once_and_its_connection_is_cut(n: int) -> None:
    dispatcher = Cancellable(60_000 // n)
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        _, writer = await opened(client, body(stream=True, n=n, max_tokens=2**29))
        await dispatcher.until_nobody_reads()
        assert dispatcher.open.cancel(dispatcher.open.all()[0].request.rpartition("-")[0], "a runaway") == n
        await until(lambda: not len(dispatcher.open))
        own = writer.get_extra_info("sockname")
        await until(lambda: own not in [connection.raddr for connection in psutil.Process().net_connections("tcp")])
        writer.close()


async def test_a_cancelled_request_whose_client_reads_on_is_answered() -> None:
    dispatcher = Cancellable(1000)
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        async with client.stream("POST", PLAIN, json=body(stream=True, max_tokens=2**29)) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            dispatcher.open.cancel(dispatcher.open.all()[0].request, "a runaway")
            rest = [line async for line in lines if line]
        assert "a runaway" in rest[-1]


async def test_a_stream_that_is_closed_early_by_its_reader_cancels(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    waits_forever(dispatcher, "some text")
    async with client.stream("POST", PLAIN, json=body(stream=True)) as reply:
        async for line in reply.aiter_lines():
            assert line.startswith("data: ")
            break
    await until(lambda: len(dispatcher.cancelled) == 1)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_an_operator_cancels_is_answered(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher, n: int
) -> None:
    dispatcher.script = lambda _: [Cancelled("cancelled by an operator: a runaway")]
    reply = await client.post(PLAIN, json=body(n=n))
    assert (reply.status_code, reply.json()["error"]["code"]) == (499, "cancelled") and "a runaway" in reply.text
    dispatcher.script = lambda _: [*says("some", "length"), Cancelled("cancelled by an operator: a runaway")]
    stream = await client.post(PLAIN, json=body(n=n, stream=True, max_tokens=50))
    assert stream.status_code == 200 and "a runaway" in stream.text.strip().splitlines()[-1]
    assert "pdcluster_client_disconnects_total 0.0" in (await client.get("/metrics")).text


async def test_requests_over_the_limit_are_429_and_places_come_back(dispatcher: ScriptedDispatcher) -> None:
    gate = asyncio.Event()
    dispatcher.script = lambda _: [Wait(gate), *says("done")]
    async with (
        served(dispatcher, HttpSettings(max_requests=2)) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        open_ones = [asyncio.create_task(client.post(PLAIN, json=body())) for _ in range(2)]
        await until(lambda: len(dispatcher.started) == 2)
        refused = await client.post(PLAIN, json=body())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await client.get("/health")).status_code == 200
        gate.set()
        assert [(await reply).status_code for reply in open_ones] == [200, 200]
        assert (await client.post(PLAIN, json=body())).status_code == 200


@pytest.mark.parametrize(
    ("wait_s", "seconds", "predicted"),
    [(0.0, "1", "0.100"), (0.25, "1", "0.250"), (1.0, "1", "1.000"), (1.001, "2", "1.001"), (29.2, "30", "29.200")],
)
async def test_a_refusal_says_when_to_retry_in_whole_seconds_rounded_up(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher, wait_s: float, seconds: str, predicted: str
) -> None:
    dispatcher.script = lambda _: [refusal("hold_count", "the queue is full", wait_s)]
    reply = await client.post(PLAIN, json=body())
    assert (reply.status_code, reply.headers["retry-after"]) == (429, seconds)
    assert reply.headers["x-pdcluster-predicted-wait-s"] == predicted


async def test_clients_are_told_not_to_send_again_what_may_end_nodes(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = lambda _: [RequestStopped("request r1 lost 3 nodes without progress")]
    reply = await client.post(PLAIN, json=body())
    assert (reply.status_code, reply.headers["x-should-retry"]) == (500, "false")
    assert reply.json()["error"]["code"] == "request_stopped" and "retry-after" not in reply.headers


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (DeadlineExceeded("no token within 5 s", "queue"), 504, "timeout_error"),
        (NodeLost("node p-1 is gone"), 503, "service_unavailable_error"),
        (RuntimeError("secret detail"), 500, "server_error"),
    ],
)
async def test_errors_before_the_first_byte_have_their_status(
    client: httpx.AsyncClient,
    dispatcher: ScriptedDispatcher,
    error: Exception,
    status: int,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher.script = lambda _: [error]
    with caplog.at_level(logging.CRITICAL):
        reply = await client.post(PLAIN, json=body(stream=True))
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == kind
    assert "secret" not in reply.text
    assert ("retry-after" in reply.headers) == (status == 503)


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [(NodeLost("node d-1 is gone"), "node_lost", 503), (RuntimeError("secret detail"), "internal", 500)],
)
async def test_an_error_after_the_first_byte_is_the_last_event_and_is_counted(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher, error: Exception, code: str, status: int
) -> None:
    dispatcher.script = lambda _: [*says("text", "length"), error]
    reply = await client.post(PLAIN, json=body(stream=True))
    assert reply.status_code == 200
    events = reply.text.strip().split("\n\n")
    name, data = events[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in reply.text and "secret" not in reply.text
    counted = (await client.get("/metrics")).text
    assert f'pdcluster_errors_total{{code="{code}"}} 1.0' in counted
    assert f'pdcluster_http_requests_total{{endpoint="{PLAIN}",status="{status}"}} 1.0' in counted
    assert 'status="200"' not in counted


async def test_a_stream_ends_with_done(client: httpx.AsyncClient, dispatcher: ScriptedDispatcher) -> None:
    reply = await client.post(PLAIN, json=body(stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    assert "usage" not in reply.text
    assert (len(dispatcher.ended), dispatcher.cancelled) == (1, [])


class RepeatsAPosition(ScriptedDispatcher):
    async def generate(self, generation: Generation) -> AsyncGenerator[TokenChunk | Done, None]:
        async for event in super().generate(generation):
            yield event
            yield event


async def test_a_dispatcher_that_breaks_its_contract_is_an_error_not_a_wrong_answer() -> None:
    async with served(RepeatsAPosition()) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        reply = await client.post(PLAIN, json=body())
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "integrity"


async def test_without_nodes_the_router_lives_but_is_not_ready(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.is_up = False
    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/ready")
    assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
    assert (await client.get("/v1/models")).json() == {"data": [], "object": "list"}
    assert (await client.post(PLAIN, json=body())).status_code == 503
    assert 'pdcluster_errors_total{code="unavailable"} 1.0' in (await client.get("/metrics")).text
    dispatcher.is_up = True
    assert (await client.get("/ready")).status_code == 200
    assert (await client.head("/ready")).status_code == 200


async def test_a_plain_request_id_of_the_client_is_echoed(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    given = await client.post(PLAIN, json=body(), headers={"x-request-id": "trace-7"})
    assert given.headers["x-request-id"] == "trace-7"
    odd = await client.post(PLAIN, json=body(), headers={"x-request-id": b"\xe9" * 10})
    assert odd.headers["x-request-id"] == odd.json()["id"].removeprefix("cmpl-")
    failed = await client.post(PLAIN, json={}, headers={"x-request-id": "trace-8"})
    assert failed.headers["x-request-id"] == "trace-8"
    assert len({generation.request for generation in dispatcher.started}) == 2


async def test_metrics_count_requests_tokens_and_errors(client: httpx.AsyncClient) -> None:
    await client.post(PLAIN, json=body(n=2))
    await client.post(PLAIN, json=body(max_tokens=-1))
    await client.get("/made/up/path")
    text = (await client.get("/metrics")).text
    tokens = len(says("hello world"))
    for line in (
        'pdcluster_http_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'pdcluster_http_requests_total{endpoint="/v1/completions",status="400"} 1.0',
        'pdcluster_http_requests_total{endpoint="other",status="404"} 1.0',
        'pdcluster_errors_total{code="invalid_request"} 1.0',
        f"pdcluster_output_tokens_total {2.0 * tokens}",
        'pdcluster_choices_total{finish="stop",mode="remote"} 2.0',
        'pdcluster_time_to_first_token_seconds_count{mode="remote"} 2.0',
        'pdcluster_kv_transfer_bytes_total{backend="shm"} 8192.0',
        "pdcluster_cached_prompt_tokens_total 6.0",
        "pdcluster_http_requests_open 0.0",
    ):
        assert line in text, line
    assert "made/up" not in text


async def test_probes_and_scrapes_are_no_requests(client: httpx.AsyncClient, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.is_up = False
    for path in ("/health", "/ready", "/livez", "/readyz", "/metrics", "/metrics", "/metrics/nothing"):
        await client.get(path)
    await client.post("/ready")
    counted = [line for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")]
    requests = [line for line in counted if line.startswith("pdcluster_http_requests_total")]
    assert requests == ['pdcluster_http_requests_total{endpoint="other",status="404"} 1.0']
    assert "pdcluster_http_requests_open 0.0" in counted
    assert not any('endpoint="/ready"' in line for line in counted)


def test_metric_names_follow_the_rules() -> None:
    for family in router_metrics().registry.collect():
        if not family.name.startswith(("python_", "process_")):
            assert family.name.startswith("pdcluster_")
            assert family.documentation.endswith(".")
            assert family.type in ("counter", "gauge", "histogram", "info")


async def test_tokenize_and_detokenize_are_inverse(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"prompt": "naïve 日本", "return_token_strs": True})).json()
    assert tokens["tokens"] == list(TEXT.encode("naïve 日本", add_special_tokens=True))
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), MAX_LEN)
    assert tokens["token_strs"][0] == "<|bos|>"
    text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "<|bos|>naïve 日本"}


async def test_many_tokens_are_made_text_off_the_event_loop(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.max_len = 10_000
    token_ids = list(TEXT.encode("hello ", add_special_tokens=False)) * 2000
    reply = await client.post("/detokenize", json={"tokens": token_ids[:9000]})
    assert reply.json()["prompt"] == TEXT.decode(token_ids[:9000])


async def test_tokenize_of_messages_shows_the_prompt_a_chat_would_have(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    await client.post(CHAT, json={"model": MODEL, "messages": messages})
    assert list(dispatcher.started[0].token_ids) == tokens


async def test_a_chat_can_continue_its_last_message(client: httpx.AsyncClient, dispatcher: ScriptedDispatcher) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two,"}]
    await client.post(CHAT, json={"model": MODEL, "messages": messages, "continue_final_message": True})
    assert TEXT.decode(dispatcher.started[0].token_ids, skip_special_tokens=False).endswith(
        "<|start|>assistant\none, two,"
    )


async def test_a_long_prompt_is_tokenized_off_the_event_loop_with_the_same_ids(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.max_len = 2**20
    prompt = "The quick brown fox. " * 2000
    assert (await client.post(PLAIN, json=body(prompt=prompt, max_tokens=4))).status_code == 200
    assert dispatcher.started[0].token_ids == TEXT.encode(prompt, add_special_tokens=True)


async def test_without_a_seed_one_is_drawn_for_all_choices_and_a_negative_one_is_taken(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    await client.post(PLAIN, json=body(n=2))
    await client.post(PLAIN, json=body())
    await client.post(PLAIN, json=body(seed=-1))
    seeds = [generation.sampling.seed for generation in dispatcher.started]
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[3] == 2**63 - 1
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_a_body_that_does_not_arrive_is_408(dispatcher: ScriptedDispatcher) -> None:
    async with (
        served(dispatcher, HttpSettings(body_s=0.2)) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode() + b'{"model"')
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408")
        writer.close()
        assert (await client.post(PLAIN, json=body())).status_code == 200


async def test_a_client_that_leaves_during_its_upload_is_only_counted(
    client: httpx.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode() + b'{"model"')
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.close()
    async with asyncio.timeout(20):
        while "pdcluster_client_disconnects_total 1.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
    assert dispatcher.started == []


async def test_shutdown_lets_an_open_stream_finish(dispatcher: ScriptedDispatcher) -> None:
    gate = asyncio.Event()
    dispatcher.script = lambda _: [*says("first ", "length"), Wait(gate), *says("last")]
    async with httpx.AsyncClient(timeout=None) as client:
        async with served(dispatcher) as url:
            reply = asyncio.create_task(client.post(url + PLAIN, json=body(stream=True)))
            await until(lambda: len(dispatcher.started) == 1)
            asyncio.get_running_loop().call_later(0.1, gate.set)
        texts = [
            json.loads(event[6:])["choices"][0]["text"]
            for event in (await reply).text.split("\n\n")
            if event.startswith("data: {")
        ]
    assert "".join(texts) == "first last"


async def test_shutdown_cancels_what_outlives_the_drain_and_says_so(
    dispatcher: ScriptedDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    never = Wait(asyncio.Event())
    dispatcher.script = lambda generation: (
        [never] if generation.sampling.max_tokens == 7 else [*says("text", "length"), never]
    )
    with caplog.at_level(logging.CRITICAL):
        async with httpx.AsyncClient(timeout=None) as client:
            async with served(dispatcher) as url:
                streamed = asyncio.create_task(client.post(url + PLAIN, json=body(stream=True)))
                whole = asyncio.create_task(client.post(url + PLAIN, json=body(max_tokens=7)))
                await until(lambda: len(dispatcher.started) == 2)
            begun, unbegun = await streamed, await whole
    assert begun.status_code == 200 and "the router stops" in begun.text.split("data: ")[-1]
    assert (
        unbegun.status_code == 503
        and "the router stops" in unbegun.json()["error"]["message"]
        and "retry-after" in unbegun.headers
    )
    assert len(dispatcher.cancelled) == 2


async def test_an_address_in_use_is_a_config_error(dispatcher: ScriptedDispatcher) -> None:
    async with served(dispatcher) as url:
        app = create_app(dispatcher, HttpSettings(), router_metrics())
        with pytest.raises(ConfigError, match=r"cannot listen on .*choose another address with --http"):
            async with listening(app, url.removeprefix("http://"), drain_s=1.0):
                raise AssertionError("must not listen twice")
