"""How an answer follows from what nodes say, whenever they say it: a line that pauses when the test says so,
generations moved by hand."""

from __future__ import annotations

import gc
import weakref

import pytest
from answer_by_hand import ByHand, asked
from scripted_dispatcher import ROUTE, TEXT

from pdcluster.core.errors import NodeLost
from pdcluster_router.core.generation import Done, Timeline
from pdcluster_router.frontend.response import named_headers
from pdcluster_router.http.exchange import JSON

STOPPED = Done("stop", None, 0, 1, ROUTE, Timeline())


async def test_a_stop_string_that_was_left_unread_does_not_end_the_other_choices() -> None:
    dispatcher = ByHand()
    line, exchange = asked(dispatcher, stream=True, n=2, stop=["END"])
    line.is_paused = True
    position = dispatcher.says(0, 0, "ok END")
    dispatcher.says(0, position, " more")
    position = dispatcher.says(1, 0, "fine")
    line.is_paused = False
    assert exchange.on_resume is not None
    exchange.on_resume()
    dispatcher.sinks[0].on_done(STOPPED)
    dispatcher.sinks[1].on_done(Done("length", None, 0, 1, ROUTE, Timeline()))
    assert b'"ok ' in line.sent and b"more" not in line.sent and b"fine" in line.sent
    assert b"error" not in line.sent and line.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert dispatcher.ends == [f"finished with {len(TEXT.encode('ok END', add_special_tokens=False))}"]


async def test_a_stop_string_ends_its_generation_at_once_though_its_client_does_not_read() -> None:
    dispatcher = ByHand()
    line, exchange = asked(dispatcher, stream=True, stop=["END"])
    line.is_paused = True
    dispatcher.says(0, 0, "ok END")
    assert (
        dispatcher.ends == [f"finished with {len(TEXT.encode('ok END', add_special_tokens=False))}"] and not line.sent
    )
    dispatcher.sinks[0].on_done(STOPPED)
    line.is_paused = False
    assert exchange.on_resume is not None
    exchange.on_resume()
    assert (
        b'"ok ' in line.sent
        and b'"finish_reason":"stop"' in line.sent
        and line.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    )


async def test_a_choice_that_fails_ends_the_others_at_once_though_their_client_does_not_read() -> None:
    dispatcher = ByHand()
    line, exchange = asked(dispatcher, stream=True, n=2)
    dispatcher.says(0, 0, "one")
    line.is_paused = True
    dispatcher.says(1, 0, "two")
    dispatcher.sinks[0].on_error(NodeLost("node n-1 is gone"))
    assert dispatcher.ends == ["node n-1 is gone"] * 2 and b"two" not in line.sent
    line.is_paused = False
    assert exchange.on_resume is not None
    exchange.on_resume()
    told = line.sent.decode()
    assert told.index("one") < told.index("two") < told.index("event: error") and "node n-1 is gone" in told


async def test_a_bug_in_starting_one_choice_ends_those_that_run_and_answers_once() -> None:
    dispatcher = ByHand()

    def fails_at_the_second() -> None:
        if len(dispatcher.sinks) == 2:
            raise RuntimeError("a bug")

    dispatcher.on_start = fails_at_the_second
    line, exchange = asked(dispatcher, n=3)
    assert line.sent.startswith(b"HTTP/1.1 500 ") and exchange.finished
    assert dispatcher.ends == ["a bug"] and len(dispatcher.sinks) == 2
    told = line.sent
    dispatcher.says(0, 0, "late")
    assert line.sent == told, "nothing comes after the answer"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_that_is_an_error_is_no_garbage(is_stream: bool) -> None:
    dispatcher = ByHand()
    line, exchange = asked(dispatcher, stream=is_stream)
    sink = dispatcher.sinks.pop()
    gc.collect()
    gc.disable()
    try:
        sink.on_error(NodeLost("node n-1 is gone"))
        assert exchange.finished
        left = weakref.ref(line)
        del line, exchange, sink
        assert left() is None, "only the garbage collector finds it"
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["n-1\r\nset-cookie: a=b", "n-1\nx: y", "n\x00", "n\x7f\x85"])
def test_what_nodes_call_themselves_and_their_media_begins_no_line_of_a_head(name: str) -> None:
    head = named_headers(JSON, "remote", name, name, name)
    lines = head.split(b"\r\n")
    assert [line.partition(b":")[0] for line in lines] == [
        b"content-type", b"x-pdcluster-mode", b"x-pdcluster-prefill", b"x-pdcluster-decode", b"x-pdcluster-transfer",
        b"",
    ]  # fmt: skip
    assert all(line.decode("latin-1").isprintable() for line in lines)


def test_names_that_no_head_can_hold_are_told_as_far_as_it_can() -> None:
    assert (
        named_headers(JSON, "local", None, "\u7bc0 caf\xe9", "")
        == JSON + b"x-pdcluster-mode: local\r\nx-pdcluster-decode: ? caf\xe9\r\n"
    )
