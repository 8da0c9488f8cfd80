"""A transfer at the seam of the backends (`transfer.backends.base`), without the protocol above: what of it is the
medium's. For `bench.transfer`.

Pages, chunks, permits and digests are those of a transfer. Timed from the first `write` until the reader's thread has
taken the last arrival and the writer's the last DONE, whichever is later: both processes read the same clock of the
machine. What the protocol checks, says and remembers is left out, and runs and permits are made before.
"""

from __future__ import annotations

import os
import select
import time

import numpy as np

from pdcluster.core.messages import NodeMessage
from pdcluster.transfer.backends.base import Backend, Fence, Handle, Peer, Permit, Stamp, WriteStatus
from pdcluster.transfer.layout.geometry import PageShape, join_runs_in_parts, join_spans
from pdcluster.transfer.layout.runs import RunTable
from pdcluster.transfer.protocol.session import Settings

LIMIT_S = 60.0


class Expect(NodeMessage, frozen=True, array_like=True):
    """Please permit writes for so many tokens and tell when all of them arrived."""

    num_tokens: int


class Permitted(NodeMessage, frozen=True, array_like=True):
    nonce: int
    advert: bytes
    pages: list[int]


class Seen(NodeMessage, frozen=True, array_like=True):
    """When the last arrival was taken, by time.monotonic."""

    at: float


def _wait(backend: Backend, since: float) -> None:
    left = since + LIMIT_S - time.monotonic()
    if left <= 0 or not select.select([backend.wakeup_fd], [], [], left)[0]:
        raise RuntimeError(f"{backend.name} moved nothing for {LIMIT_S} s")


def permit(backend: Backend, shape: PageShape, pages: list[int], writer: Peer, *, digests: bool) -> Permitted:
    """The reader's part before the bytes come."""
    nonce = int.from_bytes(os.urandom(8), "little")
    spans = join_spans(np.sort(np.array(pages, dtype=np.int64)) * shape.page_bytes, shape.page_bytes)
    backend.permit(Permit(nonce, writer, 0, spans, digests))
    return Permitted(nonce, backend.advert(), pages)


def await_arrivals(backend: Backend, permitted: Permitted, nbytes: int) -> Seen:
    """The reader's part while they come."""
    begin, missing = time.monotonic(), nbytes
    while True:
        missing -= sum(arrival.stamp.nbytes for arrival in backend.arrivals() if arrival.stamp.nonce == permitted.nonce)
        if missing <= 0:
            break
        _wait(backend, begin)
    seen = Seen(time.monotonic())
    if backend.revoke(permitted.nonce) is Fence.FENCED:
        backend.arrivals()
    return seen


def chunks_of(shape: PageShape, settings: Settings, sources: list[int], targets: list[int]) -> list[RunTable]:
    """As few even ones as the settings allow."""
    starts, ends = (np.array(pages, dtype=np.int64) * shape.page_bytes for pages in (sources, targets))
    count = -(-len(sources) // min(max(1, settings.chunk_bytes // shape.page_bytes), settings.chunk_runs))
    return join_runs_in_parts(
        starts, ends, shape.page_bytes, [len(sources) * part // count for part in range(1, count + 1)]
    )


def write_all(
    backend: Backend, reader: Peer, permitted: Permitted, chunks: list[RunTable], settings: Settings
) -> tuple[float, float]:
    """The writer's part. Returns when the first write was asked for, and when the last was seen to be DONE; by
    time.monotonic."""
    stamps = [Stamp(permitted.nonce, index, 1, runs.nbytes) for index, runs in enumerate(chunks)]
    coming = list(zip(stamps, chunks, strict=True))[::-1]
    handles: list[Handle] = []
    flying: dict[Handle, int] = {}
    begin = time.monotonic()
    backend.connect(reader, permitted.advert)
    while coming or flying:
        while coming and (not flying or sum(flying.values()) + coming[-1][0].nbytes <= settings.window_bytes):
            stamp, runs = coming.pop()
            flying[backend.write(reader, 0, 0, stamp, runs, settings.digests)] = stamp.nbytes
        backend.arrivals()  # clears the doorbell
        states = {handle: backend.poll(handle) for handle in flying}
        if not {WriteStatus.DONE, WriteStatus.PENDING}.issuperset(states.values()):
            raise RuntimeError(f"a write by {backend.name} ended as {set(states.values())}")
        done = [handle for handle, status in states.items() if status is WriteStatus.DONE]
        for handle in done:
            del flying[handle]
        handles += done
        if not done:
            _wait(backend, begin)
    end = time.monotonic()
    for handle in handles:
        backend.take_digest(handle)
        backend.take_duration(handle)
    return begin, end
