"""What one request costs the router's own thread, and where: `python -m bench.request_path`

The router's real parts (HTTP connection, prepare, gate, policy, attempt, links, codec) run in this process; nodes are
fakes in processes of their own, over real links. Clients are in this process and take next to no time: a request is
bytes that a connection gets, an answer bytes that it writes. So what is counted is the one thread that a router has:
microseconds of its CPU, and the interpreter's instructions by part, which no busy machine changes. Not in it: the
kernel's time of HTTP sockets, and other routers; `bench.router` has both.

Instructions of libraries in C are not counted (msgspec, hashes, zmq); time has them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from types import FrameType
from typing import Any, Protocol, cast

import uvloop

from bench.fakes.bare_router import BareConnection, bare_router
from bench.fakes.bare_router import __file__ as bare_router_file
from bench.harness.cluster import ends_with_us, start
from bench.harness.http_load import Ask
from bench.harness.report import Row, add_output_flags, print_rows, row, row_of_turns, save
from bench.rivals.routers import ROUTER_CORE, stop
from bench.router import CLIENT_CORE, NUM_PROMPT, NUM_STREAMED, PACE_S
from pdcluster.bootstrap.agent import watch
from pdcluster.checkpoint import bundled
from pdcluster.processes.garbage import collect_seldom
from pdcluster.settings.config import RouterConfig, TracingConfig, cache_directory
from pdcluster.telemetry.tracing import open_tracer
from pdcluster.transfer.backends.base import Peer
from pdcluster_router import process
from pdcluster_router.core.kept_heap import keep_heap
from pdcluster_router.core.tracing import Tracing
from pdcluster_router.frontend.app import create_app
from pdcluster_router.frontend.server import http_settings
from pdcluster_router.http.connection import Connection, ConnectionLimits, Connections
from pdcluster_router.policy.predicted import compiled

NUM_CLIENTS = 32
ROLES = {"local": ("mixed",), "P/D": ("prefill", "decode")}
LENGTHS = (10_000, 100_000)
# Requests of which every instruction is looked at: as many as fill what is counted many at a time (metrics.MOST_NOTED).
# That takes a hundred times as long, so reports of nodes, which come 20 times a second, count for more than they are:
# for some 500 instructions a node.
NUM_COUNTED, NUM_COUNTED_STREAMS = 512, 100
# Where nobody listens: what counts is the router's own thread.
NO_COLLECTOR = "http://127.0.0.1:9"
READY_S = 60.0
LOOK_S = 0.05
# Of one request, if 9,000 of them are to go through one core.
GOAL_US = 1e6 / 9000
TOKEN_GOAL_US = 1e6 / 60_000
# asyncio's loop, libraries, this bench.
NOT_OURS = "around it"
ROOTS = (os.path.dirname(process.__file__), os.path.dirname(os.path.dirname(bundled.__file__)))
LIMITS = ConnectionLimits(1 << 24, READY_S, READY_S)
OK = b"HTTP/1.1 200 "
STREAM_END = b"\r\n0\r\n\r\n"
PARTS = (
    ("HTTP and JSON", ("_router/http/", "_router/frontend/", "/api/", "tenants.py")),
    ("choice of nodes", ("_router/policy/", "view.py", "pacing.py", "/cost/")),
    ("prefixes", ("_router/prefix_index/", "hashing.py")),
    ("gate", ("_router/queueing/",)),
    ("one request's life", ("_router/request/", "_router/cluster/", "_router/core/")),
    ("wire", ("/wire/", "messages.py")),
    ("counted and explained", ("_router/explain/", "_router/admin/", "/telemetry/", "open_requests.py")),
)


Connect = Callable[[], asyncio.Protocol]


class Answering(Protocol):
    """What is measured."""

    async def answer(self, ask: Ask, count: int) -> None:
        """So many requests, NUM_CLIENTS at a time; raises RuntimeError when one fails."""
        ...


class Client:
    """The transport of one connection, as far as connections know it. Asks again as soon as it was answered, while
    `more` says so."""

    def __init__(self, request: bytes, end: bytes, more: Callable[[bytes], bool]) -> None:
        self._request, self._end, self._more = request, end, more
        self._answer = b""
        self.connection: asyncio.Protocol | None = None

    def ask(self) -> None:
        assert self.connection is not None
        self.connection.data_received(self._request)

    def write(self, data: bytes) -> None:
        self._answer += data
        if self._answer.endswith(self._end):
            answer, self._answer = self._answer, b""
            if self._more(answer):
                asyncio.get_running_loop().call_soon(self.ask)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self._more(b"the connection was closed")

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Router:
    """The parts of a router process but for its sockets to clients, in the loop that runs."""

    def __init__(self, parts: process.RouterComponents, config: RouterConfig) -> None:
        self._parts = parts
        front = parts.front
        self.app = create_app(front.dispatch, http_settings(config), front.metrics, front.places)
        self._connect: Connect = partial(Connection, self.app, LIMITS, Connections())

    async def wait_ready(self, num_nodes: int) -> None:
        """Looks again and again: nodes that have nothing new to say say nothing, and a model is loaded without a
        word."""
        cluster, dispatch, until = self._parts.cluster, self._parts.front.dispatch, time.monotonic() + READY_S
        while time.monotonic() < until:
            if len(cluster.view().nodes) >= num_nodes and dispatch.readiness().can_serve:
                return
            await asyncio.sleep(LOOK_S)
        raise TimeoutError(f"the router does not know {num_nodes} nodes and their model after {READY_S:g} s")

    async def answer(self, ask: Ask, count: int) -> None:
        await answer(self._connect, ask, count)


class Bare:
    """`bench.fakes.bare_router` in the same place."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    async def answer(self, ask: Ask, count: int) -> None:
        await answer(self._connect, ask, count)


