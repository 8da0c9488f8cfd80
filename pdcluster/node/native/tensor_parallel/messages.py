"""Messages between rank 0 and another rank about transfers: the verbs of `transfer.backends.base` and their answers.

They have a channel beside that of the plans. `endpoint_client` is rank 0's end, `endpoint` the other. medium: a
backend's name. Tables of runs and spans are packed little-endian 64-bit words. question: comes back in the answer.
Messages are handled in order.
"""

from __future__ import annotations

import msgspec
import numpy as np

from pdcluster.transfer.backends.base import Arrival, Peer, Permit, Stamp
from pdcluster.transfer.layout.runs import RunTable, SpanTable, span_table


class RankMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# ---------------------------------------------------------------- rank 0 → rank


class Allow(RankMessage, frozen=True):
    """A permit."""

    medium: str
    nonce: int
    writer: tuple[str, str]
    region: int
    ranges: bytes
    digests: bool


class Revoke(RankMessage, frozen=True):
    medium: str
    nonce: int
    question: int


class WriteRequest(RankMessage, frozen=True):
    """A write.

    handle: rank 0's.
    advert: of its ticket, to connect with first.
    stamp: nonce, chunk, trial, nbytes.
    """

    medium: str
    handle: int
    peer: tuple[str, str]
    advert: bytes
    source_region: int
    target_region: int
    stamp: tuple[int, int, int, int]
    runs: bytes
    digests: bool


class Close(RankMessage, frozen=True):
    medium: str
    peer: tuple[str, str]
    question: int


class Digest(RankMessage, frozen=True):
    """Digest these bytes of the rank's pool."""

    question: int
    spans: bytes


class Mark(RankMessage, frozen=True):
    """Answered when all before it was done and all arrivals until then were reported."""

    question: int


# ---------------------------------------------------------------- rank → rank 0


class Settled(RankMessage, frozen=True):
    """A write's state: the value of a WriteStatus.

    digest, seconds: of a finished one.
    """

    medium: str
    handle: int
    status: int
    digest: int | None = None
    seconds: float | None = None


class Arrived(RankMessage, frozen=True):
    medium: str
    stamp: tuple[int, int, int, int]
    digest: int | None
    spans: bytes
    region: int


class Fenced(RankMessage, frozen=True):
    """Answers Revoke and Close.

    advert: as it is now.
    """

    medium: str
    question: int
    is_fenced: bool
    advert: bytes


class DigestResult(RankMessage, frozen=True):
    """Answers Digest, and Mark (0)."""

    question: int
    value: int


ToRank = Allow | Revoke | WriteRequest | Close | Digest | Mark
FromRank = Settled | Arrived | Fenced | DigestResult


# ---------------------------------------------------------------- values


def allow(medium: str, permit: Permit) -> Allow:
    return Allow(
        medium, permit.nonce, name_of(permit.writer), permit.region, span_table(permit.ranges).pack(), permit.digests
    )


def permit_of(message: Allow) -> Permit:
    return Permit(
        message.nonce, Peer(*message.writer), message.region, SpanTable.unpack(message.ranges), message.digests
    )


def arrived(medium: str, arrival: Arrival) -> Arrived:
    return Arrived(medium, words_of(arrival.stamp), arrival.digest, span_table(arrival.spans).pack(), arrival.region)


def words_of(stamp: Stamp) -> tuple[int, int, int, int]:
    return stamp.nonce, stamp.chunk, stamp.trial, stamp.nbytes


def name_of(peer: Peer) -> tuple[str, str]:
    return peer.node, peer.incarnation


def pack_runs(runs: RunTable) -> bytes:
    return runs.rows.astype("<i8", copy=False).tobytes()


def unpack_runs(data: bytes) -> RunTable:
    return RunTable(np.frombuffer(data, dtype="<i8").reshape(-1, 3))
