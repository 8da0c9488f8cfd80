"""Two staged backends over a library of this process whose writes may stay unknown and land later, for tests. No test
in it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np

from pdcluster.transfer.backends.base import Handle, Peer, Permit, Region, Stamp, WriteStatus
from pdcluster.transfer.backends.staged.backend import StagedBackend
from pdcluster.transfer.backends.staged.staging import StagedSettings
from pdcluster.transfer.layout.spans import CopyRun

WRITER, READER = Peer("w", "w1"), Peer("r", "r1")
BLOCK, BLOCKS, FLYING = 4096, 4, 3
UNKNOWN_S = 5.0


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.001)


class Unreliable:
    """An engine in this process. unknown: the writes, counted from 0, that get no definite answer; `land` copies them
    then, from what their source holds by that time. lost: those that end so. most: writes under way at once."""

    needs_calls = False
    reads_anywhere = False

    def __init__(self, unknown: Callable[[int], bool] = lambda _: False) -> None:
        self.unknown = unknown
        self.lost: Callable[[int], bool] = lambda _: False
        self.ended: set[int] = set()
        self.lock = threading.Lock()
        self.writes: list[tuple[int, int, int]] = []
        self.under_way: set[int] = set()
        self.most = 0
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        self.registered[address] = nbytes

    def unregister(self, address: int, nbytes: int) -> None:
        self.registered.pop(address)

    def grant(self, address: int, nbytes: int) -> bytes:
        return b"here"

    def meet(self, grant: bytes) -> str:
        return grant.decode()

    def part(self, far: str) -> None:
        """Nothing is kept."""

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        with self.lock:
            self.writes.append((source, target, nbytes))
            self.under_way.add(len(self.writes))
            self.most = max(self.most, len(self.under_way))
            return len(self.writes)

    def check(self, batch: int) -> WriteStatus:
        assert batch not in self.ended, "the library forgot it with its last word"
        self.under_way.discard(batch)
        if self.unknown(batch - 1):
            return WriteStatus.UNKNOWN
        self.ended.add(batch)
        if self.lost(batch - 1):
            return WriteStatus.LOST
        self.land(batch - 1)
        return WriteStatus.DONE

    def land(self, number: int) -> None:
        source, target, nbytes = self.writes[number]
        ctypes.memmove(target, source, nbytes)

    def expect(self) -> None:
        """It has nothing to call."""

    def close(self) -> None:
        """It has no threads."""


class Slow(Unreliable):
    """Answers nothing before it `may_answer`. looks: how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = False
        self.looks = 0

    def check(self, batch: int) -> WriteStatus:
        self.looks += 1
        return super().check(batch) if self.may_answer else WriteStatus.PENDING


class Straight(Unreliable):
    """One that sends from the pages themselves."""

    reads_anywhere = True


class SlowStraight(Slow):
    reads_anywhere = True


class Breaking(SlowStraight):
    """Its third write is an error."""

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        if len(self.writes) == 2:
            raise OSError("the library is out of memory")
        return super().submit(far, source, target, nbytes)


class Ungiving(Breaking):
    """And each time that it is to give something back."""

    def unregister(self, address: int, nbytes: int) -> None:
        super().unregister(address, nbytes)
        raise OSError("the library knows nothing of this memory")

    def part(self, far: str) -> None:
        raise OSError("the library knows nothing of this peer")


class Ends:
    def __init__(self, engine: Unreliable) -> None:
        self.engine = engine
        settings = StagedSettings(block_bytes=BLOCK, blocks=BLOCKS, flying=FLYING, retry_s=0.01, unknown_s=UNKNOWN_S)
        self.source, self.target = (np.zeros(64 * BLOCK, dtype=np.uint8) for _ in range(2))
        self.source[:] = np.random.default_rng(1).integers(1, 256, self.source.nbytes)
        self.writer, self.reader = (
            StagedBackend(peer, "mooncake", engine, settings, owns_engine=False) for peer in (WRITER, READER)
        )
        self.writer.register(Region(0, self.source.ctypes.data, self.source.nbytes))
        self.reader.register(Region(0, self.target.ctypes.data, self.target.nbytes))
        self.reader.permit(Permit(7, WRITER, 0, ((0, self.target.nbytes),)))
        self.writer.connect(READER, self.reader.advert())

    def write(self, chunk: int, first: int, blocks: int) -> WriteStatus:
        """Blocks [first, first + blocks), to where they are at the source."""
        nbytes = blocks * BLOCK
        stamp, runs = Stamp(7, chunk, 1, nbytes), (CopyRun(first * BLOCK, first * BLOCK, nbytes),)
        return self.result(self.writer.write(READER, 0, 0, stamp, runs))

    def result(self, handle: Handle) -> WriteStatus:
        found = [WriteStatus.PENDING]

        def is_final() -> bool:
            found[0] = self.writer.poll(handle)
            return found[0] is not WriteStatus.PENDING

        eventually(is_final, "an answer")
        return found[0]

    def close(self) -> None:
        self.writer.shutdown()
        self.reader.shutdown()
