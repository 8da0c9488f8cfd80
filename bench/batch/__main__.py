"""Batches beside what they must not disturb: `pdctl batch run` over a router and fake nodes, as processes.

Alone: pdctl answers lines as fast as 64 clients that ask the same in a closed loop, in turns. In `prompts` the prefill
node is what bounds both, in `rows` the time of the rows, where pdctl gets 64 lines at a time, too. pdctl's time counts
from when it opens its output to its end.

Beside: interactive streams arrive at random at half of what the prefill node can do, with a batch that would take all
of it and without, in turns. Fakes compute one prompt at a time, whole, where a real node gives way between chunks;
their rows do not slow each other, so that the figure between tokens is what router and machine do.

Kills: two routers share a batch. Each is killed once and comes back, and so is pdctl. Every line is answered once.

Real: the first two over two real nodes with the bundled model and 300 lines. They share the machine's cores with the
rest, so these rows have no goal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import uvloop

from bench.harness.cluster import NodePlan, cluster, ends_with_us, start
from bench.harness.report import Row, add_output_flags, print_rows, row, row_of_turns, save
from bench.rivals.routers import stop, wait_ready
from pdcluster.checkpoint import bundled
from pdcluster_router.operate.batch.http_client import RouterClient
from pdcluster_router.operate.batch.lines import BatchLine, read_lines

PARTS = ("alone", "beside", "kills", "real")
CLIENTS = 64
ALONE_GOAL, TTFT_ALLOWED, ITL_ALLOWED = 0.95, 1.2, 1.1
READY = b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
# One request, or the next part of a batch; and a whole batch.
WITHIN_S, WHOLE_S = 120.0, 1200.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A case. prompt_token_s and token_s: of the fakes. capacity: prompts per second of the prefill node."""

    name: str
    num_prompt: int
    num_output: int
    prompt_token_s: float
    token_s: float
    concurrency: int = 128

    @property
    def capacity(self) -> float:
        return 1 / (self.prompt_token_s * self.num_prompt)


PROMPTS = Shape("prompts", 128, 16, 30e-6, 0.005)
ROWS = Shape("rows", 64, 32, 1e-6, 0.006, CLIENTS)
BESIDE = Shape("half load", 128, 16, 80e-6, 0.02)


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster. model: by which its routers know it."""

    addresses: list[str]
    model: str
    processes: list[subprocess.Popen[bytes]]
    bootstrap: str


def router_flags(bootstrap: str, listen: str) -> list[str]:
    flags = ["--http", listen, "--grpc", "none", "--admin", "none", "--bootstrap", bootstrap]
    return ["pdcluster_router.cli", *flags, "--tokenizer", str(bundled.path()), "--mode", "remote"]


@contextmanager
def fakes(shape: Shape, num_routers: int = 1) -> Iterator[Served]:
    """One prefill node and two that decode."""
    running: list[subprocess.Popen[bytes]] = []
    model = bundled.path()
    try:
        bootstrap = start(running, ["pdcluster.cli", "bootstrap", "--listen", "127.0.0.1:0"])
        for number, role in enumerate(("prefill", "decode", "decode")):
            argv = [sys.executable, "-m", "bench.fakes.fake_node", "--bootstrap", bootstrap, "--model", str(model)]
            argv += ["--name", f"f{number}", "--role", role, "--token-s", str(shape.token_s)]
            argv += ["--prefill-token-s", str(shape.prompt_token_s)]
            running.append(subprocess.Popen(argv, preexec_fn=ends_with_us()))
        addresses = [start(running, router_flags(bootstrap, "127.0.0.1:0")) for _ in range(num_routers)]
        for address in addresses:
            wait_ready(address, READY)
        yield Served(addresses, model.resolve().name, running, bootstrap)
    finally:
        stop(running)


# ---------------------------------------------------------------- the same work for both


def body_of(shape: Shape, model: str, rng: random.Random) -> dict[str, object]:
    prompt = [rng.randrange(100, 1000) for _ in range(shape.num_prompt)]
    return {"model": model, "prompt": prompt, "max_tokens": shape.num_output, "temperature": 0, "ignore_eos": True}


def write_lines(file: Path, shape: Shape, model: str, num_lines: int, seed: str) -> None:
    """Prompts of their own for each seed: nodes have cached the others."""
    rng = random.Random(seed)
    with file.open("w") as out:
        for number in range(num_lines):
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions"}
            out.write(json.dumps(line | {"body": body_of(shape, model, rng)}) + "\n")


def pdctl(lines: Path, out: Path, addresses: Sequence[str], shape: Shape) -> subprocess.Popen[bytes]:
    words = ["batch", "run", str(lines), "-o", str(out), "--api", ",".join(addresses), "--quiet"]
    argv = [sys.executable, "-m", "pdcluster_router.pdctl", *words, "--concurrency", str(shape.concurrency)]
    return subprocess.Popen(argv, stderr=subprocess.DEVNULL, preexec_fn=ends_with_us())


def batch_rate(served: Served, shape: Shape, lines: Path, num_lines: int) -> float:
    """Lines per second of pdctl."""
    out = lines.with_suffix(".out")
    run = pdctl(lines, out, served.addresses, shape)
    wait_for(run, out.exists, "opens its output", 0.002)
    began = time.perf_counter()
    finish(run)
    taken = time.perf_counter() - began
    check_once(out, num_lines)
    out.unlink()
    return num_lines / taken


def wait_for(run: subprocess.Popen[bytes], is_so: Callable[[], object], what: str, pause_s: float = 0.05) -> None:
    """Until it is so. Raises where pdctl ends before, or takes too long."""
    until = time.monotonic() + WITHIN_S
    while not is_so():
        if time.monotonic() > until or run.poll() is not None:
            raise RuntimeError(f"pdctl, with exit code {run.poll()}, never {what}")
        time.sleep(pause_s)


def finish(run: subprocess.Popen[bytes]) -> None:
    """Wait for pdctl's end. Raises where it fails, or takes too long."""
    if run.wait(WHOLE_S) != 0:
        raise RuntimeError(f"pdctl ended with {run.returncode}")


