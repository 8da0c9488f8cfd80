"""`python -m bench.vllm.pair`: nodes with vLLM behind our router beside vLLM's own P/D behind vllm-router.

Both systems have one prefill and one decode engine of the same arguments, each bound to a core of its own, prefix
caches off. They take turns: while one is measured, every process of the other stands still. Run it with the python of
an environment that has vLLM, NIXL and pdcluster:

    .venv-vllm/bin/python -m bench.vllm.pair --model DIR --router DIR/vllm-router/bin/vllm-router

--progress-delay-us is the pause of the thread by which NIXL makes progress, and --yield-sleep-us that of vLLM's
processes which wait for each other, in both systems alike. Their own are 0: then such a thread takes the core of its
engine, and on Linux 6.18 yielding processes stop all others for seconds.
--kill ends the prefill engine under load, and says what clients get.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import psutil  # type: ignore[import-untyped]

from bench.harness.cluster import random_prompt
from bench.harness.report import Better, Row, add_output_flags, print_rows, row_of_turns, save
from bench.parts.real_turns import Asked, Target, ask
from pdcluster.checkpoint.bundled import path as bundled_model
from pdcluster.settings.config import own_environment

ROOT = Path(__file__).parents[2]
READY_S = 500.0
PROMPT, OUTPUT = 256, 64
REQUESTS = {1: 8, 4: 24, 8: 40}
KILLED_AFTER_S, KILL_LOAD_S, PATIENCE_S = 3.0, 30.0, 120.0
PRELOAD = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", f"{sys.prefix}/lib/libiomp5.so")
VLLM = (
    "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "16", "--no-enable-prefix-caching",
)  # fmt: skip

# Of a turn: unit, scale and what is better.
METRICS: dict[str, tuple[str, float, Better]] = {
    "ttft_s": ("ms", 1e3, "less"),
    "tpot_s": ("ms", 1e3, "less"),
    "tokens_s": ("tok/s", 1.0, "more"),
}

Role = Literal["prefill", "decode"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Pace:
    """How vLLM shares two cores, in microseconds; see tests/harness/paced_vllm."""

    progress_delay_us: int
    yield_sleep_us: int

    @property
    def variables(self) -> dict[str, str]:
        return {
            "NIXL_PROGRESS_DELAY_US": str(self.progress_delay_us), "VLLM_YIELD_SLEEP_US": str(self.yield_sleep_us)
        }  # fmt: skip


def add_pace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--progress-delay-us", type=int, default=100)
    parser.add_argument("--yield-sleep-us", type=int, default=100)


@dataclass
class System:
    """The processes of one of the two, and where its router listens."""

    name: str
    folder: Path
    pace: Pace
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    http: int = field(default_factory=free_port)

    def spawn(self, name: str, *command: str, core: int | None = None, **variables: str) -> None:
        paths = (ROOT, ROOT / "router", ROOT / "tests" / "harness" / "paced_vllm")
        environment = {
            **own_environment(), "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1",
            **self.pace.variables, **variables,
        }  # fmt: skip
        if core is not None:
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "OMP_NUM_THREADS": "1",
                "UCX_TLS": "tcp,self,shm,cma",
                "LD_PRELOAD": os.pathsep.join(path for path in PRELOAD if Path(path).exists()),
            }
        with (self.folder / f"{self.name}-{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)

    def wait_ready(self, url: str) -> None:
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended:
                raise RuntimeError(f"{self.name}: {', '.join(ended)} ended; see the logs in {self.folder}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=2.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"{self.name}: {url} is not ready after {READY_S:g} s; see the logs in {self.folder}")

    @property
    def target(self) -> Target:
        models = httpx.get(f"http://127.0.0.1:{self.http}/v1/models", timeout=30.0, trust_env=False).json()
        return Target("127.0.0.1", self.http, models["data"][0]["id"])

    def family(self, name: str) -> list[psutil.Process]:
        root = psutil.Process(self.processes[name].pid)
        return [root, *root.children(recursive=True)]

    def signal_all(self, number: int) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                for each in self.family(name):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.send_signal(number)

    def kill(self, name: str) -> None:
        for each in reversed(self.family(name)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def close(self) -> None:
        self.signal_all(signal.SIGCONT)
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)
            process.wait(10.0)


def ours(folder: Path, model: Path, pace: Pace) -> System:
    system = System("pdcluster", folder, pace)
    bootstrap = f"127.0.0.1:{free_port()}"
    system.spawn("bootstrap", sys.executable, "-m", "pdcluster.cli", "bootstrap", "--listen", bootstrap)
    roles: tuple[Role, ...] = ("prefill", "decode")
    for core, role in enumerate(roles):
        health = f"127.0.0.1:{free_port()}"
        system.spawn(
            role, sys.executable, "-m", "pdcluster.cli", "node", "--engine", "vllm", "--role", role, "--name", role,
            "--bootstrap", bootstrap, "--model", str(model), "--health", health, "--", *VLLM, core=core,
        )  # fmt: skip
        system.wait_ready(f"http://{health}/readyz")
    system.spawn(
        "router", sys.executable, "-m", "pdcluster_router.cli", "--bootstrap", bootstrap, "--grpc", "none",
        "--admin", "none", "--http", f"127.0.0.1:{system.http}",
    )  # fmt: skip
    system.wait_ready(f"http://127.0.0.1:{system.http}/ready")
    return system


def theirs(folder: Path, model: Path, pace: Pace, router: Path) -> System:
    system = System("vllm-router", folder, pace)
    ports: dict[Role, int] = {"prefill": free_port(), "decode": free_port()}
    for core, (role, kv_role) in enumerate({"prefill": "kv_producer", "decode": "kv_consumer"}.items()):
        transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
        port = ports[role]  # type: ignore[index]
        system.spawn(
            role, f"{sys.prefix}/bin/vllm", "serve", str(model), "--port", str(port), "--host", "127.0.0.1",
            "--disable-uvicorn-access-log", "--kv-transfer-config", json.dumps(transfer), *VLLM, core=core,
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
        )  # fmt: skip
        system.wait_ready(f"http://127.0.0.1:{port}/health")
    system.spawn(
        "router", str(router), "--host", "127.0.0.1", "--port", str(system.http), "--policy", "round_robin",
        "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prometheus-port", str(free_port()),
        "--prefill", f"http://127.0.0.1:{ports['prefill']}", "--decode", f"http://127.0.0.1:{ports['decode']}",
    )  # fmt: skip
    system.wait_ready(f"http://127.0.0.1:{system.http}/health")
    return system


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one system at one concurrency: medians, and output tokens a second."""

    ttft_s: float
    tpot_s: float
    tokens_s: float


