"""The whole thing as a user starts it: real processes, weights, sockets and media, through the OpenAI API."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import numpy as np
import openai
import psutil
import pytest
from driver import Driver, greedy
from processes import (
    EXACT,
    PATIENT,
    Up,
    abandoned_memory,
    ask,
    listening_ports,
    make_prompts,
    running,
    wait_nothing_abandoned,
)

from pdcluster import client as api
from pdcluster.checkpoint import bundled
from pdcluster.core.errors import DeadlineExceeded
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.rpc import bootstrap_pb2 as pb
from pdcluster.rpc import bootstrap_pb2_grpc as stubs
from pdcluster.settings.config import cache_directory

pytestmark = pytest.mark.timeout(300)

BACKENDS = ("shm", "tcp", "mooncake")
MOST_LONG = 4
KEY_VARIABLE = "PDCLUSTER_BOOTSTRAP_SECURITY_CLUSTER_KEY_FILE"


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.path()


@pytest.fixture(scope="module")
def reference(model):
    """Greedy tokens of one engine in this process, by prompt."""
    engine = Engine(EngineConfig(model, cache_directory(), dtype="float32", num_pages=4096, threads=1))

    def continue_(prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        jobs = Driver(engine).run(
            [np.array(p, np.int32) for p in prompts], [greedy(count, ignore_eos=True) for count in counts]
        )
        return [job.tokens for job in jobs]

    yield continue_
    engine.close()


@pytest.fixture(scope="module")
def two_pairs() -> Iterator[Up]:
    with running("--prefill", "2", "--decode", "2", *EXACT, *PATIENT) as up:
        yield up


def test_grpc_gives_the_tokens_of_http_over_the_same_two_nodes(two_pairs: Up) -> None:
    prompt = make_prompts(1, seed=7)[0]
    with api.Client(two_pairs.grpc) as client:
        outputs = list(client.generate(prompt, max_tokens=20, temperature=0.0, ignore_eos=True, timeout_s=60.0))
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == ask(two_pairs, prompt, 20)[0]
    assert (
        outputs[0].route is not None
        and outputs[0].route.mode == "remote"
        and outputs[0].route.decode.startswith("decode-")
    )
    assert outputs[-1].timings is not None and outputs[-1].timings.transfer_bytes


@pytest.mark.skipif(KEY_VARIABLE not in os.environ, reason="scripts/with_key.sh runs these tests with a cluster key")
def test_a_cluster_key_is_in_force(two_pairs: Up) -> None:
    (node, *_) = [argv for argv in map(psutil.Process.cmdline, two_pairs.children()) if "--role" in argv]
    address = node[node.index("--bootstrap") + 1]
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        stubs.BootstrapStub(channel).Leave(pb.LeaveRequest(node="x", incarnation="x"), timeout=20.0)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_grpc_deadline_ends_the_request_on_both_nodes(two_pairs: Up) -> None:
    with api.Client(two_pairs.grpc) as client, pytest.raises(DeadlineExceeded):
        client.complete(make_prompts(1, seed=8)[0], max_tokens=1500, ignore_eos=True, timeout_s=0.3)
    two_pairs.wait_idle()


def test_two_hundred_requests_sixteen_at_a_time_equal_the_reference_and_leave_nothing(two_pairs: Up, reference) -> None:
    prompts = make_prompts(200, seed=1)
    counts = [1 + index * 5 % 24 for index in range(200)]
    expected = reference(prompts, counts)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda pair: ask(two_pairs, *pair), zip(prompts, counts, strict=True)))
    assert [tokens for tokens, _ in answers] == expected
    modes = {reply["headers"]["x-pdcluster-mode"] for _, reply in answers}
    assert modes == {"remote"}, "every request went through prefill, push and decode"
    assert {reply["headers"]["x-pdcluster-prefill"] for _, reply in answers} == {"prefill-0", "prefill-1"}
    assert {reply["headers"]["x-pdcluster-decode"] for _, reply in answers} == {"decode-0", "decode-1"}
    two_pairs.wait_idle()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_medium_gives_the_same_tokens_and_is_named(backend: str, reference) -> None:
    prompts, counts = make_prompts(12, seed=2), [12] * 12
    expected = reference(prompts, counts)
    with running("--transfer", backend, *EXACT, *PATIENT) as up, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda pair: ask(up, *pair), zip(prompts, counts, strict=True)))
        assert [tokens for tokens, _ in answers] == expected
        assert {reply["headers"]["x-pdcluster-transfer"] for _, reply in answers} == {backend}
        assert {reply["usage"]["pdcluster"]["transfer"] for _, reply in answers} == {backend}
        assert all(reply["usage"]["pdcluster"]["timeline"]["transfer_bytes"] > 0 for _, reply in answers)
        up.wait_idle()


def test_the_official_client_works_unchanged(two_pairs: Up) -> None:
    client = openai.OpenAI(base_url=f"{two_pairs.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [two_pairs.model]
    chat = client.chat.completions.create(
        model=two_pairs.model,
        messages=[{"role": "user", "content": "def add(a, b):"}],
        max_tokens=16,
        n=2,
        seed=3,
        logprobs=True,
        top_logprobs=3,
    )
    assert len(chat.choices) == 2
    for choice in chat.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert chat.usage is not None and chat.usage.completion_tokens <= 32
    completion = client.completions.create(
        model=two_pairs.model, prompt="import os\nimport ", max_tokens=24, temperature=0, stop=["\n"]
    )
    assert "\n" not in completion.choices[0].text
    asked = {
        "model": two_pairs.model,
        "prompt": "import os\nimport ",
        "max_tokens": 24,
        "temperature": 0,
        "stop": ["\n"],
    }
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == completion.choices[0].text
    assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == completion.usage.completion_tokens
    client.close()


async def test_short_streams_end_while_long_ones_run_beside_them(two_pairs: Up) -> None:
    """Long ones come until every decode node has one, or enough of them: where they go is the policy's choice, and a
    node whose steps were disturbed may look slower than another that has rows. Short ones come until a long one ends,
    read as bytes: how chunks of two streams alternate at a client that is slower than the nodes, or gets no core, says
    nothing about the cluster."""
    async with httpx.AsyncClient(base_url=two_pairs.url, timeout=120.0) as client:

        async def follow(name: str, count: int, begun: asyncio.Queue[str]) -> None:
            body = {
                "model": two_pairs.model,
                "prompt": f"class {name}:",
                "max_tokens": count,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            end = b""
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                begun.put_nowait(reply.headers["x-pdcluster-decode"])
                async for some in reply.aiter_raw():
                    end = (end + some)[-100:]
            assert end.rstrip().endswith(b"data: [DONE]"), end

        begun: asyncio.Queue[str] = asyncio.Queue()
        long: list[asyncio.Task[None]] = []
        busy: set[str] = set()
        while len(busy) < 2 and len(long) < MOST_LONG:
            long.append(asyncio.create_task(follow(f"Long{len(long)}", 1500, begun)))
            busy.add(await asyncio.wait_for(begun.get(), 60.0))
        num_shorts = ended_meanwhile = 0
        while not any(task.done() for task in long):
            await follow(f"Short{num_shorts}", 8, begun)
            num_shorts += 1
            is_beside = (
                begun.get_nowait() in busy or len(busy) == 1
            )  # then the other node is the better place for a short one
            ended_meanwhile += is_beside and not any(task.done() for task in long)
        await asyncio.gather(*long)
    assert ended_meanwhile >= 2


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", b'{"model": "MODEL", "prompt": ""}', 400, "empty"),
        ("/v1/completions", b'{"model": "MODEL", "prompt": [99999999]}', 400, "99999999"),
        ("/v1/completions", b'{"model": "other", "prompt": "x"}', 404, "other"),
        ("/v1/completions", b'{"model": "MODEL", "prompt": "x", "max_tokens": -1}', 400, "max_tokens"),
        ("/v1/completions", b'{"model": "MODEL", "prompt": "x", "max_token": 1}', 400, "max_tokens"),
        ("/v1/completions", b'{"model": "MODEL", "prompt": 5}', 400, "prompt"),
        ("/v1/completions", b'{"model": "MODEL", ', 400, "JSON"),
        ("/v1/completions", b'{"model": "\xff"}', 400, "UTF-8"),
        ("/v1/completions", b'{"model": "MODEL", "prompt": "' + b"x" * 10_000_000 + b'"}', 413, "bytes"),
        ("/v1/chat/completions", b'{"model": "MODEL", "messages": []}', 400, "messages"),
        ("/v1/completions", b'{"model": "MODEL", "prompt": "LONG"}', 400, "token"),
    ],
    ids=["empty", "id-range", "model", "negative", "name", "type", "json", "utf8", "10MB", "no-messages", "too-long"],
)
def test_bad_input_gets_a_4xx_that_says_what_to_change(
    two_pairs: Up, path: str, body: bytes, status: int, says: str
) -> None:
    body = body.replace(b"MODEL", two_pairs.model.encode()).replace(b"LONG", b"word " * 200_000)
    reply = two_pairs.client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text[:300]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and says in error["message"]
    assert ask(two_pairs, [50, 51, 52], 3)[1]["choices"], "the cluster is unharmed"


def test_a_prefill_node_killed_under_load_costs_no_request_and_comes_back(reference) -> None:
    prompts, counts = make_prompts(48, seed=3), [16] * 48
    expected = reference(prompts, counts)
    with running("--prefill", "2", "--decode", "1", *EXACT) as up:
        with ThreadPoolExecutor(12) as pool:
            running_requests = [
                pool.submit(ask, up, prompt, count) for prompt, count in zip(prompts, counts, strict=True)
            ]
            while sum(request.done() for request in running_requests) < 6:
                time.sleep(0.005)
            killed = up.kill("prefill-0")
            answers = [request.result(timeout=120) for request in running_requests]
        assert [tokens for tokens, _ in answers] == expected
        up.wait_nodes(3)
        assert up.pid_of("prefill-0") != killed
        used = {ask(up, prompt, 2)[1]["headers"]["x-pdcluster-prefill"] for prompt in make_prompts(12, seed=4)}
        assert "prefill-0" in used, "the restarted node serves again"
        up.wait_idle()


def test_a_decode_node_killed_mid_stream_is_replaced_without_a_token_lost(reference) -> None:
    prompts, counts = make_prompts(12, seed=5), [200] * 12
    expected = reference(prompts, counts)
    with running("--prefill", "1", "--decode", "2", *EXACT) as up:
        victim = up.pid_of("decode-0")
        with ThreadPoolExecutor(12) as pool:
            running_requests = [
                pool.submit(ask, up, prompt, count) for prompt, count in zip(prompts, counts, strict=True)
            ]
            while up.metrics().get('pdcluster_node_running{node="decode-0",role="decode"}', 0) == 0:
                time.sleep(0.005)
            os.kill(victim, signal.SIGKILL)
            answers = [request.result(timeout=120) for request in running_requests]
        assert [tokens for tokens, _ in answers] == expected
        assert max(reply["usage"]["pdcluster"]["attempts"] for _, reply in answers) > 1
        up.wait_nodes(3)
        up.wait_idle()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_cluster_finishes_what_it_streams_and_leaves_no_process_no_shared_memory_and_no_socket(
    number: int,
) -> None:
    memory = abandoned_memory()
    with running(*EXACT, "--set=up.drain_s=60") as up:
        pids = {process.pid for process in up.survivors()}
        assert pids >= {child.pid for child in up.children()} | {up.process.pid} and len(pids) >= 5
        assert listening_ports(pids)
        body = {"model": up.model, "prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with up.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            up.process.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert up.process.wait(90) == 0, up.output()
        with pytest.raises(httpx.ConnectError):
            httpx.get(up.url + "/health", trust_env=False)
        assert not up.survivors(), "nor a socket, as each needs a process"
        wait_nothing_abandoned(memory)
