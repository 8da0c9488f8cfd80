"""Hellos that prove a token, and records that only the other end of their lane can read, each once and in order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends import sealing
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.backends.lane_hello import TOKEN_BYTES, Greeted, LaneKeys, hear_hello, say_hello
from pdcluster.transfer.backends.sealing import LENGTH, RECORD_BYTES, TAG_BYTES, RecordOpener, RecordSealer
from pdcluster.transfer.backends.tcp_links import SealedLink

TOKEN, OTHER = bytes(range(TOKEN_BYTES)), bytes(TOKEN_BYTES)
WRITER = Peer("prefill-0", "boot-1")
KEY = bytes(range(1, 33))


class Wire:
    """Both halves of a hello in one thread. said: every byte, in order. `change` is applied to what is sent."""

    def __init__(self, reader_token: bytes, *, is_sealed: bool = True, flip: int = -1) -> None:
        self.said = b""
        self.greeted: Greeted | None = None
        self._flip = flip
        self._to_writer = self._to_reader = b""
        self._reader = hear_hello(reader_token, is_sealed=is_sealed, send=self._say_to_writer)
        self._needed = next(self._reader)

    def send(self, data: bytes) -> None:
        self._to_reader += self._passed(data)
        while self.greeted is None and len(self._to_reader) >= self._needed:
            taken, self._to_reader = self._to_reader[: self._needed], self._to_reader[self._needed :]
            try:
                self._needed = self._reader.send(taken)
            except StopIteration as end:
                self.greeted = end.value

    def receive(self, nbytes: int) -> bytes:
        if len(self._to_writer) < nbytes:
            raise ProtocolError("the reader says nothing more")
        taken, self._to_writer = self._to_writer[:nbytes], self._to_writer[nbytes:]
        return taken

    def _say_to_writer(self, data: bytes) -> None:
        self._to_writer += self._passed(data)

    def _passed(self, data: bytes) -> bytes:
        at = self._flip - len(self.said)
        self.said += data
        return data if not 0 <= at < len(data) else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def hello(wire: Wire, token: bytes = TOKEN, *, is_sealed: bool = True) -> LaneKeys | None:
    return say_hello(WRITER, token, is_sealed=is_sealed, send=wire.send, receive=wire.receive)


def test_both_ends_get_the_same_keys_and_the_token_is_not_said() -> None:
    first, second = Wire(TOKEN), Wire(TOKEN)
    keys = hello(first)
    assert keys is not None and first.greeted == Greeted(WRITER, keys)
    assert keys.to_reader != keys.to_writer and keys != hello(second)
    assert TOKEN not in first.said and TOKEN[:16] not in first.said and keys.to_reader not in first.said
    assert "secret" in repr(keys) and repr(keys.to_reader) not in repr(keys)


def test_a_plain_lane_has_no_keys() -> None:
    wire = Wire(TOKEN, is_sealed=False)
    assert hello(wire, is_sealed=False) is None and wire.greeted == Greeted(WRITER, None)


@pytest.mark.parametrize(("ours", "theirs"), [(TOKEN, OTHER), (OTHER, TOKEN)])
def test_another_token_is_refused(ours: bytes, theirs: bytes) -> None:
    wire = Wire(theirs)
    with pytest.raises(ProtocolError):
        hello(wire, ours)
    assert wire.greeted is None


def test_whichever_byte_of_a_hello_is_changed_one_end_notices() -> None:
    whole = Wire(TOKEN)
    hello(whole)
    for number in range(len(whole.said) - 1):  # the last one is the welcome
        with pytest.raises(ProtocolError):
            wire = Wire(TOKEN, flip=number)
            hello(wire)


# ---------------------------------------------------------------- records


def opened(opener: RecordOpener, record: bytes) -> bytes:
    head, sealed = record[: LENGTH.size], record[LENGTH.size :]
    plain = bytearray(opener.size_of(head) - TAG_BYTES)
    opener.open_into(head, memoryview(sealed), memoryview(plain))
    return bytes(plain)


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8))
def test_records_come_out_as_they_went_in_and_show_nothing(parts: list[bytes]) -> None:
    sealer, opener = RecordSealer(KEY), RecordOpener(KEY)
    records = [bytes(sealer.seal(part)) for part in parts]
    assert [opened(opener, record) for record in records] == parts
    assert all(part not in record for part, record in zip(parts, records, strict=True) if len(part) > 3)


@given(st.integers(0, 2**32), st.sampled_from(["flip", "repeat", "swap", "drop", "other key", "other direction"]))
def test_a_record_that_is_not_the_next_one_ends_the_lane(seed: int, fault: str) -> None:
    chance = Random(seed)
    sealer, opener = RecordSealer(KEY), RecordOpener(KEY)
    records = [bytes(sealer.seal(chance.randbytes(40))) for _ in range(4)]
    at = chance.randrange(3)
    if fault == "flip":
        place = chance.randrange(LENGTH.size, len(records[at]))
        records[at] = (
            records[at][:place] + bytes([records[at][place] ^ 1 << chance.randrange(8)]) + records[at][place + 1 :]
        )
    elif fault == "repeat":
        records[at + 1] = records[at]
    elif fault == "swap":
        records[at], records[at + 1] = records[at + 1], records[at]
    elif fault == "drop":
        del records[at]
    else:
        opener = RecordOpener(bytes(32))
    with pytest.raises(ProtocolError, match="next one of its lane"):
        for record in records:
            opened(opener, record)


@pytest.mark.parametrize("size", [0, TAG_BYTES, RECORD_BYTES + TAG_BYTES + 1, 2**32 - 1])
def test_a_record_of_an_impossible_size_is_refused_before_it_is_read(size: int) -> None:
    with pytest.raises(ProtocolError, match="sealed record of"):
        RecordOpener.size_of(LENGTH.pack(size))


def test_a_lane_ends_before_its_numbers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "MAX_RECORDS", 2)
    sealer = RecordSealer(KEY)
    sealer.seal(b"1"), sealer.seal(b"2")
    with pytest.raises(ProtocolError, match="ends after"):
        sealer.seal(b"3")


# ---------------------------------------------------------------- links


@contextmanager
def sealed_pair() -> Iterator[tuple[SealedLink, SealedLink]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        near, _ = server.accept()
        with near:
            yield SealedLink(far, WRITER, 20.0, KEY, bytes(32)), SealedLink(near, WRITER, 20.0, bytes(32), KEY)


def test_bytes_arrive_whole_whatever_the_sizes_of_sends_and_receives() -> None:
    chance = Random(7)
    sent = [chance.randbytes(chance.choice((1, 33, 4096, RECORD_BYTES, 3 * RECORD_BYTES + 5))) for _ in range(30)]
    total = sum(map(len, sent))
    with sealed_pair() as (writer, reader):
        thread = threading.Thread(target=lambda: [writer.send(data) for data in sent])
        thread.start()
        received = b""
        while len(received) < total:
            received += bytes(reader.receive(min(chance.choice((1, 7, 5000, 2 * RECORD_BYTES)), total - len(received))))
        thread.join()
    assert received == b"".join(sent)


def test_a_thread_that_polls_sends_and_receives_without_waiting() -> None:
    data = Random(8).randbytes(5 * RECORD_BYTES)
    with sealed_pair() as (writer, reader):
        left, taken = memoryview(data), b""
        is_flushed = False
        while len(taken) < len(data):
            try:
                if left:
                    left = left[writer.send_some([left, left]) :]
                writer.flush()
                is_flushed = not left
            except BlockingIOError:
                pass
            try:
                taken += reader.recv_some(100_000)
            except BlockingIOError:
                continue
        assert taken == data and is_flushed and writer.num_flushed > len(data)
        writer.sock.close()
        assert reader.recv_some(10) == b""
