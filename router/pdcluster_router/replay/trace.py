"""Traces for the replay: arrivals, lengths, and which blocks prompts share. Readers of two public formats.

Mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 tokens; the last
may cover fewer; without them nothing is shared). Azure: CSV with TIMESTAMP (a date, or seconds), ContextTokens,
GeneratedTokens, and nothing about contents. Only full blocks are cached, as on a node. Every error names the file and
the line.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

import msgspec

from pdcluster.core.errors import ConfigError
from pdcluster.core.messages import HASH_BYTES

MOONCAKE_BLOCK_TOKENS = 512
MAX_FILE_BYTES = 2 << 30
MAX_REQUESTS = 5_000_000
# Of one prompt or answer. A longer one is taken for a broken line.
MAX_TOKENS = 10_000_000

# Chained hashes of full blocks from the first token on. Equal hashes are one object, which keeps memory small.
Blocks = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    blocks: of the prompt.
    grown: of prompt and answer, as the decoding node can cache them; the prompt's where the trace does not say.
    session: of one conversation; -1 where unknown.
    """

    arrival_s: float
    num_tokens: int
    num_output: int
    blocks: Blocks
    grown: Blocks
    kind: str = ""
    session: int = -1


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, the first at 0."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def span_s(self) -> float:
        return self.requests[-1].arrival_s if self.requests else 0.0

    @property
    def mean_tokens(self) -> float:
        return sum(r.num_tokens for r in self.requests) / max(len(self.requests), 1)

    def at_speed(self, speedup: float) -> Trace:
        """The same requests, `speedup` times as fast."""
        if not speedup > 0:
            raise ConfigError(f"speedup must be above 0, not {speedup}")
        return Trace(
            self.name, self.block_tokens, tuple(replace(r, arrival_s=r.arrival_s / speedup) for r in self.requests)
        )

    def head(self, num_requests: int) -> Trace:
        return Trace(self.name, self.block_tokens, self.requests[:num_requests])


class BlockChain:
    """Names blocks: a block's hash names all blocks before it. Each name exists once."""

    def __init__(self) -> None:
        self._names: dict[bytes, bytes] = {}

    def extend(self, blocks: Sequence[bytes], contents: Sequence[int]) -> Blocks:
        """`blocks` and one more for each number in `contents`."""
        chained = list(blocks)
        parent = chained[-1] if chained else b""
        for content in contents:
            name = hashlib.blake2b(
                content.to_bytes(8, "little", signed=True), digest_size=HASH_BYTES, key=parent
            ).digest()
            parent = self._names.setdefault(name, name)
            chained.append(parent)
        return tuple(chained)


def read_trace(path: Path) -> Trace:
    """Read a trace. The first line tells the format."""
    text = _read(path)
    first = text[: text.find("\n")] if "\n" in text else text
    if first.lstrip().startswith("{"):
        rows = _mooncake(path, text)
    elif "ContextTokens" in first:
        rows = _azure(path, text)
    else:
        raise ConfigError(
            f"{path}:1: {first[:60]!r} starts neither a Mooncake trace (JSON lines) nor an Azure one (CSV with "
            "ContextTokens)"
        )
    return in_order(path.stem, MOONCAKE_BLOCK_TOKENS, list(rows))


def in_order(name: str, block_tokens: int, requests: list[TraceRequest]) -> Trace:
    """Sort by arrival, and shift the first to 0."""
    if not requests:
        raise ConfigError(f"trace {name} holds no request")
    requests.sort(key=lambda r: r.arrival_s)
    first = requests[0].arrival_s
    return Trace(
        name,
        block_tokens,
        tuple(replace(r, arrival_s=r.arrival_s - first) for r in requests) if first else tuple(requests),
    )


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} has {size} bytes, more than the {MAX_FILE_BYTES} that a replay reads; cut it with head"
            )
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: byte {error.start} is not UTF-8") from error


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def _mooncake(path: Path, text: str) -> Iterator[TraceRequest]:
    decoder, chain = msgspec.json.Decoder(_MooncakeRow, strict=False), BlockChain()
    for number, line in _lines(path, io.StringIO(text)):
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        _check_lengths(path, number, row.timestamp, row.input_length, row.output_length)
        most = -(-row.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(row.hash_ids) > most:
            raise ConfigError(
                f"{path}:{number}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens, at most {most} blocks "
                "of 512 fit"
            )
        try:
            blocks = chain.extend((), row.hash_ids[: row.input_length // MOONCAKE_BLOCK_TOKENS])
        except OverflowError as error:
            raise ConfigError(f"{path}:{number}: a hash_id is beyond 64 bits") from error
        yield TraceRequest(row.timestamp / 1000, max(row.input_length, 1), max(row.output_length, 1), blocks, blocks)


def _azure(path: Path, text: str) -> Iterator[TraceRequest]:
    rows = csv.reader(io.StringIO(text))
    header = [cell.strip() for cell in next(rows)]
    try:
        columns = [header.index(name) for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens")]
    except ValueError as error:
        raise ConfigError(
            f"{path}:1: columns {', '.join(header)} lack TIMESTAMP, ContextTokens or GeneratedTokens"
        ) from error
    chain = BlockChain()
    for number, cells in enumerate(rows, 2):
        if not cells:
            continue
        if number > MAX_REQUESTS + 1:
            raise ConfigError(f"{path} has more than {MAX_REQUESTS} requests; cut it with head")
        try:
            when, context, generated = (cells[column].strip() for column in columns)
            arrival_s, num_tokens, num_output = _moment(when), _whole(context), _whole(generated)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{path}:{number}: {','.join(cells)[:80]!r}: {error}") from error
        _check_lengths(path, number, arrival_s, num_tokens, num_output)
        unique = range(number << 24, (number << 24) + num_tokens // MOONCAKE_BLOCK_TOKENS)
        blocks = chain.extend((), unique)
        yield TraceRequest(arrival_s, max(num_tokens, 1), max(num_output, 1), blocks, blocks)


def _moment(text: str) -> float:
    """A date, in UTC unless it says otherwise, or seconds of any clock."""
    try:
        return float(text)
    except ValueError:
        found = datetime.fromisoformat(text)
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def _whole(text: str) -> int:
    """A whole number. Tables from spreadsheets say 100.0."""
    number = float(text)
    if not number.is_integer():
        raise ValueError(f"{text} is no whole number of tokens")
    return int(number)


def _lines(path: Path, lines: io.StringIO) -> Iterator[tuple[int, str]]:
    num_requests = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            num_requests += 1
            if num_requests > MAX_REQUESTS:
                raise ConfigError(f"{path} has more than {MAX_REQUESTS} requests; cut it with head")
            yield number, line


def _check_lengths(path: Path, number: int, arrival_s: float, num_tokens: int, num_output: int) -> None:
    if not isfinite(arrival_s):
        raise ConfigError(f"{path}:{number}: the time {arrival_s} is no moment")
    for what, value in (("prompt", num_tokens), ("answer", num_output)):
        if not 0 <= value <= MAX_TOKENS:
            raise ConfigError(f"{path}:{number}: a {what} of {value} tokens; 0 to {MAX_TOKENS} are possible")
