"""PrefixIndex under random histories of nodes, beside a dict of sets; and ExpectedBlocks beside the chains it was told."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pytest import MonkeyPatch

from pdcluster.kv.hashing import block_hashes
from pdcluster.messages import HASH_BYTES
from pdcluster_router import index as index_module
from pdcluster_router.expected import ExpectedBlocks
from pdcluster_router.index import PrefixIndex

NODES = [f"node-{i}" for i in range(5)]
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
"""Each element stands for one block; few values make prefixes collide often."""


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

    @initialize(first_slots=st.sampled_from([4, 16, 64]), swept=st.integers(0, 3), moved=st.integers(1, 8))
    def start(self, first_slots: int, swept: int, moved: int) -> None:
        """Small enough that tables move and sweeps last over many changes."""
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
TestPrefixIndex.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    told=st.lists(st.tuples(st.sampled_from(NODES[:3]), st.lists(st.integers(0, 1), min_size=1, max_size=120), st.integers(1, 6)), max_size=8),
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


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.integers(0, 1), min_size=1, max_size=300), shared=st.integers(0, 300), tail=st.lists(st.just(7), max_size=50))
def test_a_single_expectation_is_found_exactly(text: list[int], shared: int, tail: list[int]) -> None:
    expected = ExpectedBlocks()
    expected.add("a", chain(text), 10.0)
    common = min(shared, len(text))
    asked = text[:common] + tail
    assert expected.depths(chain(asked), 1.0) == ({"a": common} if common else {})
