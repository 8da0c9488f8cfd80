"""The end of a transfer of weights that writes: from memory of this process, over the best medium that both ends have.

Every byte goes over the link once, in bounded pieces, a few at a time. Digests are taken beside it, on threads.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pdcluster.checkpoint.weights_digest import tensor_digest
from pdcluster.core.errors import PeerUnreachable, TransferError
from pdcluster.core.messages import TensorDigests, WeightsTarget
from pdcluster.core.weights import WeightTensor
from pdcluster.transfer.backends.base import Backend, Handle, Peer, Region, Stamp, WriteStatus
from pdcluster.transfer.layout.spans import CopyRun
from pdcluster.weights.pieces import PROGRESS_S, START_S, WINDOW, OpenMedia, Piece, pieces_of

LOOK_S = 0.1
# Memory is not read faster by more.
MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor in memory of this process, which stays as it is until it is sent."""

    tensor: WeightTensor
    address: int


class WeightsSender:
    """One transfer. `stop` may be called by any thread; one thread calls `send` once."""

    def __init__(
        self,
        me: Peer,
        sources: Sequence[SourceTensor],
        target: WeightsTarget,
        open_media: OpenMedia,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me, self._sources, self._target, self._open_media, self._clock = me, sources, target, open_media, clock
        self._peer = Peer(target.receiver.node, target.receiver.incarnation)
        self._stopped = threading.Event()
        # By medium, for whoever counts.
        self.sent_bytes: dict[str, int] = {}

    def stop(self) -> None:
        self._stopped.set()

    def send(self) -> TensorDigests:
        """Write everything. Returns the digests. Raises TransferError."""
        if len(self._target.starts) != len(self._sources):
            raise TransferError(f"{self._peer.node} wants {len(self._target.starts)} of {len(self._sources)} tensors")
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="weights-digest") as pool:
            digests: list[Future[bytes]] = []
            try:
                digests += [pool.submit(digest_of, source) for source in self._sources]
                self._write_all()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            return tuple(
                (source.tensor.name, digest.result()) for source, digest in zip(self._sources, digests, strict=True)
            )

    def _write_all(self) -> None:
        """By one medium after the other, as far as one fails."""
        left = list(enumerate(pieces_of([source.tensor for source in self._sources])))
        media, reasons = self._open_media(self._me), list[str]()
        try:
            for trial, (name, advert) in enumerate(self._target.receiver.adverts):
                if left and (backend := media.get(name)) is not None:
                    try:
                        left = self._write_by(backend, advert, trial, left)
                    except PeerUnreachable as error:
                        reasons.append(f"{name}: {error}")
                        continue
                    if left:
                        reasons.append(f"{name}: the connection broke")
            if left:
                why = "; ".join(reasons) or f"it has none of {', '.join(media) or 'no medium'}"
                raise TransferError(f"weights cannot be written to {self._peer.node}: {why}")
        finally:
            for backend in media.values():
                backend.shutdown()

    def _write_by(
        self, backend: Backend, advert: bytes, trial: int, left: list[tuple[int, Piece]]
    ) -> list[tuple[int, Piece]]:
        """Returns what the medium did not carry."""
        for number, source in enumerate(self._sources):
            if source.tensor.nbytes:
                backend.register(Region(number, source.address, source.tensor.nbytes, is_source=True))
        backend.connect(self._peer, advert)
        waiting, flying = deque(left), dict[Handle, tuple[int, Piece]]()
        poller = select.poll()
        poller.register(backend.wakeup_fd, select.POLLIN)
        moved_at, most_s = self._clock(), START_S
        while waiting or flying:
            if self._stopped.is_set():
                raise TransferError("the transfer was stopped")
            while waiting and len(flying) < WINDOW:
                number, piece = waiting.popleft()
                flying[self._write(backend, number, piece, trial)] = number, piece
            poller.poll(LOOK_S * 1000)
            backend.arrivals()  # clears the descriptor
            done, is_broken = self._settle(backend, flying)
            if is_broken:
                return [*flying.values(), *waiting]
            if done:
                moved_at, most_s = self._clock(), PROGRESS_S
            elif self._clock() - moved_at > most_s:
                raise TransferError(f"{self._peer.node} took no bytes by {backend.name} for {most_s:g} s")
        return []

    def _write(self, backend: Backend, number: int, piece: Piece, trial: int) -> Handle:
        run = CopyRun(piece.offset, self._target.starts[piece.tensor] + piece.offset, piece.nbytes)
        stamp = Stamp(self._target.nonce, number, trial, piece.nbytes)
        return backend.write(self._peer, piece.tensor, self._target.region, stamp, (run,))

    def _settle(self, backend: Backend, flying: dict[Handle, tuple[int, Piece]]) -> tuple[int, bool]:
        """How many writes are done, and whether the medium failed. Raises TransferError where the receiver gave up."""
        done, is_broken = 0, False
        for handle in list(flying):
            status = backend.poll(handle)
            if status is WriteStatus.REFUSED:
                raise TransferError(f"{self._peer.node} takes these weights no more; see its log")
            if status is WriteStatus.DONE:
                _, piece = flying.pop(handle)
                self.sent_bytes[backend.name] = self.sent_bytes.get(backend.name, 0) + piece.nbytes
                done += 1
            elif status is not WriteStatus.PENDING:
                is_broken = True
        return done, is_broken


def digest_of(source: SourceTensor) -> bytes:
    tensor = source.tensor
    state = tensor_digest(tensor.name, tensor.kind, tensor.shape)
    if tensor.nbytes:
        state.update(memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(source.address)))  # without the GIL
    return state.digest()
