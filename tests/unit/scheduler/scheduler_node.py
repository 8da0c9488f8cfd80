"""A node for tests of the scheduler: pool, scheduler and a fake engine, driven as the node's loop drives them. No
sockets, no torch."""

from __future__ import annotations

from fake_engine import FakeEngine, draw, kv_of, make_sequence, reference

from pdcluster.core.step import StepPlan
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.scheduler import Scheduler, SchedulerLimits, Update
from pdcluster.scheduler.sequence import Sequence

PAGE = 4
# 20 tokens.
LONG = list(range(10)) + [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class Node:
    """Pool, scheduler and engine together, as the node's loop drives them."""

    def __init__(self, num_pages: int = 32, **limits: object) -> None:
        chosen = {"token_budget": 16, "max_rows": 4, "max_waiting": 8, "max_len": 64, "reserve_tokens": 4, **limits}
        self.pool = PagePool(num_pages, PAGE, PAGE)
        self.limits = SchedulerLimits(**chosen)  # type: ignore[arg-type]
        self.now = 0.0
        self.scheduler = Scheduler(self.pool, self.limits, clock=lambda: self.now)
        self.engine = FakeEngine(num_pages, PAGE)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def add(self, key: str, prompt: list[int], **options: object) -> Sequence:
        sequence = make_sequence(prompt, key=key, **options)  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        return sequence

    def plan(self, token_budget: int | None = None) -> StepPlan:
        plan = self.scheduler.schedule(token_budget)
        assert plan is not None
        return plan

    def finish_step(self, plan: StepPlan) -> list[Update]:
        updates = self.scheduler.update(plan, self.engine.run(plan))
        for update in updates:
            self.note(update)
        self.scheduler.check_integrity()
        return updates

    def note(self, update: Update) -> None:
        if update.token is not None:
            self.tokens.setdefault(update.key, []).append(update.token)
        if update.finished is not None:
            assert update.key not in self.ended
            self.ended[update.key] = update.finished

    def step(self, token_budget: int | None = None) -> dict[str, Update]:
        return {update.key: update for update in self.finish_step(self.plan(token_budget))}

    def run(self) -> None:
        for _ in range(1000):
            plan = self.scheduler.schedule()
            if plan is None:
                return
            self.finish_step(plan)
        raise AssertionError("the node does not come to rest")

    def expected(self, prompt: list[int], **sampling: object) -> list[int]:
        sequence = make_sequence(prompt, **sampling)  # type: ignore[arg-type]
        return reference(prompt, sequence.sampling, eos=self.limits.eos_token_ids, max_len=self.limits.max_len)[0]

    def fill_slot(self, sequence: Sequence, pages: list[int]) -> int:
        """Write the KV a remote node would, and give the first token."""
        entries = kv_of(sequence.tokens.tolist())
        self.engine.write(pages, sequence.num_cached, entries[sequence.num_cached :])
        return draw(entries)

    def is_clean(self) -> bool:
        self.scheduler.check_integrity()
        return self.scheduler.is_idle() and self.pool.num_used == 0 and self.pool.num_quarantined == 0


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.request, row.start, len(row.tokens)) for row in plan.rows]
