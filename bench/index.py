"""The prefix index at the size of a large cluster, beside a dict of sets: lookups per second, bytes per (block, node)
entry, what changes cost.

1,000 nodes hold 10 million entries: conversations of 40 to 600 blocks behind 50 system prompts, each conversation on
one to three nodes, because it moved or was split between prefill and decode. The dict of sets (block hash → set of node
numbers) is what one would write first; it is asked in the same way, by bisection, and in the plain way, block by block.
Both hold the same and must answer the same.

Not measured: the router around it (bench.router), lateness of what nodes tell (bench.routing).
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.harness.report import Row, add_output_flags, print_rows, row, save
from pdcluster.core.messages import HASH_BYTES, CacheDelta
from pdcluster.kv.hashing import chain_root, extend
from pdcluster_router.prefix_index.index import PrefixIndex
from pdcluster_router.prefix_index.updates import CacheUpdates

NUM_SYSTEM = 50
SYSTEM_BLOCKS = 40
GOAL_ENTRY_BYTES = 64
GOAL_SLICE_MS = 5.0
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Talk:
    """system: which prompt it begins with; own: the hashes after it."""

    system: bytes
    own: bytes
    nodes: tuple[int, ...]

    @property
    def hashes(self) -> bytes:
        return self.system + self.own


class DictOfSets:
    """block hash → set of node numbers."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, set[int]] = {}

    def add(self, node: int, hashes: bytes) -> None:
        for begin in range(0, len(hashes), HASH_BYTES):
            self.blocks.setdefault(hashes[begin : begin + HASH_BYTES], set()).add(node)

    def depths_by_scan(self, hashes: bytes) -> dict[int, int]:
        found: dict[int, int] = {}
        for number, begin in enumerate(range(0, len(hashes), HASH_BYTES), 1):
            holders = self.blocks.get(hashes[begin : begin + HASH_BYTES])
            if not holders:
                break
            found.update(dict.fromkeys(holders, number))
        return found

    def depths_by_bisection(self, hashes: bytes) -> dict[int, int]:
        """The same probes as the index makes: halve where the number of holders differs."""
        found: dict[int, int] = {}
        nobody: set[int] = set()
        left, last = 0, len(hashes) // HASH_BYTES - 1
        held = self.blocks.get(hashes[:HASH_BYTES], nobody)
        further = [(last, self.blocks.get(hashes[last * HASH_BYTES :], nobody))]
        while held:
            while further and len(further[-1][1]) == len(held):
                left = further.pop()[0]
            if further and further[-1][0] > left + 1:
                middle = (left + further[-1][0]) // 2
                further.append(
                    (middle, self.blocks.get(hashes[middle * HASH_BYTES : (middle + 1) * HASH_BYTES], nobody))
                )
                continue
            found.update(dict.fromkeys(held, left + 1))
            left, held = further.pop() if further else (left, nobody)
        return found


def make_talks(num_nodes: int, num_entries: int, chance: random.Random) -> list[Talk]:
    systems = [chance.randbytes(SYSTEM_BLOCKS * HASH_BYTES) for _ in range(NUM_SYSTEM)]
    talks: list[Talk] = []
    left = num_entries
    while left > 0:
        nodes = tuple(chance.sample(range(num_nodes), chance.choice((1, 1, 2, 3))))
        own = chance.randbytes(chance.randrange(40, 600) * HASH_BYTES)
        talks.append(Talk(chance.choice(systems), own, nodes))
        left -= len(own) // HASH_BYTES + (len(nodes) - 1) * (len(own) // HASH_BYTES // 2)
    return talks


