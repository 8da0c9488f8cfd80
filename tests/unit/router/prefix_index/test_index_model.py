"""PrefixIndex under random histories of nodes, beside a dict of sets; and ExpectedBlocks beside the chains it was
told."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pytest import MonkeyPatch

from pdcluster.core.messages import HASH_BYTES
from pdcluster.kv.hashing import block_hashes
from pdcluster_router.prefix_index import block_table
from pdcluster_router.prefix_index import index as index_module
from pdcluster_router.prefix_index.expected import ExpectedBlocks
from pdcluster_router.prefix_index.index import PrefixIndex

NODES = [f"node-{i}" for i in range(5)]
# Each element stands for one block; few values make prefixes collide often.
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def chain(text: list[int]) -> bytes:
    return block_hashes(text, block_tokens=1)


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


def depths_of(model: dict[str, set[bytes]], hashes: bytes) -> dict[str, int]:
    found = {}
    for node, held in model.items():
        blocks = split(hashes)
        depth = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
        if depth:
            found[node] = depth
    return found


class PrefixIndexMachine(RuleBasedStateMachine):
    """Nodes take in whole prompts and evict leaves, as page pools do, so that their holdings stay prefix-closed."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[str, set[bytes]] = defaultdict(set)
        self.texts: dict[bytes, list[int]] = {}
        self.patch = MonkeyPatch()

    @initialize(
        first_slots=st.sampled_from([4, 16, 64]),
        swept=st.integers(0, 3),
        moved=st.integers(1, 80),
        few=st.sampled_from([0, 8, 48]),
    )
    def start(self, first_slots: int, swept: int, moved: int, few: int) -> None:
        """Small enough that tables move and sweeps last over many changes."""
        self.patch.setattr(index_module, "FEW_BLOCKS", few)
        self.patch.setattr(block_table, "FEW", few // 8)
        self.patch.setattr(index_module, "FIRST_SLOTS", first_slots)
        self.patch.setattr(index_module, "SWEPT_SETS", swept)
        self.patch.setattr(index_module, "LEAST_MOVED", moved)
        self.index = PrefixIndex()

    def teardown(self) -> None:
        self.patch.undo()

    def blocks(self, text: list[int]) -> bytes:
        hashes = chain(text)
        self.texts.update({block: text[: i + 1] for i, block in enumerate(split(hashes))})
        return hashes

    def leaves(self, node: str) -> list[bytes]:
        held = self.model[node]
        parents = {tuple(self.texts[block][:-1]) for block in held}
        return sorted(block for block in held if tuple(self.texts[block]) not in parents)

    @rule(node=st.sampled_from(NODES), text=TEXTS)
    def add(self, node: str, text: list[int]) -> None:
        hashes = self.blocks(text)
        self.index.add(node, hashes)
        self.model[node] |= set(split(hashes))

    @rule(node=st.sampled_from(NODES), num_blocks=st.integers(1, 30))
    def evict(self, node: str, num_blocks: int) -> None:
        gone: list[bytes] = []
        while self.model[node] and len(gone) < num_blocks:
            leaf = self.leaves(node)[0]
            self.model[node].discard(leaf)
            gone.append(leaf)
        self.index.remove(node, b"".join(gone))

    @rule(node=st.sampled_from(NODES), texts=st.lists(TEXTS, max_size=4))
    def snapshot(self, node: str, texts: list[list[int]]) -> None:
        held = {block for text in texts for block in split(self.blocks(text))}
        self.index.snapshot(node, b"".join(sorted(held)))
        self.model[node] = held

    @rule(node=st.sampled_from(NODES))
    def drop(self, node: str) -> None:
        self.index.drop(node)
        self.model.pop(node, None)

    @rule(text=TEXTS)
    def ask(self, text: list[int]) -> None:
        hashes = chain(text)
        assert self.index.depths(hashes) == depths_of(self.model, hashes)

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        assert self.index.num_entries == sum(map(len, self.model.values()))
        for node, held in self.model.items():
            assert self.index.holdings(node) == held
        self.index.check_integrity()


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    told=st.lists(
        st.tuples(st.sampled_from(NODES[:3]), st.lists(st.integers(0, 1), min_size=1, max_size=120), st.integers(1, 6)),
        max_size=8,
    ),
    ended=st.lists(st.integers(0, 7)),
    asked=st.lists(st.integers(0, 1), min_size=1, max_size=140),
    now=st.integers(0, 6),
)
def test_what_is_expected_is_never_more_than_the_chains_say(
    told: list[tuple[str, list[int], int]], ended: list[int], asked: list[int], now: int
) -> None:
    expected = ExpectedBlocks()
    open_chains: dict[tuple[str, bytes], tuple[bytes, int]] = {}
    for node, text, until in told:
        hashes = chain(text)
        expected.add(node, hashes, until)
        open_chains[node, hashes[-HASH_BYTES:]] = (hashes, until)
    for number in ended:
        if number < len(told):
            node, text, _ = told[number]
            expected.confirm(node, chain(text))
            for block in split(chain(text)):
                open_chains.pop((node, block), None)
    found = expected.depths(chain(asked), now)
    expected.check_integrity()
    most = defaultdict(int)
    for (node, _), (hashes, until) in open_chains.items():
        if until > now:
            shared = sum(a == b for a, b in zip(split(hashes), split(chain(asked)), strict=False))
            most[node] = max(most[node], shared)
    assert all(depth <= most[node] for node, depth in found.items())


