"""The control channel: frames over a socket, errors that keep their kind, ends that are noticed, and bounds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import BadRequest, DeadlineExceeded, Overloaded, PdclusterError, ProtocolError, UnknownName
from pdcluster_router.cluster.events import Event
from pdcluster_router.workers import channel as channel_module
from pdcluster_router.workers import frames
from pdcluster_router.workers.channel import Channel, WorkerSilent


@asynccontextmanager
async def pair(reply) -> AsyncIterator[tuple[Channel, Channel, list[Event]]]:
    """Both ends of one connection; the second one replies."""
    ends, heard = socket.socketpair(), []

    async def refuse(question):
        raise ProtocolError("nobody asks this end")

    first = Channel("the other", *await asyncio.open_unix_connection(sock=ends[0]), refuse, heard.append)
    second = Channel("the asker", *await asyncio.open_unix_connection(sock=ends[1]), reply, lambda event: None)
    running = [asyncio.create_task(end.run()) for end in (first, second)]
    try:
        yield first, second, heard
    finally:
        first.close()
        second.close()
        await asyncio.gather(*running)


async def echo(question: frames.AskRequests) -> list[str]:
    return [question.node]


async def test_answers_find_their_questions_in_any_order() -> None:
    gates = {name: asyncio.Event() for name in "ab"}

    async def when_told(question: frames.AskRequests) -> str:
        await gates[question.node].wait()
        return question.node

    async with pair(when_told) as (asker, _, _):
        asking = [asyncio.create_task(asker.ask(frames.AskRequests(name), str, 10)) for name in "ab"]
        gates["b"].set()
        assert await asking[1] == "b"
        gates["a"].set()
        assert await asking[0] == "a"


@pytest.mark.parametrize(
    "error",
    [
        UnknownName("no such", "node"),
        BadRequest("odd", None),
        DeadlineExceeded("late", "handshake"),
        Overloaded("full", 2.5),
        PdclusterError("x"),
    ],
)
async def test_an_error_of_the_other_end_keeps_its_kind(error: PdclusterError) -> None:
    async def fails(question: frames.AnyQuestion) -> None:
        raise error

    async with pair(fails) as (asker, _, _):
        with pytest.raises(type(error), match=str(error)) as caught:
            await asker.ask(frames.AskNodes(), list, 10)
        assert vars(caught.value) == {name: value for name, value in vars(error).items() if name != "reason"} | (
            {"reason": "busy"} if isinstance(error, Overloaded) else {}
        )


async def test_a_question_that_is_not_answered_in_time_is_silence() -> None:
    async def never(question: frames.AnyQuestion) -> None:
        await asyncio.Event().wait()

    async with pair(never) as (asker, _, _):
        with pytest.raises(WorkerSilent, match="did not answer within"):
            await asker.ask(frames.AskNodes(), list, 0.05)


async def test_an_end_that_closes_leaves_nobody_waiting() -> None:
    async def never(question: frames.AnyQuestion) -> None:
        await asyncio.Event().wait()

    async with pair(never) as (asker, other, _):
        asking = asyncio.create_task(asker.ask(frames.AskNodes(), list, 60))
        await asyncio.sleep(0.01)
        other.close()
        with pytest.raises(WorkerSilent, match="is gone"):
            await asking
        with pytest.raises(WorkerSilent):
            await asker.ask(frames.AskNodes(), list, 60)


async def test_an_answer_of_another_kind_is_an_error() -> None:
    async with pair(echo) as (asker, _, _):
        with pytest.raises(ProtocolError, match="something else"):
            await asker.ask(frames.AskRequests("n"), int, 10)


async def test_an_answer_that_is_too_large_is_an_error_and_the_channel_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 2000)

    async def large(question: frames.AskRequests) -> str:
        return question.node * 100

    async with pair(large) as (asker, _, _):
        with pytest.raises(ProtocolError, match="too large"):
            await asker.ask(frames.AskRequests("x" * 50), str, 10)
        assert await asker.ask(frames.AskRequests("x"), str, 10) == "x" * 100


async def test_more_questions_than_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_QUESTIONS", 3)
    gate = asyncio.Event()

    async def when_told(question: frames.AnyQuestion) -> int:
        await gate.wait()
        return 1

    async with pair(when_told) as (asker, _, _):
        asking = [asyncio.create_task(asker.ask(frames.AskNodes(), int, 10)) for _ in range(5)]
        done, _ = await asyncio.wait(asking, timeout=0.2)
        assert len(done) == 2 and all(isinstance(task.exception(), Overloaded) for task in done)
        gate.set()
        assert sum(isinstance(found, int) for found in await asyncio.gather(*asking, return_exceptions=True)) == 3


async def test_a_peer_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT_BYTES", 100_000)
    ends = socket.socketpair()
    deaf = Channel("the deaf", *await asyncio.open_unix_connection(sock=ends[0]), echo, lambda event: None)
    with pytest.raises(WorkerSilent, match="reads nothing"):
        for _ in range(10_000):
            deaf.tell(Event(1, 0.0, "role", "n" * 1000, "x"))
    assert not deaf.is_open
    ends[1].close()


async def test_events_are_told_in_order() -> None:
    async with pair(echo) as (_, teller, heard):
        for number in range(100):
            teller.tell(Event(number, 0.0, "role", "n", "x"))
        while len(heard) < 100:
            await asyncio.sleep(0.002)
        assert [event.sequence for event in heard] == list(range(100))


async def test_a_frame_that_makes_no_sense_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    ends = socket.socketpair()
    broken = Channel("the odd", *await asyncio.open_unix_connection(sock=ends[0]), echo, lambda event: None)
    ends[1].sendall(b"\x03\x00\x00\x00abc")
    await broken.run()
    assert not broken.is_open and "is not understood" in caplog.text
    ends[1].close()


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_a_frame_or_a_protocol_error(data: bytes) -> None:
    try:
        frames.decode(data)
    except ProtocolError as error:
        assert "control socket" in str(error)


QUESTIONS = (
    frames.AskNodes(),
    frames.AskCordon("n", True),
    frames.SetPolicy(None, "x", False),
    frames.AskExplain("é" * 50),
)


@given(st.sampled_from(QUESTIONS), st.integers(0))
def test_a_frame_comes_back_as_it_was(question: frames.AnyQuestion, number: int) -> None:
    asked = frames.WorkerQuestion(number % 2**63, question)
    assert frames.decode(frames.encode(asked)[4:]) == asked
