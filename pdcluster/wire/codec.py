"""Envelopes as msgpack frames: `encode` or `assemble` what we send, `decode` and check what a peer sent.

A frame ends with a digest of what is before it: TCP's checksum misses a damaged frame now and then, and one wrong page id or token would be a wrong
answer. Every id, size, range and number is checked, by msgspec while it decodes (`bounds`) or after that, so that nothing behind this border meets a
value that it does not expect. Whatever is wrong raises ProtocolError and nothing else. Not here: sockets, sequence numbers, and what a message
means. Only the size of what we send is checked: our own values are right by construction.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import xxhash

from pdcluster import messages as m
from pdcluster.bounds import INT31, MAX_ID_CHARS, MAX_SECONDS, MAX_TEXT_CHARS, UINT63
from pdcluster.errors import ProtocolError
from pdcluster.wire.address import parse_address

MAX_FRAME_BYTES = 64 << 20
MAX_ITEMS = 1 << 20
MAX_RANKS = 512
MAX_TICKET_ADVERT_BYTES = 64 << 10
UINT64 = (1 << 64) - 1
MAX_PATHS = 1024
MAX_REASONS = 64
MAX_BYTES_S = 1e15
DIGEST_BYTES = 8
ALONE = (m.Hello, m.Welcome)
"""They set the count of frames, so each is the only message of its frame."""
_ALONE_TYPES = frozenset(ALONE)

_NUMBERS = struct.Struct(">BQBI")
"""msgpack's forms of an envelope's sequence (uint 64) and of the number of its messages (array 32)."""
_UINT64, _ARRAY32, _ARRAY_OF_6 = 0xCF, 0xDD, b"\x96"
FEW_BYTES = 4096
"""Of packed ids that are looked at sooner than numpy is called."""
MAX_TAIL_BYTES = _NUMBERS.size + DIGEST_BYTES
"""Of a frame, beside its head and its messages."""

_LOGPROBS, _PROMPT_LOGPROBS = attrgetter("logprobs"), attrgetter("prompt_logprobs")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(m.Envelope)


class _Version(msgspec.Struct, frozen=True, array_like=True):
    """The part of an envelope that no protocol version may move."""

    protocol: int


_version_decoder = msgspec.msgpack.Decoder(_Version)
# A frame may nest deeper than the interpreter's stack: msgspec raises RecursionError for it, and ValueError subclasses for all else.
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


def encode(envelope: m.Envelope, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The frame of an envelope; raises ProtocolError when it is larger than any peer would take."""
    frame = seal(_encoder.encode(envelope))
    if len(frame) > max_bytes:
        raise _too_large(" + ".join(type(message).__name__ for message in envelope.messages), len(frame), max_bytes)
    return frame


def encode_message(message: m.AnyMessage, *, max_bytes: int) -> bytes:
    """A message as it stands in a frame, to be put there by `assemble`; raises ProtocolError when it has more bytes."""
    part = _encoder.encode(message)
    if len(part) > max_bytes:
        raise _too_large(type(message).__name__, len(part), max_bytes)
    return part


def encode_head(sender: str, incarnation: str, to_incarnation: str) -> bytes:
    """How every frame of one sender to one receiver begins."""
    return _ARRAY_OF_6 + b"".join(_encoder.encode(value) for value in (m.PROTOCOL_VERSION, sender, incarnation, to_incarnation))


def assemble(head: bytes, sequence: int, parts: Sequence[bytes]) -> bytes:
    """The frame of encoded messages: what `encode` makes of their envelope, but for the width of two numbers."""
    return seal(b"".join((head, _NUMBERS.pack(_UINT64, sequence, _ARRAY32, len(parts)), *parts)))


def _too_large(name: str, num_bytes: int, max_bytes: int) -> ProtocolError:
    return ProtocolError(f"{name} of {num_bytes} bytes exceeds the frame limit of {max_bytes} bytes; split it or raise the limit")


