"""The simulated cache against a plain LRU that searches for the oldest leaf, and its accounts under random use."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_router.replay.cache import Hold, PrefixCache, pooled_depths
from pdcluster_router.replay.trace import BlockChain, Blocks

CHAIN = BlockChain()
PROMPTS: list[Blocks] = [
    CHAIN.extend((), contents) for contents in ([1, 2, 3, 4], [1, 2, 5], [1, 6, 7, 8, 9], [10, 11], [10, 12, 13], [14])
]


class LeafLru:
    """Evicts, of all blocks behind which nothing is kept, the one that was used longest ago."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[bytes, tuple[int, int]] = {}
        self.parent: dict[bytes, bytes | None] = {}
        self.clock = 0

    def depth(self, blocks: Blocks) -> int:
        return next((position for position, block in enumerate(blocks) if block not in self.used), len(blocks))

    def use(self, blocks: Blocks) -> None:
        self.clock += 1
        for position, block in enumerate(blocks):
            self.used[block] = (self.clock, -position)
            self.parent[block] = blocks[position - 1] if position else None
        while len(self.used) > self.capacity:
            inner = {self.parent[block] for block in self.used}
            oldest = min((block for block in self.used if block not in inner), key=lambda block: self.used[block])
            del self.used[oldest]


@given(capacity=st.integers(5, 12), order=st.lists(st.integers(0, len(PROMPTS) - 1), max_size=60))
def test_one_request_at_a_time_it_is_a_leaf_first_lru(capacity: int, order: list[int]) -> None:
    reference = LeafLru(capacity)
    expected = []
    for number in order:
        expected.append(reference.depth(PROMPTS[number]))
        reference.use(PROMPTS[number])
    assert pooled_depths([(PROMPTS[number], PROMPTS[number]) for number in order], capacity) == expected


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["open", "publish", "close"]), st.integers(0, 9), st.integers(0, 2)), max_size=80
    )
)
def test_whatever_is_opened_and_closed_the_accounts_are_right(steps: list[tuple[str, int, int]]) -> None:
    cache, seen = PrefixCache(12), set[bytes]()
    holds: list[Hold] = []
    for what, number, extra in steps:
        if what == "open":
            blocks = PROMPTS[number % len(PROMPTS)]
            hold = cache.open(blocks, len(blocks) + extra)
            if hold is None:
                assert cache.num_busy + len(blocks) + extra > cache.capacity, (
                    "refused though all of it would have fitted"
                )
            else:
                holds.append(hold)
        elif what == "publish" and holds:
            hold = holds[number % len(holds)]
            cache.publish(hold, hold.blocks)
        elif what == "close" and holds:
            cache.close(holds.pop(number % len(holds)))
        cache.check_integrity()
        for block, is_there in cache.take_changes().items():
            (seen.add if is_there else seen.discard)(block)
        assert seen == set(cache.names()), "the changes that were told add up to what is there"
        for prompt in PROMPTS:
            held = [block in seen for block in prompt]
            assert held == sorted(held, reverse=True), "what is kept is closed under prefixes"
    for hold in holds:
        cache.close(hold)
    cache.check_integrity()
    assert cache.num_busy == 0


def test_a_request_that_does_not_fit_beside_pinned_ones_waits_and_evicts_nothing() -> None:
    cache = PrefixCache(5)
    first = cache.open(PROMPTS[0], 4)
    assert first is not None and cache.open(PROMPTS[3], 2) is None
    cache.publish(first, PROMPTS[0])
    cache.close(first)
    assert cache.depth(PROMPTS[0]) == 4 and cache.open(PROMPTS[3], 2) is not None and cache.depth(PROMPTS[0]) == 3


def test_an_answer_extends_what_is_kept() -> None:
    cache = PrefixCache(8)
    hold = cache.open(PROMPTS[1], 5)
    assert hold is not None
    cache.publish(hold, PROMPTS[1])
    grown = CHAIN.extend(PROMPTS[1], [20, 21])
    cache.publish(hold, grown)
    cache.close(hold)
    assert cache.depth(grown) == 5 and cache.num_busy == 0
