"""Weights in panels, each laid out once and kept for whoever multiplies by it, and the product on them for any number
of rows.

Their memory is the process's own and comes in large pieces, which the system backs by huge pages. From mapped files, in
pages of 4 KiB, one row went over the weights of 0.5 B parameters at 21 GB/s and four at 19. From here at 26 and 27.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from pdcluster.engine.kernels.loader import Array, PairKernels, Parallel, as_array
from pdcluster.engine.ops.linear import bias_array

PIECE_WORDS = 16 << 20
# Of a cache line.
LINE_WORDS = 16
ROWS_AT_ONCE = 6
# Of weights to go over, once for every six rows, below which a thread is not worth waking.
THREAD_BYTES = 1 << 20

Key: TypeAlias = tuple[int, torch.Size, tuple[int, ...]]


class Panels:
    """Used by one thread at a time. Weights are known by where they lie, so they are kept, too."""

    def __init__(self, kernels: PairKernels, parallel: Parallel) -> None:
        self._kernels, self._parallel, self._outputs = kernels, parallel, kernels.PANEL
        self._known: dict[Key, tuple[Tensor, Array]] = {}
        self._free = self._passing = np.empty(0, np.uint32)

    def of(self, weight: Tensor) -> Array:
        """uint32 [panel, pair of inputs, output of the panel]; the number of inputs is even."""
        key = _key(weight)
        if key not in self._known:
            outputs, inputs = weight.shape
            num_panels, num_pairs = -(-outputs // self._outputs), inputs // 2
            panels = self._take(num_panels * num_pairs * self._outputs)
            self._put(weight, panels.reshape(num_panels, num_pairs, self._outputs))
        return self._known[key][1]

    def interleaved(self, kinds: Sequence[Sequence[Tensor]]) -> list[Array]:
        """Of each kind of weight that all layers have in one shape: uint32 [layer, panel, pair of inputs, output of the
        panel].

        A layer's weights lie behind each other in the order of kinds, so asking beyond one asks for the next. `of`
        gives each one's part. A lone layer is there twice, at the same place, since kernels are compiled for arrays
        whose layers lie apart.
        """
        shapes = [(-(-len(weights[0]) // self._outputs), weights[0].shape[1] // 2, self._outputs) for weights in kinds]
        sizes, num_layers = [math.prod(shape) for shape in shapes], len(kinds[0])
        layers, found = self._take(num_layers * sum(sizes)).reshape(num_layers, -1), []
        for weights, shape, begin in zip(kinds, shapes, accumulate(sizes, initial=0), strict=False):
            first = layers[0, begin : begin + math.prod(shape)].reshape(shape)
            whole = as_strided(
                first, (max(num_layers, 2), *shape), (layers.strides[0] if num_layers > 1 else 0, *first.strides)
            )
            for weight, part in zip(weights, whole, strict=False):
                self._put(weight, part)
            found.append(whole)
        return found

    def multiply_once(self, x: Tensor, weight: Tensor, bias: Array) -> Tensor:
        """x by a weight that is laid out for this product alone."""
        outputs, inputs = weight.shape
        num_panels = -(-outputs // self._outputs)
        size = num_panels * inputs // 2 * self._outputs
        if size > len(self._passing):
            self._passing = _whole_lines(size)
        panels = self._passing[:size].reshape(num_panels, inputs // 2, self._outputs)
        self._lay_out(weight, panels)
        out = torch.empty(x.shape[0], outputs)
        grain = _panels_of_a_thread(panels[0].nbytes, x.shape[0])
        self._parallel.run(
            self._kernels.multiply_panels, num_panels, as_array(x), panels, bias, as_array(out), 0, grain=grain
        )
        return out

    def _put(self, weight: Tensor, panels: Array) -> None:
        self._lay_out(weight, panels)
        self._known[_key(weight)] = weight, panels

    def _lay_out(self, weight: Tensor, panels: Array) -> None:
        if len(weight) % self._outputs:
            panels[-1] = 0
        self._parallel.run(self._kernels.pack_panels, len(weight), _pairs(weight), panels, grain=self._outputs)

    def _take(self, num_words: int) -> Array:
        if num_words > len(self._free):
            self._free = _whole_lines(max(num_words, PIECE_WORDS))
        taken, self._free = self._free[:num_words], self._free[num_words:]
        return taken


def _whole_lines(num_words: int) -> Array:
    """Words that begin where a cache line does, as no loaded vector of a panel should lie in two of them."""
    words = np.empty(num_words + LINE_WORDS, np.uint32)
    begin = -words.ctypes.data % (4 * LINE_WORDS) // 4
    return words[begin : begin + num_words]


def _key(weight: Tensor) -> Key:
    return weight.data_ptr(), weight.shape, weight.stride()


def _pairs(weight: Tensor) -> Array:
    """uint32 [outputs, pairs of inputs], a copy where the weight does not lie as such."""
    values = np.ascontiguousarray(as_array(weight))
    return (values if values.ctypes.data % 4 == 0 else values.copy()).view(np.uint32)


class PanelLinear:
    """Panels are made when they are first needed: nodes that never use a weight do not pay for it."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        panels: Panels,
        kernels: PairKernels,
        parallel: Parallel,
    ) -> None:
        self._panels, self._kernels, self._parallel = panels, kernels, parallel
        sizes = [weight.shape[0] for weight in weights]
        self._width = sum(sizes)
        self._parts = tuple(
            (weight, bias_array(bias, len(weight)), begin)
            for weight, bias, begin in zip(weights, biases, [0, *accumulate(sizes[:-1])], strict=True)
        )

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self._width)
        rows, target = as_array(x.contiguous()), as_array(out)
        for weight, bias, begin in self._parts:
            panels = self._panels.of(weight)
            grain = _panels_of_a_thread(panels[0].nbytes, len(rows))
            self._parallel.run(
                self._kernels.multiply_panels, len(panels), rows, panels, bias, target, begin, grain=grain
            )
        return out


def _panels_of_a_thread(panel_bytes: int, num_rows: int) -> int:
    times = max(-(-num_rows // ROWS_AT_ONCE), 1)
    return -(-THREAD_BYTES // (panel_bytes * times))
