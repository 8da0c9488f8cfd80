"""Requests from prompt to end over a real scheduler and a real engine, without a node around them."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from pdcluster.core.messages import Work, pack_tokens
from pdcluster.core.sampling import Sampling
from pdcluster.engine.engine import Engine
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.scheduler import Scheduler, SchedulerLimits
from pdcluster.scheduler.sequence import Sequence


def run(
    engine: Engine,
    prompt: Sequence_[int],
    samplings: Sequence_[Sampling],
    *,
    num_pages: int | None = None,
    token_budget: int = 512,
    emitted: Sequence_[int] = (),
    name: str = "r",
) -> tuple[list[list[int]], Scheduler]:
    """The output tokens of each, and the scheduler. emitted: output of an earlier attempt, the same for all."""
    pages = PagePool(num_pages or engine.num_pages, engine.layout.page_tokens, 32)
    limits = SchedulerLimits(
        token_budget, 63, 1024, engine.max_len, reserve_tokens=16, eos_token_ids=frozenset(engine.config.eos_token_ids)
    )
    scheduler = Scheduler(pages, limits)
    outputs: dict[str, list[int]] = {}
    tokens = pack_tokens([*prompt, *emitted])
    for index, sampling in enumerate(samplings):
        key = f"{name}{index}"
        outputs[key] = list(emitted)
        scheduler.add(Sequence(Work(key, 0, tokens, len(prompt), b"", sampling, 60.0), key=key))
    while (plan := scheduler.schedule()) is not None:
        for update in scheduler.update(plan, engine.step(plan)):
            assert update.error is None, update.error
            if update.token is not None:
                outputs[update.key].append(update.token)
    scheduler.check_integrity()
    return list(outputs.values()), scheduler
