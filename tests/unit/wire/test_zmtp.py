"""Bytes of ZMTP into frames: however they are cut, and whatever does not belong there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.core.errors import ProtocolError
from pdcluster.wire.zmtp import GREETING, GREETING_BYTES, MAX_COMMAND_BYTES, READY, Reader, framed, head_of

MOST = 1000
COMMAND, LONG, MORE = 4, 2, 1
PEER_READY = framed(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER", COMMAND)


def ready_reader(most: int = MOST) -> Reader:
    reader = Reader(most)
    reader.feed(GREETING + PEER_READY)
    reader.answers.clear()
    return reader


def test_our_greeting_is_of_version_3_without_encryption() -> None:
    assert len(GREETING) == GREETING_BYTES
    assert GREETING[:10] == b"\xff\0\0\0\0\0\0\0\0\x7f" and GREETING[10] == 3
    assert GREETING[12:32].rstrip(b"\0") == b"NULL" and not any(GREETING[32:])


def test_we_are_ready_after_a_greeting_and_may_send_after_a_ready() -> None:
    reader = Reader(MOST)
    reader.feed(GREETING)
    assert reader.answers == [READY] and not reader.is_ready
    reader.feed(PEER_READY)
    assert reader.answers == [READY] and reader.is_ready and not reader.frames


@pytest.mark.parametrize(("size", "head"), [(0, b"\0\0"), (255, b"\0\xff"), (256, b"\x02\0\0\0\0\0\0\x01\0")])
def test_what_stands_before_a_message(size: int, head: bytes) -> None:
    assert head_of(size) == head and framed(bytes(size)) == head + bytes(size)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=600), max_size=8), st.data())
def test_frames_come_whole_and_in_order_however_they_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    said = GREETING + PEER_READY + b"".join(map(framed, bodies))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=10)))
    reader = Reader(MOST)
    for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
        reader.feed(said[start:end])
    assert list(reader.frames) == bodies and reader.answers == [READY] and reader.is_ready


def test_frames_come_whole_byte_by_byte() -> None:
    reader = Reader(MOST)
    for byte in GREETING + PEER_READY + framed(b"a" * 300) + framed(b"b"):
        reader.feed(bytes((byte,)))
    assert list(reader.frames) == [b"a" * 300, b"b"]


def test_what_is_asked_is_answered_with_its_own_words() -> None:
    reader = ready_reader()
    reader.feed(framed(b"\x04PING\0\x0acontext", COMMAND) + framed(b"said") + framed(b"\x04PONGcontext", COMMAND))
    assert reader.answers == [framed(b"\x04PONGcontext", COMMAND)] and list(reader.frames) == [b"said"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 400", "does not speak ZMTP"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "before 3"),
        (GREETING[:9] + b"\x7e" + GREETING[10:], "before 3"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32), "'CURVE'.*cluster key"),
        (GREETING + framed(b"early"), "before it was ready"),
        (GREETING + framed(b"\x05ERROR\x07go away", COMMAND), "refuses us: b'go away'"),
        (GREETING + PEER_READY + PEER_READY, "command that is not known here.*READY"),
        (GREETING + PEER_READY + framed(b"\x09SUBSCRIBE", COMMAND), "command that is not known"),
        (GREETING + PEER_READY + framed(b"a", MORE) + framed(b"b"), "more than one part"),
        (GREETING + PEER_READY + b"\x08\x01a", "flags 0x8"),
        (GREETING + PEER_READY + framed(b"x", COMMAND | MORE), "flags 0x5"),
        (GREETING + PEER_READY + framed(b"\x04PING\0\0" + bytes(17), COMMAND), "context of 17 bytes, allowed are 16"),
    ],
)
def test_what_does_not_belong_there_is_refused(said: bytes, why: str) -> None:
    reader = Reader(MOST)
    with pytest.raises(ProtocolError, match=why):
        reader.feed(said)


@pytest.mark.parametrize(("flags", "most"), [(LONG, MOST), (LONG | COMMAND, MAX_COMMAND_BYTES)])
def test_a_size_is_refused_before_its_bytes_come(flags: int, most: int) -> None:
    reader = ready_reader()
    reader.feed(bytes((flags,)) + most.to_bytes(8, "big"))
    with pytest.raises(ProtocolError, match=f"{most + 1} bytes exceeds the limit of {most}"):
        ready_reader().feed(bytes((flags,)) + (most + 1).to_bytes(8, "big"))


def test_the_largest_frame_is_taken() -> None:
    reader = ready_reader()
    reader.feed(framed(b"x" * MOST))
    assert list(reader.frames) == [b"x" * MOST]
