"""What planning a decode step while one runs is worth: the gap between tokens with it and without, on one core and on
two.

    python -m bench.look_ahead [--quick] [--json FILE] [--cores 0 0,1]

A 30 M Qwen3-shaped model on one real node (mode local, one thread for its kernels) behind a real router; 8 and 32
streams at once. The gap is the node's own count: from a row's first token to its last. Beside it what a newcomer pays,
who may come when two steps are launched: the time to the first token of short prompts that come one after the other
while the others decode. In turns: off, on, off, … in one run.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.engine import random_checkpoint
from bench.harness.cluster import Client, NodePlan, cluster, random_prompt
from bench.harness.report import Row, add_output_flags, print_rows, row, save
from pdcluster.settings.config import cache_directory

BATCHES = (8, 32)
CORES = ("0", "0,1")
PROMPT_TOKENS = 32
NEWCOMERS = 8


@dataclass(slots=True)
class Seen:
    """Milliseconds, one value per start of the node."""

    gaps: dict[int, list[float]] = field(default_factory=lambda: {batch: [] for batch in BATCHES})
    newcomers: dict[int, list[float]] = field(default_factory=lambda: {batch: [] for batch in BATCHES})


def measure(model: Path, cores: str, look_ahead: str, tokens: int, seen: Seen) -> None:
    plan = NodePlan("m", "mixed", 0, (), ("--cores", cores, "--scheduler-look-ahead", look_ahead))
    rng = random.Random(3)
    with cluster(model, [plan], "tcp") as client:
        client.complete(random_prompt(PROMPT_TOKENS, rng), 8)
        for batch in BATCHES:
            gap, newcomer = run(client, batch, tokens, rng)
            seen.gaps[batch].append(gap)
            seen.newcomers[batch].append(newcomer)


def run(client: Client, batch: int, tokens: int, rng: random.Random) -> tuple[float, float]:
    """Medians of all rows, and of the newcomers beside them."""
    clients = [Client(client.address) for _ in range(batch)]
    prompts = [random_prompt(PROMPT_TOKENS, rng) for _ in range(batch)]
    with ThreadPoolExecutor(batch) as pool:
        timelines = list(
            pool.map(lambda pair: pair[0].complete(pair[1], tokens)["timeline"], zip(clients, prompts, strict=True))
        )
        rows = [
            pool.submit(each.complete, prompt, tokens) for each, prompt in zip(clients[1:], prompts[1:], strict=True)
        ]
        newcomers = [
            clients[0].complete(random_prompt(PROMPT_TOKENS, rng), 2)["timeline"]["ttft_s"] for _ in range(NEWCOMERS)
        ]
        for each in rows:
            each.result()
    gaps = [timeline["decode_s"] / timeline["decode_tokens"] for timeline in timelines]
    return 1e3 * statistics.median(gaps), 1e3 * statistics.median(newcomers[1:])


def rows_of(model: Path, each: Sequence[str], repeats: int, tokens: int) -> list[Row]:
    rows = []
    for cores in each:
        off, on = Seen(), Seen()
        for _ in range(repeats):
            measure(model, cores, "false", tokens, off)
            measure(model, cores, "true", tokens, on)
        for batch in BATCHES:
            case = f"batch {batch}, {len(cores.split(','))} cores"
            rows.append(
                row(
                    "gap between tokens",
                    case,
                    on.gaps[batch],
                    "ms",
                    against="off",
                    against_value=statistics.median(off.gaps[batch]),
                    better="less",
                )
            )
            against = statistics.median(off.newcomers[batch])
            rows.append(
                row(
                    "a newcomer's first token",
                    case,
                    on.newcomers[batch],
                    "ms",
                    against="off",
                    against_value=against,
                    better="less",
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and starts")
    add_output_flags(parser)
    parser.add_argument(
        "--cores", nargs="+", default=CORES, help="what the node is pinned to, a list of cores for each case"
    )
    arguments = parser.parse_args()
    model = random_checkpoint(cache_directory() / "bench-engine-30m")
    rows = rows_of(model, arguments.cores, 2 if arguments.quick else 5, 128 if arguments.quick else 384)
    print_rows(rows)
    save(rows, arguments)


if __name__ == "__main__":
    main()
