"""Envelopes as msgpack frames: `encode` or `assemble` what leaves, `decode` and check what a peer sent.

A frame ends with a digest, because TCP's checksum misses a damaged frame now and then. Every id, size, range and number
is checked. msgspec checks while it decodes. Rules between two values, or inside packed bytes, are checked here.
Whatever is wrong raises ProtocolError and nothing else. Of what leaves only the size is checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import xxhash

from pdcluster.core import messages as m
from pdcluster.core.bounds import DECODE_ERRORS, INT31, MAX_ID_CHARS
from pdcluster.core.errors import OtherProtocol, ProtocolError
from pdcluster.core.trace_context import CONTEXT_BYTES
from pdcluster.wire.address import peer_address

MAX_FRAME_BYTES = 64 << 20
DIGEST_BYTES = 8
# They set the count of frames, so each is the only message of its frame.
ALONE: frozenset[type[m.AnyMessage]] = frozenset((m.Hello, m.Welcome))

# msgpack's forms of an envelope's sequence (uint 64) and of the number of its messages (array 32).
_NUMBERS = struct.Struct(">BQBI")
_UINT64, _ARRAY32, _ARRAY_OF_6 = 0xCF, 0xDD, b"\x96"
# Of packed ids that are looked at sooner than numpy is called.
FEW_BYTES = 4096
# Of a frame, beside its head and its messages.
MAX_TAIL_BYTES = _NUMBERS.size + DIGEST_BYTES

_LOGPROBS, _PROMPT_LOGPROBS = attrgetter("logprobs"), attrgetter("prompt_logprobs")

_digest = xxhash.xxh3_64_digest
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(m.Envelope)
# A message as it stands in a frame, to be put there by `assemble`. Its size is not looked at.
encoded: Callable[[m.AnyMessage], bytes] = _encoder.encode


class _Version(msgspec.Struct, frozen=True, array_like=True):
    """The part of an envelope that no protocol version may move."""

    protocol: int


_version_decoder = msgspec.msgpack.Decoder(_Version)
# A frame may nest deeper than the interpreter's stack. msgspec raises RecursionError for it, and subclasses of
# ValueError for all else.


def encode(envelope: m.Envelope, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The frame of an envelope; raises ProtocolError when it is larger than any peer would take."""
    frame = seal(_encoder.encode(envelope))
    if len(frame) > max_bytes:
        raise too_large(" + ".join(type(message).__name__ for message in envelope.messages), len(frame), max_bytes)
    return frame


def encode_head(sender: str, incarnation: str, to_incarnation: str) -> bytes:
    """How every frame of one sender to one receiver begins."""
    return _ARRAY_OF_6 + b"".join(
        _encoder.encode(value) for value in (m.PROTOCOL_VERSION, sender, incarnation, to_incarnation)
    )


def assemble(head: bytes, sequence: int, parts: Sequence[bytes]) -> bytes:
    """The frame of encoded messages: what `encode` makes of their envelope, except for the width of two numbers."""
    return seal(b"".join((head, _NUMBERS.pack(_UINT64, sequence, _ARRAY32, len(parts)), *parts)))


def too_large(name: str, num_bytes: int, max_bytes: int) -> ProtocolError:
    return ProtocolError(
        f"{name} of {num_bytes} bytes exceeds the frame limit of {max_bytes} bytes; split it or raise the limit"
    )


