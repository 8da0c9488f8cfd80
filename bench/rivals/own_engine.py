"""Our engine behind the protocol of `bench.rivals.engines`, in a process like its rivals'.

python -m bench.rivals.own_engine CHECKPOINT THREADS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from bench.engine import CACHE, LARGE_WIDTH, PAGE_TOKENS, decode_plan, prefill_plan
from pdcluster.core.step import StepPlan
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.model.config import read_config
from pdcluster.processes.garbage import collect_seldom

MOST_TOKENS = 2200
# Of the longest contexts; the latter of a model of LARGE_WIDTH.
MOST_ROWS, MOST_LARGE_ROWS = 32, 8


def main() -> None:
    model, threads = Path(sys.argv[1]), int(sys.argv[2])
    rows = MOST_ROWS if read_config(model).hidden_size < LARGE_WIDTH else MOST_LARGE_ROWS
    num_pages = rows * MOST_TOKENS // PAGE_TOKENS
    engine = Engine(
        EngineConfig(model, CACHE / "kernels", page_tokens=PAGE_TOKENS, num_pages=num_pages, threads=threads)
    )
    engine.warmup()
    collect_seldom()
    answer({"version": ""})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["kind"] == "prefill":
            plan = prefill_plan(engine, asked["tokens"])
            answer({"seconds": timed(engine, plan, 1)})
        else:
            plan = decode_plan(engine, asked["batch"], asked["context"])
            engine.step(plan)
            answer({"seconds": timed(engine, plan, asked["steps"])})
    engine.close()


def timed(engine: Engine, plan: StepPlan, times: int) -> float:
    """Seconds of one of so many steps."""
    begin = time.perf_counter()
    for _ in range(times):
        engine.step(plan)
    return (time.perf_counter() - begin) / times


def answer(what: dict[str, object]) -> None:
    print("@" + json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
