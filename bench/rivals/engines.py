"""The engine beside vLLM and llama.cpp: the same checkpoint, one pinned core for each process, repeats interleaved.
Used by `bench.engine --compare`.

Each engine is a process that says `@{"version"}` once it serves and then answers each line of its input with
`@{"seconds"}`:

    {"kind": "prefill", "tokens": n}                          one prompt, one token drawn
    {"kind": "decode", "batch": b, "context": c, "steps": s}  one step of b rows that hold c tokens

An idle engine waits in a read and takes no time of the core. vLLM's figures hold its own scheduler, ours and
llama.cpp's are the engine alone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.report import Row as Figure
from bench.harness.report import row

VENVS = {"vllm": "vllm", "llama.cpp": "llama"}
PREFILL_GOAL = {"vllm": 1.0}
BATCH_1_GOAL = {"vllm": 1.6, "llama.cpp": 1.2}
BATCH_GOAL = {"vllm": 1.3}
# Share of the roofline at which a step of several rows is fast enough, however fast others are.
ROOFLINE_GOAL = 0.85
START_GOAL = {"vllm": 10.0}
# Enough that what a process has to fetch anew after the others ran is of no weight.
STEPS = 32

Roofline = Callable[[int, int], float]


class Silent(Exception):
    """An engine that does not answer, and why."""


@dataclass(slots=True)
class Contender:
    name: str
    process: subprocess.Popen[str]
    ready_s: float
    version: str

    def ask(self, what: Mapping[str, object]) -> float:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Silent(f"{self.name} ended: {error}") from error
        return float(str(read_answer(self.name, self.process)["seconds"]))


def compare(
    rivals: list[str],
    venvs: Path,
    model: Path,
    core: int,
    prefills: tuple[int, ...],
    decodes: list[tuple[int, int]],
    roofline: Roofline,
    repeats: int,
    most_context: int | None = None,
) -> list[Figure]:
    """Figures of all that are installed; a line for those that are not. roofline: the least seconds of a decode step of
    a batch and context. most_context: tokens of all contexts of a case; others are left out, with a line."""
    with ExitStack() as stack:
        contenders = [
            stack.enter_context(
                started("pdcluster", [sys.executable, "-m", "bench.rivals.own_engine", str(model), "1"], {}, core)
            )
        ]
        for rival in rivals:
            command = rival_command(rival, venvs, model)
            if command is None:
                print(
                    f"{rival} is skipped: {venvs / VENVS[rival]} is no virtual environment with it; bench/README.md "
                    "says how to make one"
                )
                continue
            try:
                contenders.append(
                    stack.enter_context(started(rival, command, rival_environment(rival, venvs, core), core))
                )
            except Silent as error:
                print(f"{rival} is skipped: {error}")
        return [
            *_starts(contenders),
            *_prefills(contenders, prefills, repeats),
            *_decodes(contenders, decodes, roofline, repeats, most_context),
        ]


def rival_command(rival: str, venvs: Path, model: Path) -> list[str] | None:
    python = venvs / VENVS[rival] / "bin" / "python"
    script = Path(__file__).parent / f"rival_{VENVS[rival]}.py"
    return [str(python), str(script), str(model)] if python.exists() else None


def rival_environment(rival: str, venvs: Path, core: int) -> dict[str, str]:
    """vLLM wants its OpenMP and tcmalloc in front; without them it is two to three times slower. One process: a second
    one would share the core."""
    if rival != "vllm":
        return {}
    wanted = [venvs / "vllm/lib/libiomp5.so", Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")]
    missing = [str(path) for path in wanted if not path.exists()]
    if missing:
        print(f"vllm runs without {', '.join(missing)}")
    return {
        "LD_PRELOAD": ":".join(str(path) for path in wanted if path.exists()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def started(name: str, command: list[str], environment: Mapping[str, str], core: int) -> Iterator[Contender]:
    begin = time.perf_counter()
    assignments = [f"{name}={value}" for name, value in {"OMP_NUM_THREADS": "1", **environment}.items()]
    process = subprocess.Popen(
        ["taskset", "-c", str(core), "env", *assignments, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        version = str(read_answer(name, process)["version"])
        yield Contender(name, process, time.perf_counter() - begin, version)
    finally:
        process.kill()
        process.wait(timeout=10)


def read_answer(name: str, process: subprocess.Popen[str]) -> dict[str, object]:
    """The next line that is an answer; engines also print what they like."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("@"):
            found: dict[str, object] = json.loads(line[1:])
            return found
    raise Silent(f"{name} ended with {process.wait(timeout=10)} before it answered")


