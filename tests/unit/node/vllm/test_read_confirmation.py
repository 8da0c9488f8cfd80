"""A read of parked KV counts once, in time and for its own prompt, in whatever order its parts arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.node.vllm.engine.read_confirmation import (
    ConfirmationClient,
    ConfirmationServer,
    ReadBook,
    ReadNotice,
    ReadQuestion,
    parse_notice,
)

QUESTION = ReadQuestion("r1-ab", "reader1", "fence1")


@pytest.fixture
def book() -> ReadBook:
    book = ReadBook()
    book.hold("r1-ab", "fence1")
    return book


@pytest.fixture
def server(book: ReadBook) -> Iterator[ConfirmationServer]:
    server = ConfirmationServer(book, "127.0.0.1")
    yield server
    server.close()


def outcome(client: ConfirmationClient, timeout_s: float = 5.0) -> tuple[set[str], set[str]]:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        confirmed, refused = client.collect()
        if confirmed or refused:
            return confirmed, refused
    raise AssertionError("no outcome")


def test_the_first_reader_is_confirmed_again_and_again_also_after_the_end(book: ReadBook) -> None:
    assert book.confirm(QUESTION)
    book.forget("r1-ab")
    assert book.confirm(QUESTION)


def test_a_second_reader_is_refused_while_the_kv_is_held_and_after(book: ReadBook) -> None:
    second = ReadQuestion("r1-ab", "reader2", "fence1")
    assert book.confirm(QUESTION)
    assert not book.confirm(second)
    book.forget("r1-ab")
    assert not book.confirm(second)


def test_a_foreign_reader_is_refused_and_takes_nothing_from_the_right_one(book: ReadBook) -> None:
    assert not book.confirm(ReadQuestion("r1-ab", "reader2", "fence2"))
    assert book.confirm(QUESTION)


def test_a_reader_after_the_lease_is_refused(book: ReadBook) -> None:
    book.forget("r1-ab")
    assert not book.confirm(QUESTION)


def test_a_request_without_a_fence_is_never_confirmed() -> None:
    book = ReadBook()
    book.hold("r1", "")
    assert not book.confirm(ReadQuestion("r1", "reader1", ""))


def test_nobody_reads_what_was_released(book: ReadBook) -> None:
    assert book.release("r1-ab")
    assert not book.confirm(QUESTION)
    assert not book.release("unknown")


def test_books_of_readers_are_bounded() -> None:
    book = ReadBook(max_readers=4)
    for number in range(20):
        book.hold(f"r{number}", "f")
        assert book.confirm(ReadQuestion(f"r{number}", "a", "f"))
        book.forget(f"r{number}")
    assert len(book) == 0
    # The oldest is unknown, so it gets a no rather than a second yes.
    assert not book.confirm(ReadQuestion("r0", "a", "f"))
    assert book.confirm(ReadQuestion("r19", "a", "f"))


@given(st.lists(st.sampled_from(["a", "b", "c", "forget", "release"]), max_size=12))
def test_at_most_one_reader_gets_a_yes_and_only_one_that_asked_while_held(events: list[str]) -> None:
    book = ReadBook()
    book.hold("r", "f")
    is_open, first = True, None
    for event in events:
        if event == "forget":
            book.forget("r")
            is_open = False
        elif event == "release":
            if is_open:
                book.release("r")
                first = None
                is_open = False
                book.forget("r")
        else:
            if is_open and first is None:
                first = event
            assert book.confirm(ReadQuestion("r", event, "f")) == (event == first)


def test_a_question_gets_its_answer_over_the_wire(server: ConfirmationServer) -> None:
    client = ConfirmationClient()
    client.ask("key1", QUESTION, [server.address])
    assert outcome(client) == ({"key1"}, set())
    client.ask("key2", ReadQuestion("r1-ab", "reader2", "fence1"), [server.address])
    assert outcome(client) == (set(), {"key2"})
    assert client.num_open == 0
    client.close()


def test_every_rank_must_say_yes(server: ConfirmationServer) -> None:
    other = ConfirmationServer(ReadBook(), "127.0.0.1")
    client = ConfirmationClient()
    client.ask("key1", QUESTION, [server.address, other.address])
    assert outcome(client) == (set(), {"key1"})
    client.close()
    other.close()


def test_no_answer_is_a_no() -> None:
    client = ConfirmationClient(timeout_s=0.1)
    client.ask("key1", QUESTION, ["tcp://127.0.0.1:9"])
    began = time.monotonic()
    assert outcome(client) == (set(), {"key1"})
    assert time.monotonic() - began < 2.0
    client.close()


def test_an_address_that_cannot_be_asked_is_a_no() -> None:
    client = ConfirmationClient()
    client.ask("key1", QUESTION, ["tcp://127.0.0.1:nonsense"])
    assert outcome(client) == (set(), {"key1"})
    client.close()


@pytest.mark.parametrize("data", [b"", b"\x93", b"x" * 200, msgspec.msgpack.encode(["a|b", "c", "d"])])
def test_a_server_outlives_hostile_bytes(server: ConfirmationServer, data: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(server.address)
        socket.send(data)
    client = ConfirmationClient()
    client.ask("key1", QUESTION, [server.address])
    assert outcome(client) == ({"key1"}, set())
    client.close()


def test_the_thread_of_a_server_ends_with_it(book: ReadBook) -> None:
    before = threading.active_count()
    ConfirmationServer(book, "127.0.0.1").close()
    assert threading.active_count() == before


def test_a_notice_is_read_as_it_was_written() -> None:
    notice = ReadNotice("r1-ab", "reader1", "fence1", 4)
    assert parse_notice(f"{notice.name}:4") == notice


@pytest.mark.parametrize(
    "text", ["", ":", "r1:1", "a|b|c", "a|b|c:", "a|b|c:0", "a|b|c:-1", "a|b|c:99999", "a|b|c|d:1", "a|b|c:²"]
)
def test_what_is_no_notice_is_none(text: str) -> None:
    assert parse_notice(text) is None
