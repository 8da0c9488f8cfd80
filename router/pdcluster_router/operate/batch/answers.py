"""The output of a batch: a file of answers and one of errors, and how a later run goes on from them.

1. A line is one write at the end of a file, so a kill of this process tears the last line at most. `open_answers` cuts
   off what has no line feed.
2. A name stands in one of the files, once. Of the errors, those that may go away are removed when a run begins, and
   those of lines that cannot be sent, which are found again.
3. Files are written through to the disk once a second and at the end. A machine that loses power loses that second,
   and the next run answers its lines again.
4. Both files are locked while a run writes them. Neither is changed before all that stands there is known as ours.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from pdcluster.core.errors import ConfigError
from pdcluster_router.operate.batch.lines import BadLine, LineIndex

SYNC_S = 1.0
BUFFER_BYTES = 1 << 20
# Of every line.
BEGINNING = b'{"id":"batch_req_'
# An answer with one of these statuses may be another one later.
PASSING = frozenset((408, 409, 429, 500, 502, 503, 504, 529))


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str = ""


class LineError(msgspec.Struct, omit_defaults=True):
    """Why a line has no answer. line: its number, where it cannot be sent."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class _Written(msgspec.Struct):
    """What is read back of a written line."""

    custom_id: str | None
    response: LineResponse | None = None
    error: LineError | None = None

    def __post_init__(self) -> None:
        if self.response is None and self.error is None:
            raise ValueError("it has neither a response nor an error")

    @property
    def is_passing(self) -> bool:
        """Whether a later run may do better, or finds it again by itself."""
        if self.response is not None:
            return self.response.status_code in PASSING
        return True


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What a router answered. body: JSON."""

    custom_id: str
    status: int
    request_id: str
    body: bytes

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    def text(self) -> bytes:
        head = msgspec.json.encode({"id": _batch_id(self.custom_id), "custom_id": self.custom_id})
        response = msgspec.json.encode({"status_code": self.status, "request_id": self.request_id})
        return b'%b,"response":%b,"body":%b},"error":null}\n' % (head[:-1], response[:-1], one_line(self.body))


@dataclass(frozen=True, slots=True)
class LineFailure:
    """A line without an answer."""

    custom_id: str | None
    error: LineError

    @classmethod
    def of(cls, bad: BadLine) -> LineFailure:
        return cls(bad.custom_id, LineError("invalid_request_error", bad.message, bad.param, bad.number))

    def text(self) -> bytes:
        name = _batch_id(self.custom_id or f"line {self.error.line}")
        found = {"id": name, "custom_id": self.custom_id, "response": None, "error": self.error}
        return msgspec.json.encode(found) + b"\n"


def _batch_id(custom_id: str) -> str:
    return f"batch_req_{hashlib.blake2b(custom_id.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"


def one_line(body: bytes) -> bytes:
    """The body as JSON without line feeds. A body that is no JSON, as proxies send, becomes a string."""
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.encode(body.decode("utf-8", "replace"))
    return msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body


# ---------------------------------------------------------------- what stands there already


def whole_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(end, text) of every line that has its line feed."""
    end = 0
    file.seek(0)
    while (text := file.readline()).endswith(b"\n"):
        end += len(text)
        yield end, text


def _read(name: Path, number: int, text: bytes) -> _Written:
    try:
        return msgspec.json.decode(text, type=_Written)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"line {number} of {name} is no answer of a batch: {error}; move the file away") from error


def _check_tail(name: Path, file: BinaryIO, end: int) -> None:
    """What a kill left behind the last whole line begins as our lines do. Raises ConfigError for the text of others."""
    file.seek(end)
    tail = file.read(len(BEGINNING))
    if not BEGINNING.startswith(tail):
        raise ConfigError(f"{name} ends with text that is no answer of a batch; move the file away")


def _check_own(name: Path, number: int, custom_id: str | None, index: LineIndex) -> str:
    if custom_id is None or custom_id not in index:
        raise ConfigError(
            f"line {number} of {name} answers {custom_id!r:.100}, which is in no line of the input; "
            "give the input that it belongs to, or another output"
        )
    return custom_id


