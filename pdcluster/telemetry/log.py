"""Structured logs, one line per event: for people on a terminal, JSON otherwise. Not metrics, and never secrets.

    log = Log("node.loop", node="prefill-0")
    log.warning("transfer failed", request=work.request, attempt=work.attempt, peer=peer)

Built on the standard `logging`, so that lines of libraries come out in the same shape.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from pdcluster.settings.config import LogConfig, LogFormat
from pdcluster.settings.keys import MASK

SECRET_WORDS = ("secret", "password", "api_key", "cluster_key", "authorization")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Log:
    """A named source of log lines with bound fields. Immutable; `bind` gives one with more fields."""

    def __init__(self, name: str, **fields: object) -> None:
        self.name = name
        self.fields = fields
        self._logger = logging.getLogger(f"pdcluster.{name}")

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


class LineFormatter(logging.Formatter):
    """What both formats share. process: the fields every line of this process carries."""

    def __init__(self, process: Mapping[str, object]) -> None:
        super().__init__()
        self._process = dict(process)

    def values(self, record: logging.LogRecord) -> dict[str, object]:
        fields = record.__dict__.get("fields")  # absent on lines of libraries
        return {
            name: _masked(name, value)
            for name, value in {**self._process, **(fields or {})}.items()
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
    as_json = resolve_format(config.format, stream) == "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(process) if as_json else TextFormatter(process))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[config.level])
    logging.captureWarnings(True)


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
