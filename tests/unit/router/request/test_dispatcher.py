"""One request's life through Dispatch, against nodes that answer by script and die where they are told to."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import aclosing

import pytest
from dispatch_pair import EXPECTED, NoModels, collect, make_dispatch, make_generation, make_pair
from msgspec.structs import replace
from scripted_cluster import EMPTY_LOAD, FakeCluster, ScriptedPair, make_chooser, make_node, row, settle

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster.kv.hashing import block_hashes
from pdcluster_router.core.generation import BATCH_PRIORITY, Done, Generation, TakeTokens, TenantPriority, TokenChunk
from pdcluster_router.core.job import HashChain, Job, RetryAttempt
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings
from pdcluster_router.request.retries import RetryBudget
from pdcluster_router.request.stream import Events


async def test_a_request_goes_through_prefill_and_decode_and_ends_once() -> None:
    cluster, _, dispatch = make_pair()
    tokens, done = await collect(dispatch, make_generation())
    assert tokens == EXPECTED
    assert (done.route.mode, done.route.prefill, done.route.decode, done.route.backend) == ("remote", "p0", "d0", "shm")
    assert done.attempts == 1
    assert cluster.ledger.num_requests() == 0
    assert cluster.ledger.in_flight("p0-boot") == cluster.ledger.in_flight("d0-boot") == 0
    assert not cluster.sent_to("p0", m.Cancel) and not cluster.sent_to("d0", m.Cancel), (
        "nothing is cancelled after a good end"
    )


class Breaks(Events):
    """A sink whose short way fails."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def fast_token_path(self) -> TakeTokens:
        return self._take

    def _take(self, position: int, token_ids: tuple[int, ...]) -> bool:
        if position >= self.last:
            raise RuntimeError("no bytes")
        return True


@pytest.mark.parametrize("last", [2, 4])
async def test_an_error_on_the_short_way_ends_its_own_request_and_not_those_whose_rows_come_behind_it_in_the_frame(
    last: int,
) -> None:
    """Who reads the frames of a node calls all its requests one after the other."""
    cluster = FakeCluster([make_node("m0", "mixed")])
    dispatch, sink, behind = make_dispatch(cluster), Breaks(last), Events()
    dispatch.start(make_generation(max_tokens=9), sink)
    dispatch.start(make_generation("r2", max_tokens=9), behind)
    for position in range(last + 1):
        rows = [m.TokenRow(request, 0, position, (7,)) for request in ("r1", "r2")]
        assert cluster.ledger.deliver_rows("m0-boot", rows, 0.0) == 0
    assert [(await sink.next()).position for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="no bytes"):
        await sink.next()
    assert [(await behind.next()).position for _ in range(last + 1)] == [*range(last + 1)]
    assert cluster.ledger.num_requests() == 1 and [cancel.request for cancel in cluster.sent_to("m0", m.Cancel)] == [
        "r1"
    ]
    assert cluster.ledger.deliver_rows("m0-boot", [m.TokenRow("r1", 0, last + 1, (7,))], 0.0) == 1


async def test_a_path_that_is_cut_for_a_moment_costs_a_pause_even_when_every_decode_node_failed() -> None:
    cluster, pair, _ = make_pair()
    dispatch = make_dispatch(cluster, force="remote")
    refusals = 7

    def refuse_delivery(message: m.NodeMessage, answer) -> None:
        nonlocal refusals
        if isinstance(message, m.Deliver) and refusals:
            refusals -= 1
            answer(
                m.Refused(
                    message.ticket.request, message.ticket.attempt, "deliver", "no transfer backend reaches d0", 0.05
                )
            )
        else:
            pair.on_prefill(message, answer)

    cluster.handlers["p0"] = refuse_delivery
    tokens, done = await collect(dispatch, make_generation())
    assert tokens == EXPECTED and refusals == 0 and 1 < done.attempts <= 4


