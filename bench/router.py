"""What the router costs: added latency, requests and tokens per second of one core, core time per request. `python -m
bench.router`

Nodes are fakes that answer at once (`bench.fakes.fake_node`) on core 0 beside the client, the router has core 1. Core
time is the router process's own, so it holds when the fakes are the bottleneck: `per core` is what one core of router
could do.

Added latency is what the client waits, less what it waits for a fake worker (`bench.fakes.fake_worker`) without any
router, alone. That is measured once in a run, has a row, and is taken off every router alike: ours and rivals, one leg
and two, idle and at half load. Links to nodes, and waits for the core that client and fakes share, are the router's.
What our fakes take over links of our own without a router is printed beside it and subtracted from nothing.

The ceiling of the machine of the moment is `bench.fakes.bare_router` on the same core over the same fakes, asked in
turns with ours: what plain Python can do without any routing. Where the goals come from it did 18,000 requests/s,
100,000 tokens/s and 0.31 ms; they are 0.5, 0.6 and 1.13 of that.

`--keyed` asks only what a cluster key costs: one token after the other in turns, with a key and without.

`--compare` puts other routers in the same places (`bench.rivals.routers` says which, how, and how to install them):
those found in `--rivals DIR`. Which are not there, or do not come up, is said. Ours routes by its default policy with
exact prefixes. Each is measured by itself, and in turns with ours, both being up: the rows "in turns" are those to
judge by on a machine with neighbours, whose pace changes within a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvloop
import zmq

from bench.harness.cluster import ends_with_us, start
from bench.harness.http_load import Ask, Outcome, load
from bench.harness.report import Row, add_output_flags, print_rows, row, row_of_turns, save
from bench.rivals.routers import BARE, NAMES, ROUTER_CORE, Placed, rival, stop, wait_ready, worker
from pdcluster.bootstrap.agent import watch
from pdcluster.checkpoint import bundled
from pdcluster.core.messages import Cancel, Deliver, Finished, Prefill, Reserve, Reserved, Sampling, Work, pack_tokens
from pdcluster.kv.hashing import chain_root, extend
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.cluster.legs import RequestLeg
from pdcluster_router.cluster.node_table import NodeTable
from pdcluster_router.cluster.view import NodeView

CLIENT_CORE = 0
CONNECTIONS = 32
NUM_PROMPT = 128
NUM_STREAMED = 64
# From one token of a stream to the next, on our fakes and on the rivals': each is an event of its own, which no router
# can take together with the next. It bounds what CONNECTIONS streams bring in a second; what counts is tokens/s per
# core. Timers of both fakes know milliseconds.
PACE_S = 0.001
LONE_STREAM = "stream of 64 alone"
# Before what counts: ours loads compiled choices beside its start, which is 0.4 s of a core and no part of any request.
WARM_S = 2.0
TURNS = 5
KEYED_GOAL = 0.95
NUM_DIRECT = 500
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- ours


@contextmanager
def ours(roles: Sequence[str], token_s: float = 0.0, key_file: Path | None = None) -> Iterator[tuple[Placed, str]]:
    """Our router over fakes of these roles; gives the bootstrap's address, too. key_file: of the cluster's key."""
    running: list[subprocess.Popen[bytes]] = []
    model = bundled.path()
    try:
        bootstrap = start(
            running, ["pdcluster.cli", "bootstrap", "--listen", "127.0.0.1:0", *key_flags("bootstrap", key_file)]
        )
        for number, role in enumerate(roles):
            argv = [
                sys.executable,
                "-m",
                "bench.fakes.fake_node",
                "--bootstrap",
                bootstrap,
                "--model",
                str(model),
                "--name",
                f"f{number}",
                *([] if key_file is None else ["--cluster-key-file", str(key_file)]),
            ]
            running.append(
                subprocess.Popen([*argv, "--role", role, "--token-s", str(token_s)], preexec_fn=ends_with_us())
            )
        own = [
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "none",
            "--admin",
            "none",
            "--bootstrap",
            bootstrap,
            "--tokenizer",
            str(model),
            *key_flags("router", key_file),
        ]
        own += (
            ["--mode", "remote"] if "prefill" in roles else []
        )  # nodes that take no time are best left alone with a request
        address = start(running, ["pdcluster_router.cli", *own])
        pid = running[-1].pid
        os.sched_setaffinity(pid, {ROUTER_CORE})
        wait_ready(address, b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        name = "pdcluster" if key_file is None else "with a key"
        yield Placed(name, address, pid, "/v1/completions", model.resolve().name), bootstrap
    finally:
        stop(running)


def key_flags(who: str, key_file: Path | None) -> list[str]:
    return [] if key_file is None else [f"--set={who}.security.cluster_key_file={key_file}"]


@contextmanager
def bare(bootstrap: str) -> Iterator[Placed]:
    """The router without routing over the first of the same fakes."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        address = start(running, ["bench.fakes.bare_router", "--bootstrap", bootstrap])
        os.sched_setaffinity(running[-1].pid, {ROUTER_CORE})
        wait_ready(address, b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        yield Placed(BARE, address, running[-1].pid, "/v1/completions", bundled.path().resolve().name)
    finally:
        stop(running)


class _Exchange:
    """What a router says to the fakes of one request, and nothing else that a router does. second: the decode node,
    where there is one; both work at once then, on the same core, so that one of them alone takes less than the two."""

    def __init__(self, cluster: NodeTable, first: NodeView, second: NodeView | None) -> None:
        self._cluster, self._first, self._second = cluster, first.endpoint, None if second is None else second.endpoint
        self._root = chain_root(block_tokens=first.block_tokens, salt=b"", weights="bench")
        self._packed = pack_tokens(10 + index % 400 for index in range(NUM_PROMPT))
        self._hashes = extend(b"", self._packed, root=self._root, block_tokens=first.block_tokens)
        self._sampling = Sampling(1, 1, temperature=0.0)

    async def ask(self, request: str) -> float:
        """Seconds to its answer."""
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hear(_: object, body: object) -> None:
            if isinstance(body, Finished):
                finished.set_result(None)
            elif isinstance(body, Reserved) and not finished.done():
                self._cluster.send(self._first, Deliver(body.ticket))

        ledger = self._cluster.ledger
        ledger.readers[request] = hear
        began = time.perf_counter()
        ledger.enter(RequestLeg(request, 0, self._first, []))
        self._cluster.send(self._first, Prefill(self._work(request, 0), remote=self._second is not None))
        if self._second is not None:
            ledger.enter(RequestLeg(request, 1, self._second, []))
            self._cluster.send(self._second, Reserve(self._work(request, 1), self._first))
        await finished
        taken = time.perf_counter() - began
        if self._second is not None:
            self._cluster.send(self._second, Cancel(request, 1, "done"))  # the prefill node's token was the last
        del ledger.readers[request]
        return taken

    def _work(self, request: str, attempt: int) -> Work:
        return Work(request, attempt, self._packed, NUM_PROMPT, self._hashes, self._sampling, 60.0, self._root)


async def _direct(bootstrap: str, num_nodes: int, count: int, interval_s: float = 0.0) -> float:
    """Median seconds of requests asked of the fakes over links of our own: of one node, or of one for each leg.
    interval_s: from one request to the next in the mean, at random, whenever answers come; 0: one after the other."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    cluster = NodeTable(Peer("bench", secrets.token_hex(8)), context=context, settings=WireSettings())
    following = asyncio.create_task(cluster.follow(watch((bootstrap,))))
    async with asyncio.timeout(60):
        while len(cluster.view().nodes) < num_nodes:
            await cluster.wait_for_change(cluster.version)
        first, *others = sorted(cluster.view().nodes, key=lambda node: node.role == "decode")
        exchange = _Exchange(cluster, first, others[0] if others else None)
        names = [f"direct-{number}" for number in range(count)]
        if interval_s:
            taken = await _at_random(exchange, names, interval_s)
        else:
            taken = [await exchange.ask(name) for name in names]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    cluster.close()
    context.destroy(0)
    return statistics.median(taken)


async def _at_random(exchange: _Exchange, names: Sequence[str], interval_s: float) -> list[float]:
    gaps, loop = random.Random(len(names)), asyncio.get_running_loop()
    due, asked = loop.time(), []
    for name in names:
        due += gaps.expovariate(1 / interval_s)
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        asked.append(asyncio.create_task(exchange.ask(name)))
    return await asyncio.gather(*asked)


@dataclass(frozen=True, slots=True)
class FakesAlone:
    """What the fakes take without a router: median seconds of lone requests, and of those that come as often as to a
    router at half load."""

    alone_s: float
    half_s: float

    @classmethod
    def measured(cls, bootstrap: str, num_nodes: int, half_rate: float, seconds: float) -> FakesAlone:
        # The least of three: what disturbs a moment is none of theirs, and would be taken off what the router adds.
        alone_s = min(uvloop.run(_direct(bootstrap, num_nodes, NUM_DIRECT)) for _ in range(3))
        num_half = max(int(half_rate * seconds), 1)
        return cls(alone_s, min(uvloop.run(_direct(bootstrap, num_nodes, num_half, 1 / half_rate)) for _ in range(3)))

    def rows(self, case: str) -> list[Row]:
        times = ("alone", self.alone_s), ("half", self.half_s)
        return [
            row(f"latency of the fakes alone, {load_name}", case, [seconds * 1e3], "ms") for load_name, seconds in times
        ]


# ---------------------------------------------------------------- measuring


def without_router(seconds: float) -> Row:
    """What a client waits for a worker by itself; it is taken off every router's latency."""
    with worker() as placed:
        runs = [
            measure(placed, placed.ask(NUM_PROMPT, 1, stream=False), connections=1, seconds=seconds) for _ in range(3)
        ]
    samples = [run.outcome.percentile(0.5) * 1e3 for run in runs]
    return row("latency p50 without a router", "a worker alone, taken off every router's", samples, "ms")


@dataclass(frozen=True, slots=True)
class Measured:
    outcome: Outcome
    core_s: float


def measure(placed: Placed, ask: Ask, *, connections: int, seconds: float, interval_s: float = 0.0) -> Measured:
    before = _cpu_s(placed.pid)
    outcome = load(placed.address, ask, connections=connections, seconds=seconds, interval_s=interval_s)
    if outcome.num_failed or not outcome.latencies:
        raise RuntimeError(f"{placed.name} failed {outcome.num_failed} requests, the last with {outcome.failure!r}")
    return Measured(outcome, _cpu_s(placed.pid) - before)


def latency_rows(
    placed: Placed, case: str, worker_s: float, seconds: float, repeats: int, half_rate: float
) -> list[Row]:
    """Added latency: alone, and at half of what the router can do."""
    idle = [
        measure(placed, placed.ask(NUM_PROMPT, 1, stream=False), connections=1, seconds=seconds) for _ in range(repeats)
    ]
    interval_s = CONNECTIONS / half_rate
    ask = placed.ask(NUM_PROMPT, 1, stream=False)
    half = [
        measure(placed, ask, connections=CONNECTIONS, seconds=seconds, interval_s=interval_s) for _ in range(repeats)
    ]
    return added_rows(placed.name, case, [run.outcome for run in idle], [run.outcome for run in half], worker_s)


def added_rows(name: str, case: str, idle: Sequence[Outcome], half: Sequence[Outcome], worker_s: float) -> list[Row]:
    """worker_s: what the client waits for a worker without a router."""
    rows = []
    for load_name, outcomes in (("idle", idle), ("half", half)):
        for share in (0.5, 0.99):
            samples = [(outcome.percentile(share) - worker_s) * 1e3 for outcome in outcomes]
            rows.append(row(f"added latency p{share * 100:.0f}, {load_name}", f"{name} {case}", samples, "ms"))
    return rows


def request_rows(placed: Placed, case: str, seconds: float, repeats: int) -> list[Row]:
    """Requests per second, as they came and per core of router."""
    measure(placed, placed.ask(NUM_PROMPT, 1, stream=False), connections=CONNECTIONS, seconds=WARM_S)
    whole = [
        measure(placed, placed.ask(NUM_PROMPT, 1, stream=False), connections=CONNECTIONS, seconds=seconds)
        for _ in range(repeats)
    ]
    name = f"{placed.name} {case}"
    return [
        row("requests/s", name, [run.outcome.requests_s for run in whole], "1/s"),
        row("requests/s per core", name, [run.outcome.all_answers / run.core_s for run in whole], "1/s"),
        row("core time per request", name, [_core_ms(run) for run in whole], "ms"),
    ]


def stream_rows(placed: Placed, case: str, seconds: float, repeats: int) -> list[Row]:
    """Streamed tokens per second, one event each, and how long one stream takes alone, which shows stalls."""
    ask = placed.ask(NUM_PROMPT, NUM_STREAMED, stream=True)
    measure(placed, ask, connections=CONNECTIONS, seconds=WARM_S)
    streams = [measure(placed, ask, connections=CONNECTIONS, seconds=seconds) for _ in range(repeats)]
    alone = measure(placed, ask, connections=1, seconds=seconds)
    name = f"{placed.name} {case}"
    return [
        row(LONE_STREAM, name, [alone.outcome.percentile(0.5) * 1e3], "ms"),
        row("tokens/s", name, [run.outcome.tokens_s for run in streams], "1/s"),
        row("tokens/s per core", name, [run.outcome.all_tokens / run.core_s for run in streams], "1/s"),
    ]


def ceiling_rows(placed: Placed, bootstrap: str, seconds: float, turns: int, *, is_stream: bool) -> list[Row]:
    """Ours beside the router without routing."""
    with bare(bootstrap) as other:
        return turn_rows(placed, other, "local", seconds, turns, is_stream=is_stream)


def turn_rows(
    placed: Placed,
    other: Placed,
    case: str,
    seconds: float,
    turns: int,
    *,
    is_stream: bool,
    worker_s: float | None = None,
) -> list[Row]:
    """Ours beside another one that is up as long, in turns. worker_s: what a worker takes without a router, where both
    are to be judged by what they add to it."""
    asks = (
        [("tokens", NUM_STREAMED, CONNECTIONS)]
        if is_stream
        else [("requests", 1, CONNECTIONS), ("latency p50, alone", 1, 1)]
    )
    is_judged, rows = worker_s is not None, []
    for metric, num_output, connections in asks:
        turn = [(each, each.ask(NUM_PROMPT, num_output, stream=is_stream)) for each in (placed, other)]
        for each, ask in turn:
            measure(each, ask, connections=connections, seconds=WARM_S if is_judged else seconds / 4)
        runs = [
            [measure(each, ask, connections=connections, seconds=seconds) for each, ask in turn] for _ in range(turns)
        ]
        beside = partial(_beside, case, other.name, has_goal=is_judged)
        came = [[run.outcome.tokens_s if is_stream else run.outcome.requests_s for run in pair] for pair in runs]
        if connections == 1:
            name = f"added {metric}" if is_judged else metric
            pairs = [[(run.outcome.percentile(0.5) - (worker_s or 0.0)) * 1e3 for run in pair] for pair in runs]
            rows.append(beside(name, pairs, "ms"))
            continue
        rows.append(
            beside(f"{metric}/s", came, "1/s", has_goal=is_judged and not is_stream)
        )  # the fakes' pace bounds what comes
        counted = [
            [(run.outcome.all_tokens if is_stream else run.outcome.all_answers) / run.core_s for run in pair]
            for pair in runs
        ]
        rows.append(beside(f"{metric}/s per core", counted, "1/s"))
    return rows


def _beside(case: str, other: str, metric: str, pairs: Sequence[Sequence[float]], unit: str, *, has_goal: bool) -> Row:
    """The median of the ratios of turns, which both sides of a turn had the same machine for. has_goal: we are to be as
    fast."""
    own, theirs = zip(*pairs, strict=True)
    against = "a router without routing" if other == BARE else other
    return row_of_turns(
        f"{metric}, in turns" + ("" if other == BARE else f" with {other}"),
        f"pdcluster {case}",
        own,
        unit,
        against=against,
        other=theirs,
        better="less" if unit == "ms" else "more",
        goal=1.0 if has_goal else None,
    )


def keyed_rows(seconds: float, turns: int) -> list[Row]:
    """The router with a cluster key beside itself without one."""
    with tempfile.TemporaryDirectory(prefix="pdcluster-bench-") as folder:
        key_file = Path(folder) / "key"
        key_file.write_text(secrets.token_hex(32))
        key_file.chmod(0o600)
        roles = ("prefill", "decode")
        with ours(roles, PACE_S, key_file) as (keyed, _), ours(roles, PACE_S) as (open_, _):
            rows = turn_rows(keyed, replace(open_, name="without a key"), "P/D", seconds, turns, is_stream=True)
    return [replace(each, goal=KEYED_GOAL) for each in rows]


def prompt_rows(placed: Placed, lengths: Sequence[int], seconds: float) -> list[Row]:
    """Core time by prompt length, of prompts given as token ids (nothing is tokenised)."""
    rows = []
    for length in lengths:
        run = measure(placed, placed.ask(length, 1, stream=False), connections=1, seconds=seconds)
        found = row("core time per request", f"{placed.name} {length} tokens", [_core_ms(run)], "ms")
        if length >= 100_000:
            found = replace(found, against="goal", against_value=5.0, better="less", goal=1.0)
        rows.append(found)
    return rows


def _core_ms(run: Measured) -> float:
    """Of a request."""
    return run.core_s / run.outcome.all_answers * 1e3


def against_rivals(rows: list[Row]) -> list[Row]:
    """Our figures beside the best rival's of the same run and case; not a lone stream's time, which is the fakes' pace
    (Dynamo's has its own)."""
    compared = []
    for own in [found for found in rows if found.case.startswith("pdcluster ") and found.metric != LONE_STREAM]:
        case = own.case.removeprefix("pdcluster ")
        others = [
            found for found in rows if found.metric == own.metric and found.case in {f"{name} {case}" for name in NAMES}
        ]
        if not others:
            continue
        is_cost = own.unit == "ms"
        best = (min if is_cost else max)(others, key=lambda found: found.value)
        compared.append(
            Row(
                f"{own.metric} vs best rival",
                case,
                own.value,
                own.unit,
                against=best.case.split(" ", 1)[0],
                against_value=best.value,
                better="less" if is_cost else "more",
                goal=1.0,
                spread=own.spread,
            )
        )
    return compared


# ---------------------------------------------------------------- processes


def _cpu_s(pid: int) -> float:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def compare(folder: Path, case: str, roles: Sequence[str], worker_s: float, seconds: float, repeats: int) -> list[Row]:
    """Each rival by itself, and in turns with ours."""
    rows: list[Row] = []
    for name in NAMES:
        if not (folder / name).exists():
            print(
                f"{name} is left out: there is no {folder / name}; bench/rivals/routers.py says how to install it",
                file=sys.stderr,
            )
            continue
        try:
            is_apart = case == "P/D"
            with rival(name, folder, disaggregated=is_apart) as placed, ours(roles) as (own, _):
                rates = request_rows(placed, case, seconds, repeats)
                rows += rates + latency_rows(placed, case, worker_s, seconds, repeats, rates[0].value / 2)
                rows += turn_rows(own, placed, case, seconds / 2, TURNS, is_stream=False, worker_s=worker_s)
            with rival(name, folder, disaggregated=is_apart, token_s=PACE_S) as placed, ours(roles, PACE_S) as (own, _):
                rows += stream_rows(placed, case, seconds, repeats)
                rows += turn_rows(own, placed, case, seconds / 2, TURNS, is_stream=True, worker_s=worker_s)
        except (RuntimeError, OSError, TimeoutError) as error:
            print(f"{name} {case} is left out: {error}", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.router", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--keyed", action="store_true")
    parser.add_argument("--rivals", type=Path, default=Path("rivals"))
    add_output_flags(parser)
    chosen = parser.parse_args()
    os.sched_setaffinity(0, {CLIENT_CORE})
    seconds, repeats = (2.0, 1) if chosen.quick else (4.0, 3)
    if chosen.keyed:
        found = keyed_rows(seconds, 3 if chosen.quick else 9)
        print_rows(found)
        save(found, chosen)
        return
    rows = [without_router(seconds)]
    worker_s = rows[0].value / 1e3
    for case, roles in (("local", ("mixed",)), ("P/D", ("prefill", "decode"))):
        with ours(roles) as (placed, bootstrap):
            rates = request_rows(placed, case, seconds, repeats)
            half_rate = rates[0].value / 2
            fakes = FakesAlone.measured(bootstrap, len(roles), half_rate, seconds)
            rows += fakes.rows(case) + rates + latency_rows(placed, case, worker_s, seconds, repeats, half_rate)
            if case == "local":
                rows += ceiling_rows(placed, bootstrap, seconds, 3, is_stream=False)
                rows += prompt_rows(placed, (100, 10_000) if chosen.quick else (100, 10_000, 100_000), seconds)
        with ours(roles, PACE_S) as (placed, bootstrap):
            rows += stream_rows(placed, case, seconds, repeats)
            if case == "local":
                rows += ceiling_rows(placed, bootstrap, seconds, 3, is_stream=True)
        if chosen.compare:
            rows += compare(chosen.rivals, case, roles, worker_s, seconds, repeats)
    rows += against_rivals(rows)
    print_rows(rows)
    save(rows, chosen)


if __name__ == "__main__":
    main()
