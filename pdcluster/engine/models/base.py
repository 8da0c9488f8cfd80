"""What the engine needs of a model, whatever is inside it (dense, mixture of experts, another attention)."""

from __future__ import annotations

import ctypes
from typing import Protocol

from torch import Tensor

from pdcluster.engine.batch import Batch


class Progress:
    """Counts the layers computed since start. One writer (the worker), any number of readers, also in other processes when `cell` is shared."""

    __slots__ = ("_cell",)

    def __init__(self, cell: ctypes.c_uint64 | None = None) -> None:
        self._cell = ctypes.c_uint64() if cell is None else cell

    @property
    def value(self) -> int:
        return self._cell.value

    def advance(self) -> None:
        self._cell.value += 1


class Model(Protocol):
    def forward(self, batch: Batch, progress: Progress) -> Tensor:
        """Write the batch's KV and return the last layer's hidden states, [num_tokens, hidden], before the final norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocabulary] of chosen rows of `forward`'s result."""
