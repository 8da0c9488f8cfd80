"""How far a batch is, on standard error: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pdcluster_router.operate.batch.answers import LineAnswer, LineFailure
from pdcluster_router.operate.printing import console

LOOK_S, LINE_S = 0.25, 5.0


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Used(msgspec.Struct):
    usage: _Usage | None = None


_decode_used = msgspec.json.Decoder(_Used).decode


def output_tokens(body: bytes) -> int:
    """Tokens of an answer, by its usage; 0 where it has none."""
    try:
        usage = _decode_used(body).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    return 0 if usage is None else usage.completion_tokens or usage.output_tokens or 0


@dataclass(slots=True)
class BatchCount:
    """num_lines: to answer, with those of earlier runs. num_done: answered. num_failed: in the file of errors."""

    num_lines: int
    num_done: int = 0
    num_failed: int = 0
    # Of this run.
    num_answered: int = 0
    num_tokens: int = 0
    num_sent_again: int = 0

    def note(self, found: LineAnswer | LineFailure) -> None:
        self.num_answered += 1
        if isinstance(found, LineAnswer) and found.is_good:
            self.num_done += 1
            self.num_tokens += output_tokens(found.body)
        else:
            self.num_failed += 1

    @property
    def num_left(self) -> int:
        return self.num_lines - self.num_done - self.num_failed


def line_of(count: BatchCount, seconds: float) -> str:
    """One line about a run that takes so long already."""
    rate = count.num_answered / seconds if seconds > 0 else 0.0
    left = f"{_time(count.num_left / rate)} left" if rate else "time left not known"
    tokens_s = count.num_tokens / seconds if seconds > 0 else 0.0
    return (
        f"{count.num_done + count.num_failed} of {count.num_lines} lines, {count.num_failed} failed, "
        f"{tokens_s:.0f} tokens/s, {left if count.num_left else 'done'}"
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


async def show_progress(count: BatchCount, clock: Callable[[], float] = time.monotonic) -> None:
    """Show it until cancelled."""
    began = clock()
    if not sys.stderr.isatty():
        while True:
            await asyncio.sleep(LINE_S)
            print(line_of(count, clock() - began), file=sys.stderr, flush=True)
    columns: tuple[Any, ...] = (
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console(is_error=True)) as shown:
        task = shown.add_task("", total=count.num_lines)
        while True:
            tokens_s = count.num_tokens / max(clock() - began, 1e-9)
            described = f"lines, {count.num_failed} failed, {tokens_s:.0f} tokens/s"
            shown.update(task, completed=count.num_done + count.num_failed, description=described)
            await asyncio.sleep(LOOK_S)