def test_the_first_retry_comes_at_once_and_later_ones_after_longer_and_longer_pauses() -> None:
    budget = RetryBudget(DispatchSettings(retries=3))
    job = Job("r1", [1], m.Sampling(max_tokens=1, seed=1), 10.0, HashChain(b"", 4))
    pauses = [budget.spend(RetryAttempt(errors.TransferError("cut"), "d0-boot"), job, 0.0) for _ in range(3)]
    assert pauses[0] == 0.0 < pauses[1] < pauses[2] <= 1.0
    with pytest.raises(errors.Unavailable, match="failed 4 times without progress, last: cut"):
        budget.spend(RetryAttempt(errors.TransferError("cut"), "d0-boot"), job, 0.0)


def fresh_budget(retries: int = 3) -> tuple[RetryBudget, Job]:
    job = Job("r1", [1], m.Sampling(max_tokens=9, seed=1), 10.0, HashChain(b"", 4))
    return RetryBudget(DispatchSettings(retries=retries)), job


def test_retries_count_since_the_last_progress() -> None:
    budget, job = fresh_budget(retries=1)
    for number in range(6):
        assert budget.spend(RetryAttempt(errors.NodeLost("killed"), f"d0-{number}"), job, 0.0) == 0.0
        assert job.excluded == {f"d0-{number}"}, "a node that failed before the progress is as good as any"
        job.emitted += (7, 7)
    assert budget.attempts == 7
    budget.spend(RetryAttempt(errors.TransferError("cut"), "d0-7"), job, 0.0)
    with pytest.raises(errors.Unavailable, match="failed 2 times without progress"):
        budget.spend(RetryAttempt(errors.TransferError("cut"), "d0-8"), job, 0.0)


def test_a_request_that_ends_nodes_is_stopped_after_three() -> None:
    budget, job = fresh_budget(retries=100)
    for number in range(2):
        budget.spend(RetryAttempt(errors.TransferError("cut"), "p0"), job, 0.0)
        budget.spend(RetryAttempt(errors.NodeLost("killed"), f"d0-{number}"), job, 0.0)
        budget.spend(RetryAttempt(errors.NodeLost("killed"), f"d0-{number}"), job, 0.0)
    with pytest.raises(errors.RequestStopped, match="lost 3 nodes without progress"):
        budget.spend(RetryAttempt(errors.NodeLost("killed"), "d0-2"), job, 0.0)


def test_a_node_that_drains_is_no_failure() -> None:
    budget, job = fresh_budget(retries=0)
    drained = RetryAttempt(errors.NodeDrains("node m0 gives its work to other nodes"), "m0-boot")
    assert [budget.spend(drained, job, 0.0) for _ in range(9)] == [0.0] * 9
    assert not job.excluded and budget.attempts == 10


def test_the_token_that_comes_with_each_prompt_is_no_progress() -> None:
    """A request that ends each node that decodes it would else end as many as it has tokens."""
    budget, job = fresh_budget(retries=100)
    for number in range(2):
        job.emitted.append(7)
        budget.spend(RetryAttempt(errors.NodeLost("killed"), f"d0-{number}"), job, 0.0)
    job.emitted.append(7)
    with pytest.raises(errors.RequestStopped, match="lost 3 nodes without progress"):
        budget.spend(RetryAttempt(errors.NodeLost("killed"), "d0-2"), job, 0.0)


def test_refusals_for_want_of_room_have_their_time_anew_after_progress() -> None:
    budget, job = fresh_budget()
    hold_s = DispatchSettings().hold_s
    full = RetryAttempt(errors.Overloaded("full"), "d0")
    assert budget.spend(full, job, 0.0) == budget.spend(full, job, hold_s - 1) == 0.0
    job.emitted.append(7)
    assert budget.spend(full, job, hold_s + 1) == 0.0
    with pytest.raises(errors.Overloaded):
        budget.spend(full, job, 2 * hold_s + 2)


