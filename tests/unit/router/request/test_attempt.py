"""One attempt against nodes that answer by script: its clocks, its races, and what is never asked twice. Whole lives
are in test_dispatcher.py."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest
from dispatch_pair import EXPECTED, NoModels, collect, make_dispatch, make_generation, make_pair
from scripted_cluster import FakeCluster, ScriptedPair, make_chooser, make_node, make_ticket, row, settle

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster_router.cluster.legs import LegLost
from pdcluster_router.core.generation import Generation, ModelInfo, TokenChunk
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings


def with_stages(cluster: FakeCluster, **stages: float) -> Dispatch:
    return Dispatch(
        cluster,
        NoModels(),
        make_chooser(cluster),
        DispatchSettings(retries=0, stages=StageDeadlines(hold_s=0.01, **stages)),
    )


async def test_kv_goes_to_another_decode_node_after_its_first_token_was_streamed() -> None:
    """The second reservation is for the same tokens as the first: what the prefill node computed, without the token
    that the client has seen."""
    cluster = FakeCluster(
        [make_node("p0", "prefill"), make_node("d0", "decode"), make_node("d1", "decode", in_flight=1)]
    )
    first, second = (ScriptedPair(cluster, cluster.nodes[0], node) for node in cluster.nodes[1:])
    second.works = first.works
    first.install()
    serve_prefill = second.on_prefill
    second.install()

    def prefill(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Deliver) and message.ticket.reader.node == "d0":
            cluster.kill(cluster.nodes[1], "it died during the transfer")
            return
        serve_prefill(message, answer)

    cluster.handlers.update(p0=prefill, d0=first.on_decode)
    tokens, done = await collect(make_dispatch(cluster), make_generation())
    assert tokens == EXPECTED and done.attempts == 1 and done.route.decode == "d1"
    assert len(cluster.sent_to("p0", m.Prefill)) == 1
    (again,) = cluster.sent_to("d1", m.Reserve)
    assert m.unpack_tokens(again.work.token_ids) == list(range(10)), "not with the token that was streamed already"
    assert len(again.work.hashes) == 2 * 16


async def test_a_place_in_line_is_given_back_when_another_node_has_a_slot() -> None:
    cluster = FakeCluster(
        [make_node("p0", "prefill"), make_node("d0", "decode"), make_node("d1", "decode", in_flight=1)]
    )
    pair = ScriptedPair(cluster, cluster.nodes[0], cluster.nodes[2])
    pair.install()

    def refuse(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Reserve):
            answer(m.Refused(message.work.request, message.work.attempt, "reserve", "full", 0.01))

    cluster.handlers["d0"] = refuse
    tokens, done = await collect(make_dispatch(cluster), make_generation())
    assert tokens == EXPECTED and done.route.decode == "d1"
    (refused,) = cluster.sent_to("d0", m.Reserve)
    assert [each.attempt for each in cluster.sent_to("d0", m.Cancel)] == [refused.work.attempt]


async def test_a_place_in_line_is_given_back_when_the_client_leaves() -> None:
    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])
    pair = ScriptedPair(cluster, *cluster.nodes)
    pair.install()
    asked = asyncio.Event()

    def refuse(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Reserve):
            answer(m.Refused(message.work.request, message.work.attempt, "reserve", "full", 60.0))
            asked.set()

    cluster.handlers["d0"] = refuse
    running = asyncio.create_task(collect(make_dispatch(cluster), make_generation()))
    await asked.wait()
    await settle()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(cluster.sent_to("d0", m.Cancel)) == 1


async def test_a_decode_node_that_breaks_every_transfer_is_not_asked_for_ever() -> None:
    cluster, pair, _ = make_pair()
    serve = cluster.handlers["p0"]

    def prefill(message: m.NodeMessage, answer) -> None:
        if not isinstance(message, m.Deliver):
            serve(message, answer)

    def broken(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Reserve):
            answer(m.Reserved(make_ticket(message.work, pair.decode, message.writer)))
            answer(m.Failed(message.work.request, message.work.attempt, "transfer_failed", "digest mismatch", True))

    cluster.handlers.update(p0=prefill, d0=broken)
    with pytest.raises(errors.Unavailable, match="digest mismatch"):
        await collect(with_stages(cluster, handshake_s=1.0), make_generation())
    assert len(cluster.sent_to("d0", m.Reserve)) == 3


async def test_who_waits_for_room_loses_no_time_of_handshake_or_transfer() -> None:
    """The decode node refuses for far longer than either clock."""
    cluster, pair, _ = make_pair(refusals=30)
    tokens, done = await collect(with_stages(cluster, handshake_s=0.05, transfer_s=0.05), make_generation())
    assert tokens == EXPECTED and done.attempts == 1
    assert pair.refusals == 0 and not cluster.sent_to("d0", m.Cancel)


async def test_who_waits_for_room_finds_a_decode_node_that_has_it_before_the_full_one_is_asked_again() -> None:
    cluster, pair, dispatch = make_pair(refusals=1000)
    refuse = cluster.handlers["d0"]

    def full(message: m.NodeMessage, answer) -> None:
        refuse(message, lambda body: answer(msgspec.structs.replace(body, retry_after_s=3.0)))

    cluster.handlers["d0"] = full
    asked = asyncio.create_task(collect(dispatch, make_generation()))
    await asyncio.sleep(0.05)
    assert len(cluster.sent_to("d0", m.Reserve)) == 1
    cluster.nodes.append(make_node("d1", "decode"))
    other = ScriptedPair(cluster, pair.prefill, cluster.nodes[-1], works=pair.works)
    other.install()
    tokens, done = await asyncio.wait_for(asked, 2.0)
    assert tokens == EXPECTED and done.route.decode == "d1" and len(cluster.sent_to("d0", m.Reserve)) == 1


async def test_a_transfer_clock_runs_for_the_second_decode_node_too() -> None:
    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])

    def prefill(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            answer(m.Scheduled(message.work.request, message.work.attempt))
            answer(m.TokenRow(message.work.request, message.work.attempt, 0, (100,)))

    def decode(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Reserve):
            answer(m.Reserved(make_ticket(message.work, cluster.nodes[1], message.writer)))

    cluster.handlers = {"p0": prefill, "d0": decode}
    with pytest.raises(errors.Unavailable, match="got no commit"):
        await collect(with_stages(cluster, transfer_s=0.03), make_generation())
    assert len(cluster.sent_to("d0", m.Reserve)) == 3


@pytest.mark.parametrize("how", ["refused", "failed"])
async def test_what_of_the_work_is_at_fault_is_told_whether_a_node_refused_it_or_failed_at_it(how: str) -> None:
    cluster = FakeCluster([make_node("m0", "mixed")])

    def end(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            key = message.work.request, message.work.attempt
            failed = m.Failed(*key, errors.BadRequest.code, "too slow", False, "grammar")
            answer(failed if how == "failed" else m.Refused(*key, "prefill", "too slow", 0.0, False, "grammar"))

    cluster.handlers = {"m0": end}
    with pytest.raises(errors.BadRequest, match="too slow") as told:
        await collect(make_dispatch(cluster), make_generation())
    assert told.value.param == "grammar" and len(cluster.sent_to("m0", m.Prefill)) == 1


async def test_a_prompt_that_is_never_scheduled_runs_into_the_queue_clock() -> None:
    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])
    with pytest.raises(errors.Unavailable, match="did not schedule the prompt"):
        await collect(with_stages(cluster, queue_s=0.03), make_generation())


async def test_a_stream_that_falls_silent_is_replayed_elsewhere() -> None:
    cluster = FakeCluster([make_node("m0", "mixed"), make_node("m1", "mixed", in_flight=2)])

    def mute(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            answer(m.TokenRow(message.work.request, message.work.attempt, 0, (100, 101)))

    def serve(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            answer(m.TokenRow(message.work.request, message.work.attempt, 2, (102, 103)))
            answer(m.Finished(message.work.request, message.work.attempt, "length", 4, m.LegTimings()))

    cluster.handlers = {"m0": mute, "m1": serve}
    dispatch = Dispatch(
        cluster, NoModels(), make_chooser(cluster), DispatchSettings(stages=StageDeadlines(liveness_s=0.05))
    )
    tokens, done = await collect(dispatch, make_generation())
    assert tokens == EXPECTED and done.attempts == 2
    assert cluster.sent_to("m0", m.Cancel), "a node that only seemed dead does not go on"


class OneModel(NoModels):
    def __init__(self, eos: int = 999, max_len: int = 4096) -> None:
        self.info = ModelInfo("model", 0, max_len, 5000, (eos,))

    def models(self):
        return (self.info,)


@pytest.mark.parametrize(
    ("model", "max_tokens", "reason", "stop_token"),
    [(OneModel(), 4, "length", None), (OneModel(eos=103), 9, "eos", 103), (OneModel(max_len=14), 9, "length", None)],
    ids=["all tokens are there", "it ended itself", "the model holds no more"],
)
async def test_a_node_that_dies_between_its_last_token_and_its_last_word_is_not_replayed(
    model, max_tokens, reason, stop_token
) -> None:
    cluster = FakeCluster([make_node("m0", "mixed"), make_node("m1", "mixed", in_flight=2)])

    def die(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            answer(m.TokenRow(message.work.request, message.work.attempt, 0, tuple(EXPECTED)))
            cluster.kill(cluster.nodes[0])

    cluster.handlers["m0"] = die
    tokens, done = await collect(
        Dispatch(cluster, model, make_chooser(cluster), DispatchSettings()), make_generation(max_tokens=max_tokens)
    )
    assert tokens == EXPECTED and (done.reason, done.stop_token) == (reason, stop_token)
    assert not cluster.sent_to("m1", m.Prefill)


async def test_a_decode_node_that_dies_after_its_last_word_costs_nothing() -> None:
    cluster, pair, _ = make_pair()
    serve = cluster.handlers["p0"]

    def prefill(message: m.NodeMessage, answer) -> None:
        def without_report(body: object) -> None:
            if not isinstance(body, m.Delivered):
                answer(body)

        serve(message, without_report)
        if isinstance(message, m.Deliver):
            cluster.kill(pair.decode)

    cluster.handlers["p0"] = prefill
    tokens, done = await collect(make_dispatch(cluster), make_generation())
    assert tokens == EXPECTED and done.attempts == 1
    assert len(cluster.sent_to("p0", m.Prefill)) == 1


async def test_what_was_cached_is_known_even_when_the_prefill_nodes_report_comes_too_late() -> None:
    cluster, pair, _ = make_pair()
    serve = cluster.handlers["p0"]

    def prefill(message: m.NodeMessage, answer) -> None:
        def changed(body: object) -> None:
            if isinstance(body, m.Scheduled):
                answer(m.Scheduled(body.request, body.attempt, cached_tokens=8))
            elif not isinstance(body, m.Delivered):
                answer(body)

        serve(message, changed)

    cluster.handlers["p0"] = prefill
    _, done = await collect(make_dispatch(cluster), make_generation())
    assert done.cached_tokens == 8
    assert pair.works


async def test_a_refusal_after_a_long_stream_is_held_like_any_other() -> None:
    """The time to wait for room starts when room is needed, not when the request came."""
    cluster = FakeCluster([make_node("m0", "mixed")])
    calls: list[m.Work] = []

    def serve(message: m.NodeMessage, answer) -> None:
        if not isinstance(message, m.Prefill):
            return
        work = message.work
        calls.append(work)
        if len(calls) == 1:
            answer(m.TokenRow(work.request, work.attempt, 0, (100, 101)))
        elif len(calls) < 5:
            answer(m.Refused(work.request, work.attempt, "prefill", "full", 0.01))
        else:
            answer(m.TokenRow(work.request, work.attempt, 2, (102, 103)))
            answer(m.Finished(work.request, work.attempt, "length", 4, m.LegTimings()))

    cluster.handlers["m0"] = serve
    settings = DispatchSettings(hold_s=0.2, stages=StageDeadlines(liveness_s=0.3, hold_s=0.01))
    tokens, done = await collect(Dispatch(cluster, NoModels(), make_chooser(cluster), settings), make_generation())
    assert tokens == EXPECTED and done.attempts == 2 and len(calls) == 5


async def test_a_busy_prefill_node_is_passed_over_and_a_busy_pool_is_waited_for() -> None:
    cluster = FakeCluster(
        [make_node("p0", "prefill"), make_node("p1", "prefill", in_flight=1), make_node("d0", "decode")]
    )

    def refuse(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            answer(m.Refused(message.work.request, message.work.attempt, "prefill", "finished KV waits here", 5.0))

    pair = ScriptedPair(cluster, cluster.nodes[1], cluster.nodes[2])
    pair.install()
    cluster.handlers["p0"] = refuse
    tokens, done = await collect(make_dispatch(cluster), make_generation())
    assert tokens == EXPECTED and done.route.prefill == "p1" and done.attempts == 1
    cluster.handlers["p1"] = refuse
    with pytest.raises(errors.DeadlineExceeded, match="found no room"):
        await collect(make_dispatch(cluster), make_generation("r2", deadline_s=0.2))
    assert not cluster.sent_to("d0", m.Prefill), (
        "what the prefill pool is too busy for is not pushed onto the decode pool"
    )


async def test_an_answer_about_an_older_attempt_does_not_end_the_present_one() -> None:
    cluster = FakeCluster([make_node("m0", "mixed")])
    started = asyncio.Event()

    def serve(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            started.set()

    cluster.handlers["m0"] = serve
    async with aclosing(make_dispatch(cluster).generate(make_generation())) as events:
        first = asyncio.ensure_future(anext(events))
        await started.wait()
        cluster.ledger.deliver("r1", "m0-boot", LegLost("unknown there", attempt=7))
        await settle()
        cluster.ledger.deliver("r1", "m0-boot", m.TokenRow("r1", 0, 0, (100,)))
        assert (await first).token_ids == (100,)
    assert len(cluster.sent_to("m0", m.Prefill)) == 1


PROMPT_LOGPROBS = (m.TokenLogprobs(-0.5),) * 9


def with_prompt_logprobs(max_tokens: int = 4) -> Generation:
    return msgspec.structs.replace(
        make_generation(), sampling=m.Sampling(max_tokens=max_tokens, seed=1, prompt_logprobs=0)
    )


async def chunks_of(dispatch: Dispatch, generation: Generation) -> list[TokenChunk]:
    return [event async for event in dispatch.generate(generation) if isinstance(event, TokenChunk)]


@pytest.mark.parametrize("fate", ["late", "lost", "its node died"])
async def test_a_prompts_logprobs_come_with_the_first_token_even_when_the_decode_node_speaks_first(fate: str) -> None:
    """They may be 48 MiB, and the decode node's row comes by another connection."""
    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])
    prompts: list[m.Work] = []
    reserved: list[m.Work] = []

    def decodes() -> None:
        work, boot = reserved[-1], cluster.nodes[1].endpoint.incarnation
        for said in (
            row(work, 0, (100, 101)),
            row(work, 2, (102, 103)),
            m.Finished(work.request, work.attempt, "length", 4, m.LegTimings()),
        ):
            cluster.ledger.deliver(work.request, boot, said)

    def prefill(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Prefill):
            prompts.append(message.work)
            answer(m.Scheduled(message.work.request, message.work.attempt))
        elif isinstance(message, m.Deliver):
            decodes()
            work, is_second = prompts[-1], len(prompts) > 1
            if fate == "its node died" and not is_second:
                answer(LegLost("it died"))
                return
            if fate == "late" or is_second:
                answer(m.TokenRow(work.request, work.attempt, 0, (100,), prompt_logprobs=PROMPT_LOGPROBS))
            answer(m.Delivered(work.request, work.attempt, m.LegTimings()))

    def decode(message: m.NodeMessage, answer) -> None:
        if isinstance(message, m.Reserve):
            reserved.append(message.work)
            answer(m.Reserved(make_ticket(message.work, cluster.nodes[1], message.writer)))

    cluster.handlers = {"p0": prefill, "d0": decode}
    chunks = await chunks_of(make_dispatch(cluster, force="remote"), with_prompt_logprobs())
    assert [token for chunk in chunks for token in chunk.token_ids] == EXPECTED
    assert [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs] == [PROMPT_LOGPROBS] and chunks[
        0
    ].prompt_logprobs
    assert len(prompts) == (1 if fate == "late" else 2)
