"""What is said in one turn, gathered into frames of bounded size."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core import messages as m
from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.batch import MAX_BATCH_BYTES, MessageBatch
from pdcluster.wire.codec import MAX_FRAME_BYTES, decode, encode, seal

ME = Peer("prefill-0", "inc-p")


def envelope(sequence: int, *messages: m.AnyMessage) -> m.Envelope:
    return m.Envelope(m.PROTOCOL_VERSION, ME.node, ME.incarnation, "inc-r", sequence, messages)


def filled(*messages: m.AnyMessage, max_frame_bytes: int = MAX_FRAME_BYTES) -> MessageBatch:
    batch = MessageBatch(ME, "inc-r", max_frame_bytes=max_frame_bytes)
    for message in messages:
        assert batch.put(message)
    return batch


small = st.one_of(
    st.builds(m.Release, st.text(min_size=1, max_size=20)),
    st.builds(m.Scheduled, st.just("r"), st.integers(0, 2**31 - 1)),
    st.just(m.AskCache()),
    st.builds(
        lambda tokens: m.Tokens((m.TokenRow("r", 0, 3, tuple(tokens)),)),
        st.lists(st.integers(0, 2**31 - 1), max_size=5),
    ),
)


@given(st.lists(small, min_size=1, max_size=40), st.integers(1, 2**63 - 1))
def test_a_frame_of_a_batch_is_the_envelope_of_its_messages(messages: list[m.AnyMessage], sequence: int) -> None:
    assert decode(filled(*messages).frame(sequence)) == envelope(sequence, *messages)


def test_a_batch_is_empty_again_when_it_is_cleared_and_keeps_its_frame_until_then() -> None:
    batch = filled(m.Release("r1"), m.Release("r2"))
    assert len(batch.parts) == 2 and batch.frame(7) == batch.frame(7)
    batch.clear()
    assert not batch.parts
    assert batch.put(m.Ping())
    assert decode(batch.frame(8)) == envelope(8, m.Ping())


@pytest.mark.parametrize("alone", [m.Hello("node"), m.Welcome("mixed")], ids=lambda message: type(message).__name__)
def test_what_sets_the_count_of_frames_goes_with_nothing_else(alone: m.AnyMessage) -> None:
    assert not filled(m.Release("r")).put(alone)
    batch = filled(alone)
    assert not batch.put(m.Release("r")) and not batch.put(alone) and len(batch.parts) == 1
    batch.clear()
    assert batch.put(m.Release("r")) and batch.put(m.Release("r"))
    with pytest.raises(ProtocolError, match="which come alone"):
        decode(encode(envelope(1, m.Release("r"), alone)))


def test_a_batch_has_a_bound_in_messages_and_one_in_bytes() -> None:
    full = filled(*(m.Release(f"r{number}") for number in range(m.MAX_MESSAGES)))
    assert not full.put(m.AskCache())
    assert len(decode(full.frame(1)).messages) == m.MAX_MESSAGES
    heavy = filled(m.FileChunk("f", 0, 1 << 20, bytes(MAX_BATCH_BYTES - 100)))
    assert not heavy.put(m.FileChunk("f", 0, 1 << 20, bytes(100)))
    assert heavy.put(m.FileChunk("f", 0, 1 << 20, bytes(10)))
    assert not heavy.put(m.FileChunk("f", 0, 1 << 20, bytes(60)))
    assert filled(m.FileChunk("f", 0, 1 << 20, bytes(MAX_BATCH_BYTES))).put(m.Ping()) is False, (
        "a large one has a frame of its own"
    )


@pytest.mark.parametrize("limit", [200, 1000, 70_000, 1 << 20])
def test_no_frame_of_a_batch_exceeds_the_limit_and_what_cannot_fit_is_refused(limit: int) -> None:
    batch = MessageBatch(ME, "inc-r", max_frame_bytes=limit)
    largest = 0
    for size in range(limit - 150, limit):
        message = m.FileChunk("f", 0, 1 << 30, bytes(size))
        try:
            assert batch.put(message)
        except ProtocolError as error:
            assert "FileChunk of" in str(error) and not batch.parts
            continue
        largest = max(largest, len(batch.frame(2**63 - 1)))
        decode(batch.frame(2**63 - 1), max_bytes=limit)
        if batch.put(m.Release("r")):
            assert len(batch.frame(1)) <= limit
        batch.clear()
    assert limit - 10 < largest <= limit


@pytest.mark.parametrize("messages", [(), (m.Release("r"),) * (m.MAX_MESSAGES + 1)], ids=["none", "too many"])
def test_a_frame_of_no_message_or_of_too_many_is_refused(messages: tuple[m.AnyMessage, ...]) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        decode(encode(envelope(1, *messages)))


def test_one_bad_message_makes_the_whole_frame_bad() -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        decode(encode(envelope(1, m.Release("r"), m.Release(""), m.Release("r"))))


def test_only_a_hello_may_leave_the_receiver_open_and_not_behind_other_messages() -> None:
    for messages in ((m.Release("r"),), (m.Release("r"), m.Hello("router"))):
        with pytest.raises(ProtocolError):
            decode(encode(msgspec.structs.replace(envelope(1, *messages), to_incarnation="")))


def test_a_count_that_the_frame_cannot_hold_costs_no_memory() -> None:
    frame = seal(
        b"\x96"
        + b"".join(map(msgspec.msgpack.encode, (m.PROTOCOL_VERSION, "a", "b", "c", 1)))
        + b"\xdd\xff\xff\xff\xff"
    )
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="malformed"):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
