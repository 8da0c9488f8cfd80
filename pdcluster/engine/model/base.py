"""What the engine needs of a model, whatever is inside it (dense, mixture of experts, another attention)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdcluster.engine.model.batch import Batch


class LayerProgress:
    """Counts the layers computed since start. One writer (the worker), any number of readers, also in other processes
    when `cell` is shared."""

    __slots__ = ("_cell", "_milestones", "_start", "counter", "milestone_fd")

    def __init__(self, cell: ctypes.c_uint64 | None = None) -> None:
        self._cell = ctypes.c_uint64() if cell is None else cell
        # The cell, for kernels that count layers themselves. They compute `runs` of them, and their caller signals.
        self.counter: NDArray[np.uint64] = np.frombuffer(memoryview(self._cell), np.uint64)
        self._start = self._cell.value
        self._milestones: tuple[int, ...] = ()
        # Readable when one of the milestones is reached.
        self.milestone_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def begin(self, milestones: tuple[int, ...]) -> None:
        """A step is about to start: no layer of it is done, and no signal of an earlier one is left. milestones:
        numbers of layers to signal after.

        Called by the launching thread, before the worker sees the step. A late look at an earlier step's signal must
        not find this one's KV done.
        """
        with contextlib.suppress(BlockingIOError):  # no signal, or it was read
            os.eventfd_read(self.milestone_fd)
        self._start = self._cell.value
        self._milestones = milestones

    @property
    def layers_done(self) -> int:
        """Layers computed of the step that runs, or ran last. Their KV is in the pool."""
        return self._cell.value - self._start

    @property
    def value(self) -> int:
        return self._cell.value

    def advance(self) -> None:
        self._cell.value += 1
        self.signal()

    def signal(self) -> None:
        """To be called after the milestones. Calls after other layers do no harm."""
        if self._milestones and self.layers_done in self._milestones:
            os.eventfd_write(self.milestone_fd, 1)

    def runs(self, count: int) -> tuple[tuple[int, int], ...]:
        """The step's next `count` layers, [begin, end) from the first of them on, cut at its milestones."""
        inner = sorted(
            {milestone - self.layers_done for milestone in self._milestones if 0 < milestone - self.layers_done < count}
        )
        return tuple(pairwise((0, *inner, count)))

    def close(self) -> None:
        if self.milestone_fd >= 0:
            os.close(self.milestone_fd)
            self.milestone_fd = -1


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward computed, to be looked at before the model's next one. Either every rank calls `logits`, or none
    does.

    hidden: the last layer's states, float32 [num_tokens, hidden], before the final norm.
    logits: float32 [n, vocabulary] of the wanted tokens.
    best: each one's most likely token, the first of equals, where the forward finds it in passing. -1: its logits are
    no numbers.
    """

    hidden: Callable[[], Tensor]
    logits: Callable[[], Tensor]
    best: NDArray[np.int64] | None = None


class CausalModel(Protocol):
    def forward(self, batch: Batch, progress: LayerProgress, wanted: Sequence[int] = ()) -> ForwardOutput:
        """Write the batch's KV. wanted: indexes of the tokens that are to yield another one."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocabulary] of chosen rows of a forward's hidden states."""
