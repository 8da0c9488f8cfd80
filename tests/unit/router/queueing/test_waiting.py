"""Requests that wait in the router, as coroutines: they go when a node reports room, and leave when their client
does."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import aclosing

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from scripted_cluster import FakeCluster, make_chooser, make_node, settle
from version_choice import FirstVersion

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster.kv.hashing import chain_root
from pdcluster.telemetry.metrics import HoldMetrics
from pdcluster_router.core.generation import Done, Generation, TenantPriority, TokenChunk
from pdcluster_router.core.job import HashChain
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.gate import Gate, Released
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

BUSY = m.Load(100, 0, 100_000, 0, 100, 100, 0, 0, 0, 8, 0)
IDLE = m.Load(0, 0, 0, 0, 100, 100, 0, 0, 0, 8, 0)


class OneModel(FirstVersion):
    def models(self):
        return ()

    def text(self, model):
        raise errors.UnknownModel(model)

    def chain(self, model, salt, weights=None):
        return HashChain(chain_root(block_tokens=4, salt=salt), 4)


def generation_of(request: str, tenant: str = "a", deadline_s: float = 5.0, priority: int = 0) -> Generation:
    sampling = m.Sampling(max_tokens=1, seed=1)
    return Generation(
        request, "model", array("i", range(10)), sampling, deadline_s, standing=TenantPriority(tenant, 1.0, priority)
    )


class Choices:
    """Implements generation.Sink for several choices of one request: the first that fails takes the others along, as an
    HTTP answer does."""

    def __init__(self, bench: Bench, request: str, num_choices: int, deadline_s: float) -> None:
        self.errors: list[Exception] = []
        generations = [generation_of(f"{request}-{number}", deadline_s=deadline_s) for number in range(num_choices)]
        self.running = [bench.dispatch.start(generation, self) for generation in generations]

    def on_chunk(self, chunk: TokenChunk) -> None:
        raise AssertionError("there is no node for it")

    def on_done(self, done: Done) -> None:
        raise AssertionError("there is no node for it")

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)
        for running in self.running:
            running.cancel("another choice failed")


class Bench:
    """One mixed node that serves one token to whoever it is sent, and is as busy as the test says."""

    def __init__(self, slo: Slo | None = None, **limits) -> None:
        self.cluster = FakeCluster([make_node("m0", "mixed", load=BUSY)])
        self.cluster.handlers["m0"] = self.serve
        self.served: list[str] = []
        self.occupies = False
        self.registry = CollectorRegistry()
        settings = DispatchSettings(stages=StageDeadlines(hold_s=0.01), hold=HoldLimits(**limits), slo=slo or Slo())
        self.dispatch = Dispatch(
            self.cluster, OneModel(), make_chooser(self.cluster), settings, metrics=HoldMetrics(self.registry)
        )

    def serve(self, message, answer) -> None:
        if isinstance(message, m.Prefill):
            request, attempt = message.work.request, message.work.attempt
            self.served.append(request)
            if self.occupies:
                self.report(BUSY)
            answer(m.TokenRow(request, attempt, 0, (7,)))
            answer(m.Finished(request, attempt, "length", 1, m.LegTimings()))

    def report(self, load: m.Load) -> None:
        self.cluster.nodes[0] = replace(self.cluster.nodes[0], load=load)
        self.dispatch.waiting.poke()

    def start(self, request: str, tenant: str = "a", deadline_s: float = 5.0, priority: int = 0) -> asyncio.Task[Done]:
        return asyncio.create_task(self.run(generation_of(request, tenant, deadline_s, priority)))

    async def run(self, generation: Generation) -> Done:
        async with aclosing(self.dispatch.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return event
        raise AssertionError("a generation ended without Done")

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pdcluster_{name}", labels)


async def test_requests_wait_until_a_node_reports_room_and_then_all_are_served() -> None:
    bench = Bench()
    tasks = [bench.start(f"r{number}") for number in range(5)]
    await settle()
    assert bench.served == [] and bench.dispatch.waiting.num_held == 5 and bench.metric("held_requests") == 5
    bench.report(IDLE)
    await asyncio.gather(*tasks)
    assert bench.served == [f"r{number}" for number in range(5)]
    assert bench.dispatch.waiting.num_held == 0 and bench.metric("held_requests") == 0
    assert bench.metric("hold_wait_seconds_count", outcome="placed") == 5


async def test_each_is_scored_against_a_view_that_has_the_last_one() -> None:
    bench = Bench()
    bench.occupies = True
    tasks = [bench.start(f"r{number}") for number in range(3)]
    await settle()
    for number in range(3):
        bench.report(IDLE)
        await tasks[number]
        await settle()
        assert bench.served == [f"r{n}" for n in range(number + 1)], "one report of room is room for one"


async def test_a_client_that_leaves_frees_its_place_at_once() -> None:
    bench = Bench(count=1)
    first = bench.start("r1")
    await settle()
    with pytest.raises(errors.Overloaded, match="no more may"):
        await bench.start("r2")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert bench.dispatch.waiting.num_held == 0 and bench.cluster.ledger.num_requests() == 0
    third = bench.start("r3")
    await settle()
    bench.report(IDLE)
    await third
    assert bench.served == ["r3"]
    assert bench.metric("hold_wait_seconds_count", outcome="left") == 1
    assert bench.metric("rejected_requests_total", reason="hold_count", tenant="a") == 1


async def test_a_client_that_leaves_in_the_moment_it_is_given_a_place_costs_nobody_else_one() -> None:
    bench = Bench()
    first, second = bench.start("r1"), bench.start("r2")
    await settle()
    bench.report(IDLE)
    first.cancel()
    await second
    await asyncio.gather(first, return_exceptions=True)
    assert "r2" in bench.served and bench.dispatch.waiting.num_held == 0


async def test_every_refused_request_is_answered_at_once_with_the_predicted_wait() -> None:
    bench = Bench(count=8)
    tasks = [bench.start(f"r{number}") for number in range(50)]
    await settle()
    refused = [task for task in tasks if task.done()]
    assert len(refused) == 42
    for task in refused:
        error = task.exception()
        assert isinstance(error, errors.Overloaded) and error.retry_after_s > 0 and "predicted wait" in str(error)
    bench.report(IDLE)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(bench.served) == 8


async def test_a_flooding_tenant_does_not_starve_another() -> None:
    bench = Bench(count=100, is_shared=True, quantum=0.001)
    flood = [bench.start(f"f{number}", "flood") for number in range(200)]
    other = [bench.start(f"o{number}", "other") for number in range(5)]
    await settle()
    assert not any(task.done() for task in other), "there is room for the other tenant though one flooded"
    bench.report(IDLE)
    await asyncio.gather(*other)
    assert max(bench.served.index(f"o{number}") for number in range(5)) < 20
    await asyncio.gather(*flood, return_exceptions=True)
    assert len(bench.served) == 85


async def test_urgent_requests_go_first() -> None:
    bench = Bench()
    tasks = [bench.start("normal"), bench.start("urgent", priority=-1)]
    await settle()
    bench.report(IDLE)
    await asyncio.gather(*tasks)
    assert bench.served == ["urgent", "normal"]


async def test_a_held_request_ends_by_its_deadline_or_its_age() -> None:
    bench = Bench(age_s=0.05)
    hurried, patient = bench.start("r1", deadline_s=0.02), bench.start("r2")
    with pytest.raises(errors.DeadlineExceeded, match="found no room by its deadline"):
        await hurried
    with pytest.raises(errors.Overloaded, match="as long as it may"):
        await patient
    assert bench.dispatch.waiting.num_held == 0


async def test_choices_that_expire_together_cost_nobody_else_their_place() -> None:
    bench = Bench()
    patient = bench.start("patient")
    choices = Choices(bench, "hurried", 3, deadline_s=0.02)
    hurried = bench.start("hurried too", deadline_s=0.03)
    with pytest.raises(errors.DeadlineExceeded):
        await hurried
    assert [type(error) for error in choices.errors] == [errors.DeadlineExceeded]
    assert not patient.done() and bench.dispatch.waiting.num_held == 1
    bench.report(IDLE)
    await patient


async def test_a_bug_in_the_queue_is_told_to_all_that_wait_and_to_none_that_comes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    later = []

    class ComesBack(Choices):
        def on_error(self, error: Exception) -> None:
            super().on_error(error)
            later.append(Choices(bench, "later", 1, deadline_s=0.02))

    def fail(self: Gate, now: float) -> list[Released]:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    choices, alone = ComesBack(bench, "several", 2, deadline_s=5.0), bench.start("alone")
    await asyncio.sleep(0)
    monkeypatch.setattr(Gate, "expire", fail)
    with pytest.raises(errors.PdclusterError, match="internal error in the hold queue: a bug"):
        await alone
    assert len(choices.errors) == 1 and later[0].errors == []
    with pytest.raises(errors.DeadlineExceeded):
        await bench.start("afterwards", deadline_s=0.03)
    assert [type(error) for error in later[0].errors] == [
        errors.DeadlineExceeded
    ] and bench.dispatch.waiting.num_held == 0


async def test_when_the_last_node_goes_those_that_wait_stay_for_their_time() -> None:
    bench = Bench(age_s=0.2)
    task = bench.start("r1")
    await settle()
    bench.cluster.kill(bench.cluster.nodes[0])
    bench.dispatch.waiting.poke()
    await settle()
    assert not task.done() and bench.dispatch.waiting.num_held == 1
    with pytest.raises(errors.Unavailable, match=r"waited 0\.2. s for a node, .*none of 0 known nodes"):
        await task


async def test_a_prompt_that_no_node_can_take_is_the_callers_mistake() -> None:
    bench = Bench()
    bench.cluster.nodes[0] = replace(bench.cluster.nodes[0], max_len=9)
    with pytest.raises(errors.BadRequest, match="maximum context length is 9 tokens"):
        await bench.start("r1")


async def test_a_node_that_refuses_is_not_asked_by_everybody() -> None:
    bench = Bench()
    asked: list[str] = []

    def refuse(message, answer) -> None:
        if isinstance(message, m.Prefill):
            asked.append(message.work.request)
            answer(m.Refused(message.work.request, message.work.attempt, "prefill", "no pages", 5.0))

    bench.cluster.handlers["m0"] = refuse
    bench.report(IDLE)
    tasks = [bench.start(f"r{number}") for number in range(20)]
    await settle()
    assert asked == ["r0"] and bench.dispatch.waiting.num_held == 20
    bench.cluster.handlers["m0"] = bench.serve
    await asyncio.gather(*tasks[1:])
    assert len(bench.served) == 19, "the others found room after a moment, long before the first may come back"
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
