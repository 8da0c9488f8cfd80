"""The channel between rank 0 and another rank: length-prefixed msgpack over a socket pair.

Start and RankPlan go down. Here and Ready come up once each. A second channel carries `messages`. The end of a stream
is the end of the node. It has no state but the socket.
"""

from __future__ import annotations

import select
import socket
import struct
import time

import msgspec
import numpy as np

from pdcluster.core.errors import ProtocolError
from pdcluster.core.messages import Sampling
from pdcluster.core.step import Row, StepPlan
from pdcluster.node.native.tensor_parallel.messages import FromRank, ToRank
from pdcluster.transfer.backends.base import DECODE_ERRORS

LENGTH = struct.Struct("<I")
MAX_BYTES = 256 << 20
MAX_PIECE = 1 << 20


class Media(msgspec.Struct, frozen=True, array_like=True):
    """A rank's transfer endpoint: boot and media of its node, and its pool's region id."""

    node: str
    incarnation: str
    region: int
    backend: str
    host: str
    staging_bytes: int
    devices: tuple[str, ...] = ()
    gid_index: int | None = None
    rails: int | None = None
    port: int | None = None
    is_sealed: bool = False


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a rank computes, and where it finds the others.

    config: the fields of engine.EngineConfig, paths as text.
    cores: empty for all.
    pulse_s: how often it must show that it lives.
    media: None without transfers.
    """

    rank: int
    size: int
    store_port: int
    timeout_s: float
    pulse_s: float
    model_dir: str
    cache_dir: str
    dtype: str
    device: str
    page_tokens: int
    num_pages: int | None
    kv_bytes: int
    max_len: int | None
    threads: int
    log_level: str
    log_format: str
    cores: tuple[int, ...] = ()
    media: Media | None = None
    deterministic: bool = False
    quantization: str = "none"
    weights_files: tuple[str, ...] = ()
    populates: bool = True


class Here(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank runs and is about to join the group."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has its weights and its pool.

    adverts: of its transfer endpoint, by medium.
    """

    num_pages: int
    weights_digest: str
    adverts: tuple[tuple[str, bytes], ...] = ()


class PlanRow(msgspec.Struct, frozen=True, array_like=True):
    """step.Row with packed int32 arrays."""

    request: str
    tokens: bytes
    start: int
    pages: bytes
    sampling: Sampling | None
    output_index: int
    prompt_logprobs: int | None
    next_token: int | None


class RankPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    rows: tuple[PlanRow, ...]
    copies: tuple[tuple[int, int], ...] = ()


RankMessage = Start | Here | Ready | RankPlan | ToRank | FromRank

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


def pack_plan(plan: StepPlan) -> RankPlan:
    """The plan without milestones, which only rank 0 reports, and without histories, since only rank 0 samples."""
    return RankPlan(
        tuple(
            PlanRow(
                row.request,
                row.tokens.astype(np.int32, copy=False).tobytes(),
                row.start,
                row.pages.astype(np.int32, copy=False).tobytes(),
                _bare(row.sampling),
                row.output_index,
                row.prompt_logprobs,
                row.next_token,
            )
            for row in plan.rows
        ),
        plan.copies,
    )


def _bare(sampling: Sampling | None) -> Sampling | None:
    """That a row samples, without its grammar: only rank 0 samples."""
    return sampling if sampling is None or sampling.grammar is None else msgspec.structs.replace(sampling, grammar=None)


def unpack_plan(plan: RankPlan) -> StepPlan:
    """Raises ProtocolError for malformed arrays."""
    for row in plan.rows:
        if len(row.tokens) % 4 or len(row.pages) % 4:
            raise ProtocolError(
                f"a row of {row.request} has {len(row.tokens)} bytes of tokens and {len(row.pages)} of pages, no int32s"
            )
    return StepPlan(
        tuple(
            Row(
                row.request,
                np.frombuffer(row.tokens, np.int32),
                row.start,
                np.frombuffer(row.pages, np.int32),
                row.sampling,
                row.output_index,
                row.prompt_logprobs,
                row.next_token,
            )
            for row in plan.rows
        ),
        copies=plan.copies,
    )


def frame(message: RankMessage) -> bytes:
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


class RankChannel:
    """One end. One thread may send while another receives. Both block; every send has a deadline, a receive may have
    one.
    """

    def __init__(self, sock: socket.socket, *, send_s: float) -> None:
        self.sock = sock
        self._send_s = send_s

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, data: bytes) -> None:
        """Send frames. Raises TimeoutError when the other end takes nothing, OSError when it is gone."""
        view, deadline = memoryview(data), time.monotonic() + self._send_s
        while view := self.offer(view):
            self._wait(select.POLLOUT, deadline)

    def offer(self, view: memoryview) -> memoryview:
        """Send what the other end takes at once, and return the rest. Raises OSError when it is gone."""
        while view:
            try:
                view = view[self.sock.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                break
        return view

    def receive(self, timeout_s: float | None = None) -> RankMessage | None:
        """The next message. None at the end of the stream, also within a message: the other end is gone. Raises
        TimeoutError.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        head = self._take(LENGTH.size, deadline)
        if len(head) < LENGTH.size:
            return None
        length = LENGTH.unpack(head)[0]
        if length > MAX_BYTES:
            raise ProtocolError(
                f"a message of {length} bytes between ranks exceeds {MAX_BYTES} bytes; the processes run different "
                "versions"
            )
        data = self._take(length, deadline)
        if len(data) < length:
            return None
        try:
            return _decoder.decode(data)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"a message between ranks is not readable: {error}") from error

    def shutdown(self) -> None:
        """End the stream, also for a thread in `receive`."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    def close(self) -> None:
        self.sock.close()

    def _take(self, count: int, deadline: float | None) -> bytearray:
        """Exactly so many bytes; fewer only at the end of the stream."""
        data = bytearray()
        while len(data) < count:
            try:
                piece = self.sock.recv(min(count - len(data), MAX_PIECE), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            if not piece:
                break
            data += piece
        return data

    def _wait(self, events: int, deadline: float | None) -> None:
        poller = select.poll()
        poller.register(self.sock, events)
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poller.poll(left_ms):
            raise TimeoutError("the other rank says or takes nothing")