async def test_the_choices_of_one_request_are_packed_and_hashed_once() -> None:
    """Of a prompt of 100,000 tokens 128 choices held up the loop for 1.3 s."""
    cluster, _, dispatch = make_pair()
    prompt = array("i", range(10))
    for number in range(3):
        await collect(dispatch, Generation(f"r1-{number}", "model", prompt, m.Sampling(max_tokens=4, seed=1), 5.0))
    works = [message.work for message in cluster.sent_to("p0", m.Prefill)]
    assert (
        len(works) == 3 and len({id(work.token_ids) for work in works}) == len({id(work.hashes) for work in works}) == 1
    )
    assert works[0].hashes == block_hashes(prompt, block_tokens=4)


async def test_the_choices_of_one_request_say_once_what_of_their_prompt_is_kept() -> None:
    """Each follower finds all of it on its leader's node, which would make room look plentiful."""
    cluster = FakeCluster([make_node("m0", "mixed")])
    dispatch, noted, sinks = make_dispatch(cluster), [], [Events() for _ in range(3)]
    dispatch.shared.selector.note_prefix = lambda *words: noted.append(words)  # type: ignore[method-assign]
    dispatch.start(replace(make_generation("r1-0"), leads=True), sinks[0])
    for number in (1, 2):
        dispatch.start(replace(make_generation(f"r1-{number}"), parent="r1-0"), sinks[number])
    cluster.ledger.deliver_rows("m0-boot", [m.TokenRow("r1-0", 0, 0, (7,))], 0.0)
    assert len(cluster.sent_to("m0", m.Prefill)) == 3 and len(noted) == 1


async def test_a_prefill_node_is_not_busy_with_what_decodes_elsewhere() -> None:
    cluster, pair, dispatch = make_pair()
    pair.run = lambda *_, **__: None
    events = dispatch.generate(make_generation())
    await anext(events)
    waiting = asyncio.ensure_future(anext(events))
    await settle()
    assert cluster.ledger.in_flight("p0-boot") == 0 and cluster.ledger.in_flight("d0-boot") == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await events.aclose()


async def test_the_first_token_waits_for_the_reservation() -> None:
    """Without room on the decode node nothing may be streamed, because nobody could go on with it."""
    cluster, pair, dispatch = make_pair(refusals=3)
    tokens, done = await collect(dispatch, make_generation())
    assert tokens == EXPECTED
    assert len(cluster.sent_to("d0", m.Reserve)) == 4
    assert len(cluster.sent_to("p0", m.Prefill)) == 1, (
        "the prompt is computed once, however often the decode node refuses"
    )
    assert done.attempts == 1
    assert pair.refusals == 0


@pytest.mark.parametrize("moment", ["before_token", "before_commit"])
async def test_a_prefill_node_that_dies_before_the_commit_is_replaced(moment: str) -> None:
    cluster, pair, dispatch = make_pair(die_at={"p0": moment})
    tokens, done = await collect(dispatch, make_generation())
    assert tokens == EXPECTED
    assert done.route.mode == "local" and done.route.decode == "d0", (
        "the decode node serves alone when the prefill pool is gone"
    )
    assert done.attempts == 2
    assert cluster.sent_to("d0", m.Cancel), "the slot is released by message, not by timeout"
    assert pair.die_at


async def test_a_decode_node_that_dies_mid_stream_is_replayed_from_what_was_emitted() -> None:
    cluster, _, dispatch = make_pair(die_at={"d0": "mid_decode"})
    tokens, done = await collect(dispatch, make_generation())
    assert tokens == EXPECTED
    replay = cluster.sent_to("p0", m.Prefill)[-1]
    assert m.unpack_tokens(replay.work.token_ids) == [*range(10), 100, 101, 102]
    assert replay.work.num_prompt == 10
    assert replay.work.hashes == block_hashes([*range(10), 100, 101, 102], block_tokens=4)
    assert done.attempts == 2