def _starts(contenders: list[Contender]) -> list[Figure]:
    ours, *others = contenders
    figures = [row("start to ready", ours.name, [ours.ready_s], "s")]
    for other in others:
        goal = START_GOAL.get(other.name)
        figures.append(
            _faster("start to ready", f"{other.name} {other.version}", [ours.ready_s], [other.ready_s], "s", goal)
        )
    return figures


def _prefills(contenders: list[Contender], prefills: tuple[int, ...], repeats: int) -> Iterator[Figure]:
    for tokens in prefills:
        taken = _interleaved(contenders, {"kind": "prefill", "tokens": tokens}, repeats)
        yield from _beside(contenders, "prefill", f"{tokens} tokens", taken, PREFILL_GOAL)


def _decodes(
    contenders: list[Contender],
    decodes: list[tuple[int, int]],
    roofline: Roofline,
    repeats: int,
    most_context: int | None,
) -> Iterator[Figure]:
    for batch, context in decodes:
        if most_context is not None and batch * context > most_context:
            print(
                f"decode of batch {batch}, context {context} is left out of a quick comparison: its contexts take "
                "minutes to fill"
            )
            continue
        taken = _interleaved(
            contenders, {"kind": "decode", "batch": batch, "context": context, "steps": STEPS}, repeats
        )
        case, least = f"batch {batch}, context {context}", roofline(batch, context)
        goals = BATCH_1_GOAL if batch == 1 else _batch_goals(contenders, taken, least)
        yield from _beside(contenders, "decode step", case, taken, goals)
        yield row(
            "decode of the roofline",
            case,
            [1 / seconds for seconds in taken[0]],
            "step/s",
            against="roofline",
            against_value=1 / least,
        )


def _batch_goals(contenders: list[Contender], taken: list[list[float]], least: float) -> dict[str, float]:
    """As ratios of speed; that of ROOFLINE_GOAL where it is the lower one."""
    theirs = {contender.name: statistics.median(seconds) for contender, seconds in zip(contenders, taken, strict=True)}
    return {
        name: min(goal, ROOFLINE_GOAL * theirs[name] / least) for name, goal in BATCH_GOAL.items() if name in theirs
    }


def _interleaved(contenders: list[Contender], what: Mapping[str, object], repeats: int) -> list[list[float]]:
    taken: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):
        for contender, seconds in zip(contenders, taken, strict=True):
            seconds.append(contender.ask(what))
    case = ", ".join(f"{name} {value}" for name, value in what.items())
    found = ", ".join(
        f"{contender.name} {1e3 * min(seconds):.1f} ms" for contender, seconds in zip(contenders, taken, strict=True)
    )
    print(
        f"{case}: best of {repeats}: {found}", file=sys.stderr, flush=True
    )  # the table comes at the end, and a run takes a quarter of an hour
    return taken


def _beside(
    contenders: list[Contender], metric: str, case: str, taken: list[list[float]], goals: Mapping[str, float]
) -> Iterator[Figure]:
    ours = [1e3 * seconds for seconds in taken[0]]
    for contender, theirs in zip(contenders[1:], taken[1:], strict=True):
        yield _faster(
            metric,
            f"{case}, {contender.name} {contender.version}",
            ours,
            [1e3 * seconds for seconds in theirs],
            "ms",
            goals.get(contender.name),
        )
    if len(contenders) == 1:
        yield row(metric, case, ours, "ms")


def _faster(metric: str, case: str, ours: list[float], theirs: list[float], unit: str, goal: float | None) -> Figure:
    """Times, with the ratio as speed: above 1 where we are faster."""
    beside = statistics.median(theirs)
    return row(metric, case, ours, unit, against="its time", against_value=beside, better="less", goal=goal)