async def answer(connect: Connect, ask: Ask, count: int) -> None:
    """So many requests, NUM_CLIENTS at a time; raises RuntimeError when one fails."""
    left, num_open, failure = count, 0, b""
    done = asyncio.Event()

    def more(answer: bytes) -> bool:
        nonlocal left, num_open, failure
        if not answer.startswith(OK):
            failure = answer
        left -= 1
        if left > 0 and not failure:
            return True
        num_open -= 1
        if num_open == 0 or failure:
            done.set()
        return False

    clients = [
        Client(ask.request(), STREAM_END if ask.is_stream else b"", more) for _ in range(min(NUM_CLIENTS, count))
    ]
    num_open, left = len(clients), count - len(clients) + 1
    for client in clients:
        client.connection = connect()
        client.connection.connection_made(cast(asyncio.Transport, client))
        client.ask()
    async with asyncio.timeout(60 + count):
        await done.wait()
    for client in clients:
        assert client.connection is not None
        client.connection.connection_lost(None)
    if failure:
        raise RuntimeError(f"a request failed: {failure[:200]!r}")


@contextmanager
def counting(found: Counter[str]) -> Iterator[None]:
    """Instructions of the interpreter by file, while the block runs."""

    def each(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            found[frame.f_code.co_filename] += 1
        return each

    sys.settrace(each)
    try:
        yield
    finally:
        sys.settrace(None)


def part_of(file: str) -> str:
    if file == bare_router_file:
        return "the bare router itself"
    ours = next((root for root in ROOTS if file.startswith(root)), None)
    if ours is None:
        return NOT_OURS
    name = file[len(os.path.dirname(ours)) :]
    return next((part for part, marks in PARTS if any(mark in name for mark in marks)), "other modules of ours")


def completion(num_prompt: int, num_output: int, *, is_stream: bool) -> Ask:
    ids = [10 + index % 400 for index in range(num_prompt)]
    model = bundled.path().resolve().name
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": num_output,
        "temperature": 0,
        "stream": is_stream,
        "ignore_eos": True,
    }
    return Ask("/v1/completions", json.dumps(body).encode(), is_stream)


