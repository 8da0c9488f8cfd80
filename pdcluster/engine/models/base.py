"""What the engine needs of a model, whatever is inside it (dense, mixture of experts, another attention)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Protocol

from torch import Tensor

from pdcluster.engine.batch import Batch


class Progress:
    """Counts the layers computed since start. One writer (the worker), any number of readers, also in other processes when `cell` is shared."""

    __slots__ = ("_bells", "_cell", "_start", "bell_fd")

    def __init__(self, cell: ctypes.c_uint64 | None = None) -> None:
        self._cell = ctypes.c_uint64() if cell is None else cell
        self._start = self._cell.value
        self._bells: tuple[int, ...] = ()
        self.bell_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when a layer was done after which the step was asked to ring."""

    def begin(self, bells: tuple[int, ...]) -> None:
        """A step is about to start: no layer of it is done, and no ring of an earlier one is left. Ring after these numbers of its layers.

        Called by the thread that launches, before the worker sees the step: a late look at an earlier step's bell must not find this one's KV
        done."""
        with contextlib.suppress(BlockingIOError):  # it did not ring, or was heard
            os.eventfd_read(self.bell_fd)
        self._start = self._cell.value
        self._bells = bells

    @property
    def layers_done(self) -> int:
        """Layers computed of the step that runs, or ran last. Their KV is in the pool."""
        return self._cell.value - self._start

    @property
    def value(self) -> int:
        return self._cell.value

    def advance(self) -> None:
        self._cell.value += 1
        if self._bells and self.layers_done in self._bells:
            os.eventfd_write(self.bell_fd, 1)

    def close(self) -> None:
        if self.bell_fd >= 0:
            os.close(self.bell_fd)
            self.bell_fd = -1


class Model(Protocol):
    def forward(self, batch: Batch, progress: Progress) -> Tensor:
        """Write the batch's KV and return the last layer's hidden states, [num_tokens, hidden], before the final norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocabulary] of chosen rows of `forward`'s result."""