async def test_the_timeline_of_a_replayed_request_says_when_the_attempt_began_that_it_is_of() -> None:
    """Its first token came from the first attempt, so before the second one was given nodes."""
    _, _, dispatch = make_pair(die_at={"d0": "mid_decode"})
    _, done = await collect(dispatch, make_generation())
    timeline = done.timeline
    assert timeline.placed_s is not None and timeline.ttft_s is not None and timeline.placed_s > timeline.ttft_s
    _, _, undisturbed = make_pair()
    _, done = await collect(undisturbed, make_generation())
    assert (
        done.timeline.placed_s is not None
        and done.timeline.ttft_s is not None
        and done.timeline.placed_s <= done.timeline.ttft_s
    )


async def test_chunks_say_what_was_cached_and_which_attempt_they_are_of() -> None:
    _, _, dispatch = make_pair(die_at={"d0": "mid_decode"})
    routes = []
    async with aclosing(dispatch.generate(make_generation())) as events:
        async for event in events:
            routes.append((event.route.attempts, event.route.cached_tokens))
    assert routes[0] == (1, 0) and routes[-1] == (2, 0), (
        "a node found nothing in its cache, which is not the same as unknown"
    )


async def test_a_decode_node_that_dies_after_the_commit_is_replayed() -> None:
    _, _, dispatch = make_pair(die_at={"d0": "after_commit"})
    tokens, _ = await collect(dispatch, make_generation())
    assert tokens == EXPECTED


async def test_parked_kv_goes_to_another_decode_node_without_computing_again() -> None:
    cluster = FakeCluster(
        [make_node("p0", "prefill"), make_node("d0", "decode"), make_node("d1", "decode", in_flight=1)]
    )
    first = ScriptedPair(cluster, cluster.nodes[0], cluster.nodes[1])
    second = ScriptedPair(cluster, cluster.nodes[0], cluster.nodes[2])
    first.install()
    second.works = first.works
    second.install()

    def dying_decode(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Reserve):
            cluster.kill(cluster.nodes[1], "it died with the reservation")

    cluster.handlers["d0"] = dying_decode
    tokens, done = await collect(make_dispatch(cluster), make_generation())
    assert tokens == EXPECTED
    assert done.route.decode == "d1"
    assert len(cluster.sent_to("p0", m.Prefill)) == 1
    assert [message.work.attempt for message in cluster.sent_to("d1", m.Reserve)] == [2]


async def test_a_request_with_no_node_left_waits_for_one_and_then_gets_a_clear_error() -> None:
    cluster, pair, _ = make_pair()
    dispatch = make_dispatch(cluster, hold=HoldLimits(age_s=0.1))
    cluster.nodes.pop()
    pair.die_at["p0"] = "before_token"
    with pytest.raises(errors.Unavailable, match=r"waited 0\.1. s for a node, .*none of 0 known nodes"):
        await collect(dispatch, make_generation())
    assert cluster.ledger.num_requests() == 0


async def test_a_stream_whose_only_node_dies_goes_on_where_it_was_once_the_node_is_back() -> None:
    cluster = FakeCluster([make_node("m0", "mixed"), make_node("m1", "mixed")])
    first = ScriptedPair(cluster, cluster.nodes[0], cluster.nodes[0], die_at={"m0": "mid_decode"})
    second = ScriptedPair(cluster, cluster.nodes[1], cluster.nodes[1])
    cluster.handlers = {"m0": first.on_prefill, "m1": second.on_prefill}
    cluster.dead.add("m1")
    dispatch = make_dispatch(cluster)
    running = asyncio.create_task(collect(dispatch, make_generation()))
    fresh = asyncio.create_task(collect(dispatch, make_generation("r2")))
    while dispatch.waiting.num_held < 2:
        await asyncio.sleep(0.01)
    cluster.dead.remove("m1")
    dispatch.waiting.poke()
    assert (await running)[0] == EXPECTED and (await fresh)[0] == EXPECTED
    sent = {work.request: work for work in (message.work for message in cluster.sent_to("m1", m.Prefill))}
    assert len(sent["r1"].token_ids) // 4 == 13 and len(sent["r2"].token_ids) // 4 == 10