@asynccontextmanager
async def routing(bootstrap: str, case: str) -> AsyncIterator[Router]:
    """A router that knows the nodes, and has answered some requests."""
    config = RouterConfig(bootstrap=(bootstrap,), tokenizer=bundled.path(), mode="remote" if case == "P/D" else "auto")
    async with AsyncExitStack() as stack:
        parts = process.assemble(config, Peer("bench", f"bench-{secrets.token_hex(8)}"), None, stack)
        tasks = process.Tasks(asyncio.Event(), stack)
        for work in (
            parts.cluster.follow(watch(config.bootstrap)),
            parts.models.keep_loaded(),
            parts.front.dispatch.waiting.follow(parts.cluster),
        ):
            await tasks.run(work)
        router = Router(parts, config)
        await router.wait_ready(len(ROLES[case]))
        await router.answer(completion(NUM_PROMPT, 1, is_stream=False), 500)
        collect_seldom()
        yield router


@asynccontextmanager
async def without_routing(bootstrap: str) -> AsyncIterator[Bare]:
    router = bare_router()
    try:
        await router.connect(bootstrap)
        async with asyncio.timeout(READY_S):
            await router.ready.wait()
        bare = Bare(lambda: BareConnection(router))
        await bare.answer(completion(NUM_PROMPT, 1, is_stream=False), 500)
        yield bare
    finally:
        router.close()


async def beside_bare(
    router: Answering, bootstrap: str, ask: Ask, unit: str, count: int, turns: int, num_units: int
) -> list[Row]:
    """The thread's time of one and the other, in turns: what is left when the machine's own pace of the moment is taken
    out."""
    async with without_routing(bootstrap) as bare:
        pairs = [
            [(await _microseconds(each, ask, count, 1))[0] / num_units for each in (router, bare)] for _ in range(turns)
        ]
        own, other = zip(*pairs, strict=True)
        against = "a router without routing"
        metric = f"router thread per {unit}, in turns"
        rows = [row_of_turns(metric, "local", own, "us", against=against, other=other, better="less")]
        return rows + await _instructions(bare, ask, against, unit, num_units)


async def request_rows(bootstrap: str, case: str, scale: int) -> list[Row]:
    async with routing(bootstrap, case) as router:
        ask = completion(NUM_PROMPT, 1, is_stream=False)
        samples = await _microseconds(router, ask, 100, 10 * scale)
        rows = [_goal("router thread per request", case, samples, "9,000 a second", GOAL_US)]
        rows += await _instructions(router, ask, case, "request", 1)
        if case == "local":
            rows += await beside_bare(router, bootstrap, ask, "request", 200, 10 * scale, 1)
            for length in LENGTHS:
                samples = await _microseconds(router, completion(length, 1, is_stream=False), 10, 3 * scale)
                rows.append(
                    row(
                        "router thread per request",
                        f"{case}, {length:,} ids",
                        [sample / 1e3 for sample in samples],
                        "ms",
                    )
                )
    return rows


def _goal(metric: str, case: str, samples: Sequence[float], against: str, goal_us: float) -> Row:
    return row(metric, case, samples, "us", against=against, against_value=goal_us, better="less", goal=1.0)


