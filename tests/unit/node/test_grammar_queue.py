"""Work in front of a node that waits for its grammar: nothing else waits for it, and every router hears how it
ended."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import replace

import pytest
from local_cluster import EngineKit, LocalCluster, oracle_kit
from oracle import reference

from pdcluster.core import messages as m
from pdcluster.core.errors import BadRequest, Overloaded
from pdcluster.core.grammar import Grammar
from pdcluster.node.native.grammar_queue import LOOK_S, MAX_WAITING, RESERVE_S, GrammarQueue
from pdcluster.node.outbox import Outbox
from pdcluster.transfer.backends.base import Peer

ROUTER, OTHER = Peer("router", "r1"), Peer("router-2", "r2")
ENDPOINT = m.Endpoint("p", "p1", "127.0.0.1:1")


class Compiler:
    """Implements GrammarSource: a grammar is ready, refused or on its way as the test says."""

    news_fd = 7

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.refused: dict[str, Exception] = {}
        self.has_news = self.is_full = False
        self.used: set[Grammar] = set()
        self.trims = 0

    def trim(self, used: Set[Grammar]) -> None:
        self.used = set(used)
        self.trims += 1

    def want(self, grammar: Grammar) -> bool:
        if grammar.source in self.refused:
            raise self.refused[grammar.source]
        return grammar.source in self.ready

    def take_news(self) -> None:
        self.has_news = False


class Bed:
    def __init__(self, source: Compiler | None = None) -> None:
        self.compiler = source or Compiler()
        self.now = 100.0
        self.outbox = Outbox()
        self.queue = GrammarQueue(self.compiler, self.outbox, lambda: self.now)

    def ready(self) -> list[tuple[Peer, m.Prefill | m.Reserve | m.Deliver]]:
        return list(self.queue.ready())

    def said(self) -> list[m.AnyMessage]:
        told: list[m.AnyMessage] = []

        class Sender:
            def send(self, to: Peer | m.Endpoint, message: m.AnyMessage) -> bool:
                told.append(message)
                return True

        self.outbox.flush(Sender())
        return told


@pytest.fixture
def bed() -> Bed:
    return Bed()


def work(request: str = "r", grammar: str | None = "g", attempt: int = 0, deadline_s: float = 60.0) -> m.Work:
    sampling = m.Sampling(max_tokens=4, seed=1, grammar=None if grammar is None else Grammar(grammar))
    return m.Work(request, attempt, m.pack_tokens([1, 2]), 2, b"", sampling, deadline_s)


def prefill(*args: object, **kwargs: object) -> m.Prefill:
    return m.Prefill(work(*args, **kwargs), True)  # type: ignore[arg-type]


def reserve(*args: object, **kwargs: object) -> m.Reserve:
    return m.Reserve(work(*args, **kwargs), ENDPOINT)  # type: ignore[arg-type]


def ticket(request: str = "r") -> m.Deliver:
    return m.Deliver(m.Ticket(5, request, 1, ENDPOINT, ENDPOINT, 0, b"", 32, 64, 2, 0, 5.0))


def test_work_without_a_grammar_or_with_one_that_is_here_passes(bed):
    bed.compiler.ready.add("here")
    assert bed.queue.admit(ROUTER, prefill(grammar=None)) and bed.queue.admit(ROUTER, prefill(grammar="here"))
    assert len(bed.queue) == 0 and bed.queue.next_deadline() is None


def test_work_comes_back_in_order_when_its_grammar_is_here(bed):
    first, other, third = prefill("a"), prefill("b", grammar="slow"), reserve("c")
    assert [bed.queue.admit(ROUTER, each) for each in (first, other, third)] == [False] * 3
    bed.compiler.ready.add("g")
    assert bed.ready() == [(ROUTER, first), (ROUTER, third)]
    assert bed.queue.has("b", 0) and len(bed.queue) == 1 and bed.said() == []


def test_a_refused_grammar_is_told_at_once_or_when_it_is_known(bed):
    bed.compiler.refused["bad"] = BadRequest("no such type")
    assert not bed.queue.admit(ROUTER, prefill(grammar="bad"))
    bed.queue.admit(ROUTER, reserve("s", grammar="late"))
    bed.compiler.refused["late"] = Overloaded("many", 0.5)
    assert bed.ready() == [] and len(bed.queue) == 0
    bad, late = bed.said()
    assert (bad.leg, bad.reason, bad.retryable, bad.param) == ("prefill", "no such type", False, "grammar")
    assert (late.leg, late.retryable, late.retry_after_s) == ("reserve", True, 0.5)


def test_an_engine_without_grammars_refuses(bed):
    none = GrammarQueue(None, bed.outbox, lambda: 0.0)
    assert not none.admit(ROUTER, prefill()) and none.news_fd is None
    assert not bed.said()[0].retryable


def test_a_reservation_is_answered_soon_and_a_prompt_waits_as_long_as_it_lives(bed):
    bed.queue.admit(ROUTER, prefill("p", deadline_s=30.0))
    bed.queue.admit(ROUTER, reserve("d"))
    assert bed.queue.next_deadline() <= bed.now + LOOK_S
    bed.now += RESERVE_S
    assert bed.ready() == []
    (refused,) = bed.said()
    assert (refused.request, refused.leg, refused.retryable) == ("d", "reserve", True)
    bed.now += 30.0
    assert bed.ready() == []
    (failed,) = bed.said()
    assert (failed.request, failed.code, failed.retryable) == ("p", "deadline_exceeded", False)


def test_a_ticket_waits_for_its_prompt_and_goes_with_it(bed):
    waiting = prefill()
    bed.queue.admit(ROUTER, waiting)
    assert bed.queue.keep_ticket(ROUTER, ticket())
    assert not bed.queue.keep_ticket(OTHER, ticket()) and not bed.queue.keep_ticket(ROUTER, ticket("unknown"))
    bed.compiler.ready.add("g")
    assert bed.ready() == [(ROUTER, waiting), (ROUTER, ticket())]
    bed.queue.admit(ROUTER, prefill("again", grammar="other"))
    bed.queue.keep_ticket(ROUTER, ticket("again"))
    bed.queue.cancel("again", 0)
    assert not bed.queue._tickets


def test_cancels_newer_attempts_and_lost_routers_end_the_wait(bed):
    bed.queue.admit(ROUTER, prefill("a"))
    bed.queue.admit(ROUTER, prefill("a", attempt=2))
    assert not bed.queue.has("a", 0) and bed.queue.has("a", 2)
    bed.queue.cancel("a", 1)
    assert bed.queue.has("a", 2)
    bed.queue.cancel("a", 2)
    bed.queue.admit(ROUTER, prefill("b"))
    bed.queue.admit(ROUTER, prefill("c"))
    bed.queue.admit(OTHER, prefill("d"))
    bed.queue.keep_only(ROUTER, {("c", 0)})
    assert [bed.queue.has(each, 0) for each in "bcd"] == [False, True, True]
    bed.queue.cancel_router(OTHER)
    bed.queue.cancel_router(ROUTER)
    assert len(bed.queue) == 0


def test_the_queue_is_bounded(bed):
    for index in range(MAX_WAITING):
        bed.queue.admit(ROUTER, prefill(str(index)))
    assert not bed.queue.admit(ROUTER, prefill("more")) and len(bed.queue) == MAX_WAITING
    assert bed.said()[0].retryable
    bed.compiler.ready.add("g")
    assert len(bed.ready()) == MAX_WAITING, "those that wait are not too many for themselves"


def test_news_are_taken_though_nobody_waits_for_them_any_more(bed):
    """The loop would never sleep again."""
    bed.queue.admit(ROUTER, prefill("a"))
    bed.queue.cancel("a", 0)
    bed.compiler.has_news = True
    assert bed.ready() == [] and not bed.compiler.has_news


def test_grammars_of_what_waits_are_in_use_too(bed):
    bed.queue.admit(ROUTER, prefill("a", grammar="waits"))
    bed.compiler.is_full = True
    assert bed.queue.is_full
    bed.queue.trim({Grammar("runs")})
    assert bed.compiler.used == {Grammar("waits"), Grammar("runs")}


async def test_grammars_of_requests_that_run_on_a_node_are_in_use_until_they_end():
    compilers: list[Compiler] = []

    def kit(num_pages: int) -> EngineKit:
        compiler = Compiler()
        compiler.ready, compiler.is_full = {"one", "other"}, True
        compilers.append(compiler)
        return replace(oracle_kit(num_pages), grammars=compiler)

    async with LocalCluster({"p0": "prefill", "d0": "decode"}, make_kit=kit, force="remote") as cluster:
        engine = cluster.nodes["p0"].engine
        engine.hold = True
        names = ("one", "other")
        tasks = [
            asyncio.create_task(cluster.run([1, 2, 3], m.Sampling(max_tokens=20, seed=1, grammar=Grammar(name))))
            for name in names
        ]
        await cluster.until(lambda: all(len(compiler.used) == 2 for compiler in compilers))
        assert [compiler.used for compiler in compilers] == [{Grammar("one"), Grammar("other")}] * 2
        engine.hold = False
        engine.finish()
        answers = await asyncio.gather(*tasks)
        assert [tokens for tokens, _ in answers] == [reference([1, 2, 3], 20)] * 2
        await cluster.until_idle()
        await cluster.until(lambda: not any(compiler.used for compiler in compilers))
        assert [compiler.trims > 1 for compiler in compilers] == [True] * 2