async def test_a_client_that_leaves_while_no_node_takes_work_frees_its_place() -> None:
    cluster = FakeCluster([])
    dispatch = make_dispatch(cluster)
    running = asyncio.create_task(collect(dispatch, make_generation()))
    await settle()
    assert dispatch.waiting.num_held == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert dispatch.waiting.num_held == 0 and cluster.ledger.num_requests() == 0


async def test_failures_stop_at_the_retry_budget() -> None:
    cluster = FakeCluster([make_node("m0", "mixed"), make_node("m1", "mixed")])

    def fail(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            answer(m.Failed(message.work.request, message.work.attempt, "transfer_failed", "the disk ate it", True))

    cluster.handlers = {"m0": fail, "m1": fail}
    with pytest.raises(errors.Unavailable, match="failed 4 times without progress, last: the disk ate it"):
        await collect(make_dispatch(cluster), make_generation())
    assert len(cluster.sent_to("m0", m.Prefill)) + len(cluster.sent_to("m1", m.Prefill)) == 4


async def test_a_full_cluster_is_overloaded_after_the_hold_time() -> None:
    cluster = FakeCluster([make_node("m0", "mixed")])

    def refuse(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            answer(m.Refused(message.work.request, message.work.attempt, "prefill", "queue is full", 0.01))

    cluster.handlers = {"m0": refuse}
    with pytest.raises(errors.Overloaded, match="queue is full"):
        await collect(make_dispatch(cluster, hold_s=0.1), make_generation())
    assert len(cluster.sent_to("m0", m.Prefill)) > 2


async def test_what_can_never_fit_is_the_callers_mistake() -> None:
    cluster = FakeCluster([make_node("m0", "mixed")])
    cluster.handlers = {
        "m0": lambda message, answer: answer(
            m.Refused("r1", 0, "prefill", "the prompt needs 999 pages, the node has 10", 0.0, False)
        )
    }
    with pytest.raises(errors.BadRequest, match="999 pages"):
        await collect(make_dispatch(cluster), make_generation())


async def test_a_silent_node_runs_into_the_request_deadline() -> None:
    cluster = FakeCluster([make_node("m0", "mixed")])
    with pytest.raises(errors.DeadlineExceeded, match="was not done by its deadline"):
        await collect(make_dispatch(cluster), make_generation(deadline_s=0.05))
    assert cluster.sent_to("m0", m.Cancel)


@pytest.mark.parametrize(
    ("first_row", "stage"), [(False, "did not schedule the prompt"), (True, "no token from node m0")]
)
async def test_a_node_that_lives_but_says_nothing_is_left(first_row: bool, stage: str) -> None:
    cluster = FakeCluster([make_node("m0", "mixed"), make_node("m1", "mixed", in_flight=5)])

    def stall(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill) and first_row:
            answer(m.TokenRow("r1", message.work.attempt, 0, (100,)))

    def serve(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            emitted = len(message.work.token_ids) // 4 - message.work.num_prompt
            answer(m.TokenRow("r1", message.work.attempt, emitted, tuple(EXPECTED[emitted:])))
            answer(m.Finished("r1", message.work.attempt, "length", 4, m.LegTimings()))

    cluster.handlers = {"m0": stall, "m1": serve}
    stages = StageDeadlines(queue_s=0.05, liveness_s=0.05)
    tokens, done = await collect(
        Dispatch(cluster, NoModels(), make_chooser(cluster), DispatchSettings(stages=stages)), make_generation()
    )
    assert tokens == EXPECTED and done.attempts == 2
    assert stage in cluster.sent_to("m0", m.Cancel)[0].reason


@pytest.mark.parametrize("first_row", [False, True])
async def test_a_batch_request_waits_on_its_node_for_as_long_as_others_do(first_row: bool) -> None:
    """Its prompt waits behind those of others, and its row is preempted for theirs."""
    cluster = FakeCluster([make_node("m0", "mixed"), make_node("m1", "mixed", in_flight=5)])

    def stall(message: m.NodeMessage, answer) -> None:
        if not isinstance(message, m.Prefill):
            return
        if first_row:
            answer(m.TokenRow("r1", message.work.attempt, 0, (EXPECTED[0],)))

        def finish() -> None:
            answer(m.TokenRow("r1", message.work.attempt, int(first_row), tuple(EXPECTED[int(first_row) :])))
            answer(m.Finished("r1", message.work.attempt, "length", 4, m.LegTimings()))

        asyncio.get_running_loop().call_later(0.4, finish)

    cluster.handlers = {"m0": stall}
    stages = StageDeadlines(queue_s=0.05, liveness_s=0.05)
    dispatch = Dispatch(cluster, NoModels(), make_chooser(cluster), DispatchSettings(stages=stages))
    generation = replace(make_generation(), standing=TenantPriority(priority=BATCH_PRIORITY))
    tokens, done = await collect(dispatch, generation)
    assert tokens == EXPECTED and done.attempts == 1 and not cluster.sent_to("m0", m.Cancel)


@pytest.mark.parametrize(("times", "mode", "attempts"), [(1, "remote", 1), (3, "local", 2), (99, "local", 2)])
async def test_a_delivery_that_keeps_breaking_is_a_failure_and_not_want_of_room(
    times: int, mode: str, attempts: int
) -> None:
    """Otherwise a pair that cannot exchange KV would be tried for as long as requests may wait for room."""
    cluster, pair, dispatch = make_pair()
    inner, broken = cluster.handlers["p0"], []

    def break_deliveries(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Deliver) and len(broken) < times:
            broken.append(message)
            answer(m.Refused("r1", message.ticket.attempt, "deliver", "the medium broke", 0.05))
        else:
            inner(message, answer)

    cluster.handlers["p0"] = break_deliveries
    tokens, done = await collect(dispatch, make_generation())
    assert tokens == EXPECTED
    assert (done.route.mode, done.attempts) == (mode, attempts), (
        "a decode node that cannot be reached is left out in the end"
    )
    assert pair.num_tokens == 4


async def test_a_ticket_that_was_lost_with_the_link_is_said_again() -> None:
    cluster, pair, dispatch = make_pair()
    inner, lost = cluster.handlers["p0"], []

    def lose_first(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Deliver) and not lost:
            lost.append(message)
            cluster.ledger.rewelcome("p0-boot")
        else:
            inner(message, answer)

    cluster.handlers["p0"] = lose_first
    tokens, done = await collect(dispatch, make_generation())
    assert tokens == EXPECTED and done.attempts == 1 and pair.num_tokens == 4
    assert cluster.sent_to("p0", m.Deliver)[1] == lost[0]


async def test_a_client_that_leaves_cancels_both_legs() -> None:
    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])
    events = make_dispatch(cluster).generate(make_generation())
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await events.aclose()
    assert cluster.sent_to("p0", m.Cancel) and cluster.sent_to("d0", m.Cancel)
    assert cluster.ledger.num_requests() == 0 and cluster.ledger.in_flight("p0-boot") == 0


async def test_a_request_that_has_all_that_is_wanted_of_it_ends_well() -> None:
    """As one does whose stop string came: it is no cancelled one, and its length is that of an answer."""
    cluster, pair, _ = make_pair()
    pair.run = lambda node, work, answer, position: answer(row(work, position, (100 + position,)))  # type: ignore[method-assign]
    selector, noted = make_chooser(cluster), []
    selector.note_end = lambda *given: noted.append(given)  # type: ignore[method-assign]
    dispatch = Dispatch(cluster, NoModels(), selector, DispatchSettings())
    events = Events()
    running = dispatch.start(make_generation(max_tokens=8), events)
    assert isinstance(await events.next(), TokenChunk) and len(dispatch.open) == 1
    running.finish(1)
    running.cancel("too late")
    assert noted == [(10, 1)] and not len(dispatch.open)
    assert next(iter(dispatch.explainer.recent(1))).error is None
    assert cluster.sent_to("d0", m.Cancel), "the nodes go on with something else"


async def test_a_first_token_that_ends_the_request_needs_no_decode_node() -> None:
    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])

    def finish(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            answer(m.TokenRow(message.work.request, message.work.attempt, 0, (7,)))
            answer(m.Finished(message.work.request, message.work.attempt, "eos", 1, m.LegTimings(prefill_s=0.5), 7))

    cluster.handlers["p0"] = finish
    tokens, done = await collect(make_dispatch(cluster), make_generation(max_tokens=8))
    assert tokens == [7] and done.reason == "eos" and done.stop_token == 7
    assert done.timeline.prefill_s == 0.5
    assert cluster.sent_to("d0", m.Cancel), "the slot that was reserved beside it is given back"


async def test_frames_out_of_order_or_twice_are_put_right() -> None:
    cluster = FakeCluster([make_node("m0", "mixed")])

    def jumble(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            request, attempt = message.work.request, message.work.attempt
            answer(m.TokenRow(request, attempt, 2, (102,)))
            answer(m.TokenRow(request, attempt, 0, (100,)))
            answer(m.TokenRow(request, attempt, 0, (100, 101)))
            answer(m.Finished(request, attempt, "length", 4, m.LegTimings()))
            answer(m.TokenRow(request, attempt, 2, (102, 103)))

    cluster.handlers["m0"] = jumble
    tokens, _ = await collect(make_dispatch(cluster), make_generation())
    assert tokens == EXPECTED


async def test_answers_of_an_older_attempt_are_ignored() -> None:
    cluster = FakeCluster([make_node("m0", "mixed"), make_node("m1", "mixed", in_flight=3)])
    first: list[m.Work] = []

    def fail_then_babble(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            first.append(message.work)
            answer(m.Failed(message.work.request, message.work.attempt, "transfer_failed", "gone", True))

    def serve(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            cluster.ledger.deliver("r1", "m0-boot", m.TokenRow("r1", first[0].attempt, 0, (666,)))
            request, attempt = message.work.request, message.work.attempt
            answer(m.TokenRow(request, attempt, 0, tuple(EXPECTED)))
            answer(m.Finished(request, attempt, "length", 4, m.LegTimings()))

    cluster.handlers = {"m0": fail_then_babble, "m1": serve}
    tokens, done = await collect(make_dispatch(cluster), make_generation())
    assert tokens == EXPECTED and done.attempts == 2


async def test_reservation_waits_for_the_schedule_when_the_decode_node_has_no_slack() -> None:
    busy = m.Load(0, 8, 0, 0, 100, 10, 0, 0, 0, 8, 8)
    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode", load=busy)])
    order: list[str] = []
    pair = ScriptedPair(cluster, *cluster.nodes)
    pair.install()
    inner = cluster.handlers["p0"]

    def late_schedule(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            assert not cluster.sent_to("d0", m.Reserve)
            order.append("prefill")
        inner(message, answer)

    cluster.handlers["p0"] = late_schedule
    tokens, _ = await collect(make_dispatch(cluster), make_generation())
    assert tokens == EXPECTED and order == ["prefill"]
    assert EMPTY_LOAD.slots == 8


async def test_a_request_that_has_said_its_last_word_cannot_be_cancelled_any_more() -> None:
    _, _, dispatch = make_pair()
    async with aclosing(dispatch.generate(make_generation())) as events:
        async for event in events:
            if isinstance(event, Done):
                assert dispatch.open.cancel("r1", "too late") == 0
    assert isinstance(event, Done) and not len(dispatch.open)


class OneOfSeveral(Events):
    """A choice of a request whose client leaves all of it when one fails."""

    def __init__(self, choices: list[OneOfSeveral]) -> None:
        super().__init__()
        self.choices = choices
        self.heard: list[str] = []
        choices.append(self)

    def on_error(self, error: Exception) -> None:
        self.heard.append(type(error).__name__)
        for choice in self.choices:
            if choice is not self and choice.running is not None:
                choice.heard.append("left")
                choice.running.cancel("another choice failed")


async def test_a_choice_that_was_cancelled_hears_nothing_more() -> None:
    """Also where it is about to fail itself: then its forks do, and its client has left by the first error."""
    dispatch, choices = make_dispatch(FakeCluster([])), []
    leader = replace(make_generation("r-0", deadline_s=0.05), leads=True)
    for generation in (leader, replace(leader, request="r-1", leads=False, parent="r-0")):
        choice = OneOfSeveral(choices)
        choice.running = dispatch.start(generation, choice)
    await asyncio.sleep(0.2)
    assert [choice.heard for choice in choices] == [["DeadlineExceeded"], ["left"]]
    assert len(dispatch.shared.fork_groups) == len(dispatch.open) == 0


async def test_a_policy_with_a_bug_answers_its_request_and_no_other() -> None:
    class Broken:
        name = "broken"

        def choose(self, query, view):
            raise ZeroDivisionError("a bug of the policy's author")

    *_, dispatch = make_pair()
    works, dispatch.shared.selector.holder.live = dispatch.shared.selector.holder.live, Broken()
    with pytest.raises(errors.PdclusterError, match="routing policy failed"):
        await collect(dispatch, make_generation())
    dispatch.shared.selector.holder.live = works
    tokens, _ = await collect(dispatch, make_generation("r2"))
    assert len(tokens) == 4


async def test_requests_wait_for_the_first_model_where_pools_may_be_empty() -> None:
    served = asyncio.Event()

    class Models(NoModels):
        def models(self):
            return ("model",) if served.is_set() else ()

        def refusal(self):
            return None

        async def first(self) -> None:
            await served.wait()

    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])
    settings = DispatchSettings(hold=HoldLimits(count=2, age_s=0.2), from_zero=True)
    dispatch = Dispatch(cluster, Models(), make_chooser(cluster), settings)
    assert dispatch.awaits_model and dispatch.readiness().is_awaited
    waiting = [asyncio.create_task(dispatch.first_model()) for _ in range(2)]
    await asyncio.sleep(0)
    assert dispatch.demand("boot").num_held == 2, "autoscaling hears of them"
    with pytest.raises(errors.Overloaded, match="2 requests wait for the first node"):
        await dispatch.first_model()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in found] == ["no node came within 0.2 s; see whether pools scale up"] * 2
    coming = asyncio.create_task(dispatch.first_model())
    await asyncio.sleep(0)
    served.set()
    await coming
    assert not dispatch.awaits_model and dispatch.demand("boot").num_held == 0
    assert not Dispatch(cluster, NoModels(), make_chooser(cluster), DispatchSettings()).awaits_model


async def test_each_request_that_comes_is_counted_once() -> None:
    _, _, dispatch = make_pair()
    counted: list[tuple[str, float, str]] = []
    dispatch.shared.demand.arrived = lambda *words: counted.append(words)  # type: ignore[method-assign,assignment,misc]
    await collect(dispatch, make_generation())
    await collect(dispatch, make_generation("r2"))
    assert [(first, decode) for first, _, decode in counted] == [("prefill", "decode")] * 2
    assert all(work_s > 0 for _, work_s, _ in counted)


async def test_requests_that_no_node_takes_are_counted_in_what_autoscaling_reads() -> None:
    cluster, _, dispatch = make_pair()
    nodes, cluster.nodes = cluster.nodes, [replace(node, is_cordoned=True) for node in cluster.nodes]
    counted: list[tuple[str, float, str]] = []
    dispatch.shared.demand.arrived = lambda *words: counted.append(words)  # type: ignore[method-assign,assignment,misc]
    waiting = asyncio.create_task(collect(dispatch, make_generation()))
    await settle()
    assert [(first, decode) for first, _, decode in counted] == [("prefill", "decode")]
    assert counted[0][1] > 0 and sum(held.work for held in dispatch.waiting.held()) == counted[0][1]
    cluster.nodes = nodes
    dispatch.waiting.poke()
    await waiting
    assert len(counted) == 1, "once"