def holdings(talks: Sequence[Talk], num_nodes: int) -> Iterator[tuple[int, bytes]]:
    """Each node with all that it holds; some holders of a talk have only its first half."""
    parts: list[list[bytes]] = [[] for _ in range(num_nodes)]
    systems: list[set[bytes]] = [set() for _ in range(num_nodes)]
    for talk in talks:
        for place, node in enumerate(talk.nodes):
            systems[node].add(talk.system)
            parts[node].append(talk.own if place == 0 else talk.own[: len(talk.own) // HASH_BYTES // 2 * HASH_BYTES])
    for node, own in enumerate(parts):
        yield node, b"".join([*sorted(systems[node]), *own])
        own.clear()


def rss_bytes() -> int:
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS; run this on Linux")


def prompts(talks: Sequence[Talk], chance: random.Random, count: int) -> dict[str, list[bytes]]:
    """short: system prompt and a new question; long: the next turn of a conversation; huge: 100,000 tokens, mostly new;
    unknown: none is cached."""
    some = [chance.choice(talks) for _ in range(count)]
    return {
        "short, 50 blocks": [talk.system + chance.randbytes(10 * HASH_BYTES) for talk in some],
        "next turn, 90 to 670 blocks": [talk.hashes + chance.randbytes(30 * HASH_BYTES) for talk in some],
        "100k tokens, 3125 blocks": [
            (talk.hashes + chance.randbytes(3125 * HASH_BYTES))[: 3125 * HASH_BYTES] for talk in some
        ],
        "unknown, 300 blocks": [chance.randbytes(300 * HASH_BYTES) for _ in some],
    }


def per_second(call: Callable[[bytes], object], asked: Sequence[bytes]) -> list[float]:
    rates = []
    for _ in range(REPEATS):
        started = time.process_time()
        for hashes in asked:
            call(hashes)
        rates.append(len(asked) / (time.process_time() - started))
    return rates


def same_answers(index: PrefixIndex, plain: DictOfSets, asked: Sequence[bytes]) -> None:
    for hashes in asked:
        expected = {f"n{node}": depth for node, depth in plain.depths_by_scan(hashes).items()}
        if (
            not index.depths(hashes)
            == expected
            == {f"n{node}": depth for node, depth in plain.depths_by_bisection(hashes).items()}
        ):
            raise AssertionError(
                f"the index and the dict of sets disagree about a prompt of {len(hashes) // HASH_BYTES} blocks"
            )


def measure_changes(index: PrefixIndex, chance: random.Random) -> list[Row]:
    """What a delta costs the router, by its size; microseconds per block."""
    rows = []
    for size in (1, 16, 256, 3125):
        deltas = [chance.randbytes(size * HASH_BYTES) for _ in range(max(2000 // size, 10))]
        for name, change in (("add", index.add), ("remove", index.remove)):
            started = time.process_time()
            for delta in deltas:
                change("n1", delta)
            per_block_us = (time.process_time() - started) / len(deltas) / size * 1e6
            rows.append(row(f"index {name}", f"{size} blocks at once", [per_block_us], "us/block"))
    return rows


def measure_request(index: PrefixIndex, chance: random.Random) -> list[Row]:
    """What one new prompt costs the router beside tokenizing and sending it: names for its blocks, who has them, what
    will be there, what then is."""
    rows = []
    for num_tokens in (100, 10_000, 100_000):
        prompts = [chance.randbytes(4 * num_tokens) for _ in range(20)]
        root = chain_root()
        spent: dict[str, float] = dict.fromkeys(("hash", "look up", "expect", "take in"), 0.0)
        for number, packed in enumerate(prompts):
            started = time.process_time()
            hashes = extend(b"", packed, root=root)
            hashed = time.process_time()
            index.depths(hashes, float(number))
            asked = time.process_time()
            index.expect("n1", hashes, number + 5.0)
            expected = time.process_time()
            index.add("n1", hashes)
            done = time.process_time()
            for name, took in zip(
                spent, (hashed - started, asked - hashed, expected - asked, done - expected), strict=True
            ):
                spent[name] += took / len(prompts)
        rows += [
            Row(f"request: {name}", f"{num_tokens} new tokens", took * 1e3, "core-ms") for name, took in spent.items()
        ]
        rows.append(Row("request: all of it", f"{num_tokens} new tokens", sum(spent.values()) * 1e3, "core-ms"))
    return rows


def run(num_nodes: int, num_entries: int, num_prompts: int) -> list[Row]:
    chance = random.Random(1)
    talks = make_talks(num_nodes, num_entries, chance)
    asked = prompts(talks, chance, num_prompts)
    rows: list[Row] = []

    told = list(holdings(talks, num_nodes))
    before = rss_bytes()
    plain = DictOfSets()
    started = time.process_time()
    for node, hashes in told:
        plain.add(node, hashes)
    plain_s, plain_bytes = time.process_time() - started, rss_bytes() - before

    gc.freeze()  # the rival's sets are not looked through again in the middle of a slice
    before, index, slices = rss_bytes(), PrefixIndex(), list[float]()
    caches = CacheUpdates(index)
    started = time.process_time()
    for node, hashes in told:
        caches.apply(f"n{node}", CacheDelta(0, True, hashes, b""), 0.0)
        while caches.has_pieces:
            called = time.process_time()
            caches.take_piece()
            slices.append(time.process_time() - called)
    index_s, index_bytes = time.process_time() - started, rss_bytes() - before
    entries, case = index.num_entries, f"{num_nodes} nodes, {index.num_entries / 1e6:.1f} M entries"
    same_answers(index, plain, [hashes for group in asked.values() for hashes in group[:: max(num_prompts // 50, 1)]])

    for name, group in asked.items():
        rates = {
            "scan": per_second(plain.depths_by_scan, group[: max(num_prompts // 20, 10)]),
            "bisection": per_second(plain.depths_by_bisection, group),
        }
        ours = per_second(index.depths, group)
        for rival, rate in rates.items():
            rows.append(
                row(
                    f"index lookups, beside {rival}",
                    name,
                    ours,
                    "1/s",
                    against="dict of sets",
                    against_value=float(np.median(rate)),
                )
            )
    per_entry = index_bytes / entries
    for metric, against, nbytes, goal in (
        ("index bytes per entry", "goal", float(GOAL_ENTRY_BYTES), 1.0),
        ("index bytes per entry, beside plain sets", "dict of sets", plain_bytes / entries, None),
    ):
        rows.append(Row(metric, case, per_entry, "B", against=against, against_value=nbytes, better="less", goal=goal))
    rows.append(Row("index bytes per entry, as it says itself", case, index.num_bytes / entries, "B"))
    rows.append(Row("index holder sets", case, float(index.num_sets), ""))
    rows.append(
        row(
            "index build",
            case,
            [entries / index_s],
            "entries/s",
            against="dict of sets",
            against_value=entries / plain_s,
        )
    )
    for name, slice_s in (("p99", float(np.percentile(slices, 99))), ("longest", max(slices))):
        rows.append(
            Row(
                f"index slice, {name}",
                case,
                slice_s * 1e3,
                "ms",
                against="goal",
                against_value=GOAL_SLICE_MS,
                better="less",
                goal=1.0,
            )
        )
    rows += measure_changes(index, chance)
    rows += measure_request(index, chance)
    started = time.process_time()
    index.drop("n7")
    rows.append(Row("index drop of a node", case, (time.process_time() - started) * 1e3, "ms"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.index", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the entries")
    add_output_flags(parser)
    chosen = parser.parse_args()
    rows = run(1000, 1_000_000 if chosen.quick else 10_000_000, 500 if chosen.quick else 2000)
    print_rows(rows)
    save(rows, chosen)


if __name__ == "__main__":
    main()
