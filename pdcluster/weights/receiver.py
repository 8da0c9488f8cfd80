"""The end of a transfer of weights that is written to.

It has media and memory of its own, which take this one transfer and nothing else. So whoever writes too late writes to
memory that nobody reads, and nothing has to be fenced. A sender that dies or stalls leaves nothing behind once a clock
has run out.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pdcluster.checkpoint.weight_image import WeightImage, new_image
from pdcluster.checkpoint.weights_digest import tensor_digest
from pdcluster.core.errors import TransferError
from pdcluster.core.messages import Endpoint, TensorDigests, WeightsTarget
from pdcluster.core.weights import WeightTensor
from pdcluster.transfer.backends.base import Backend, Peer, Permit, Region
from pdcluster.transfer.backends.shm_memory import MADV_POPULATE_WRITE
from pdcluster.weights.pieces import COMMIT_S, PROGRESS_S, START_S, OpenMedia, Piece, pieces_of

REGION = 0
# A wait ends this often, whatever happens.
LOOK_S = 0.5
POPULATE_BYTES = 2 << 20


class WeightsReceiver:
    """`commit` and `fail` may be called by any thread; one thread calls the rest, `receive` once."""

    def __init__(
        self,
        me: Peer,
        address: str,
        writer: Peer,
        tensors: Sequence[WeightTensor],
        open_media: OpenMedia,
        *,
        is_sealed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tensors: checked by the caller."""
        self._writer, self._tensors, self._clock = writer, tuple(tensors), clock
        self._pieces = pieces_of(self._tensors)
        self._landed: dict[int, Piece] = {}
        self.image = new_image(self._tensors)
        self._digests = _Digests(self._tensors, self.image)
        self._lock = threading.Lock()
        self._committed: dict[str, bytes] | None = None
        self._failure = ""
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._populating = threading.Thread(target=self._populate, name="weights-populate", daemon=True)
        self._is_ended = False
        self._media: dict[str, Backend] = {}
        nonce = secrets.randbits(63)
        starts = tuple(each.offset for each in self.image.tensors)
        try:
            self._media = open_media(me)
            adverts = tuple((name, self._open(backend, nonce, starts)) for name, backend in self._media.items())
        except BaseException:
            self.close()
            self.image.close()
            raise
        self._populating.start()
        self.target = WeightsTarget(
            nonce, Endpoint(me.node, me.incarnation, address, adverts), REGION, starts, is_sealed
        )

    def _open(self, backend: Backend, nonce: int, starts: Sequence[int]) -> bytes:
        """Let the writer write the tensors, once. Returns the medium's advert."""
        image = self.image
        backend.register(Region(REGION, image.address(), image.nbytes, image.fds[0]))
        first = min(starts, default=image.nbytes)
        if first < image.nbytes:
            backend.permit(Permit(nonce, self._writer, REGION, ((first, image.nbytes - first),)))
        return backend.advert()

    def commit(self, digests: TensorDigests) -> None:
        """The sender has written everything, and says the digests."""
        with self._lock:
            self._committed = dict(digests)
        self._wake()

    def fail(self, reason: str) -> None:
        """The sender gave up, or nobody wants it any more."""
        with self._lock:
            self._failure = self._failure or reason
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def receive(self) -> WeightImage:
        """The image, once every byte landed and is what the sender had. Raises TransferError, and then frees it."""
        try:
            self._wait()
            self._check()
        except BaseException:
            self.image.close()
            raise
        finally:
            self.close()
        self.image.digests = dict(self._committed or {})
        return self.image

    def close(self) -> None:
        """End the media. Idempotent."""
        self._is_ended = True
        if self._populating.is_alive():
            self._populating.join()
        media, self._media = self._media, {}
        for backend in media.values():
            backend.shutdown()
        self._digests.close()
        with self._lock:
            if self._wakeup >= 0:
                os.close(self._wakeup)
            self._wakeup = -1

    def _populate(self) -> None:
        """On a thread: have the kernel make pages, many at a time. Otherwise each would be made when it is written. A
        kernel without support does that.
        """
        madvise = ctypes.CDLL(None).madvise  # without the GIL
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start in range(0, self.image.nbytes, POPULATE_BYTES):
            if self._is_ended:
                return
            nbytes = min(POPULATE_BYTES, self.image.nbytes - start)
            madvise(self.image.address() + start, nbytes, MADV_POPULATE_WRITE)

    # ------------------------------------------------------------ waiting

    def _wait(self) -> None:
        poller = select.poll()
        for fd in (self._wakeup, *(backend.wakeup_fd for backend in self._media.values())):
            poller.register(fd, select.POLLIN)
        moved_at, most_s = self._clock(), START_S
        while self._failure == "" and (len(self._landed) < len(self._pieces) or self._committed is None):
            left_s = moved_at + most_s - self._clock()
            if left_s <= 0:
                raise TransferError(self._stalled(most_s))
            poller.poll(min(LOOK_S, left_s) * 1000)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            if self._take_arrivals():
                most_s = PROGRESS_S if len(self._landed) < len(self._pieces) else COMMIT_S
                moved_at = self._clock()
        if self._failure:
            raise TransferError(self._failure)

    def _stalled(self, most_s: float) -> str:
        landed = sum(piece.nbytes for piece in self._landed.values())
        of = sum(tensor.nbytes for tensor in self._tensors)
        what = "sent no commit" if landed == of else f"sent {landed} of {of} bytes, then nothing"
        return f"{self._writer.node} {what} for {most_s:g} s; the memory is free again, send the weights again"

    def _take_arrivals(self) -> bool:
        """Whether anything landed. It is digested while the next pieces are on their way."""
        has_moved = False
        for backend in self._media.values():
            for arrival in backend.arrivals():
                stamp = arrival.stamp
                if stamp.nonce != self.target.nonce or stamp.chunk >= len(self._pieces):
                    continue
                piece = self._pieces[stamp.chunk]
                if stamp.nbytes == piece.nbytes and stamp.chunk not in self._landed:
                    self._landed[stamp.chunk] = piece
                    self._digests.add(piece)
                    has_moved = True
        return has_moved

    def _check(self) -> None:
        """Compare what landed with what was sent. Raises TransferError."""
        found, sent = self._digests.result(), self._committed or {}
        strange = sorted(name for name in found.keys() | sent.keys() if found.get(name) != sent.get(name))
        if strange:
            raise TransferError(
                f"tensor {strange[0]} did not arrive as it was sent ({len(strange)} such tensors); nothing is taken: "
                "send the weights again"
            )


class _Digests:
    """Of the tensors of an image, taken as far as they landed in order."""

    def __init__(self, tensors: Sequence[WeightTensor], image: WeightImage) -> None:
        self._memory = image.memory()
        self._starts = [each.offset for each in image.tensors]
        self._tensors = tensors
        self._states = [tensor_digest(each.name, each.kind, each.shape) for each in tensors]
        self._ends = [0] * len(tensors)
        # Landed before a piece in front of it.
        self._early: dict[tuple[int, int], Piece] = {}

    def add(self, piece: Piece) -> None:
        self._early[piece.tensor, piece.offset] = piece
        while (found := self._early.pop((piece.tensor, self._ends[piece.tensor]), None)) is not None:
            begin = self._starts[found.tensor] + found.offset
            self._states[found.tensor].update(self._memory[begin : begin + found.nbytes])  # without the GIL
            self._ends[found.tensor] += found.nbytes

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.release()

    def result(self) -> Mapping[str, bytes]:
        return {tensor.name: state.digest() for tensor, state in zip(self._tensors, self._states, strict=True)}
