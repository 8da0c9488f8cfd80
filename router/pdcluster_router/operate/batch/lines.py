"""Lines of a batch: what OpenAI's batch files hold, read one at a time. Pure but for reading the file.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}

The file is read twice: once to check every line and to learn its names, and once to send. Memory is bounded by 9 bytes
a line and one line's length.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pdcluster.core.errors import BadRequest, ConfigError

SERVED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")
MAX_LINE_BYTES = 64 << 20
MAX_ID_CHARACTERS = 512


class _Line(msgspec.Struct):
    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: Any = None


class _Body(msgspec.Struct):
    stream: Any = None


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line that can be sent. number: in the file, from 1. body: JSON as it stands there."""

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be sent. custom_id: None where none can be read."""

    number: int
    custom_id: str | None
    message: str
    param: str | None = None


_decode = msgspec.json.Decoder(_Line).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def parse(number: int, text: bytes) -> BatchLine | BadLine:
    """Read one line."""
    try:
        line = _decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return BadLine(number, _id_of(text), f"the line is no request of a batch: {error}")
    try:
        _check(line)
    except BadRequest as error:
        return BadLine(number, line.custom_id, str(error), error.param)
    return BatchLine(number, line.custom_id, line.url, bytes(line.body))


def _check(line: _Line) -> None:
    if line.method != "POST":
        raise BadRequest(f"method is {line.method[:20]!r}; it must be POST", "method")
    if line.url not in SERVED:
        raise BadRequest(f"url is {line.url[:200]!r}; it must be one of {', '.join(SERVED)}", "url")
    try:
        body = _decode_body(line.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body is no object: {error}", "body") from error
    if body.stream not in (None, False):
        raise BadRequest("stream is not possible in a batch; leave it out", "body.stream")


def _id_of(text: bytes) -> str | None:
    try:
        found = _decode_named(text).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def read_lines(file: Path) -> Iterator[BatchLine | BadLine]:
    """All lines of a file, in order. Blank ones count, and are passed over. Raises ConfigError."""
    try:
        with open(file, "rb") as opened:
            number = 0
            while text := opened.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(text) > MAX_LINE_BYTES:
                    raise ConfigError(f"line {number} of {file} has more than {MAX_LINE_BYTES} bytes; split it")
                if text.strip():
                    yield parse(number, text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; check the path") from error


class LineIndex:
    """The names of all lines that can be sent, as digests under a key of this process, and which of them are done.

    Names of one file never share a digest: `of` checks it.
    """

    def __init__(self, key: bytes, digests: NDArray[np.uint64]) -> None:
        self._key, self._digests = key, digests
        self._is_done: NDArray[np.bool_] = np.zeros(len(digests), np.bool_)
        self.num_done = 0

    @classmethod
    def of(cls, file: Path) -> LineIndex:
        """Read a file. Raises ConfigError where a name comes twice."""
        while True:
            key, found = secrets.token_bytes(16), array("Q")
            for line in read_lines(file):
                if isinstance(line, BatchLine):
                    found.append(_digest(key, line.custom_id))
            digests = np.array(found, np.uint64)
            digests.sort()
            twice = digests[1:][digests[1:] == digests[:-1]]
            if not len(twice):
                return cls(key, digests)
            _refuse_twice(file, key, set(twice.tolist()))  # else two names share a digest: take another key

    def __len__(self) -> int:
        return len(self._digests)

    def _place(self, custom_id: str) -> int | None:
        digest = _digest(self._key, custom_id)
        place = int(np.searchsorted(self._digests, np.uint64(digest)))
        return place if place < len(self._digests) and int(self._digests[place]) == digest else None

    def __contains__(self, custom_id: str) -> bool:
        return self._place(custom_id) is not None

    def is_done(self, custom_id: str) -> bool:
        place = self._place(custom_id)
        return place is not None and bool(self._is_done[place])

    def finish(self, custom_id: str) -> bool:
        """Note that a line is done. False where it was already. Raises KeyError for a name of no line."""
        place = self._place(custom_id)
        if place is None:
            raise KeyError(custom_id)
        if self._is_done[place]:
            return False
        self._is_done[place] = True
        self.num_done += 1
        return True


def _digest(key: bytes, custom_id: str) -> int:
    found = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), key=key, digest_size=8).digest()
    return int.from_bytes(found, "little")


def _refuse_twice(file: Path, key: bytes, twice: set[int]) -> None:
    """Raises ConfigError for the first name that comes twice, among those of these digests."""
    first: dict[str, int] = {}
    for line in read_lines(file):
        if isinstance(line, BatchLine) and _digest(key, line.custom_id) in twice:
            before = first.setdefault(line.custom_id, line.number)
            if before != line.number:
                raise ConfigError(
                    f"line {line.number} of {file} has custom_id {line.custom_id[:100]!r}, which is that of line "
                    f"{before}, too; give each line its own"
                )
