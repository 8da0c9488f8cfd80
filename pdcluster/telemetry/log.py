"""Structured logs, one line per event: for people on a terminal, JSON otherwise. Not metrics, and never secrets.

    log = Log("node.loop", node="prefill-0")
    log.warning("transfer failed", request=work.request, attempt=work.attempt, peer=peer)

Built on the standard `logging`, so that lines of libraries come out in the same shape. Lines that repeat are bounded:
of one kind, a process writes a few in each interval and then how many it left out. Lines of single requests
(`requests`) are only written where they are asked for, and then all of them.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TextIO

from prometheus_client import CollectorRegistry

from pdcluster.settings.config import LogConfig, LogFormat
from pdcluster.settings.keys import MASK
from pdcluster.telemetry.line_writer import LineWriter, LostLines

SECRET_WORDS = ("secret", "password", "api_key", "cluster_key", "authorization")
# Lines of one kind that are written in an interval, and its seconds.
REPEATS, REPEAT_S = 30, 10.0
# Kinds of lines that are counted.
MAX_KINDS = 1024
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Log:
    """A named source of log lines with bound fields. Immutable; `bind` gives one with more fields."""

    def __init__(self, name: str, **fields: object) -> None:
        self.name = name
        self.fields = fields
        self.logger_name = f"pdcluster.{name}"
        self._logger = logging.getLogger(self.logger_name)
        # Whether lines of level info are written.
        self.is_on = partial(self._logger.isEnabledFor, logging.INFO)

    def bind(self, **fields: object) -> Log:
        return Log(self.name, **{**self.fields, **fields})

    def debug(self, event: str, **fields: object) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """An error with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, fields, trace=True)

    def _emit(self, level: int, event: str, fields: Mapping[str, object], *, trace: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event, extra={"fields": {**self.fields, **fields}}, exc_info=trace)


# Where each request goes and how it ends. On by log.requests.
requests = Log("requests")


class RepeatFilter(logging.Filter):
    """Bounds lines of one kind: those with the same source, level and unformatted text.

    The first REPEATS of each REPEAT_S pass. The last of them has `muted_s`, how long more are left out. The next line
    after that has `left_out`, how many were.
    clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # When the interval began, and how many lines came in it.
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == requests.logger_name:
            return True
        kind, now = (record.name, record.levelno, _kind_of(record)), self._clock()
        began, count = self._seen.get(kind, (now, 0))
        num_left_out = 0
        if now - began >= REPEAT_S:
            began, count, num_left_out = now, 0, max(count - REPEATS, 0)
        if kind not in self._seen and len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = began, count + 1
        if num_left_out:
            record.left_out = num_left_out
        if count == REPEATS - 1:
            record.muted_s = round(REPEAT_S - (now - began), 1)
        return count < REPEATS


def _kind_of(record: logging.LogRecord) -> str:
    """The text before anything was put into it. Lines of `Log` have it as their argument."""
    is_of_log = record.msg == "%s" and isinstance(record.args, tuple) and len(record.args) == 1
    return str(record.args[0]) if is_of_log else str(record.msg)  # type: ignore[index]


class LineFormatter(logging.Formatter):
    """What both formats share. process: the fields every line of this process carries."""

    def __init__(self, process: Mapping[str, object]) -> None:
        super().__init__()
        self._process = dict(process)

    def values(self, record: logging.LogRecord) -> dict[str, object]:
        fields = record.__dict__.get("fields")  # absent on lines of libraries
        repeats = {name: record.__dict__.get(name) for name in ("muted_s", "left_out")}  # set by RepeatFilter
        return {
            name: _masked(name, value)
            for name, value in {**self._process, **(fields or {}), **repeats}.items()
            if value is not None
        }


class JsonFormatter(LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **self.values(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_plain(value)}" for name, value in self.values(record).items())
        event = _one_line(record.getMessage())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():7} {event}"
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{head}  {fields}".rstrip() + trace


def configure(config: LogConfig, stream: TextIO | None = None, **process: object) -> None:
    """Send every log line of this process to `stream` (default stderr) in the configured form. Called once, by the
    process's entry point."""
    stream = sys.stderr if stream is None else stream
    writer = writer_of(stream)
    as_json = resolve_format(config.format, stream) == "json"
    handler = logging.StreamHandler(stream) if writer is None else WriterHandler(writer)
    handler.setFormatter(JsonFormatter(process) if as_json else TextFormatter(process))
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[config.level])
    logging.getLogger(requests.logger_name).setLevel(logging.INFO if config.requests else logging.CRITICAL)
    logging.captureWarnings(True)


class WriterHandler(logging.Handler):
    """Lines go to a writer, so that no thread waits for whoever reads them."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record))
        except Exception as error:  # a line whose arguments do not fit must not end who wrote it
            self._writer.write(f"a log line at {record.pathname}:{record.lineno} cannot be formatted: {error!r}")

    def flush(self) -> None:
        """`logging` calls this when the process ends."""
        self._writer.flush()


_writers: dict[int, LineWriter] = {}


def writer_of(stream: TextIO) -> LineWriter | None:
    """The writer of a stream with a descriptor, one for each descriptor; None for a stream in memory."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return None
    if number not in _writers:
        _writers[number] = LineWriter(stream)
        atexit.register(_writers[number].flush)
    return _writers[number]


def register_lost_lines(registry: CollectorRegistry) -> None:
    """Count the lines of this process's log that nobody read."""
    writer = writer_of(sys.stderr)
    if writer is not None:
        LostLines(writer, registry)


def resolve_format(wanted: LogFormat, stream: TextIO) -> LogFormat:
    """text or json: what `auto` means on this stream."""
    if wanted != "auto":
        return wanted
    return "text" if stream.isatty() else "json"


def _masked(name: str, value: object) -> object:
    return MASK if any(word in name.lower() for word in SECRET_WORDS) else value


def _stamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _plain(value: object) -> str:
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    return (
        json.dumps(shown, ensure_ascii=False)
        if not shown or any(c.isspace() or c in '"=' or not c.isprintable() for c in shown)
        else shown
    )


def _one_line(message: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