def decode(frame: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> m.Envelope:
    """The checked envelope of a frame; raises ProtocolError for anything that this version would not send."""
    if len(frame) > max_bytes:
        raise ProtocolError(f"frame of {len(frame)} bytes exceeds the limit of {max_bytes} bytes")
    body = memoryview(frame)[:-DIGEST_BYTES]
    if _digest(body) != frame[-DIGEST_BYTES:]:
        _check_version(_peek_version(frame))
        raise ProtocolError(f"frame of {len(frame)} bytes was damaged on its way")
    try:
        envelope = _decoder.decode(body)
    except DECODE_ERRORS as error:
        _check_version(_peek_version(body))
        raise ProtocolError(f"malformed frame of {len(frame)} bytes: {error}") from error
    messages = envelope.messages
    if envelope.protocol != m.PROTOCOL_VERSION or not 0 < len(envelope.to_incarnation) <= MAX_ID_CHARS:
        _check_head(envelope)
    for message in messages:
        check = _check_of(type(message))
        if check is not None:
            check(message)
    if len(messages) > 1 and not ALONE.isdisjoint(map(type, messages)):
        raise ProtocolError(f"a frame of {len(messages)} messages holds a Hello or a Welcome, which come alone")
    return envelope


def seal(body: bytes) -> bytes:
    """The frame of encoded bytes."""
    return body + _digest(body)


def _peek_version(frame: bytes | memoryview) -> int:
    try:
        return _version_decoder.decode(frame).protocol
    except DECODE_ERRORS:
        return m.PROTOCOL_VERSION


def _check_version(protocol: int) -> None:
    if protocol != m.PROTOCOL_VERSION:
        raise OtherProtocol(
            f"peer speaks protocol {protocol}, this process speaks {m.PROTOCOL_VERSION}; run the same pdcluster "
            "version on both"
        )


def _check_head(envelope: m.Envelope) -> None:
    """Of one that is not as nearly all are."""
    _check_version(envelope.protocol)
    size = len(envelope.to_incarnation)
    if size > MAX_ID_CHARS or not (size or isinstance(envelope.messages[0], m.Hello)):
        raise ProtocolError(f"to_incarnation has {size} characters, allowed are 1 to {MAX_ID_CHARS}, and 0 for a Hello")


# ---------------------------------------------------------------- parts


def _multiple(name: str, packed: bytes, item_bytes: int) -> int:
    count, rest = divmod(len(packed), item_bytes)
    if rest:
        raise ProtocolError(f"{name} has {len(packed)} bytes, which is no multiple of {item_bytes}")
    return count


def _packed_ids(name: str, packed: bytes) -> int:
    count = _multiple(name, packed, 4)
    # the sign is the highest bit of a number's last byte, and no character of ASCII has that
    has_negative = (
        not packed[3::4].isascii() if len(packed) <= FEW_BYTES else int(np.frombuffer(packed, "<i4").min()) < 0
    )
    if has_negative:
        raise ProtocolError(f"{name} holds a negative id")
    return count


def _check_work(work: m.Work) -> None:
    num_tokens = _packed_ids("token_ids", work.token_ids)
    if work.num_prompt > num_tokens:
        raise ProtocolError(f"a prompt has {work.num_prompt} of {num_tokens} tokens")
    num_hashes = _multiple("hashes", work.hashes, m.HASH_BYTES)
    if num_hashes > num_tokens:
        raise ProtocolError(f"{num_hashes} block hashes for {num_tokens} tokens")
    if len(work.hash_root) not in (0, m.HASH_BYTES):
        raise ProtocolError(f"hash_root has {len(work.hash_root)} bytes, allowed are none or {m.HASH_BYTES}")
    if len(work.trace) not in (0, CONTEXT_BYTES):
        raise ProtocolError(f"trace has {len(work.trace)} bytes, allowed are none or {CONTEXT_BYTES}")


# Every ticket names its two nodes.
_check_address = lru_cache(maxsize=1024)(peer_address)


def _check_ticket(ticket: m.Ticket) -> None:
    _check_address(ticket.reader.address)
    _check_address(ticket.writer.address)
    num_tokens = ticket.num_tokens
    if ticket.cached_tokens > num_tokens:
        raise ProtocolError(f"{ticket.cached_tokens} tokens are cached of a ticket's {num_tokens}")
    num_pages = _packed_ids("pages", ticket.pages)
    if num_pages * ticket.page_tokens < num_tokens:
        raise ProtocolError(
            f"{num_pages} pages of {ticket.page_tokens} tokens do not hold the ticket's {num_tokens} tokens"
        )


def _check_logprobs(entry: m.TokenLogprobs) -> None:
    # Minus infinity is the true logprob of a token that the model rules out; NaN fails the comparison.
    if not entry.logprob < math.inf:
        raise ProtocolError(f"a logprob is {entry.logprob}")
    if entry.top_ids or entry.top_logprobs:
        if len(entry.top_ids) != len(entry.top_logprobs) or not all(
            logprob < math.inf for logprob in entry.top_logprobs
        ):
            raise ProtocolError(f"top ids {entry.top_ids} do not go with top logprobs {entry.top_logprobs}")
        if not all(0 <= token <= INT31 for token in entry.top_ids):
            raise ProtocolError(f"top ids {entry.top_ids} are no ids, allowed are 0 to {INT31}")


def _check_entries(row: m.TokenRow) -> None:
    if row.logprobs and len(row.logprobs) != len(row.tokens):
        raise ProtocolError(f"{len(row.logprobs)} logprobs for {len(row.tokens)} tokens")
    for entry in row.logprobs:
        _check_logprobs(entry)
    for entry in row.prompt_logprobs:
        _check_logprobs(entry)


# ---------------------------------------------------------------- messages


def _check_prefill(message: m.Prefill) -> None:
    _check_work(message.work)
    pull = message.pull
    if message.pooling is not None and message.remote:
        raise ProtocolError("an embedding is asked for in mode remote")
    if pull is not None:
        _check_address(pull.holder.address)
        if pull.num_tokens > len(message.work.token_ids) // 4:
            raise ProtocolError(f"{pull.num_tokens} tokens are to be pulled of {len(message.work.token_ids) // 4}")


def _check_reserve(message: m.Reserve) -> None:
    _check_work(message.work)
    _check_address(message.writer.address)


def _check_ticketed(message: m.Deliver | m.Reserved) -> None:
    _check_ticket(message.ticket)


def _check_tokens(message: m.Tokens) -> None:
    rows = message.rows
    if any(map(_LOGPROBS, rows)) or any(map(_PROMPT_LOGPROBS, rows)):  # few have any
        for row in rows:
            _check_entries(row)


def _check_timed(message: m.Delivered | m.Finished | m.Embedded) -> None:
    timings = message.timings
    if timings.pulled_tokens > timings.cached_tokens:
        raise ProtocolError(
            f"{timings.pulled_tokens} tokens were pulled, more than the {timings.cached_tokens} that were cached"
        )


def _check_embedded(message: m.Embedded) -> None:
    _check_timed(message)
    _multiple("vector", message.vector, 4)
    if not np.isfinite(np.frombuffer(message.vector, "<f4")).all():
        raise ProtocolError("an embedding has numbers that are not finite")


def _check_delta(message: m.CacheDelta) -> None:
    _multiple("added", message.added, m.HASH_BYTES)
    _multiple("removed", message.removed, m.HASH_BYTES)


def _check_chunk(message: m.FileChunk) -> None:
    if message.data and message.offset + len(message.data) > message.total_bytes:
        raise ProtocolError(
            f"{message.name}: {len(message.data)} bytes at {message.offset} end past the file's "
            f"{message.total_bytes} bytes"
        )


def _check_commit(message: m.Commit) -> None:
    if message.first_logprobs is not None:
        _check_logprobs(message.first_logprobs)


def _check_fetch(message: m.Fetch) -> None:
    _check_ticket(message.ticket)
    if not _multiple("hashes", message.hashes, m.HASH_BYTES):
        raise ProtocolError("a Fetch names no block")


_CHECKS: Mapping[type[m.NodeMessage], Callable[[Any], None]] = {
    m.Prefill: _check_prefill,
    m.Reserve: _check_reserve,
    m.Deliver: _check_ticketed,
    m.Reserved: _check_ticketed,
    m.Tokens: _check_tokens,
    m.Delivered: _check_timed,
    m.Finished: _check_timed,
    m.Embedded: _check_embedded,
    m.CacheDelta: _check_delta,
    m.FileChunk: _check_chunk,
    m.Commit: _check_commit,
    m.Fetch: _check_fetch,
}  # The others have nothing that msgspec does not check.
_check_of = _CHECKS.get
