"""Rows that just go on pass the request by: what it knows is the same as if it had read them, and whatever else happens
to it, it reads on."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest
from dispatch_pair import NoModels, make_dispatch, make_generation
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_cluster import FakeCluster, make_chooser, make_node

from pdcluster.core import messages as m
from pdcluster_router.core.generation import Done, TakeTokens, TokenChunk
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.request.dispatcher import Dispatch
from pdcluster_router.request.request import Request
from pdcluster_router.request.retries import DispatchSettings

BOOT = "m0-boot"


class Sink:
    """Keeps what it hears; short: whether it takes anything without a Chunk now."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_short = 0
        self.is_short = True
        self.fails = False
        self.end: Done | Exception | None = None

    def on_chunk(self, chunk: TokenChunk) -> None:
        assert chunk.position == len(self.tokens)
        self.tokens += chunk.token_ids

    def fast_token_path(self) -> TakeTokens | None:
        return self._take if self.is_short else None

    def _take(self, position: int, token_ids: tuple[int, ...]) -> bool:
        if not self.is_short or len(token_ids) != 1:
            return False
        if self.fails:
            raise ZeroDivisionError
        assert position == len(self.tokens)
        self.num_short += 1
        self.tokens += token_ids
        return True

    def on_done(self, done: Done) -> None:
        assert self.end is None
        self.end = done

    def on_error(self, error: Exception) -> None:
        assert self.end is None
        self.end = error


def begun(max_tokens: int = 50) -> tuple[FakeCluster, Dispatch, Sink]:
    cluster, sink = FakeCluster([make_node("m0", "mixed")]), Sink()
    dispatch = make_dispatch(cluster)
    dispatch.start(make_generation(max_tokens=max_tokens), sink)
    return cluster, dispatch, sink


def say(cluster: FakeCluster, position: int, *tokens: int, attempt: int = 0, boot: str = BOOT) -> int:
    return cluster.ledger.deliver_rows(boot, [m.TokenRow("r1", attempt, position, tokens)], time.monotonic())


def finished(num_output: int, attempt: int = 0) -> m.Finished:
    return m.Finished("r1", attempt, "length", num_output, m.LegTimings(decode_tokens=num_output))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("row"), st.integers(1, 3)),
        st.tuples(
            st.sampled_from(["again", "early", "stranger", "older", "empty", "scheduled", "held back", "reads"]),
            st.just(0),
        ),
    ),
    max_size=25,
)


@given(STEPS)
@settings(deadline=None)
def test_whatever_is_said_in_between_every_token_comes_once_and_in_its_place(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[str, int]]) -> None:
    cluster, dispatch, sink = begun()
    said: list[int] = []
    for what, count in [*steps, ("row", 1)]:
        position = len(said)
        if what == "row":
            said += range(position, position + count)
            say(cluster, position, *said[position:])
        elif what == "again" and position:
            say(cluster, position - 1, said[-1])
        elif what == "early":
            say(cluster, position + 1, position + 1)
            say(cluster, position, position)
            said += [position, position + 1]
        elif what == "stranger":
            say(cluster, position, 99, boot="m1-boot")
        elif what == "older":
            say(cluster, position, 99, attempt=7)
        elif what == "empty":
            say(cluster, position)
        elif what == "scheduled":
            cluster.ledger.deliver("r1", BOOT, m.Scheduled("r1", 0, 0))
        else:
            sink.is_short = what == "reads"
        assert sink.tokens == said
        assert [entry.num_output for entry in dispatch.open.all()] == [len(said)]
        assert cluster.ledger.open_attempts(BOOT) == (("r1", 0, len(said)),)
    cluster.ledger.deliver("r1", BOOT, finished(len(said)))
    assert isinstance(sink.end, Done) and cluster.ledger.num_requests() == 0
    assert say(cluster, len(said), 99) == 1, "nobody waits for more"


async def test_the_last_row_may_come_behind_the_last_word() -> None:
    cluster, _, sink = begun()
    for position in range(5):
        say(cluster, position, position)
    assert sink.num_short == 3
    cluster.ledger.deliver("r1", BOOT, finished(6))
    assert sink.end is None
    say(cluster, 5, 5)
    assert sink.tokens == [0, 1, 2, 3, 4, 5] and isinstance(sink.end, Done)


async def test_the_next_attempt_goes_on_behind_tokens_that_went_the_short_way() -> None:
    cluster, _, sink = begun()
    for position in range(6):
        say(cluster, position, 100 + position)
    assert sink.num_short == 4
    cluster.ledger.deliver("r1", BOOT, m.Failed("r1", 0, "internal", "the step failed", retryable=True))
    again = [message.work for message in cluster.sent_to("m0", m.Prefill) if message.work.attempt == 1]
    assert m.unpack_tokens(again[0].token_ids)[-6:] == [100, 101, 102, 103, 104, 105]
    assert say(cluster, 6, 9) == 0 and sink.tokens[-1] == 105, "the old attempt is not heard"
    say(cluster, 6, 106, attempt=1)
    assert sink.tokens[-1] == 106


async def test_a_cancelled_request_takes_no_more_rows() -> None:
    cluster, dispatch, sink = begun()
    for position in range(5):
        say(cluster, position, position)
    dispatch.open.cancel("r1", "enough")
    assert say(cluster, 5, 5) == 1 and sink.tokens == [0, 1, 2, 3, 4] and isinstance(sink.end, Exception)


@pytest.mark.parametrize("end", ["cancelled", "left", "failed"])
async def test_a_request_that_ends_on_the_short_way_is_no_garbage(end: str) -> None:
    cluster, sink = FakeCluster([make_node("m0", "mixed")]), Sink()
    dispatch = make_dispatch(cluster)
    running = dispatch.start(make_generation(max_tokens=50), sink)
    for position in range(5):
        say(cluster, position, position)
    assert sink.num_short == 3
    gc.collect()
    gc.disable()
    try:
        if end == "cancelled":
            dispatch.open.cancel("r1", "enough")
        elif end == "left":
            running.cancel("the client left")
        else:
            sink.fails = True
            say(cluster, 5, 5)
            assert isinstance(sink.end, ZeroDivisionError)
            sink.end = None  # its traceback names the sink
        left = weakref.ref(sink)
        del sink, running
        assert left() is None, "only the garbage collector finds it"
    finally:
        gc.enable()


async def test_rows_on_the_short_way_show_that_a_node_lives_and_their_end_is_noticed() -> None:
    moment = 0.0
    cluster, sink = FakeCluster([make_node("m0", "mixed")]), Sink()
    stages = StageDeadlines(liveness_s=30.0)
    dispatch = Dispatch(cluster, NoModels(), make_chooser(cluster), DispatchSettings(stages=stages), lambda: moment)
    run = dispatch.start(make_generation(max_tokens=50, deadline_s=500.0), sink)
    assert isinstance(run, Request)
    for position in range(5):
        moment = 5.0 * position
        cluster.ledger.deliver_rows(BOOT, [m.TokenRow("r1", 0, position, (7,))], moment)
    assert sink.num_short == 3
    for later, num_sent in ((41.0, 1), (49.9, 1), (50.1, 2)):  # the last row came at 20
        moment = later
        run.ring()
        assert len(cluster.sent_to("m0", m.Prefill)) == num_sent
