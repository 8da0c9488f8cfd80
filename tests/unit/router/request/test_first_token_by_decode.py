"""Attempts whose first token is the decode node's: in which order nodes may speak, which clock runs, and what becomes
of KV that the prefill node keeps only for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import combinations

import pytest
from dispatch_pair import EXPECTED, NoModels, collect, make_generation
from msgspec.structs import replace
from scripted_cluster import EMPTY_LOAD, FakeCluster, make_chooser, make_node, make_ticket, row, settle

from pdcluster.bootstrap.card import Capabilities
from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster_router.core.generation import Done
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

NO_SLACK = replace(EMPTY_LOAD, pages_free=10)
FROM_PREFILL = ("scheduled", "computed", "delivered")
FROM_DECODE = ("reserved", "row 0", "row 1", "row 2", "row 3", "finished")


class Pair:
    """A prefill node and decode nodes that say only what the test says for them."""

    def __init__(self, *decodes: str, parks_s: float = 0.0, load: m.Load = EMPTY_LOAD, **stages: float) -> None:
        able = Capabilities(pulls=False, first_token="decode", parks_s=parks_s)
        nodes = [make_node("p0", "prefill"), *(make_node(name, "decode", load) for name in decodes or ("d0",))]
        self.cluster = FakeCluster([replace(node, capabilities=able) for node in nodes])
        settings = DispatchSettings(retries=2, hold_s=0.5, stages=StageDeadlines(**{"hold_s": 0.01, **stages}))
        self.dispatch = Dispatch(self.cluster, NoModels(), make_chooser(self.cluster, force="remote"), settings)
        self.answer = asyncio.create_task(collect(self.dispatch, make_generation()))

    async def sent(self, node: str, kind: type, number: int = 1) -> m.Work:
        """The work of the number-th message of a kind to a node."""
        async with asyncio.timeout(3.0):
            while len(self.cluster.sent_to(node, kind)) < number:
                await asyncio.sleep(0.005)
        return self.cluster.sent_to(node, kind)[number - 1].work

    def says(self, node: str, *bodies: object) -> None:
        for body in bodies:
            if isinstance(body, m.TokenRow):
                self.cluster.ledger.deliver_rows(f"{node}-boot", [body], 0.0)
            else:
                self.cluster.ledger.deliver(body.request, f"{node}-boot", body)  # type: ignore[arg-type]

    def reserves(self, work: m.Work, node: str = "d0") -> None:
        reader = next(each for each in self.cluster.nodes if each.name == node)
        ticket = make_ticket(work, reader, self.cluster.nodes[0].endpoint)
        self.cluster.ledger.deliver(work.request, f"{node}-boot", m.Reserved(ticket))

    def decodes(self, work: m.Work, node: str = "d0") -> None:
        """All that a decode node says once it has the KV."""
        self.says(node, *(row(work, position, (token,)) for position, token in enumerate(EXPECTED)))
        self.says(node, m.Finished(work.request, work.attempt, "length", 4, m.LegTimings(decode_tokens=3)))

    def speak(self, what: str, prefill: m.Work, decode: m.Work) -> None:
        request = prefill.request
        match what.split():
            case ["scheduled"]:
                self.says("p0", m.Scheduled(request, prefill.attempt, 4))
            case ["computed"]:
                self.says("p0", m.Computed(request, prefill.attempt, 4))
            case ["delivered"]:
                self.says("p0", m.Delivered(request, prefill.attempt, m.LegTimings(prefill_s=0.5, backend="nixl")))
            case ["reserved"]:
                self.reserves(decode)
            case ["row", position]:
                self.says("d0", row(decode, int(position), (EXPECTED[int(position)],)))
            case ["finished"]:
                self.says("d0", m.Finished(request, decode.attempt, "length", 4, m.LegTimings(decode_tokens=3)))
            case _:
                raise AssertionError(what)

    async def done(self) -> tuple[list[int], Done]:
        return await asyncio.wait_for(self.answer, 3.0)

    def check_books(self) -> None:
        assert not self.cluster.ledger.num_requests()
        assert not any(self.cluster.ledger.in_flight(node.incarnation) for node in self.cluster.nodes)


def orders() -> Iterator[tuple[str, ...]]:
    """Every way in which the words of both nodes may come between each other."""
    size = len(FROM_PREFILL) + len(FROM_DECODE)
    for places in combinations(range(size), len(FROM_PREFILL)):
        prefill, decode = iter(FROM_PREFILL), iter(FROM_DECODE)
        order = tuple(next(prefill) if place in places else next(decode) for place in range(size))
        if order.index("reserved") < order.index("delivered"):
            yield order


@pytest.mark.parametrize("lost", ["", "scheduled", "computed"])
async def test_whoever_speaks_first_the_answer_is_one_and_the_same(lost: str) -> None:
    for order in orders():
        pair = Pair()
        prefill, decode = await pair.sent("p0", m.Prefill), await pair.sent("d0", m.Reserve)
        for what in order:
            if what != lost:
                pair.speak(what, prefill, decode)
        tokens, done = await pair.done()
        assert tokens == EXPECTED and done.attempts == 1, order
        assert len(pair.cluster.sent_to("p0", m.Deliver)) == 1 and not pair.cluster.sent_to("d0", m.Cancel)
        pair.check_books()


async def test_what_was_cached_and_how_long_the_prompt_took_are_known_by_the_word_of_the_prompt_s_end() -> None:
    pair = Pair()
    prefill, decode = await pair.sent("p0", m.Prefill), await pair.sent("d0", m.Reserve)
    for what in ("reserved", "computed"):
        pair.speak(what, prefill, decode)
    await asyncio.sleep(0.05)
    pair.decodes(decode)
    _, done = await pair.done()
    assert done.cached_tokens == 4
    assert done.timeline.prefill_s < 0.05 <= done.timeline.ttft_s  # type: ignore[operator]


async def test_the_word_of_the_prompt_s_end_stops_the_queue_clock_and_finds_a_decode_node() -> None:
    pair = Pair(load=NO_SLACK, queue_s=0.1)
    prefill = await pair.sent("p0", m.Prefill)
    await settle()
    assert not pair.cluster.sent_to("d0", m.Reserve), "a node without slack is asked when the prompt is taken up"
    pair.says("p0", m.Computed(prefill.request, prefill.attempt))
    decode = await pair.sent("d0", m.Reserve)
    await asyncio.sleep(0.15)
    pair.reserves(decode)
    pair.decodes(decode)
    tokens, done = await pair.done()
    assert tokens == EXPECTED and done.attempts == 1


@pytest.mark.parametrize("order", [("reserved", "computed"), ("computed", "reserved")])
async def test_a_decode_node_that_never_answers_ends_within_the_transfer_s_clock(order: tuple[str, ...]) -> None:
    """The request goes on at the other decode node, and its prompt is not computed again."""
    pair = Pair("d0", "d1", transfer_s=0.1)
    prefill, decode = await pair.sent("p0", m.Prefill), await pair.sent("d0", m.Reserve)
    for what in order:
        pair.speak(what, prefill, decode)
    other = await pair.sent("d1", m.Reserve)
    assert pair.cluster.sent_to("d0", m.Cancel)
    pair.reserves(other, "d1")
    pair.decodes(other, "d1")
    tokens, done = await pair.done()
    assert tokens == EXPECTED and done.route.decode == "d1" and len(pair.cluster.sent_to("p0", m.Prefill)) == 1


async def test_no_transfer_clock_runs_before_the_prompt_is_done() -> None:
    pair = Pair(transfer_s=0.05)
    prefill, decode = await pair.sent("p0", m.Prefill), await pair.sent("d0", m.Reserve)
    for what in ("scheduled", "reserved"):
        pair.speak(what, prefill, decode)
    await asyncio.sleep(0.15)
    assert not pair.cluster.sent_to("d0", m.Cancel)
    pair.speak("computed", prefill, decode)
    pair.decodes(decode)
    assert (await pair.done())[0] == EXPECTED


async def test_a_prefill_node_whose_reference_is_spent_gets_the_whole_prompt_anew() -> None:
    pair = Pair()
    prefill, decode = await pair.sent("p0", m.Prefill), await pair.sent("d0", m.Reserve)
    for what in ("reserved", "computed"):
        pair.speak(what, prefill, decode)
    pair.says("p0", m.Failed(prefill.request, prefill.attempt, "transfer_failed", "the lease is over", True))
    again, decode = await pair.sent("p0", m.Prefill, 2), await pair.sent("d0", m.Reserve, 2)
    assert [each.attempt for each in pair.cluster.sent_to("d0", m.Cancel)] == [1]
    pair.reserves(decode)
    pair.says("p0", m.Computed(again.request, again.attempt))
    pair.decodes(decode)
    tokens, done = await pair.done()
    assert tokens == EXPECTED and done.attempts == 2
    pair.check_books()


async def test_the_same_failure_is_needless_once_the_decode_node_decodes() -> None:
    pair = Pair()
    prefill, decode = await pair.sent("p0", m.Prefill), await pair.sent("d0", m.Reserve)
    for what in ("reserved", "computed", "row 0"):
        pair.speak(what, prefill, decode)
    pair.says("p0", m.Failed(prefill.request, prefill.attempt, "transfer_failed", "the lease is over", True))
    pair.decodes(decode)
    tokens, done = await pair.done()
    assert tokens == EXPECTED and done.attempts == 1 and len(pair.cluster.sent_to("p0", m.Prefill)) == 1


async def test_no_decode_node_is_asked_for_kv_that_its_node_keeps_no_longer() -> None:
    """A full decode node is asked while the KV is kept. Then the prompt is computed anew, at the end nothing is left."""
    pair = Pair(parks_s=0.15)
    prefill = await pair.sent("p0", m.Prefill)
    loop = asyncio.get_running_loop()
    pair.says("p0", m.Computed(prefill.request, prefill.attempt))
    computed_at, asked = loop.time(), []

    def refuse(message: object, answer: object) -> None:
        if isinstance(message, m.Reserve):
            asked.append((loop.time() - computed_at, message.writer))
            answer(m.Refused(message.work.request, message.work.attempt, "reserve", "full", 0.01))  # type: ignore[operator]

    decode = await pair.sent("d0", m.Reserve)
    pair.cluster.handlers["d0"] = refuse
    pair.says("d0", m.Refused(decode.request, decode.attempt, "reserve", "full", 0.01))
    again = await pair.sent("p0", m.Prefill, 2)
    assert 0.14 < loop.time() - computed_at < 1.0
    assert asked and all(moment < 0.15 + 0.02 for moment, _ in asked[:-1])
    assert again.attempt > prefill.attempt
    assert [each.attempt for each in pair.cluster.sent_to("p0", m.Cancel)] == [prefill.attempt]
    with pytest.raises(errors.Overloaded, match=r"no decode node had room in the 0\.15 s for which p0 keeps KV|full"):
        while not pair.answer.done():
            number = len(pair.cluster.sent_to("p0", m.Prefill))
            work = pair.cluster.sent_to("p0", m.Prefill)[-1].work
            pair.says("p0", m.Computed(work.request, work.attempt))
            async with asyncio.timeout(3.0):
                while len(pair.cluster.sent_to("p0", m.Prefill)) == number and not pair.answer.done():
                    await asyncio.sleep(0.005)
        await pair.answer
    pair.check_books()


async def test_a_decode_node_that_breaks_a_transfer_after_the_kv_is_gone_is_avoided() -> None:
    pair = Pair("d0", "d1", parks_s=0.05, transfer_s=0.1)
    prefill, decode = await pair.sent("p0", m.Prefill), await pair.sent("d0", m.Reserve)
    for what in ("reserved", "computed"):
        pair.speak(what, prefill, decode)
    await pair.sent("p0", m.Prefill, 2)
    assert not [each for each in pair.cluster.sent_to("d1", m.Reserve) if each.work.attempt == decode.attempt + 1]
    other = await pair.sent("d1", m.Reserve)
    pair.reserves(other, "d1")
    pair.decodes(other, "d1")
    tokens, done = await pair.done()
    assert tokens == EXPECTED and done.route.decode == "d1" and done.attempts == 2


async def test_only_the_prefill_leg_may_say_that_the_prompt_is_done() -> None:
    pair = Pair(transfer_s=0.05)
    prefill, decode = await pair.sent("p0", m.Prefill), await pair.sent("d0", m.Reserve)
    for what in ("scheduled", "reserved"):
        pair.speak(what, prefill, decode)
    pair.says("d0", m.Computed(decode.request, decode.attempt))
    await asyncio.sleep(0.1)
    assert not pair.cluster.sent_to("d0", m.Cancel), "its word starts no clock"
    pair.decodes(decode)
    assert (await pair.done())[0] == EXPECTED
