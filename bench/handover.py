"""The fixed cost of handing a request over: token 1 sampled on the prefill node → the decode node's first step
launched, for a short prompt.

    python -m bench.handover [--quick] [--json FILE]

Between two real nodes, one request at a time, nothing else running; where the milliseconds go is printed beside it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.engine import random_checkpoint
from bench.harness.cluster import NodePlan, cluster, random_prompt
from bench.harness.report import Row, add_output_flags, print_rows, row, save
from pdcluster.settings.config import cache_directory

PROMPT_TOKENS = 32
GOAL_MS = 3.0
STAGES = (("token1", "commit"), ("commit", "arrived"), ("arrived", "landed"), ("landed", "launched"))


def measure(model: Path, transfer: str, requests: int) -> list[dict[str, float]]:
    """Per request: seconds from token 1 to each mark."""
    with tempfile.TemporaryDirectory() as folder:
        marks = {name: Path(folder) / name for name in ("p", "d")}
        plans = [
            NodePlan(name, role, core, ("--marks", str(marks[name])))
            for core, (name, role) in enumerate((("p", "prefill"), ("d", "decode")))
        ]
        rng = random.Random(1)
        with cluster(model, plans, transfer) as client:
            for _ in range(requests):
                client.complete(random_prompt(PROMPT_TOKENS, rng), 4)
        writer = _by_request(marks["p"], "token1")
        reader = _by_request(marks["d"], "arrived")
    both = [{**first, **second} for first, second in zip(writer, reader, strict=True)]
    return both[requests // 5 :]


def _by_request(path: Path, first: str) -> list[dict[str, float]]:
    """Marks of one node, split where each request begins; of each name the first after that."""
    found: list[dict[str, float]] = []
    for line in path.read_text().splitlines():
        name, at = line.split()
        if name == first:
            found.append({})
        if found and name not in found[-1] and (name != "launched" or "landed" in found[-1]):
            found[-1][name] = float(at)
    return found


def rows_of(model: Path, transfer: str, requests: int) -> list[Row]:
    marks = measure(model, transfer, requests)
    whole = sorted((each["launched"] - each["token1"]) * 1e3 for each in marks)
    median = statistics.median(whole)
    spread = (whole[len(whole) * 9 // 10] - whole[len(whole) // 10]) / median
    case = f"{transfer}, {PROMPT_TOKENS} tokens"
    measured = row("hand-over p50", case, whole, "ms", against="goal", against_value=GOAL_MS, better="less", goal=1.0)
    rows = [replace(measured, spread=spread)]
    rows.append(Row("hand-over p99", case, whole[len(whole) * 99 // 100], "ms"))
    for start, end in STAGES:
        rows.append(row(f"  {start} → {end}", transfer, [(each[end] - each[start]) * 1e3 for each in marks], "ms"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    add_output_flags(parser)
    parser.add_argument("--transfer", default="shm,tcp")
    arguments = parser.parse_args()
    model = random_checkpoint(cache_directory() / "bench-engine-30m")
    rows = [
        each
        for transfer in arguments.transfer.split(",")
        for each in rows_of(model, transfer, 40 if arguments.quick else 200)
    ]
    print_rows(rows)
    save(rows, arguments)


if __name__ == "__main__":
    main()
