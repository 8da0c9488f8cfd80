"""Nobody waits beside a node that could serve it: not behind requests that cannot go, and not for what they lack."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from contextlib import aclosing

import pytest
from msgspec.structs import replace
from scripted_cluster import FakeCluster, make_chooser, make_node
from version_choice import FirstVersion
from virtual_time import VirtualLoop, run_virtually

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster.kv.hashing import chain_root
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.core.generation import Done, Generation, Mode
from pdcluster_router.core.job import HashChain
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

IDLE = m.Load(0, 0, 0, 0, 100, 100, 0, 0, 0, 8, 0)
# 5 s of prompts, by the guess for nodes that measured nothing.
DEEP = m.Load(100, 0, 100_000, 0, 100, 100, 0, 0, 0, 8, 0)
FULL_ROWS = replace(IDLE, running=8, slots_used=8, rows=8)
# Takes no prompt ahead of full decode nodes, but has rows of its own.
PARKED = replace(IDLE, pages_parked=30, pages_free=70)

SHORT, LONG = 10, 1000
# Nobody is to wait longer for nothing: a few looks of the hold queue.
AT_ONCE_S = 0.5


class Models(FirstVersion):
    def models(self):
        return ()

    def text(self, model):
        raise errors.UnknownModel(model)

    def chain(self, model, salt, weights=None):
        return HashChain(chain_root(block_tokens=4, salt=salt), 4)


class Bench:
    """Nodes that serve one token to whoever they are sent, however busy they say they are."""

    def __init__(self, loop: VirtualLoop, *nodes: NodeView, slo: Slo | None = None, **limits: float) -> None:
        self.loop = loop
        self.cluster = FakeCluster(list(nodes))
        self.served: list[tuple[str, str]] = []
        for node in nodes:
            self.cluster.handlers[node.name] = self._server(node.name)
        hold = HoldLimits(**{"age_s": 60.0, **limits})  # type: ignore[arg-type]
        chooser = make_chooser(self.cluster)
        settings = DispatchSettings(hold=hold, slo=slo or Slo())
        self.dispatch = Dispatch(self.cluster, Models(), chooser, settings, loop.time)
        self.num_decided = 0
        choose = chooser.choose

        def count(*words: object) -> object:
            self.num_decided += 1
            return choose(*words)  # type: ignore[arg-type]

        chooser.choose = count  # type: ignore[method-assign,assignment]

    def _server(self, name: str) -> Callable[..., None]:
        def serve(message, answer) -> None:
            if isinstance(message, m.Prefill) and not message.remote:
                work = message.work
                self.served.append((work.request, name))
                answer(m.TokenRow(work.request, work.attempt, 0, (7,)))
                answer(m.Finished(work.request, work.attempt, "length", 1, m.LegTimings()))

        return serve

    def start(self, request: str, num_tokens: int = SHORT, mode: Mode | None = None) -> asyncio.Task[Done]:
        sampling = m.Sampling(max_tokens=1, seed=1)
        generation = Generation(request, "model", array("i", range(num_tokens)), sampling, 600.0, mode=mode)
        return self.loop.create_task(self._run(generation))

    async def _run(self, generation: Generation) -> Done:
        async with aclosing(self.dispatch.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return event
        raise AssertionError("a generation ended without Done")

    def report(self, name: str, **changes: object) -> None:
        self.cluster.nodes = [
            replace(node, **changes) if node.name == name else node  # type: ignore[type-var,arg-type]
            for node in self.cluster.nodes
        ]
        self.dispatch.waiting.poke()

    @property
    def num_held(self) -> int:
        return self.dispatch.waiting.num_held

    def node_of(self, request: str) -> str:
        return dict(self.served)[request]


def virtually(scene: Callable[[VirtualLoop], Coroutine[object, object, None]]) -> None:
    run_virtually(scene)


def small(load: m.Load = IDLE) -> NodeView:
    """Takes no long prompt."""
    return replace(make_node("small", "mixed", load), max_len=SHORT + 10)


def large(load: m.Load = IDLE, *, is_cordoned: bool = False) -> NodeView:
    return replace(make_node("large", "mixed", load), is_cordoned=is_cordoned)


@pytest.mark.parametrize("num_waiting", [17, 200])
@pytest.mark.parametrize("why", ["parked", "no room"])
def test_any_number_of_requests_that_cannot_go_keep_nobody_from_an_idle_node(num_waiting: int, why: str) -> None:
    """They are too long for the idle node. The other one takes no work, or has too much."""

    async def scene(loop: VirtualLoop) -> None:
        bench = Bench(loop, small(), large(DEEP, is_cordoned=why == "parked"))
        waiting = [bench.start(f"long-{number}", LONG) for number in range(num_waiting)]
        await asyncio.sleep(1.0)
        assert bench.num_held == num_waiting
        for number in range(3):
            done = await asyncio.wait_for(bench.start(f"short-{number}"), AT_ONCE_S)
            assert done.route.decode == "small" and bench.num_held == num_waiting
        bench.report("large", is_cordoned=False, load=IDLE)
        await asyncio.wait_for(asyncio.gather(*waiting), AT_ONCE_S)

    virtually(scene)


def test_a_full_queue_of_requests_that_cannot_go_refuses_nobody_who_can() -> None:
    async def scene(loop: VirtualLoop) -> None:
        bench = Bench(loop, small(), large(is_cordoned=True), count=20)
        waiting = [bench.start(f"long-{number}", LONG) for number in range(20)]
        await asyncio.sleep(1.0)
        with pytest.raises(errors.Unavailable, match="no more may"):
            await bench.start("long", LONG)
        await asyncio.wait_for(bench.start("short"), AT_ONCE_S)
        bench.report("large", is_cordoned=False)
        await asyncio.wait_for(asyncio.gather(*waiting), AT_ONCE_S)

    virtually(scene)


@pytest.mark.parametrize("why", ["parked", "no room"])
def test_looking_at_a_thousand_that_cannot_go_costs_few_decisions(why: str) -> None:
    """However often nodes report."""

    async def scene(loop: VirtualLoop) -> None:
        bench = Bench(loop, small(), large(DEEP, is_cordoned=why == "parked"))
        waiting = [bench.start(f"long-{number}", LONG) for number in range(1000)]
        await asyncio.sleep(1.0)
        bench.num_decided = 0
        for _ in range(500):
            bench.report("small", load=IDLE)
            await asyncio.sleep(0.002)
        assert bench.num_decided <= 500 + 17 * 21, "one a report, and twenty looks a second"
        assert bench.num_held == 1000
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    virtually(scene)


def test_who_lacks_a_row_keeps_nobody_from_nodes_that_have_other_room() -> None:
    """No decode node has a row, and the prefill node computes no more ahead. A prompt that runs there to its end needs
    neither.
    """

    async def scene(loop: VirtualLoop) -> None:
        bench = Bench(loop, make_node("p0", "prefill", PARKED), make_node("d0", "decode", FULL_ROWS))
        waiting = bench.start("far", mode="remote")
        await asyncio.sleep(5.0)
        assert bench.num_held == 1, "and it is due"
        await asyncio.wait_for(bench.start("near", mode="local"), AT_ONCE_S)
        assert bench.node_of("near") == "p0"
        waiting.cancel()

    virtually(scene)


def test_who_waits_for_one_node_keeps_nobody_from_another_though_that_is_the_second_choice() -> None:
    """The policy would send the short prompt to the large node, which is past its backlog and waited for."""

    async def scene(loop: VirtualLoop) -> None:
        bench = Bench(loop, replace(small(), in_flight=3, load=replace(IDLE, running=3)), large(DEEP))
        waiting = bench.start("long", LONG)
        await asyncio.sleep(5.0)
        bench.report("large", load=replace(DEEP, waiting=0, running=1))
        await asyncio.wait_for(bench.start("short"), AT_ONCE_S)
        assert bench.node_of("short") == "small" and bench.num_held == 1
        waiting.cancel()

    virtually(scene)


def test_parked_requests_are_no_queue_before_one_that_can_go() -> None:
    """Their prompts take 2 s, and first tokens may take 0.5 s."""

    async def scene(loop: VirtualLoop) -> None:
        bench = Bench(loop, small(), large(is_cordoned=True), slo=Slo(ttft_s=0.5))
        waiting = [bench.start(f"long-{number}", LONG) for number in range(40)]
        await asyncio.sleep(1.0)
        assert bench.num_held == 40
        shorts = [bench.start(f"short-{number}") for number in range(3)]
        await asyncio.wait_for(asyncio.gather(*shorts), AT_ONCE_S)
        for task in waiting:
            task.cancel()

    virtually(scene)


def test_the_policy_is_told_of_requests_that_wait_for_room_and_of_no_parked_ones() -> None:
    async def scene(loop: VirtualLoop) -> None:
        bench = Bench(loop, small(DEEP), large(is_cordoned=True))
        tasks = [bench.start(f"long-{number}", LONG) for number in range(5)]
        tasks += [bench.start(f"short-{number}") for number in range(2)]
        await asyncio.sleep(0.1)
        assert bench.num_held == 7 and bench.dispatch.shared.selector.queue.num_taken == 2
        for task in tasks:
            task.cancel()

    virtually(scene)


@pytest.mark.parametrize("is_first", [False, True], ids=["after others", "before any other"])
def test_parked_requests_are_work_that_clients_ask_for(is_first: bool) -> None:
    """Autoscaling reads the rates, and they are as if a node had taken each when it came."""

    async def scene(loop: VirtualLoop) -> None:
        bench = Bench(loop, make_node("p0", "prefill"), make_node("d0", "decode"))
        if not is_first:
            await bench.start("before", mode="local")
        for name in ("p0", "d0"):
            bench.report(name, is_cordoned=True)
        bench.dispatch.demand("boot")
        tasks = [bench.start(f"parked-{number}") for number in range(20)]
        await asyncio.sleep(1.0)
        found = bench.dispatch.demand("boot")
        output = sum(each.output_tokens for _, each in found.roles)
        assert output == pytest.approx(20 * bench.dispatch.shared.selector.usual_output, rel=0.1)
        assert sum(each.prompt_s for _, each in found.roles) > 0.0
        for name in ("p0", "d0"):
            bench.report(name, is_cordoned=False)
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.2)
        bench.dispatch.demand("boot")
        again = bench.dispatch.shared.demand
        assert not any(again._answers.values()) and not any(again._prompt_s.values()), "each counts once"

    virtually(scene)