def decode(frame: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> m.Envelope:
    """The checked envelope of a frame; raises ProtocolError for anything that this version would not send."""
    if len(frame) > max_bytes:
        raise ProtocolError(f"frame of {len(frame)} bytes exceeds the limit of {max_bytes} bytes")
    body = memoryview(frame)[:-DIGEST_BYTES]
    if xxhash.xxh3_64_digest(body) != frame[-DIGEST_BYTES:]:
        _check_version(_peek_version(frame))
        raise ProtocolError(f"frame of {len(frame)} bytes was damaged on its way")
    try:
        envelope = _decoder.decode(body)
    except _DECODE_ERRORS as error:
        _check_version(_peek_version(body))
        raise ProtocolError(f"malformed frame of {len(frame)} bytes: {error}") from error
    _check_version(envelope.protocol)
    _check_envelope(envelope)
    return envelope


def seal(body: bytes) -> bytes:
    """The frame of encoded bytes."""
    return body + xxhash.xxh3_64_digest(body)


def _peek_version(frame: bytes | memoryview) -> int:
    try:
        return _version_decoder.decode(frame).protocol
    except _DECODE_ERRORS:
        return m.PROTOCOL_VERSION


def _check_version(protocol: int) -> None:
    if protocol != m.PROTOCOL_VERSION:
        raise ProtocolError(f"peer speaks protocol {protocol}, this process speaks {m.PROTOCOL_VERSION}; run the same pdcluster version on both")


def _check_envelope(envelope: m.Envelope) -> None:
    messages = envelope.messages
    if envelope.to_incarnation or not isinstance(messages[0], m.Hello):
        _identifier("to_incarnation", envelope.to_incarnation)
    for message in messages:
        check = _CHECKS.get(type(message))
        if check is not None:
            check(message)
    if len(messages) > 1 and not _ALONE_TYPES.isdisjoint(map(type, messages)):
        raise ProtocolError(f"a frame of {len(messages)} messages holds a Hello or a Welcome, which come alone")


# ---------------------------------------------------------------- parts


def _identifier(name: str, value: str) -> None:
    if not 0 < len(value) <= MAX_ID_CHARS:
        raise ProtocolError(f"{name} has {len(value)} characters, allowed are 1 to {MAX_ID_CHARS}")


def _text(name: str, value: str) -> None:
    if len(value) > MAX_TEXT_CHARS:
        raise ProtocolError(f"{name} has {len(value)} characters, at most {MAX_TEXT_CHARS} are allowed")


def _integer(name: str, value: int, low: int, high: int = INT31) -> None:
    if not low <= value <= high:
        raise ProtocolError(f"{name} is {value}, allowed are {low} to {high}")


def _integers(name: str, values: Iterable[int], low: int = 0, high: int = INT31) -> None:
    for value in values:
        if not low <= value <= high:
            raise ProtocolError(f"{name} holds {value}, allowed are {low} to {high}")


def _number(name: str, value: float, low: float, high: float = MAX_SECONDS) -> None:
    # Written so that NaN fails.
    if not low <= value <= high:
        raise ProtocolError(f"{name} is {value}, allowed are {low} to {high}")


def _optional(check: Callable[..., None], name: str, value: float | None, *bounds: float) -> None:
    if value is not None:
        check(name, value, *bounds)


def _count(name: str, values: tuple[Any, ...], limit: int = MAX_ITEMS) -> None:
    if len(values) > limit:
        raise ProtocolError(f"{name} has {len(values)} entries, at most {limit} are allowed")


def _multiple(name: str, packed: bytes, item_bytes: int) -> int:
    count, rest = divmod(len(packed), item_bytes)
    if rest:
        raise ProtocolError(f"{name} has {len(packed)} bytes, which is no multiple of {item_bytes}")
    return count


def _packed_ids(name: str, packed: bytes) -> int:
    count = _multiple(name, packed, 4)
    # the sign is the highest bit of a number's last byte, and no character of ASCII has that
    has_negative = not packed[3::4].isascii() if len(packed) <= FEW_BYTES else int(np.frombuffer(packed, "<i4").min()) < 0
    if has_negative:
        raise ProtocolError(f"{name} holds a negative id")
    return count


def _check_sampling(sampling: m.Sampling) -> None:
    _integer("seed", sampling.seed, -UINT63 - 1, UINT64)
    _number("temperature", sampling.temperature, 0.0)
    _optional(_number, "top_p", sampling.top_p, 0.0, 1.0)
    _optional(_number, "min_p", sampling.min_p, 0.0, 1.0)


def _check_work(work: m.Work) -> None:
    num_tokens = _packed_ids("token_ids", work.token_ids)
    _integer("num_prompt", work.num_prompt, 1, num_tokens)
    num_hashes = _multiple("hashes", work.hashes, m.HASH_BYTES)
    if num_hashes > num_tokens:
        raise ProtocolError(f"{num_hashes} block hashes for {num_tokens} tokens")
    if len(work.hash_root) not in (0, m.HASH_BYTES):
        raise ProtocolError(f"hash_root has {len(work.hash_root)} bytes, allowed are none or {m.HASH_BYTES}")
    _check_sampling(work.sampling)


_check_address = lru_cache(maxsize=1024)(parse_address)
"""Every ticket names its two nodes."""


def _check_endpoint(endpoint: m.Endpoint) -> None:
    _check_address(endpoint.address)
    _count("adverts", endpoint.adverts, 64)
    for name, advert in endpoint.adverts:
        _identifier("backend", name)
        if len(advert) > MAX_TICKET_ADVERT_BYTES:
            raise ProtocolError(f"advert of {name} has {len(advert)} bytes, at most {MAX_TICKET_ADVERT_BYTES} are allowed")


def _check_ticket(ticket: m.Ticket) -> None:
    _integer("nonce", ticket.nonce, 0, UINT64)
    _check_endpoint(ticket.reader)
    _check_endpoint(ticket.writer)
    _integer("cached_tokens", ticket.cached_tokens, 0, ticket.num_tokens)
    _integer("ranks", ticket.ranks, 1, MAX_RANKS)
    num_pages = _packed_ids("pages", ticket.pages)
    if num_pages * ticket.page_tokens < ticket.num_tokens:
        raise ProtocolError(f"{num_pages} pages of {ticket.page_tokens} tokens do not hold the ticket's {ticket.num_tokens} tokens")


def _check_logprobs(entry: m.TokenLogprobs) -> None:
    # Minus infinity is the true logprob of a token that the model rules out; NaN fails the comparison.
    if not entry.logprob < math.inf:
        raise ProtocolError(f"a logprob is {entry.logprob}")
    if entry.top_ids or entry.top_logprobs:
        if len(entry.top_ids) != len(entry.top_logprobs) or not all(logprob < math.inf for logprob in entry.top_logprobs):
            raise ProtocolError(f"top ids {entry.top_ids} do not go with top logprobs {entry.top_logprobs}")
        _integers("top_ids", entry.top_ids)


def _check_entries(row: m.TokenRow) -> None:
    if row.logprobs and len(row.logprobs) != len(row.tokens):
        raise ProtocolError(f"{len(row.logprobs)} logprobs for {len(row.tokens)} tokens")
    for entry in row.logprobs:
        _check_logprobs(entry)
    for entry in row.prompt_logprobs:
        _check_logprobs(entry)


def _check_timings(timings: m.Timings) -> None:
    if timings.pulled_tokens > timings.cached_tokens:
        raise ProtocolError(f"{timings.pulled_tokens} tokens were pulled, more than the {timings.cached_tokens} that were cached")


# ---------------------------------------------------------------- messages


def _check_hello(message: m.Hello) -> None:
    _count("open", message.open)
    for request, attempt, position in message.open:
        _identifier("request", request)
        _integer("attempt", attempt, 0)
        _integer("position", position, 0)


def _check_welcome(message: m.Welcome) -> None:
    _count("lost", message.lost)
    for request, attempt in message.lost:
        _identifier("request", request)
        _integer("attempt", attempt, 0)


def _check_prefill(message: m.Prefill) -> None:
    _check_work(message.work)
    if message.pull is not None:
        _check_endpoint(message.pull.holder)
        _integer("num_tokens", message.pull.num_tokens, 1, len(message.work.token_ids) // 4)


def _check_reserve(message: m.Reserve) -> None:
    _check_work(message.work)
    _check_endpoint(message.writer)


def _check_ticketed(message: m.Deliver | m.Reserved) -> None:
    _check_ticket(message.ticket)


def _check_manage(message: m.Manage | m.Managed) -> None:
    _integer("number", message.number, 0, UINT63)


def _check_fetch_file(message: m.FetchFile) -> None:
    _identifier("name", message.name)
    _integer("offset", message.offset, 0, UINT63)


def _check_tokens(message: m.Tokens) -> None:
    rows = message.rows
    if any(map(_LOGPROBS, rows)) or any(map(_PROMPT_LOGPROBS, rows)):  # few have any
        for row in rows:
            _check_entries(row)


def _check_timed(message: m.Delivered | m.Finished) -> None:
    _check_timings(message.timings)


def _check_load(message: m.Load) -> None:
    _integers("load", (value for value in msgspec.structs.astuple(message) if isinstance(value, int)), high=UINT63)
    _number("itl_s", message.itl_s, 0.0)
    if message.cost is not None:
        check_cost(message.cost)
    _count("paths", message.paths, MAX_PATHS)
    for path in message.paths:
        _identifier("peer", path.peer)
        _identifier("backend", path.backend)
        _number("bytes_s", path.bytes_s, 0.0, MAX_BYTES_S)
    for counts in (message.failed_writes, message.resent_chunks, message.pulls):
        _count("reasons", counts, MAX_REASONS)
        for reason, count in counts:
            _identifier("reason", reason)
            _integer("writes", count, 0, UINT63)


def check_cost(cost: m.CostReport) -> None:
    """Raises ProtocolError for numbers that no cost can have."""
    for name, value in msgspec.structs.asdict(cost).items():
        if isinstance(value, tuple):
            for each in value:
                _number(f"cost.{name}", each, -MAX_SECONDS, MAX_SECONDS)
        else:
            _number(f"cost.{name}", value, 0.0, UINT63 if isinstance(value, int) else MAX_SECONDS)


def _check_delta(message: m.CacheDelta) -> None:
    _integer("sequence", message.sequence, 0, UINT63)
    _multiple("added", message.added, m.HASH_BYTES)
    _multiple("removed", message.removed, m.HASH_BYTES)


def _check_chunk(message: m.FileChunk) -> None:
    _identifier("name", message.name)
    _integer("offset", message.offset, 0, UINT63)
    _integer("total_bytes", message.total_bytes, 0, UINT63)
    if message.data and message.offset + len(message.data) > message.total_bytes:
        raise ProtocolError(f"{message.name}: {len(message.data)} bytes at {message.offset} end past the file's {message.total_bytes} bytes")


def _check_commit(message: m.Commit) -> None:
    _integer("nonce", message.nonce, 0, UINT64)
    _integer("round", message.round, 0)
    _optional(_integer, "first_token", message.first_token, 0)
    _integer("block_tokens", message.block_tokens, 1)
    _count("legs", message.legs, MAX_RANKS * 2)
    for leg in message.legs:
        _integer("rank", leg.rank, 0, MAX_RANKS - 1)
        _integer("reader_rank", leg.reader_rank, 0, MAX_RANKS - 1)
        _integer("first_head", leg.first_head, 0)
        _integer("num_heads", leg.num_heads, 1)
        _count("chunks", leg.chunks)
        for chunk in leg.chunks:
            _integer("chunk index", chunk.index, 0)
            _integer("chunk start", chunk.first_token, 0)
            _integer("chunk tokens", chunk.num_tokens, 1)
            _integer("chunk layer", chunk.first_layer, 0)
            _integer("chunk layers", chunk.num_layers, 1)
            _integer("chunk bytes", chunk.nbytes, 1, UINT63)
            _integer("chunk digest", chunk.digest, 0, UINT64)
    if message.first_logprobs is not None:
        _check_logprobs(message.first_logprobs)


def _check_commit_ack(message: m.CommitAck) -> None:
    _integer("nonce", message.nonce, 0, UINT64)
    _integer("round", message.round, 0)
    _count("resend", message.resend)
    _integers("resend", message.resend)
    _text("refused", message.refused)


def _check_abort(message: m.Abort) -> None:
    _integer("nonce", message.nonce, 0, UINT64)
    _text("reason", message.reason)
    _number("remaining_s", message.remaining_s, -MAX_SECONDS)


def _check_abort_ack(message: m.AbortAck) -> None:
    _integer("nonce", message.nonce, 0, UINT64)
    _text("reason", message.reason)
    _count("lost media", message.lost, MAX_REASONS)
    for name in message.lost:
        _identifier("lost medium", name)


def _check_fetch(message: m.Fetch) -> None:
    _check_ticket(message.ticket)
    num_hashes = _multiple("hashes", message.hashes, m.HASH_BYTES)
    _integer("number of hashes", num_hashes, 1)


def _check_declined(message: m.Declined) -> None:
    _integer("nonce", message.nonce, 0, UINT64)
    _text("reason", message.reason)


_CHECKS: Mapping[type[m.Message], Callable[[Any], None]] = {
    m.Hello: _check_hello,
    m.Welcome: _check_welcome,
    m.Prefill: _check_prefill,
    m.Reserve: _check_reserve,
    m.Deliver: _check_ticketed,
    m.Reserved: _check_ticketed,
    m.Manage: _check_manage,
    m.Managed: _check_manage,
    m.FetchFile: _check_fetch_file,
    m.Tokens: _check_tokens,
    m.Delivered: _check_timed,
    m.Finished: _check_timed,
    m.Load: _check_load,
    m.CacheDelta: _check_delta,
    m.FileChunk: _check_chunk,
    m.Commit: _check_commit,
    m.CommitAck: _check_commit_ack,
    m.Abort: _check_abort,
    m.AbortAck: _check_abort_ack,
    m.Fetch: _check_fetch,
    m.Declined: _check_declined,
}  # The others have nothing that msgspec does not check.
