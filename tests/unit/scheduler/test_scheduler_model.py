"""The scheduler under random histories: tiny pools, cancels, preemptions, slots, replays, late writes, steps planned
ahead.

The engine's tokens depend on every KV entry a row attends to, so any page that is shared wrongly, reused too early or
published too soon changes somebody's output. Whatever happens, every request gets exactly one end, and if it ends well,
the tokens of an undisturbed run.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from fake_engine import FakeEngine, draw, kv_of, make_work, prompt_logprob, reference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcluster.core.errors import Overloaded, RequestTooLarge
from pdcluster.core.lifecycle import Residence
from pdcluster.core.messages import HASH_BYTES, Sampling
from pdcluster.core.step import StepPlan, StepResult
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.scheduler import Scheduler, SchedulerLimits, Update
from pdcluster.scheduler.sequence import Sequence

EOS = frozenset({0})
MAX_LEN = 30
BLOCK = 2
BASES = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 1, 2, 3, 4, 9, 9, 9, 9], [5] * 12)
PROMPTS = st.builds(
    lambda base, cut, tail: base[:cut] + tail,
    st.sampled_from(BASES),
    st.integers(0, 12),
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
)
SAMPLINGS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 14),
        "min_tokens": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (1,), (2, 3)]),
    },
    optional={"prompt_logprobs": st.just(0)},
)


@dataclass
class Request:
    """What the router would know."""

    prompt: list[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    # It gives way to the others.
    is_batch: bool = False
    # Came as a slot: its prompt logprobs are the prefill node's business.
    slot: bool = False
    ends: list[str] = field(default_factory=list)
    prompt_logprobs: list[tuple[object, ...]] = field(default_factory=list)


@dataclass
class Slot:
    sequence: Sequence
    pages: list[int]
    nonce: int


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.parked: list[str] = []
        self.slots: list[Slot] = []
        # Slots that were dropped while their writer may still write.
        self.stale: list[Slot] = []
        self.readers: list[tuple[list[int], list[list[int]]]] = []
        # In flight, oldest first.
        self.plans: deque[StepPlan] = deque()
        # The same with their page tables as they were at the launch, by which the engine may go.
        self.taken: deque[StepPlan] = deque()
        # Of those that the engine is done with.
        self.results: deque[StepResult] = deque()
        # The step in flight was to take tokens from one that failed.
        self.is_void = False
        self.counts: Counter[str] = Counter()
        self.index: set[bytes] = set()
        self.now = 0.0
        self.build(6, 1, 5, 3)

    @initialize(
        num_pages=st.integers(5, 14),
        blocks=st.integers(1, 2),
        reserve_tokens=st.integers(0, 8),
        max_rows=st.integers(1, 4),
    )
    def build(self, num_pages: int, blocks: int, reserve_tokens: int, max_rows: int) -> None:
        page_tokens = BLOCK * blocks
        self.pool = PagePool(num_pages, page_tokens, BLOCK)
        limits = SchedulerLimits(
            token_budget=max_rows + 5,
            max_rows=max_rows,
            max_waiting=6,
            max_len=MAX_LEN,
            reserve_tokens=reserve_tokens,
            eos_token_ids=EOS,
            max_overtakes=2,
        )
        self.scheduler = Scheduler(self.pool, limits, clock=lambda: self.now)
        self.engine = FakeEngine(num_pages, page_tokens)

    # ------------------------------------------------------------ what a router asks

    @rule(prompt=PROMPTS, sampling=SAMPLINGS, remote=st.booleans(), is_batch=st.booleans())
    def add(self, prompt: list[int], sampling: dict[str, object], remote: bool, is_batch: bool = False) -> None:
        self.submit(self.new_request(prompt, sampling, is_batch), remote=remote)

    @rule(prompt=PROMPTS, sampling=SAMPLINGS, is_batch=st.booleans())
    def reserve(self, prompt: list[int], sampling: dict[str, object], is_batch: bool = False) -> None:
        key = self.new_request(prompt, sampling, is_batch)
        self.requests[key].slot = True
        sequence = self.sequence_of(key)
        try:
            pages = self.scheduler.reserve(sequence)
        except (Overloaded, RequestTooLarge) as error:
            self.requests[key].ends.append(error.code)
            return
        assert len(pages) == self.pool.pages_for(sequence.num_tokens)
        assert self.engine.read(pages, sequence.num_cached) == kv_of(prompt)[: sequence.num_cached]
        slot = Slot(sequence, pages, nonce=len(self.requests))
        self.pool.attach_writer(pages[sequence.num_cached // self.pool.page_tokens :], slot.nonce)
        self.slots.append(slot)

    @precondition(lambda self: any(not request.ends for request in self.requests.values()))
    @rule(data=st.data(), replay=st.booleans())
    def cancel(self, data: st.DataObject, replay: bool) -> None:
        """The client left, or the router moves the request: then the new attempt starts from the tokens that were
        sent."""
        key = data.draw(st.sampled_from([key for key, request in self.requests.items() if not request.ends]))
        request = self.requests[key]
        ended = self.scheduler.cancel(f"{key}#{request.attempt}")
        assert ended is not None and ended.state is Residence.FINISHED
        for slot in [slot for slot in self.slots if slot.sequence is ended]:
            self.slots.remove(slot)
            self.stale.append(slot)
        if key in self.parked:
            self.parked.remove(key)
        if replay:
            request.attempt += 1
            self.submit(key, remote=False)
        else:
            request.ends.append("cancelled")

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), local=st.booleans())
    def deliver(self, data: st.DataObject, local: bool) -> None:
        """A parked prompt's KV is right; it is taken, or its decode comes back to this node."""
        key = self.parked.pop(data.draw(st.integers(0, len(self.parked) - 1)))
        request = self.requests[key]
        sequence = self.scheduler.find(f"{key}#{request.attempt}")
        assert sequence is not None and sequence.state is Residence.PARKED
        context = (request.prompt + request.tokens)[:-1]
        assert self.engine.read(sequence.pages.tolist(), len(context)) == kv_of(context)
        assert self.scheduler.release(sequence.key) is sequence
        if local:
            request.attempt += 1
            self.submit(key, remote=False)
        else:
            request.ends.append("delivered")

    # ------------------------------------------------------------ what the transfer does

    @precondition(lambda self: self.scheduler._waiting)
    @rule(data=st.data())
    def hold_or_resume(self, data: st.DataObject) -> None:
        """KV of a waiting prompt is on its way, or has come, or does not come."""
        sequence = data.draw(st.sampled_from(list(self.scheduler._waiting.values())))
        if sequence.state is Residence.HELD:
            self.scheduler.resume(sequence)
        else:
            self.scheduler.hold(sequence)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        slot = self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1)))
        entries = kv_of(slot.sequence.tokens.tolist())
        self.engine.write(slot.pages, slot.sequence.num_cached, entries[slot.sequence.num_cached :])
        self.pool.detach_writer(slot.nonce)
        self.take(self.scheduler.commit(slot.sequence.key, draw(entries)))

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), proof=st.booleans())
    def write_late(self, data: st.DataObject, proof: bool) -> None:
        """A writer whose slot is gone writes garbage, until there is proof that it cannot."""
        slot = data.draw(st.sampled_from(self.stale))
        count = slot.sequence.num_prompt - slot.sequence.num_cached
        self.engine.write(slot.pages, slot.sequence.num_cached, [999] * count)
        if proof:
            self.stale.remove(slot)
            self.pool.detach_writer(slot.nonce)

    @precondition(lambda self: self.live_with_pages())
    @rule(data=st.data())
    def start_reading(self, data: st.DataObject) -> None:
        """A transfer starts to read computed pages; what they hold must not change under it."""
        sequence = data.draw(st.sampled_from(self.live_with_pages()))
        pages = sequence.pages[: sequence.num_computed // self.pool.page_tokens].tolist()
        if pages:
            self.pool.acquire(pages)
            self.readers.append((pages, self.engine.memory[pages].tolist()))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        pages, contents = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        assert self.engine.memory[pages].tolist() == contents
        self.pool.release(pages)

    # ------------------------------------------------------------ the node's loop

    @precondition(lambda self: not self.plans)
    @rule(budget=st.integers(1, 9))
    def launch(self, budget: int) -> None:
        self.now += 0.4
        plan = self.scheduler.schedule(budget)
        if plan is not None:
            self.fly(plan)
            assert not any(row.follows for row in plan.rows)

    @precondition(lambda self: len(self.plans) == 1)
    @rule()
    def look_ahead(self) -> None:
        before = self.scheduler.num_preemptions
        plan = self.scheduler.look_ahead()
        assert self.scheduler.num_preemptions == before, "looking ahead takes nothing from anybody"
        if plan is None:
            return
        assert not self.is_void
        self.counts["ahead"] += 1
        following = {row.request for row in plan.rows if row.follows}
        assert following <= {row.request for row in self.plans[0].rows if row.sampling is not None}
        for row in plan.rows:
            sequence = self.scheduler.find(row.request)
            assert len(row.tokens) == 1 and row.output_index + sequence.num_prompt < sequence.max_total, (
                "no row is launched that surely ended"
            )
        self.fly(plan)

    def fly(self, plan: StepPlan) -> None:
        assert len({row.request for row in plan.rows}) == len(plan.rows)
        lengths = [len(row.tokens) for row in plan.rows]
        assert lengths.count(1) == sum(length == 1 for length in lengths[: lengths.count(1)]), (
            "rows of one token come first"
        )
        assert all(self.scheduler.find(row.request).state is not Residence.HELD for row in plan.rows)
        self.plans.append(plan)
        self.taken.append(
            StepPlan(tuple(replace(row, pages=row.pages.copy()) for row in plan.rows), copies=plan.copies)
        )

    @precondition(lambda self: len(self.results) < len(self.plans) and not self.is_void)
    @rule()
    def compute(self) -> None:
        """The engine goes from one step to the next by itself, whether or not anybody took in the results of the
        first."""
        self.results.append(self.engine.run(self.taken[len(self.results)]))

    @precondition(lambda self: self.plans and not self.is_void)
    @rule()
    def collect(self) -> None:
        if not self.results:
            self.compute()
        plan, _, result = self.plans.popleft(), self.taken.popleft(), self.results.popleft()
        updates = self.scheduler.update(plan, result)
        self.counts["wasted"] += len(plan.rows) - len(updates)
        for update in updates:
            self.take(update)

    @precondition(lambda self: self.plans and not self.results)
    @rule()
    def fail_step(self) -> None:
        self.plans.popleft()
        self.taken.popleft()
        self.scheduler.drop_step()
        self.is_void = any(row.follows for plan in self.plans for row in plan.rows)

    @rule()
    def report(self) -> None:
        added, removed = (set(self.split(part)) for part in self.pool.drain_changes())
        assert not added & self.index and removed <= self.index
        self.index = (self.index - removed) | added
        assert self.index == set(self.split(self.pool.snapshot()))

    # ------------------------------------------------------------ what must always hold

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        """Let everything come to its end: nothing may be left, and nobody may be without an answer."""
        for _ in range(2000):
            while self.plans:
                if self.is_void:
                    self.fail_step()
                else:
                    self.collect()
            self.settle_others()
            self.now += 2.0
            plan = self.scheduler.schedule()
            self.scheduler.check_integrity()
            if plan is None and not self.parked:
                break
            if plan is not None:
                self.fly(plan)
                self.look_ahead()
        assert self.scheduler.is_idle(), f"stuck: {self.scheduler.load()}"
        assert self.pool.num_used == self.pool.num_quarantined == self.pool.num_writers == 0
        for request in self.requests.values():
            assert len(request.ends) == 1, request
            self.check_output(request)

    def settle_others(self) -> None:
        for sequence in self.scheduler._waiting.values():
            if sequence.state is Residence.HELD:
                self.scheduler.resume(sequence)
        for key in self.parked:
            self.scheduler.release(f"{key}#{self.requests[key].attempt}")
            self.requests[key].ends.append("delivered")
        for slot in self.slots:
            self.scheduler.cancel(slot.sequence.key)
            self.requests[slot.sequence.request].ends.append("cancelled")
        for slot in [*self.slots, *self.stale]:
            self.pool.detach_writer(slot.nonce)
        for pages, contents in self.readers:
            assert self.engine.memory[pages].tolist() == contents
            self.pool.release(pages)
        self.parked, self.slots, self.stale, self.readers = [], [], [], []

    def check_output(self, request: Request) -> None:
        tokens, reason = reference(request.prompt, request.sampling, eos=EOS, max_len=MAX_LEN)
        if request.ends[0] in ("eos", "stop", "length"):
            assert (request.tokens, request.ends[0]) == (tokens, reason)
        else:
            assert request.tokens == tokens[: len(request.tokens)]
        entries = kv_of(request.prompt)
        right = tuple(prompt_logprob(entries[: i + 1], token) for i, token in enumerate(request.prompt[1:]))
        assert len(request.prompt_logprobs) <= 1 and all(found == right for found in request.prompt_logprobs)
        if request.tokens and request.sampling.prompt_logprobs is not None and len(right) and not request.slot:
            assert len(request.prompt_logprobs) == 1

    # ------------------------------------------------------------ helpers

    def new_request(self, prompt: list[int], sampling: dict[str, object], is_batch: bool = False) -> str:
        key = f"r{len(self.requests)}"
        self.requests[key] = Request(prompt, make_work(prompt, **sampling).sampling, is_batch=is_batch)
        return key

    def sequence_of(self, key: str, *, remote: bool = False) -> Sequence:
        request = self.requests[key]
        fields = {name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__}
        work = make_work(
            request.prompt,
            request=key,
            attempt=request.attempt,
            emitted=tuple(request.tokens),
            block_tokens=BLOCK,
            is_batch=request.is_batch,
            **fields,
        )
        return Sequence(work, key=f"{key}#{request.attempt}", remote=remote, block_tokens=BLOCK)

    def submit(self, key: str, *, remote: bool) -> None:
        try:
            self.scheduler.add(self.sequence_of(key, remote=remote))
        except (Overloaded, RequestTooLarge) as error:
            self.requests[key].ends.append(error.code)

    def take(self, update: Update) -> None:
        """As the router does: by position, no token twice, none missing."""
        request = self.requests[update.request]
        assert not request.ends and update.attempt == request.attempt
        if update.prompt_logprobs:
            request.prompt_logprobs.append(update.prompt_logprobs)
        if update.token is None:
            return
        assert update.position == len(request.tokens)
        request.tokens.append(update.token)
        if update.finished is not None:
            request.ends.append(update.finished)
        elif update.parked:
            self.parked.append(update.request)

    def live_with_pages(self) -> list[Sequence]:
        found = (
            self.scheduler.find(f"{key}#{request.attempt}")
            for key, request in self.requests.items()
            if not request.ends
        )
        return [sequence for sequence in found if sequence is not None and sequence.num_computed]

    @staticmethod
    def split(hashes: bytes) -> list[bytes]:
        return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


class TestSchedulerMachine(SchedulerMachine.TestCase):
    settings = settings(max_examples=80, stateful_step_count=50, deadline=None, derandomize=True)


@pytest.mark.full
@pytest.mark.timeout(900)
class TestSchedulerMachineAtLength(SchedulerMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=80, deadline=None)


def test_a_busy_node_gives_every_request_the_tokens_of_an_undisturbed_run():
    """One long seeded history in which preemption, overtaking and cache hits all happen for certain."""
    random = np.random.default_rng(5)
    machine = SchedulerMachine()
    machine.build(num_pages=12, blocks=1, reserve_tokens=0, max_rows=4)
    for _ in range(1500):
        base = BASES[random.integers(3)][: random.integers(1, 12)]
        machine.add([*base, int(random.integers(13))], {"max_tokens": int(random.integers(1, 12))}, remote=False)
        machine.launch(9)
        if machine.plans:
            machine.collect()
        machine.books_agree()
    machine.teardown()
    assert machine.scheduler.num_preemptions > 20
    assert sum(request.ends[0] in ("eos", "length") for request in machine.requests.values()) > 300


def test_a_node_that_looks_ahead_gives_every_request_the_tokens_of_an_undisturbed_run():
    """One long seeded history in which steps are planned ahead, computed before anybody hears of the one before, and
    rows wasted on ends."""
    random = np.random.default_rng(6)
    machine = SchedulerMachine()
    machine.build(num_pages=24, blocks=1, reserve_tokens=0, max_rows=4)
    for _ in range(1500):
        if random.random() < 0.1:
            base = BASES[random.integers(3)][: random.integers(1, 12)]
            machine.add([*base, int(random.integers(13))], {"max_tokens": int(random.integers(1, 15))}, remote=False)
        if not machine.plans:
            machine.launch(9)
        if len(machine.plans) == 1:
            machine.look_ahead()
        for _ in range(random.integers(3)):
            if len(machine.results) < len(machine.plans):
                machine.compute()
        if machine.plans:
            machine.collect()
        machine.books_agree()
    machine.teardown()
    assert machine.counts["ahead"] > 300 and machine.counts["wasted"] > 20, machine.counts