def num_written(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def check_once(out: Path, num_lines: int) -> int:
    """Lines that were answered once. Raises when not all were."""
    counts = Counter(json.loads(line)["custom_id"] for line in out.read_bytes().splitlines())
    once = sum(count == 1 for count in counts.values())
    if once != num_lines or len(counts) != num_lines:
        raise RuntimeError(f"{once} of {num_lines} lines were answered once, {len(counts)} names are there")
    return once


def clients_rate(served: Served, lines: Path, num_lines: int) -> float:
    """Lines per second of clients in a closed loop."""

    async def ask_all() -> float:
        address = served.addresses[0]
        client = RouterClient(address, address.rpartition(":")[0], b"content-type: application/json\r\n", None)
        waiting = iter([line for line in read_lines(lines) if isinstance(line, BatchLine)])
        began = time.perf_counter()

        async def loop() -> None:
            for line in waiting:
                reply = await client.post(line.url, b"", line.body, WITHIN_S)
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status}: {bytes(reply.body[:300])!r}")

        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(loop())
        client.close()
        return num_lines / (time.perf_counter() - began)

    return uvloop.run(ask_all())


def alone(served: Served, shape: Shape, num_lines: int, turns: int, goal: float | None, case: str) -> Row:
    own: list[float] = []
    other: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "in.jsonl"
        for turn in range(-1, turns):  # the first one warms up
            sides = (own, other) if turn % 2 else (other, own)
            for side in sides:
                count = max(num_lines // 10, CLIENTS) if turn < 0 else num_lines
                write_lines(lines, shape, served.model, count, f"{shape.name} {turn} {side is own}")
                rate = batch_rate(served, shape, lines, count) if side is own else clients_rate(served, lines, count)
                if turn >= 0:
                    side.append(rate)
    return row_of_turns("lines/s", case, own, "1/s", against="64 clients", other=other, goal=goal)


# ---------------------------------------------------------------- beside interactive work


@dataclass(slots=True)
class Streams:
    """What interactive clients saw, in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)


def p99(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]


async def stream(address: str, body: dict[str, object], seen: Streams) -> None:
    async with asyncio.timeout(WITHIN_S):
        await read_stream(address, body, seen)


async def read_stream(address: str, body: dict[str, object], seen: Streams) -> None:
    host, _, port = address.rpartition(":")
    content = json.dumps(body | {"stream": True}).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        last: float | None = None
        while line := await reader.readline():
            if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                raise RuntimeError(f"an interactive request was answered with {line!r}")
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                (seen.ttft_s if last is None else seen.itl_s).append(now - (began if last is None else last))
                last = now
    finally:
        writer.close()


def interactive(served: Served, shape: Shape, rate: float, seconds: float, seed: str, prompts: str) -> Streams:
    """Poisson arrivals, the same for the same seed."""
    seen, gaps, rng = Streams(), random.Random(seed), random.Random(f"{seed} {prompts}")

    async def offer() -> None:
        due, began = 0.0, time.perf_counter()
        async with asyncio.TaskGroup() as streams:
            while (due := due + gaps.expovariate(rate)) < seconds:
                body = body_of(shape, served.model, rng)
                await asyncio.sleep(max(began + due - time.perf_counter(), 0.0))
                streams.create_task(stream(served.addresses[0], body, seen))

    uvloop.run(offer())
    return seen


def beside(
    served: Served, shape: Shape, rate: float, seconds: float, turns: int, num_lines: int, *, has_goal: bool, case: str
) -> list[Row]:
    """Turns with a batch and without. num_lines: more than a turn can answer."""
    runs: dict[bool, list[Streams]] = {False: [], True: []}
    batch_rates = []
    interactive(served, shape, rate, seconds / 4, case, "warm")
    for turn in range(turns):
        for has_batch in (False, True) if turn % 2 else (True, False):
            seed = f"{case} {turn}"
            if not has_batch:
                runs[False].append(interactive(served, shape, rate, seconds, seed, "without"))
                continue
            with tempfile.TemporaryDirectory() as folder:
                lines, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
                write_lines(lines, shape, served.model, num_lines, seed)
                run = pdctl(lines, out, served.addresses, shape)
                wait_for(run, partial(num_written, out), "writes an answer", 0.01)
                before = num_written(out)
                runs[True].append(interactive(served, shape, rate, seconds, seed, "with"))
                batch_rates.append((num_written(out) - before) / seconds)
                run.send_signal(signal.SIGKILL)
                run.wait()
                time.sleep(1.0)  # what it left running ends
    rows = [row("lines/s of the batch", case, batch_rates, "1/s")]
    for name, allowed in (("ttft_s", TTFT_ALLOWED), ("itl_s", ITL_ALLOWED)):
        own, other = ([p99(getattr(seen, name)) * 1e3 for seen in runs[has_batch]] for has_batch in (True, False))
        metric, goal = f"{name[:4].rstrip('_').upper()} p99 of streams", 1 / allowed if has_goal else None
        rows.append(row_of_turns(metric, case, own, "ms", against="without", other=other, better="less", goal=goal))
    return rows


# ---------------------------------------------------------------- kills


def kills(num_lines: int) -> Row:
    """Each of two routers is killed once and comes back; pdctl is killed and started again."""
    shape = replace(PROMPTS, concurrency=32)
    with fakes(shape, num_routers=2) as served, tempfile.TemporaryDirectory() as folder:
        lines, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        write_lines(lines, shape, served.model, num_lines, "kills")
        run = pdctl(lines, out, served.addresses, shape)

        def reach(share: float) -> None:
            wait_for(run, lambda: num_written(out) >= share * num_lines, f"answers {share:.0%}")

        for number, share in ((0, 0.2), (1, 0.6)):
            reach(share)
            victim = served.processes[-2 + number]
            victim.kill()
            victim.wait()
            fresh: list[subprocess.Popen[bytes]] = []
            start(fresh, router_flags(served.bootstrap, served.addresses[number]))
            served.processes[-2 + number] = fresh[0]
            if number == 0:
                reach(0.4)
                run.kill()
                run.wait()
                run = pdctl(lines, out, served.addresses, shape)
        finish(run)
        once = check_once(out, num_lines)
    case = "two SIGKILLs of routers, one of pdctl"
    total = float(num_lines)
    return Row("answered once", case, float(once), "lines", against="lines", against_value=total, goal=1.0)


# ---------------------------------------------------------------- real nodes


def real(num_lines: int, turns: int, seconds: float) -> list[Row]:
    shape = Shape("real", 128, 16, 0.0, 0.0)
    nodes = [NodePlan("p0", "prefill", 0), NodePlan("d0", "decode", 1)]
    case = "two real nodes"
    with cluster(bundled.path(), nodes, "auto", ["--mode", "remote"]) as client:
        served = Served([client.address], client.model, [], "")
        first = alone(served, shape, num_lines, turns, None, case)
        rate = (first.against_value or 1.0) / 2
        return [
            first,
            *beside(served, shape, rate, seconds, turns, 100 * num_lines, has_goal=False, case=f"{case}, half load"),
        ]


def measure(parts: Sequence[str], *, is_quick: bool) -> list[Row]:
    num_lines, turns, seconds = (2_000, 2, 6.0) if is_quick else (10_000, 3, 20.0)
    rows = []
    if "alone" in parts:
        for shape in (PROMPTS, ROWS):
            with fakes(shape) as served:
                rows.append(alone(served, shape, num_lines, turns, ALONE_GOAL, f"fake nodes, {shape.name}"))
    if "beside" in parts:
        with fakes(BESIDE) as served:
            rate = BESIDE.capacity / 2
            num_turns = turns if is_quick else 2 * turns
            rows += beside(
                served, BESIDE, rate, seconds, num_turns, 20_000, has_goal=True, case="fake nodes, half load"
            )
    if "kills" in parts:
        rows.append(kills(num_lines))
    if "real" in parts:
        rows += real(60 if is_quick else 300, turns, seconds)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer lines, shorter turns")
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    add_output_flags(parser)
    arguments = parser.parse_args()
    rows = measure([arguments.only] if arguments.only else PARTS, is_quick=arguments.quick)
    print_rows(rows)
    save(rows, arguments)


if __name__ == "__main__":
    main()
