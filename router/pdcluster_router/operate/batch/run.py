"""Runs a batch: reads lines, has routers answer them, writes what they say. See `answers` for how it goes on later."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from pdcluster.core.errors import ConfigError
from pdcluster.settings.secret_file import read_secret_file
from pdcluster.settings.tls_trust import TlsTrust
from pdcluster_router.operate.batch.answers import (
    AnswerFiles,
    LineAnswer,
    LineFailure,
    check_files,
    errors_beside,
    open_answers,
)
from pdcluster_router.operate.batch.http_client import RouterClient
from pdcluster_router.operate.batch.lines import BadLine, BatchLine, LineIndex, read_lines
from pdcluster_router.operate.batch.ordered import OrderedAnswers
from pdcluster_router.operate.batch.progress import BatchCount, line_of, show_progress
from pdcluster_router.operate.batch.routers import RouterPool
from pdcluster_router.operate.clients import resolved_hosts

# Lines in order that may begin beyond the one that is waited for, for each that may be open.
AHEAD = 8


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """errors: None: beside the answers. api: HOST:PORT[,…] of routers' HTTP APIs. trust: None: plain HTTP."""

    lines: Path
    answers: Path
    errors: Path | None = None
    api: str = "127.0.0.1:8000"
    key_file: Path | None = None
    trust: TlsTrust | None = None
    concurrency: int = 128
    deadline_s: float = 24 * 3600.0
    is_ordered: bool = False
    is_quiet: bool = False


def run(options: BatchOptions) -> int:
    """Answer all lines. Returns how many have failed, those of earlier runs too.

    Raises ConfigError, Unreachable and TokenRefused. What was answered before that stands in the files.
    """
    errors = options.errors or errors_beside(options.answers)
    check_files(options.lines, options.answers, errors)
    head = _head(options.key_file)
    clients = [
        RouterClient(address, host, head, options.trust)
        for address, host in resolved_hosts(options.api, "--api").items()
    ]
    index = LineIndex.of(options.lines)
    files = open_answers(options.answers, errors, index)
    count = BatchCount(len(index), index.num_done - files.num_kept_errors, files.num_kept_errors)
    try:
        seconds = uvloop.run(_run(options, clients, index, files, count))
    finally:
        files.close()
    if count.num_left > 0:
        raise ConfigError(
            f"{options.lines} changed while it was read: {count.num_left} of its lines were not found again"
        )
    again = f", {count.num_sent_again} sent again" if count.num_sent_again else ""
    print(f"{line_of(count, seconds)}{again}", file=sys.stderr)
    if count.num_failed:
        print(f"what failed is in {errors}; run the same command again to try what may pass", file=sys.stderr)
    return count.num_failed


def _head(key_file: Path | None) -> bytes:
    lines = b"content-type: application/json\r\nx-pdcluster-class: batch\r\nuser-agent: pdctl\r\n"
    if key_file is None:
        return lines
    key = read_secret_file("--key-file", key_file).strip()
    if not re.fullmatch(rb"[!-~]{1,4096}", key):
        raise ConfigError(f"--key-file {key_file} has no API key: one line of letters, digits and signs")
    return b"%bauthorization: Bearer %b\r\n" % (lines, key)


async def _run(
    options: BatchOptions, clients: list[RouterClient], index: LineIndex, files: AnswerFiles, count: BatchCount
) -> float:
    """Returns the seconds that it took."""
    began = time.monotonic()
    pool = RouterPool(clients, options.concurrency, options.deadline_s)
    writer = _Writer(files, count, options)
    lines = read_lines(options.lines)
    shown = None if options.is_quiet else asyncio.ensure_future(show_progress(count))
    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(options.concurrency, max(count.num_left, 1))):
                workers.create_task(_work(lines, index, pool, writer))
    except* Exception as failed:
        raise _first(failed) from failed
    finally:
        count.num_sent_again = pool.num_sent_again
        if shown is not None:
            shown.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await shown
        for client in clients:
            client.close()
    return time.monotonic() - began


def _first(failed: BaseException) -> BaseException:
    """One of the errors that ended workers."""
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    return failed


class _Writer:
    """Writes as lines end, or in their order."""

    def __init__(self, files: AnswerFiles, count: BatchCount, options: BatchOptions) -> None:
        self._files, self._count = files, count
        self._ordered = OrderedAnswers(self._write, AHEAD * options.concurrency) if options.is_ordered else None

    async def begin(self) -> int:
        return 0 if self._ordered is None else await self._ordered.begin()

    async def put(self, turn: int, found: LineAnswer | LineFailure) -> None:
        if self._ordered is None:
            self._write(found)
        else:
            await self._ordered.put(turn, found)

    def _write(self, found: LineAnswer | LineFailure) -> None:
        self._files.write(found)
        if isinstance(found, LineFailure) and found.error.line is not None:
            self._count.num_lines += 1  # the index has those only that can be sent
        self._count.note(found)


async def _work(lines: Iterator[BatchLine | BadLine], index: LineIndex, pool: RouterPool, writer: _Writer) -> None:
    """Answer lines until there are no more."""
    while True:
        turn = await writer.begin()
        line = next((line for line in lines if not _is_over(line, index)), None)
        if line is None:
            return
        if isinstance(line, BadLine):
            await writer.put(turn, LineFailure.of(line))
            await asyncio.sleep(0)  # many of them must not keep answers waiting
        else:
            await writer.put(turn, await pool.answer(line))


def _is_over(line: BatchLine | BadLine, index: LineIndex) -> bool:
    return isinstance(line, BatchLine) and index.is_done(line.custom_id)
