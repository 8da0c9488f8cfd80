"""What pulling saves: time to the first token of a second turn when prefill fetches the answer's KV from decode, and
when it computes it again.

    python -m bench.pull [--quick] [--json FILE] [--transfer shm,tcp]

A 30 M Qwen3-shaped model, one prefill and one decode node, every request in mode remote, one at a time. Two clusters
stand side by side and are asked in turns, one with `router.pull` always, one with never; on both, prefill still has the
first prompt cached.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.engine import random_checkpoint
from bench.harness.cluster import Client, NodePlan, cluster, random_prompt
from bench.harness.report import Row, add_output_flags, print_rows, row, save
from pdcluster.settings.config import cache_directory

PROMPT_TOKENS, NEW_TOKENS = 256, 32
ANSWERS = (32, 64, 128, 256, 512)
# The router hears what is cached where.
HEARD_S = 0.15

FLAGS = {
    "always": ("--mode", "remote", "--pull", "always", "--pull-min-tokens", "1"),
    "never": ("--mode", "remote", "--pull", "never"),
}


def second_turn(client: Client, prompt: Sequence[int], answer: int, new: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token of the second turn, and how many tokens were pulled for it."""
    first = client.answer(prompt, answer)["choices"][0]["token_ids"]
    time.sleep(HEARD_S)
    timeline = client.complete([*prompt, *first, *new], 4)["timeline"]
    return float(timeline["ttft_s"]), int(timeline["pulled_tokens"])


def rows_of(model: Path, transfer: str, answers: Sequence[int], repeats: int) -> list[Row]:
    rng, rows = random.Random(3), []
    plans = [NodePlan("p", "prefill", 0), NodePlan("d", "decode", 1)]
    with ExitStack() as stack:
        clients = {name: stack.enter_context(cluster(model, plans, transfer, flags)) for name, flags in FLAGS.items()}
        for answer in answers:
            seen: dict[str, list[tuple[float, int]]] = {name: [] for name in clients}
            for number in range(repeats + 1):
                prompt, new = random_prompt(PROMPT_TOKENS, rng), random_prompt(NEW_TOKENS, rng)
                for name in sorted(clients, reverse=number % 2 == 1):
                    seen[name].append(second_turn(clients[name], prompt, answer, new))
            rows.append(compare(f"{transfer}, answer of {answer}", {name: found[1:] for name, found in seen.items()}))
    return rows


def compare(case: str, seen: dict[str, list[tuple[float, int]]]) -> Row:
    computed = row("", "", [seconds * 1e3 for seconds, _ in seen["never"]], "ms").value
    pulled = min(tokens for _, tokens in seen["always"])
    return row(
        "TTFT of turn 2",
        f"{case}, {pulled} pulled",
        [s * 1e3 for s, _ in seen["always"]],
        "ms",
        against="computed",
        against_value=computed,
        better="less",
        goal=1.0 if pulled else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    add_output_flags(parser)
    parser.add_argument("--transfer", default="shm,tcp")
    arguments = parser.parse_args()
    model = random_checkpoint(cache_directory() / "bench-engine-30m")
    repeats = 3 if arguments.quick else 9
    rows = [each for transfer in arguments.transfer.split(",") for each in rows_of(model, transfer, ANSWERS, repeats)]
    print_rows(rows)
    save(rows, arguments)


if __name__ == "__main__":
    main()