class EndsAndAdds(ExpectedBlocks):
    """The general way: what is expected again ends, and is expected anew."""

    def add(self, node: str, hashes: bytes, until: float) -> None:
        self._end((node, hashes[-HASH_BYTES:]))
        super().add(node, hashes, until)


CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(chain)
DEED = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NODES[:3]), CHAINS, st.integers(1, 6)),
    st.tuples(st.sampled_from(["confirm", "withdraw"]), st.sampled_from(NODES[:3]), CHAINS),
    st.tuples(st.just("drop"), st.sampled_from(NODES[:3])),
)


@settings(max_examples=150, deadline=None)
@given(
    deeds=st.lists(st.tuples(DEED, st.integers(1, 3)), max_size=20), waits=st.lists(st.integers(0, 2), min_size=20,
    max_size=20),
    most=st.sampled_from([20, 1 << 18]),
)  # fmt: skip
def test_what_is_expected_again_is_what_ends_and_is_expected_anew(
    deeds: list[tuple[tuple[Any, ...], int]], waits: list[int], most: int
) -> None:
    """Said several times over, so that the short way is gone; with room for few marks, too."""
    short, general, now = ExpectedBlocks(max_marks=most), EndsAndAdds(max_marks=most), 0
    for ((name, *words), times), wait in zip(deeds, waits, strict=False):
        now += wait
        if name == "add":
            words[2] += now
        for _ in range(times):
            for each in (short, general):
                getattr(each, name)(*words)
        for asked in (words[1] if len(words) > 1 else chain([0, 1, 1]), chain([0] * 40), chain([1, 0, 1])):
            assert short.depths(asked, now) == general.depths(asked, now)
        short.check_integrity()
    assert len(short) == len(general) and short.num_bytes == general.num_bytes
    for kind in ("num_hits", "num_missed", "num_crowded_out"):
        assert getattr(short, kind) == getattr(general, kind)


@settings(max_examples=150, deadline=None)
@given(deeds=st.lists(st.tuples(st.booleans(), st.sampled_from(NODES[:2]), CHAINS), max_size=20), asked=CHAINS)
def test_what_is_withdrawn_leaves_what_others_share(deeds: list[tuple[bool, str, bytes]], asked: bytes) -> None:
    expected, left = ExpectedBlocks(), set[tuple[str, bytes]]()
    for is_new, node, text in deeds:
        if is_new:
            expected.add(node, text, 9.0)
            left.add((node, text))
        else:
            expected.withdraw(node, text)
            left.discard((node, text))
        expected.check_integrity()
    assert len(expected) == len(left)
    for text in (asked, *(text for _, text in left)):
        found = expected.depths(text, 0.0)
        for node in NODES[:2]:
            most = max((num_common(text, other) for held_by, other in left if held_by == node), default=0)
            assert found.get(node, 0) <= most, "never more than some chain has"
            assert (node in found) == (most > 0)
            assert found.get(node, 0) == most or (node, text) not in left, "all of what is expected whole"


def num_common(one: bytes, other: bytes) -> int:
    pairs = zip(split(one), split(other), strict=False)
    return next(
        (place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(one), len(other)) // HASH_BYTES
    )


def test_withdrawing_many_that_share_a_start_enters_nothing_anew() -> None:
    expected, start = ExpectedBlocks(), [0] * 32
    chains = [chain([*start, 1 + number, *start]) for number in range(100)]
    for hashes in chains:
        expected.add("a", hashes, 9.0)
    num_ends = len(expected._ends)
    for hashes in chains[:-1]:
        expected.withdraw("a", hashes)
        expected.check_integrity()
    assert len(expected._ends) == num_ends, "which would grow with the square of their number"
    assert expected.depths(chains[-1], 0.0) == {"a": 65}


def test_what_is_expected_again_and_again_has_one_end() -> None:
    expected, text = ExpectedBlocks(), chain([0, 1, 0, 1])
    for moment in range(1000):
        expected.add("a", text, moment + 5.0)
    expected.check_integrity()
    assert expected.depths(text, 1003.0) == {"a": 4} and expected.num_missed == 0
    assert expected.depths(text, 1004.0) == {} and expected.num_missed == 1


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.integers(0, 1), min_size=1, max_size=300),
    shared=st.integers(0, 300),
    tail=st.lists(st.just(7), max_size=50),
)
def test_a_single_expectation_is_found_exactly(text: list[int], shared: int, tail: list[int]) -> None:
    expected = ExpectedBlocks()
    expected.add("a", chain(text), 10.0)
    common = min(shared, len(text))
    asked = text[:common] + tail
    assert expected.depths(chain(asked), 1.0) == ({"a": common} if common else {})


