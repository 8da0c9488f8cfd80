"""A node process for benchmarks: the real one, with stopwatches at the seams and, when asked, a slower link. It changes
no behaviour but time.

    python -m bench.harness.node [--marks FILE] [--link-bytes-s N] [--bulk] -- FLAGS OF `pdcluster node`

--marks: at the end, one line "NAME SECONDS" (CLOCK_MONOTONIC, comparable between processes of one machine) per event.
--link-bytes-s: every write waits as on a serial link of that speed. --bulk: nothing is pushed before the whole prompt
is computed, as in systems without overlap.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdcluster.node.native import process
from pdcluster.node.native.decode import DecodeSide
from pdcluster.node.native.engine_side import NativeSide
from pdcluster.node.native.prefill import PrefillSide
from pdcluster.settings.config import NodeConfig, keys, load
from pdcluster.transfer.backends.base import Backend, Handle, Peer, Stamp, WriteStatus
from pdcluster.transfer.layout.spans import CopyRuns
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.session import Landed
from pdcluster.transfer.protocol.writer import Writer


class Marks:
    def __init__(self) -> None:
        self._lines: list[tuple[str, float]] = []

    def __call__(self, name: str) -> None:
        self._lines.append((name, time.monotonic()))

    def write(self, path: Path) -> None:
        path.write_text("".join(f"{name} {at:.9f}\n" for name, at in self._lines))


def before(cls: type, method: str, action: Callable[..., None]) -> None:
    """Have `action` called with the same arguments before `method`."""
    original = cls.__dict__[method]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(cls, method, wrapped)


def mark_seams(mark: Marks) -> None:
    """token1: it was taken in; commit: sent; arrived: Commit received; landed: KV verified; launched: the row's first
    step; answered: its result."""
    before(PrefillSide, "on_update", lambda _, update: mark("token1") if update.token is not None else None)
    before(Writer, "_commit_message", lambda *_: mark("commit"))
    before(Reader, "_on_commit", lambda *_: mark("arrived"))
    before(DecodeSide, "on_event", lambda _, event: mark("landed") if isinstance(event, Landed) else None)
    before(DecodeSide, "on_update", lambda *_: mark("update"))
    launch = NativeSide._launch

    def marked_launch(loop: NativeSide) -> None:
        before = len(loop._in_flight)
        launch(loop)
        if len(loop._in_flight) > before:
            mark("launched")

    NativeSide._launch = marked_launch  # type: ignore[method-assign,assignment]


def push_in_bulk() -> None:
    advance, milestones = PrefillSide._advance, PrefillSide.milestones

    def late_advance(side: PrefillSide, leg: Any) -> None:
        if leg.first_token is not None:
            advance(side, leg)

    PrefillSide._advance = late_advance  # type: ignore[method-assign,assignment]
    PrefillSide.milestones = lambda side, plan: milestones(side, plan)[:0]  # type: ignore[method-assign,assignment]


class SlowLink:
    """A backend behind a serial link of so many bytes per second; everything but `write` and `poll` is the inner
    one's."""

    def __init__(self, inner: Backend, bytes_s: float) -> None:
        self._inner = inner
        self._bytes_s = bytes_s
        self._handles = itertools.count(1)
        self._started: dict[Handle, Handle] = {}
        # The write that `poll` just said is DONE: ours and the inner one's.
        self._done: tuple[Handle, Handle] | None = None
        self._queue: queue.SimpleQueue[tuple[Handle, tuple[Any, ...]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="slow-link").start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, digests: bool = False
    ) -> Handle:
        handle = Handle(next(self._handles))
        self._queue.put((handle, (peer, source_region, target_region, stamp, runs, digests)))
        return handle

    def poll(self, handle: Handle) -> WriteStatus:
        if handle not in self._started:
            return WriteStatus.PENDING
        status = self._inner.poll(self._started[handle])
        if status not in (WriteStatus.PENDING, WriteStatus.UNKNOWN):
            self._done = (handle, self._started.pop(handle))
        return status

    def take_digest(self, handle: Handle) -> int | None:
        return self._inner.take_digest(self._inner_done(handle))

    def take_duration(self, handle: Handle) -> float | None:
        return self._inner.take_duration(self._inner_done(handle))

    def _inner_done(self, handle: Handle) -> Handle:
        assert self._done is not None and self._done[0] == handle, (
            "digest and duration are taken right after poll said DONE"
        )
        return self._done[1]

    def _run(self) -> None:
        free_at = 0.0
        while True:
            handle, arguments = self._queue.get()
            free_at = max(free_at, time.monotonic()) + arguments[3].nbytes / self._bytes_s
            time.sleep(max(free_at - time.monotonic(), 0))
            self._started[handle] = self._inner.write(*arguments)


def slow_down(bytes_s: float) -> None:
    open_backends = process.open_backends

    def slowed(*arguments: Any) -> Mapping[str, Any]:
        return {name: SlowLink(backend, bytes_s) for name, backend in open_backends(*arguments).items()}

    process.open_backends = slowed  # type: ignore[assignment]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--marks", type=Path)
    parser.add_argument("--link-bytes-s", type=float)
    parser.add_argument("--bulk", action="store_true")
    arguments, rest = parser.parse_known_args()
    flags = {key.flag: key.path for key in keys(NodeConfig)}
    given = [item for item in rest if item != "--"]
    config = load(NodeConfig, {flags[flag]: value for flag, value in zip(given[::2], given[1::2], strict=True)}).config
    mark = Marks()
    if arguments.marks is not None:
        mark_seams(mark)
    if arguments.bulk:
        push_in_bulk()
    if arguments.link_bytes_s is not None:
        slow_down(arguments.link_bytes_s)
    code = process.run(config)
    if arguments.marks is not None:
        mark.write(arguments.marks)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
