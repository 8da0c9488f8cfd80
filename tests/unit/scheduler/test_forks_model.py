"""Choices that share a prompt's pages, under random histories: no page has two writers, every token is the right one,
and nothing is left."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_engine import FakeEngine, kv_of, make_sequence, reference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcluster.core.errors import IntegrityError, Overloaded
from pdcluster.core.lifecycle import Residence
from pdcluster.core.step import StepPlan
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.scheduler import Scheduler, SchedulerLimits
from pdcluster.scheduler.sequence import Sequence

PAGE = 4
EOS: frozenset[int] = frozenset()


class ForkMachine(RuleBasedStateMachine):
    """Leaders come as local prompts or as slots whose KV another node writes; forks come while their leader is
    anywhere."""

    @initialize(num_pages=st.integers(8, 24), reserve=st.integers(0, 8))
    def start(self, num_pages: int, reserve: int) -> None:
        self.pool = PagePool(num_pages, PAGE, PAGE)
        limits = SchedulerLimits(token_budget=7, max_rows=6, max_waiting=32, max_len=48, reserve_tokens=reserve)
        self.scheduler = Scheduler(self.pool, limits)
        self.engine = FakeEngine(num_pages, PAGE)
        self.fork_groups: list[Sequence] = []
        self.prompts: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}
        self.plan: StepPlan | None = None
        self.count = 0
        self.num_forked = 0

    def _make(self, prompt: list[int], choice: int, max_tokens: int) -> Sequence:
        self.count += 1
        sequence = make_sequence(prompt, key=f"r{self.count}", block_tokens=PAGE, choice=choice, max_tokens=max_tokens)
        self.prompts[sequence.key], self.said[sequence.key] = prompt, []
        return sequence

    @precondition(lambda self: len(self.fork_groups) < 6)
    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=14), max_tokens=st.integers(1, 9))
    def lead(self, prompt: list[int], max_tokens: int) -> None:
        sequence = self._make(prompt, 0, max_tokens)
        self.scheduler.add(sequence)
        self.fork_groups.append(sequence)

    @precondition(lambda self: len(self.fork_groups) < 6)
    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=14), max_tokens=st.integers(1, 9))
    def reserve(self, prompt: list[int], max_tokens: int) -> None:
        sequence = self._make(prompt, 0, max_tokens)
        try:
            pages = self.scheduler.reserve(sequence)
        except Overloaded:
            return
        self.engine.write(pages, 0, kv_of(prompt))
        self.fork_groups.append(sequence)

    @rule(pick=st.randoms(use_true_random=False))
    def land(self, pick) -> None:
        slots = [parent for parent in self.fork_groups if parent.state is Residence.RESERVED]
        if slots:
            parent = pick.choice(slots)
            token = reference(self.prompts[parent.key], parent.sampling, eos=EOS, max_len=48)[0][0]
            self._take([self.scheduler.commit(parent.key, token)])

    @precondition(lambda self: self.fork_groups)
    @rule(pick=st.randoms(use_true_random=False), choice=st.integers(1, 5), max_tokens=st.integers(1, 9))
    def fork(self, pick, choice: int, max_tokens: int) -> None:
        parent = pick.choice(self.fork_groups)
        if self.scheduler.load().waiting < 20:
            sequence = self._make(self.prompts[parent.key], choice, max_tokens)
            sequence.parent = parent
            self.scheduler.add(sequence)

    @precondition(lambda self: self.plan is None)
    @rule()
    def launch(self) -> None:
        self.plan = self.scheduler.schedule()
        if self.plan is not None:
            self.num_forked += len(self.plan.copies)
            self._check_writers(self.plan)

    def _check_writers(self, plan: StepPlan) -> None:
        """Nobody writes where another writes or where others read what they share."""
        written: Counter[int] = Counter()
        for row in plan.rows:
            pages = {int(page) for page in row.pages[row.start // PAGE : (row.start + len(row.tokens) - 1) // PAGE + 1]}
            written.update(pages)
            for page in pages:
                assert self.pool.num_owners(page) - sum(source == page for source, _ in plan.copies) == 1, (
                    f"{row.request} writes to a shared page"
                )
                assert not self.pool._hashes[page], f"{row.request} writes to a published page"
        assert all(count == 1 for count in written.values()), "a page has two writers"
        targets = Counter(target for _, target in plan.copies)
        assert all(count == 1 for count in targets.values()) and not targets.keys() & {
            source for source, _ in plan.copies
        }

    @precondition(lambda self: self.plan is not None)
    @rule()
    def land_step(self) -> None:
        plan, self.plan = self.plan, None
        self._take(self.scheduler.update(plan, self.engine.run(plan)))

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail_step(self) -> None:
        """The engine raised; here every row is tried again."""
        self.plan = None
        self.scheduler.drop_step()

    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick) -> None:
        if live := list(self.scheduler._live.values()):
            sequence = pick.choice(live)
            self.scheduler.cancel(sequence.key)
            self.fork_groups = [parent for parent in self.fork_groups if parent is not sequence]

    def _take(self, updates) -> None:
        for update in updates:
            if update.token is None:
                continue
            said = self.said[update.key]
            assert update.position == len(said)
            said.append(update.token)
            sequence = update.sequence
            right = reference(self.prompts[update.key], sequence.sampling, eos=EOS, max_len=48)[0]
            assert said == right[: len(said)], f"{update.key}, choice {sequence.sampling.choice}"
            if update.finished is not None:
                self.fork_groups = [parent for parent in self.fork_groups if parent is not sequence]

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.land_step()
        for parent in [parent for parent in self.fork_groups if parent.state is Residence.RESERVED]:
            self.scheduler.cancel(parent.key)
        for _ in range(2000):
            self.launch()
            if self.plan is None:
                break
            self.land_step()
        assert self.scheduler.is_idle() and self.pool.num_used == 0 and self.pool.num_quarantined == 0
        self.scheduler.check_integrity()


ForkMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_forks_share_pages_and_never_write_to_them = ForkMachine.TestCase


def scheduler(num_pages: int = 16) -> tuple[Scheduler, PagePool]:
    pool = PagePool(num_pages, PAGE, PAGE)
    return Scheduler(
        pool, SchedulerLimits(token_budget=32, max_rows=8, max_waiting=32, max_len=48, reserve_tokens=0)
    ), pool


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_a_fork_computes_one_token_and_takes_one_page(length: int) -> None:
    node, pool = scheduler()
    engine = FakeEngine(16, PAGE)
    parent = make_sequence(list(range(length)), key="parent", max_tokens=8)
    node.add(parent)
    plan = node.schedule()
    assert plan is not None
    node.update(plan, engine.run(plan))
    used = pool.num_used
    forks = [
        make_sequence(list(range(length)), key=f"fork{choice}", choice=choice, max_tokens=8) for choice in (1, 2, 3)
    ]
    for fork in forks:
        fork.parent = parent
        node.add(fork)
    plan = node.schedule()
    assert plan is not None
    assert [(row.request, row.start, len(row.tokens)) for row in plan.rows if row.request != "parent"] == [
        (f.key, length - 1, 1) for f in forks
    ]
    assert len(plan.copies) == 3 and pool.num_used <= used + 3 + 1, (
        "one page each; the leader may have outgrown its own"
    )
    assert [fork.num_cached for fork in forks] == [length - 1] * 3


def test_another_prompt_shares_nothing() -> None:
    """Only a router that is wrong could say so."""
    node, _ = scheduler()
    engine = FakeEngine(16, PAGE)
    parent, fork = (
        make_sequence([1, 2, 3, 4, 5], key="parent", max_tokens=8),
        make_sequence([1, 2, 3, 4, 6], key="fork", max_tokens=8),
    )
    node.add(parent)
    plan = node.schedule()
    assert plan is not None
    node.update(plan, engine.run(plan))
    fork.parent = parent
    node.add(fork)
    plan = node.schedule()
    assert plan is not None and plan.copies == ()


def test_a_page_of_one_owner_is_private_already_and_a_shared_one_is_copied() -> None:
    pool = PagePool(2, PAGE, PAGE)
    (page,) = pool.allocate(1) or ()
    assert pool.make_private(page) == page
    pool.acquire((page,))
    other = pool.make_private(page)
    assert other is not None and other != page and (pool.num_owners(page), pool.num_owners(other)) == (2, 1)
    assert pool.make_private(page) is None, "there is no other page"
    pool.release((page, page, other))
    with pytest.raises(IntegrityError, match="cannot be made private"):
        pool.make_private(page)
    pool.check_integrity()