def _take_back(name: Path, file: BinaryIO, index: LineIndex) -> int:
    """Note the answers that stand in the file. Returns where the last whole line ends."""
    end = 0
    for number, (end, text) in enumerate(whole_lines(file), 1):  # noqa: B007
        custom_id = _check_own(name, number, _read(name, number, text).custom_id, index)
        if not index.finish(custom_id):
            raise ConfigError(f"line {number} of {name} answers {custom_id!r:.100} once more; move the file away")
    _check_tail(name, file, end)
    return end


def _keep_lasting(name: Path, index: LineIndex) -> int:
    """Rewrite the file of errors with those that stay. Returns their number."""
    if not name.exists():
        return 0
    fresh, num_kept = name.with_name(f"{name.name}.new"), 0
    with open(name, "rb") as old, open(fresh, "wb") as new:
        end = 0
        for number, (end, text) in enumerate(whole_lines(old), 1):  # noqa: B007
            written = _read(name, number, text)
            if written.error is not None and written.error.line is not None:
                continue  # the line cannot be sent, which is found again
            custom_id = _check_own(name, number, written.custom_id, index)
            if not written.is_passing and index.finish(custom_id):
                new.write(text)
                num_kept += 1
        _check_tail(name, old, end)
        new.flush()
        os.fsync(new.fileno())
    os.replace(fresh, name)
    return num_kept


# ---------------------------------------------------------------- writing


class AnswerFiles:
    """Both files, open for one run. Owned by one thread."""

    def __init__(
        self, opened: ExitStack, answers: FileIO, errors: FileIO, num_failed: int, clock: Callable[[], float]
    ) -> None:
        """opened: closes both."""
        self._opened, self._answers, self._errors, self._clock = opened, answers, errors, clock
        self._error_file = Path(str(errors.name))
        # Errors of earlier runs that stay.
        self.num_kept_errors = num_failed
        self._synced_at = clock()

    def write(self, line: LineAnswer | LineFailure) -> None:
        is_good = isinstance(line, LineAnswer) and line.is_good
        _append(self._answers if is_good else self._errors, line.text())
        if self._clock() - self._synced_at >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        for file in (self._answers, self._errors):
            os.fsync(file.fileno())
        self._synced_at = self._clock()

    def close(self) -> None:
        """A file without errors is removed."""
        with self._opened:
            self.sync()
            if not os.fstat(self._errors.fileno()).st_size:
                self._error_file.unlink()


def _append(file: FileIO, text: bytes) -> None:
    """A line at the end. A full disk may take a part, which is taken back. Raises OSError."""
    left = memoryview(text)
    start = file.seek(0, os.SEEK_END)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(start)
        raise


def open_answers(
    answers: Path, errors: Path, index: LineIndex, clock: Callable[[], float] = time.monotonic
) -> AnswerFiles:
    """Open the files of a run, and note in the index what earlier runs did. Raises ConfigError."""
    if answers.resolve() == errors.resolve():
        raise ConfigError(f"answers and errors would both go to {answers}; give --errors another file")
    try:
        with ExitStack() as opened:
            file = opened.enter_context(open(answers, "r+b" if answers.exists() else "x+b", buffering=0))
            _lock(answers, file)
            with open(answers, "rb", BUFFER_BYTES) as old:
                end = _take_back(answers, old, index)
            _lock(errors, opened.enter_context(open(errors, "ab", buffering=0)))
            num_kept = _keep_lasting(errors, index)
            failed = opened.enter_context(open(errors, "ab", buffering=0))  # another one now
            _lock(errors, failed)
            file.truncate(end)
            return AnswerFiles(opened.pop_all(), file, failed, num_kept, clock)
    except OSError as error:
        raise ConfigError(f"{error.filename or answers} cannot be written: {error.strerror}; check the path") from error


def _lock(name: Path, file: FileIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run writes {name}; wait for it, or give another output") from None


def errors_beside(answers: Path) -> Path:
    """OUT.errors.jsonl for OUT.jsonl."""
    return answers.with_name(f"{answers.name.removesuffix('.jsonl')}.errors.jsonl")


def check_files(given: Path, answers: Path, errors: Path) -> None:
    """Raises ConfigError where an output would be the input, or the input cannot be read twice."""
    if given.exists() and not given.is_file():
        raise ConfigError(f"{given} is no file that can be read twice; give the name of a file")
    for output in (answers, errors):
        if output.exists() and given.exists() and output.samefile(given):
            raise ConfigError(f"{output} is the input, too; give another output")