def test_at_the_cap_the_newest_blocks_are_dropped_and_counted_and_the_node_is_partial() -> None:
    index = PrefixIndex(max_blocks=100)
    index.snapshot("a", chain([0] * 80))
    index.add("b", chain([1] * 60))
    assert index.num_dropped > 0 and index.num_entries + index.num_dropped == 140 and index.num_entries <= 101
    assert index.is_partial("b") and not index.is_partial("a")
    assert index.depths(chain([0] * 80)) == {"a": 80}
    index.add("c", chain([0] * 80))
    assert index.depths(chain([0] * 80)) == {"a": 80, "c": 80}, "blocks that are known need no new row"
    index.check_integrity()


def test_nodes_that_find_no_room_at_the_cap_leave_no_set_behind() -> None:
    index = PrefixIndex(max_blocks=100)
    index.snapshot("full", chain([0] * 200))
    sets, nbytes = index.num_sets, index.num_bytes
    for number in range(20):
        index.snapshot(f"late-{number}", chain([1 + number] * 60))
    assert (index.num_sets, index.num_bytes) == (sets, nbytes)
    index.check_integrity()


def test_room_that_was_freed_at_the_cap_is_used_again() -> None:
    index = PrefixIndex(max_blocks=200)
    for number in range(20):
        index.snapshot("a", chain([number] * 150))
        assert index.depths(chain([number] * 150)) == {"a": 150} and not index.num_dropped
        index.check_integrity()
    index.drop("a")
    index.snapshot("b", chain([1] * 200))
    assert index.num_entries == 200 and index.num_bytes < 200_000


def test_a_hash_that_comes_twice_counts_once() -> None:
    index = PrefixIndex()
    hashes = chain(list(range(60)))
    index.add("a", hashes + hashes)
    assert index.num_entries == 60
    index.remove("a", hashes[16 * 59 :] * 2)
    assert index.num_entries == 59
    index.check_integrity()


@pytest.mark.parametrize("change", ["add", "remove", "snapshot", "drop"])
def test_the_same_question_after_a_change_gets_the_new_answer(change: str) -> None:
    index = PrefixIndex()
    chain = b"".join(bytes([number]) * HASH_BYTES for number in range(4))
    index.add("a", chain[: 2 * HASH_BYTES])
    assert index.depths(chain) == {"a": 2} and index.depth("a", chain) == 2 and index.depth("b", chain) == 0
    index.depths(chain)["b"] = 9  # an answer is the asker's own
    assert index.depths(chain) == {"a": 2}
    if change == "add":
        index.add("a", chain[2 * HASH_BYTES :])
    elif change == "remove":
        index.remove("a", chain[HASH_BYTES : 2 * HASH_BYTES])
    elif change == "snapshot":
        index.snapshot("a", chain[:HASH_BYTES])
    else:
        index.drop("a")
    depth = {"add": 4, "remove": 1, "snapshot": 1, "drop": 0}[change]
    assert index.depth("a", chain) == depth and index.depths(chain) == ({"a": depth} if depth else {})


def test_bytes_that_are_no_hashes_are_refused() -> None:
    with pytest.raises(ValueError, match="no whole number of block hashes"):
        PrefixIndex().add("a", bytes(17))


def test_many_nodes_come_and_go_without_leaving_anything_behind() -> None:
    index = PrefixIndex()
    for boot in range(300):
        index.snapshot(f"node-{boot}", chain([boot % 7] * 50))
        index.drop(f"node-{boot - 20}")
    assert index.num_entries == 20 * 50 and index.num_sets < 60
    for boot in range(300):
        index.drop(f"node-{boot}")
    for _ in range(50):
        index.remove("nobody", b"")
        index.snapshot("last", b"")
    assert index.num_entries == 0 and index.num_sets <= 1
    index.check_integrity()


def test_names_of_a_set_that_ended_behind_a_forwarding_id_are_not_taken_for_the_next_sets() -> None:
    index = PrefixIndex()
    first, *shared = split(chain(list(range(4))))
    for node, held in (("c", b"".join(shared)), ("d", chain([7])), ("e", chain([8])), ("a", first), ("b", first)):
        index.add(node, held)
    index.drop("a")
    index.remove("nobody", b"")
    index.remove("b", chain([9]))  # sweeps: the set of a and b forwards to that of b
    assert index.depths(first) == {"b": 1}
    index.remove("b", first)
    for node, block in (("d", shared[0]), ("e", shared[1]), ("d", shared[2]), ("e", shared[2])):
        index.add(node, block)
    assert [set(index.depths(block)) for block in shared] == [{"c", "d"}, {"c", "e"}, {"c", "d", "e"}]