async def tracing_rows(bootstrap: str, scale: int) -> list[Row]:
    """What tracing that is on costs a request that is not sampled, and one that is, in turns with none."""
    tracer = open_tracer(TracingConfig(NO_COLLECTOR), "router", "bench", time.monotonic, time.time)
    assert tracer is not None
    cases = {
        "tracing off": None,
        "not sampled": Tracing(tracer, 0.0),
        "sampled": Tracing(tracer, 1.0),
    }
    rows: list[Row] = []
    async with routing(bootstrap, "local") as router:
        ask = completion(NUM_PROMPT, 1, is_stream=False)
        turns: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(10 * scale):
            for case, router.app.tracing in cases.items():
                turns[case] += await _microseconds(router, ask, 100, 1)
        off = turns["tracing off"]
        for case, samples in turns.items():
            metric = "router thread per request, in turns"
            rows.append(
                row_of_turns(metric, f"local, {case}", samples, "us", against="tracing off", other=off, better="less")
            )
            router.app.tracing = cases[case]
            rows += [each for each in await _instructions(router, ask, f"local, {case}", "request", 1) if is_sum(each)]
    await asyncio.to_thread(tracer.close)
    return rows


def is_sum(row: Row) -> bool:
    return row.metric.endswith("all of ours")


async def stream_rows(bootstrap: str, case: str, scale: int) -> list[Row]:
    async with routing(bootstrap, case) as router:
        ask = completion(NUM_PROMPT, NUM_STREAMED, is_stream=True)
        samples = [sample / NUM_STREAMED for sample in await _microseconds(router, ask, 50, 4 * scale)]
        rows = [_goal("router thread per streamed token", case, samples, "60,000 a second", TOKEN_GOAL_US)]
        rows += await _instructions(router, ask, case, "streamed token", NUM_STREAMED)
        if case == "local":
            rows += await beside_bare(router, bootstrap, ask, "streamed token", 50, 4 * scale, NUM_STREAMED)
        return rows


async def _microseconds(router: Answering, ask: Ask, count: int, repeats: int) -> list[float]:
    """Of this thread's CPU, by request."""
    samples = []
    for _ in range(repeats):
        began = time.thread_time()
        await router.answer(ask, count)
        samples.append((time.thread_time() - began) / count * 1e6)
    return samples


async def _instructions(router: Answering, ask: Ask, case: str, unit: str, num_units: int) -> list[Row]:
    """By part, the largest first, `num_units` of them to a request."""
    found: Counter[str] = Counter()
    count = NUM_COUNTED_STREAMS if ask.is_stream else NUM_COUNTED
    with counting(found):
        await router.answer(ask, count)
    by_part: Counter[str] = Counter()
    for file, number in found.items():
        by_part[part_of(file)] += number
    by_part["all of ours"] = by_part.total() - by_part[NOT_OURS]
    return [
        row(f"instructions per {unit}: {part}", case, [number / count / num_units], "")
        for part, number in by_part.most_common()
    ]


@contextmanager
def nodes(roles: Sequence[str], token_s: float) -> Iterator[str]:
    """Fakes of these roles; gives the bootstrap's address."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        bootstrap = start(running, ["pdcluster.cli", "bootstrap", "--listen", "127.0.0.1:0"])
        own = ["--bootstrap", bootstrap, "--model", str(bundled.path()), "--token-s", str(token_s)]
        for number, role in enumerate(roles):
            argv = [sys.executable, "-m", "bench.fakes.fake_node", *own, "--name", f"f{number}", "--role", role]
            running.append(subprocess.Popen(argv, preexec_fn=ends_with_us()))
            os.sched_setaffinity(running[-1].pid, {CLIENT_CORE})
        yield bootstrap
    finally:
        stop(running)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.request_path", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    add_output_flags(parser)
    chosen = parser.parse_args()
    os.sched_setaffinity(0, {ROUTER_CORE})
    keep_heap()
    compiled.load(cache_directory())
    scale = 1 if chosen.quick else 5
    rows: list[Row] = []
    for case, roles in ROLES.items():
        with nodes(roles, 0.0) as bootstrap:
            rows += uvloop.run(request_rows(bootstrap, case, scale))
            if case == "local":
                rows += uvloop.run(tracing_rows(bootstrap, scale))
        with nodes(roles, PACE_S) as bootstrap:
            rows += uvloop.run(stream_rows(bootstrap, case, scale))
    print_rows(rows)
    save(rows, chosen)


if __name__ == "__main__":
    main()
