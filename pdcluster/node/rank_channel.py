"""What rank 0 of a tensor-parallel node and its other ranks say to each other: length-prefixed msgpack over a socket pair.

Start and Plan go down; Here and Ready come up once each, the latter with the rank's pool as a descriptor. The end of the stream is the end of the
node. No state but the socket; which process is started or declared dead is not decided here.
"""

from __future__ import annotations

import os
import socket
import struct

import msgspec
import numpy as np

from pdcluster.errors import ProtocolError
from pdcluster.messages import Sampling
from pdcluster.step import Row, StepPlan
from pdcluster.transfer.base import DECODE_ERRORS

LENGTH = struct.Struct("<I")
MAX_BYTES = 256 << 20


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a rank computes, and where it finds the others. config: the fields of engine.EngineConfig, paths as text; cores: empty for all;
    pulse_s: how often it must show that it lives."""

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


class Here(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank runs and is about to join the group."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has its weights and its pool. Its memfd travels beside the message, unless the pool is in device memory."""

    num_pages: int
    pool_bytes: int
    weights_digest: str


class PlanRow(msgspec.Struct, frozen=True, array_like=True):
    """step.Row, its arrays as packed int32."""

    request: str
    tokens: bytes
    start: int
    pages: bytes
    sampling: Sampling | None
    output_index: int
    prompt_logprobs: int | None
    next_token: int | None


class Plan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    rows: tuple[PlanRow, ...]


RankMessage = Start | Here | Ready | Plan

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankMessage)


def pack_plan(plan: StepPlan) -> Plan:
    """The plan without its bells: only rank 0 rings."""
    return Plan(
        tuple(
            PlanRow(
                row.request,
                row.tokens.astype(np.int32, copy=False).tobytes(),
                row.start,
                row.pages.astype(np.int32, copy=False).tobytes(),
                row.sampling,
                row.output_index,
                row.prompt_logprobs,
                row.next_token,
            )
            for row in plan.rows
        )
    )


def unpack_plan(plan: Plan) -> StepPlan:
    """Raises ProtocolError for arrays that are none."""
    for row in plan.rows:
        if len(row.tokens) % 4 or len(row.pages) % 4:
            raise ProtocolError(f"a row of {row.request} has {len(row.tokens)} bytes of tokens and {len(row.pages)} of pages, no int32s")
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
        )
    )


def frame(message: RankMessage) -> bytes:
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


class RankChannel:
    """One end. Owned by one thread; blocking, with a deadline for every send and, when told so, for a receive."""

    def __init__(self, sock: socket.socket, *, send_s: float) -> None:
        self.sock = sock
        self._send_s = send_s

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """A `frame`; raises TimeoutError when the other end takes nothing, OSError when it is gone."""
        self.sock.settimeout(self._send_s)
        sent = socket.send_fds(self.sock, [data], list(fds)) if fds else 0
        self.sock.sendall(memoryview(data)[sent:])

    def receive(self, timeout_s: float | None = None) -> tuple[RankMessage, list[int]] | None:
        """The next message and the descriptors beside it, which the caller closes; None at the end of the stream."""
        self.sock.settimeout(timeout_s)
        fds: list[int] = []
        try:
            head = self._take(LENGTH.size, fds)
            if not head:
                return None
            length = LENGTH.unpack(head)[0]
            if length > MAX_BYTES:
                raise ProtocolError(f"a message of {length} bytes between ranks exceeds {MAX_BYTES} bytes; the processes run different versions")
            return _decoder.decode(self._take(length, fds)), fds
        except (*DECODE_ERRORS, struct.error) as error:
            _close_all(fds)
            raise ProtocolError(f"a message between ranks is not readable: {error}") from error
        except BaseException:
            _close_all(fds)
            raise

    def close(self) -> None:
        self.sock.close()

    def _take(self, count: int, fds: list[int]) -> bytearray:
        """Exactly so many bytes, fewer only at the end of the stream."""
        data = bytearray()
        while len(data) < count:
            piece, more, _, _ = socket.recv_fds(self.sock, count - len(data), 4)
            fds += more
            if not piece:
                break
            data += piece
        return data


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
