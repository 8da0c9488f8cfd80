"""How much of a transfer a client waits for: layer groups against one bulk send, behind a link that takes 20, 50 and
100 % of prefill's time.

    python -m bench.overlap [--quick] [--json FILE]

A 30 M Qwen3-shaped model, prompts of 2048 tokens, real nodes over tcp, every write held back as on a serial link of the
given speed. Exposed: first token → commit acknowledged. Time to first *and* to second token stand beside it, because
what a fast first token hides comes back in the second.

The bound (reference: one layer's tail when the link keeps up): t_fix + max(KV of the last chunk ÷ its groups, KV −
bandwidth × the time before the last layer of the last chunk) ÷ bandwidth, with t_fix as exposed by the same prompts
without a slow link.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.engine import random_checkpoint
from bench.harness.cluster import Client, NodePlan, cluster, random_prompt
from bench.harness.report import Row, add_output_flags, print_rows, row, save
from pdcluster.settings.config import cache_directory

PROMPT_TOKENS = 2048
KV_BYTES = PROMPT_TOKENS * 8 * 2 * 4 * 64 * 2
CHUNK_TOKENS = 512
NUM_LAYERS = 8
SHARES = (0.2, 0.5, 1.0)
GOAL = 0.3
BOUND_SLACK = 1.2


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds, one value per request."""

    prefill: list[float]
    exposed: list[float]
    ttft: list[float]
    ttst: list[float]


def measure(model: Path, requests: int, *, link_bytes_s: float | None, bulk: bool) -> Seen:
    options: tuple[str, ...] = ("--link-bytes-s", str(link_bytes_s)) if link_bytes_s else ()
    options += ("--bulk",) if bulk else ()
    flags = ("--scheduler-token-budget", str(CHUNK_TOKENS))
    plans = [NodePlan("p", "prefill", 0, options, flags), NodePlan("d", "decode", 1, (), flags)]
    with cluster(model, plans, "tcp") as client:
        return _ask(client, requests)


def _ask(client: Client, requests: int) -> Seen:
    rng = random.Random(2)
    timelines = [client.complete(random_prompt(PROMPT_TOKENS, rng), 4)["timeline"] for _ in range(requests + 2)][2:]
    columns = ([each[name] for each in timelines] for name in ("prefill_s", "exposed_s", "ttft_s", "ttst_s"))
    return Seen(*columns)


def bound(prefill_s: float, link_bytes_s: float, fixed_s: float) -> float:
    """The least exposed time in seconds."""
    tail = KV_BYTES * CHUNK_TOKENS / PROMPT_TOKENS / NUM_LAYERS
    last_layer_s = prefill_s * CHUNK_TOKENS / PROMPT_TOKENS / NUM_LAYERS
    return fixed_s + max(tail, KV_BYTES - link_bytes_s * (prefill_s - last_layer_s)) / link_bytes_s


def tables_of(model: Path, requests: int) -> Iterator[list[Row]]:
    """One for each share: starting clusters takes minutes, and a run that is cut short has said what it found by
    then."""
    free = measure(model, requests, link_bytes_s=None, bulk=False)
    prefill_s, fixed_s = statistics.median(free.prefill), statistics.median(free.exposed)
    yield [
        row("prefill", f"{PROMPT_TOKENS} tokens, free link", _ms(free.prefill), "ms"),
        row("exposed", "free link", _ms(free.exposed), "ms"),
    ]
    for share in SHARES:
        link = KV_BYTES / (prefill_s * share)
        case = f"link takes {share:.0%} of prefill"
        bulk = measure(model, requests, link_bytes_s=link, bulk=True)
        groups = measure(model, requests, link_bytes_s=link, bulk=False)
        least = bound(prefill_s, link, fixed_s)
        yield _compare(case, bulk, groups, least)


def _compare(case: str, bulk: Seen, groups: Seen, least: float) -> list[Row]:
    """What is allowed is a share of the bulk send's, or what physics leaves where that is more."""

    def beside(metric: str, ours: list[float], against: str, seconds: float, goal: float | None = None) -> Row:
        return row(
            metric, case, _ms(ours), "ms", against=against, against_value=seconds * 1e3, better="less", goal=goal
        )

    bulk_s = statistics.median(bulk.exposed)
    return [
        beside("exposed", groups.exposed, "allowed", max(GOAL * bulk_s, BOUND_SLACK * least), 1.0),
        beside("exposed, beside one bulk send", groups.exposed, "bulk", bulk_s),
        beside("exposed, beside its bound", groups.exposed, "bound", least),
        beside("ttft", groups.ttft, "bulk", statistics.median(bulk.ttft)),
        beside("ttst", groups.ttst, "bulk", statistics.median(bulk.ttst)),
    ]


def _ms(seconds: list[float]) -> list[float]:
    return [value * 1e3 for value in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    add_output_flags(parser)
    arguments = parser.parse_args()
    model = random_checkpoint(cache_directory() / "bench-engine-30m")
    rows: list[Row] = []
    for table in tables_of(model, 4 if arguments.quick else 12):
        print_rows(table)
        sys.stdout.flush()
        rows += table
    save(rows, arguments)


if __name__ == "__main__":
    main()