async def measure(target: Target, concurrency: int, chance: random.Random) -> Turn:
    left = iter([random_prompt(PROMPT, chance, 500) for _ in range(REQUESTS[concurrency])])
    begun = time.monotonic()

    async def client() -> list[tuple[float, float]]:
        found = []
        for prompt in left:
            answer = await ask(target, Asked(0.0, prompt, OUTPUT), "remote", time.monotonic())
            if answer is None:
                raise RuntimeError("a request was refused")
            found.append((answer.ttft_s, answer.tpot_s))
        return found

    answers = [each for part in await asyncio.gather(*(client() for _ in range(concurrency))) for each in part]
    seconds = time.monotonic() - begun
    ttfts, tpots = zip(*answers, strict=True)
    return Turn(statistics.median(ttfts), statistics.median(tpots), len(answers) * OUTPUT / seconds)


@contextlib.contextmanager
def awake(system: System) -> Iterator[None]:
    """Its processes run; before and after that they stand still."""
    system.signal_all(signal.SIGCONT)
    time.sleep(3.0)  # links and leases come back
    try:
        yield
    finally:
        system.signal_all(signal.SIGSTOP)


def compare(systems: Sequence[System], rounds: int, concurrencies: Sequence[int], note: str) -> list[Row]:
    turns: dict[tuple[str, int], list[Turn]] = {}
    targets = {system.name: system.target for system in systems}
    for system in systems:
        system.signal_all(signal.SIGSTOP)
    for number in range(rounds + 1):
        for system in systems if number % 2 else reversed(systems):
            with awake(system):
                asyncio.run(measure(targets[system.name], 1, random.Random(f"{system.name} {number}")))
                for concurrency in concurrencies:
                    chance = random.Random(f"{system.name} {number} {concurrency}")
                    turn = asyncio.run(measure(targets[system.name], concurrency, chance))
                    print(f"turn {number}, {system.name}, c={concurrency}: {turn}", file=sys.stderr, flush=True)
                    if number:  # the first one warms up
                        turns.setdefault((system.name, concurrency), []).append(turn)
    own, other = (system.name for system in systems)
    rows = []
    for concurrency in concurrencies:
        case = f"c={concurrency}, {PROMPT} in, {OUTPUT} out, {note}"
        for metric, (unit, scale, better) in METRICS.items():
            mine, its = ([scale * getattr(each, metric) for each in turns[name, concurrency]] for name in (own, other))
            label = f"vLLM P/D {metric.removesuffix('_s')}"
            rows.append(row_of_turns(label, case, mine, unit, against=other, other=its, better=better))
    return rows


async def load_under_kill(system: System, target: Target) -> Counter[str]:
    """What clients get while the prefill engine dies: four of them, one request at a time each."""
    found: Counter[str] = Counter()
    begun = time.monotonic()

    async def client(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() - begun < KILL_LOAD_S:
            prompt = random_prompt(PROMPT, chance, 500)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    answer = await ask(target, Asked(0.0, prompt, OUTPUT), "auto", time.monotonic())
                found["answered" if answer is not None else "429"] += 1
            except TimeoutError:
                found[f"hung for {PATIENCE_S:g} s"] += 1
            except (RuntimeError, OSError) as error:
                found[f"error: {str(error).splitlines()[0][:80]}"] += 1
                await asyncio.sleep(0.2)

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    await asyncio.sleep(KILLED_AFTER_S)
    await asyncio.to_thread(system.kill, "prefill")
    await asyncio.gather(*clients)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm.pair", description=__doc__)
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--router", type=Path, required=True, help="the program vllm-router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", choices=list(REQUESTS), default=list(REQUESTS))
    add_pace_flags(parser)
    parser.add_argument("--kill", action="store_true")
    add_output_flags(parser)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pdcluster-vllm-pd-"))
    print(f"logs in {folder}", file=sys.stderr)
    systems: list[System] = []
    try:
        pace = Pace(given.progress_delay_us, given.yield_sleep_us)
        systems.append(ours(folder, given.model, pace))
        systems[0].signal_all(signal.SIGSTOP)
        systems.append(theirs(folder, given.model, pace, given.router))
        systems[0].signal_all(signal.SIGCONT)
        rows = compare(systems, given.rounds, given.concurrency, f"NIXL delay {given.progress_delay_us} us")
        for system in systems if given.kill else ():
            with awake(system):
                print(
                    f"{system.name}, prefill engine killed: {dict(asyncio.run(load_under_kill(system, system.target)))}"
                )
        print_rows(rows)
        save(rows, given)
    finally:
        for system in systems:
            system.close()


if __name__ == "__main__":
    main()
