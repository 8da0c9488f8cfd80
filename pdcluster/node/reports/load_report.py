"""What a node sends its routers unasked: its load when it changed, and block hashes that came and went.

Owned by the node loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from pdcluster.api.text.known_ids import check_known_ids
from pdcluster.api.text.model_text import templates_of
from pdcluster.checkpoint.text_files import files_digest, read_text_files
from pdcluster.core.messages import AnyMessage, BreakerName, CacheDelta, FetchFile, FileChunk, Load, PathLoad
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.breaker import BreakerState
from pdcluster.transfer.paths.measure import Paths

Send = Callable[[Peer, AnyMessage], None]

MAX_REPORTED_PEERS = 64
STATES: dict[BreakerState, BreakerName] = {
    BreakerState.CLOSED: "closed",
    BreakerState.OPEN: "open",
    BreakerState.HALF_OPEN: "half_open",
}


def path_loads(paths: Paths) -> tuple[PathLoad, ...]:
    """Bandwidths in two digits, so that noise alone makes no report."""
    return tuple(
        PathLoad(each.peer.node, each.backend, float(f"{each.bytes_s:.2g}"), STATES[each.state], each.is_chosen)
        for each in paths.report(MAX_REPORTED_PEERS)
    )


def by_reason(counters: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(counters.items()))


class CacheSource(Protocol):
    """Block hashes that a node has cached, HASH_BYTES each."""

    def snapshot(self) -> bytes: ...

    def drain_changes(self) -> tuple[bytes, bytes]:
        """Those that came and those that went since the last call."""
        ...


class Reporter:
    """At most one report per interval. A router that sent Hello gets a whole snapshot at once."""

    def __init__(
        self,
        cache: CacheSource,
        load: Callable[[], Load],
        *,
        interval_s: float,
        clock: Callable[[], float],
        seen: Callable[[Peer], int],
    ) -> None:
        """seen: number of the last frame taken from a router."""
        self._cache = cache
        self._load = load
        self._interval_s = interval_s
        self._clock = clock
        self._seen = seen
        self._routers: set[Peer] = set()
        self._last: Load | None = None
        self._next_at = 0.0
        self._sequence = 0

    def add(self, router: Peer, send: Send) -> None:
        """Welcome a router, or one that missed deltas, with everything as it is.

        The snapshot contains pending changes, so other routers get these first.
        """
        self._report_cache(send)
        self._routers.add(router)
        send(router, CacheDelta(self._sequence, True, self._cache.snapshot(), b""))
        send(router, self._load_for(router, self._load()))

    def remove(self, router: Peer) -> None:
        self._routers.discard(router)

    def report(self, send: Send) -> None:
        """Send what changed, when the interval is over."""
        now = self._clock()
        if now < self._next_at or not self._routers:
            return
        self._report_cache(send)
        load = self._load()
        if load != self._last:
            self._last = load
            self._next_at = now + self._interval_s
            for router in self._routers:
                send(router, self._load_for(router, load))

    def next_deadline(self) -> float | None:
        """When a change too early for the last report may go out."""
        return self._next_at if self._routers and self._clock() < self._next_at else None

    def _load_for(self, router: Peer, load: Load) -> Load:
        return replace(load, seen=self._seen(router))

    def _report_cache(self, send: Send) -> None:
        added, removed = self._cache.drain_changes()
        if not added and not removed:
            return
        self._sequence += 1
        for router in self._routers:
            send(router, CacheDelta(self._sequence, False, added, removed))


# The model's text files, which a router may fetch in pieces. Weights are not among them.
#
# They are read once at start, so a file that changes on disk cannot give a router half of each.

CHUNK_BYTES = 1 << 20


class ModelFiles:
    def __init__(self, directory: Path) -> None:
        """Raises ModelError where they need ids that the model lacks."""
        self._files = read_text_files(directory)
        check_known_ids(self._files, lambda: templates_of(self._files).values())
        self.digest = files_digest(self._files)

    def chunk(self, message: FetchFile) -> FileChunk:
        """The piece at message.offset. total_bytes is 0 for a file that the model lacks."""
        data = self._files.get(message.name, b"")
        return FileChunk(message.name, message.offset, len(data), data[message.offset : message.offset + CHUNK_BYTES])
