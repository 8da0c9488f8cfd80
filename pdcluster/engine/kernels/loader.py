"""Gets the numba kernels ready, or does without them, and splits one kernel call over threads.

The kernels are optional. When numba is missing or cannot compile here, `load_kernels` says so once in the log and
returns None. The engine then runs on plain torch: slower, with the same results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster.core.errors import ConfigError
from pdcluster.kv.layout import DType
from pdcluster.processes.kernel_cache import filled, open_place

log = logging.getLogger(__name__)

Array = NDArray[Any]
Kernel = Callable[..., None]


class Kernels(Protocol):
    """The functions of `engine.kernels.elementwise`."""

    rms_norm: Kernel
    silu_mul: Kernel
    store_kv: Kernel
    attend_decode: Kernel
    gather_pages: Kernel


class PairKernels(Protocol):
    """The functions that `fused_step` gathers for this CPU, for bfloat16.

    has_chunks, has_panels: whether `attend_chunk` and `multiply_panels` are worth calling here. PANEL: outputs of one
    panel."""

    linear_rows: Kernel
    attend_rows: Kernel
    compute_layers: Kernel
    pack_context: Kernel
    attend_chunk: Kernel
    chunk_tasks: Callable[[int, int, int], int]
    has_chunks: bool
    pack_panels: Kernel
    multiply_panels: Kernel
    has_panels: bool
    PANEL: int


class InvariantKernels(Protocol):
    """The functions of `engine.kernels.batch_invariant`, for bfloat16."""

    multiply: Kernel
    rms_norm: Kernel
    silu_mul: Kernel
    angles: Kernel
    attend: Kernel
    group_tokens: Callable[[int], int]


class Int8Kernels(Protocol):
    """The functions of `engine.kernels.quantized`. NATIVE: whether the CPU multiplies bytes."""

    NATIVE: bool
    multiply: Kernel
    quantize: Kernel
    finish: Kernel
    dequantize: Kernel


def load_kernels(cache_dir: Path, dtype: DType) -> Kernels | None:
    """The kernels, compiled for `dtype` or loaded from cache_dir; None (and a warning) when numba does not work on this
    machine."""
    try:
        import numba
        from numba.core.errors import NumbaError
    except ImportError as error:
        log.warning("numba cannot be imported (%s); the engine runs on plain torch, which is slower", error)
        return None
    try:
        place = open_place(cache_dir)
        # numba fills its config module at run time, so mypy does not see the name.
        numba.config.CACHE_DIR = str(place)  # type: ignore[attr-defined]
        return filled(place, dtype, lambda: _elementwise(dtype))
    except OSError as error:
        way_out = "plain torch, which is slower; let XDG_CACHE_HOME name a directory of this user that can be written"
        log.warning(
            "compiled CPU kernels cannot be kept in %s (%s), so the engine runs on %s", cache_dir, error, way_out
        )
        return None
    except (NumbaError, RuntimeError) as error:
        log.warning("numba cannot compile the CPU kernels (%s); the engine runs on plain torch, which is slower", error)
        return None


def _elementwise(dtype: DType) -> Kernels:
    from pdcluster.engine.kernels import elementwise as module

    kernels = cast(Kernels, module)
    _compile(kernels, dtype)
    return kernels


def load_pair_kernels() -> PairKernels | None:
    """The kernels for bfloat16, once `load_kernels` found that numba works; None (and a warning) when these do not
    compile here."""
    import numba
    from numba.core.errors import NumbaError

    try:
        kernels = filled(Path(numba.config.CACHE_DIR), "pairs", _pairs)  # type: ignore[attr-defined]
    except (NumbaError, OSError, RuntimeError) as error:
        log.warning(
            "numba cannot compile the CPU kernels for bfloat16 (%s); the engine does without them, which is slower",
            error,
        )
        return None
    log.info("CPU kernels for bfloat16 multiply by weights %s", "in panels" if kernels.has_panels else "as they are")
    return kernels


def _pairs() -> PairKernels:
    from pdcluster.engine.kernels import fused_step as module

    kernels = cast(PairKernels, module)
    _compile_pairs(kernels)
    return kernels


def load_invariant_kernels() -> InvariantKernels:
    """The kernels of the batch-invariant mode, once `load_kernels` found that numba works. Nothing can stand in for
    them, so ConfigError when they do not compile.
    """
    import numba
    from numba.core.errors import NumbaError

    try:
        return filled(Path(numba.config.CACHE_DIR), "invariant", _invariant)  # type: ignore[attr-defined]
    except (NumbaError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"deterministic: numba cannot compile the kernels that it needs ({error}); leave it out"
        ) from error


def _invariant() -> InvariantKernels:
    from pdcluster.engine.kernels import batch_invariant as module

    kernels = cast(InvariantKernels, module)
    _compile_invariant(kernels)
    return kernels


def load_int8_kernels() -> Int8Kernels | None:
    """The kernels for weights of eight bits, once `load_kernels` found that numba works. None (and a warning) when they
    do not compile.
    """
    import numba
    from numba.core.errors import NumbaError

    try:
        return filled(Path(numba.config.CACHE_DIR), "int8", _int8)  # type: ignore[attr-defined]
    except (NumbaError, OSError, RuntimeError) as error:
        log.warning(
            "numba cannot compile the CPU kernels for int8 (%s); the engine does without them, which is slower", error
        )
        return None


def _int8() -> Int8Kernels:
    from pdcluster.engine.kernels import quantized as module

    kernels = cast(Int8Kernels, module)
    _compile_int8(kernels)
    return kernels


def as_array(tensor: Tensor) -> Array:
    """The numpy view of a CPU tensor that kernels take: bfloat16 as uint16, others as they are. Shares memory."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


class Parallel:
    """Runs one kernel call on `threads` threads, its range of tasks cut in equal parts. Used by one thread at a time;
    `close` when done."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="kernel") if threads > 1 else None

    def run(self, kernel: Kernel, tasks: int, *args: object, grain: int = 1) -> None:
        """kernel(*args, lo, hi) over [0, tasks), at least `grain` tasks to a thread (handing work over costs some 50
        µs)."""
        parts = min(self.threads, tasks // grain)
        if self._pool is None or parts <= 1:
            kernel(*args, 0, tasks)
            return
        bounds = [tasks * part // parts for part in range(parts + 1)]
        pending = [self._pool.submit(kernel, *args, bounds[part], bounds[part + 1]) for part in range(1, parts)]
        try:
            kernel(*args, bounds[0], bounds[1])
        finally:
            results = [future.exception() for future in pending]
        for error in results:
            if error is not None:
                raise error

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _compile(kernels: Kernels, dtype: DType) -> None:
    """Call each kernel once on arrays of the types that the engine passes: compiles, or loads from the cache."""
    item = np.uint16 if dtype == "bfloat16" else np.float32
    one = np.zeros((1, 2), item)
    angles = np.zeros((1, 1), np.float32)
    pool = np.zeros((1, 1, 2, 1, 1, 2), item)
    pages = np.zeros(1, np.int64)
    eps = np.float32(1e-6)
    kernels.rms_norm(np.zeros((1, 2), np.float32), one[0], eps, one.copy(), 0, 1)
    queries = np.zeros((1, 1, 2), item)
    for product in {item, np.float32}:  # of oneDNN and of our own kernels
        kernels.silu_mul(np.zeros((1, 4), product), one.copy(), 0, 1)
        qkv = np.zeros((1, 6), product)
        kernels.store_kv(qkv, one[0], one[0], True, eps, angles, angles, pages, pages, pool, 0, queries, 0, 1)
    kernels.attend_decode(queries, pool, 0, pages, pages, pages + 1, np.float32(1.0), queries.copy(), 0, 1)
    tile = np.zeros((1, 1, 2), item)
    kernels.gather_pages(pool, 0, pages, tile, tile.copy(), 0, 1)


def _compile_pairs(kernels: PairKernels) -> None:
    one = np.zeros((1, 32), np.uint16)
    pool, pages = np.zeros((1, 1, 2, 1, 8, 32), np.uint16), np.zeros(1, np.int64)
    packed = np.zeros((1, 1, 16, 64), np.uint32), np.zeros((1, 1, 32, 32), np.uint32)
    kernels.pack_context(pool.view(np.uint32), 0, pages, 1, *packed, 0, 1)
    kernels.attend_chunk(one[None], *packed, 0, 0, 1, np.float32(1.0), one[None].copy(), 0, 1)
    kernels.attend_rows(one[None], pool, 0, pages, pages, pages + 1, np.float32(1.0), one[None].copy(), 0, 1)
    _compile_products(kernels, in_panels=kernels.has_panels)


def _compile_products(kernels: PairKernels, *, in_panels: bool) -> None:
    """Those of weights in panels, or those of weights as they are: an engine calls the ones or the others."""
    one, weight, bias = np.zeros((1, 32), np.uint16), np.zeros((4, 32), np.uint16), np.zeros(4, np.float32)
    panels = np.zeros((1, 16, kernels.PANEL), np.uint32)
    if in_panels:
        kernels.pack_panels(weight.view(np.uint32), panels, 0, 4)
        kernels.multiply_panels(one, panels, bias, np.zeros((1, 4), np.float32), 0, 0, 1)
    else:
        # Outputs of several rows beside those of other weights are another kind of array than outputs alone. They need
        # a kernel of their own.
        for out in (np.zeros((1, 4), np.float32), np.zeros((2, 5), np.float32)[:, :4]):
            kernels.linear_rows(one.repeat(len(out), axis=0), weight, bias, out, 0, 1)
    # Layers' panels lie apart from each other (`Panels.interleaved`), which is another kind of array, too.
    weights = np.zeros((2, 2, *panels.shape), np.uint32)[:, 0] if in_panels else np.zeros((1, 32, 32), np.uint16)
    _compile_layer(kernels, weights, weights[0].copy())


def _compile_layer(kernels: PairKernels, weights: Array, head: Array) -> None:
    """One head of 32 dimensions in a model as wide, one row that decodes and one prompt of a token. weights: every
    product's, of all layers.
    """
    row, sums, scale = np.zeros((2, 32), np.uint16), np.zeros((2, 32), np.float32), np.float32(1.0)
    pool, zeros, ones = np.zeros((2, 1, 2, 1, 8, 32), np.uint16), np.zeros(2, np.int64), np.ones(2, np.int64)
    bias, norm, half = np.zeros((1, 32), np.float32), row[:1], np.zeros((2, 16), np.float32)
    product = weights, bias
    ends = row, half[0], scale, norm[0], head, bias[0], scale
    layers = norm, *product * 3, norm, norm, True, *product, norm, *product * 3, scale
    rows = zeros, np.arange(3), ones, zeros, zeros, 1, zeros, scale
    heads = row[:, None]
    context = np.zeros((1, 1, 16, 64), np.uint32), np.zeros((1, 1, 32, 32), np.uint32)
    places = half.copy(), half.copy(), zeros.copy(), zeros.copy()
    products = sums.copy(), sums.repeat(3, axis=1)
    rest = heads.copy(), heads.copy(), sums.repeat(2, axis=1), row.copy(), *context, sums.copy(), zeros.copy()
    scratch = sums.copy(), *places, row.copy(), *products, *rest
    kernels.compute_layers(
        ends, layers, rows, pool, pool.view(np.uint32), scratch, np.zeros(1, np.uint64), 0, 0, 1, 0, 2
    )


def _compile_invariant(kernels: InvariantKernels) -> None:
    one, weight, bias = np.zeros((1, 32), np.uint16), np.zeros((4, 32), np.uint16), np.zeros(4, np.float32)
    for out in (np.zeros((1, 4), np.float32), np.zeros((2, 5), np.float32)[:, :4]):
        kernels.multiply(one.repeat(len(out), axis=0), weight, bias, out, 0, 1)
    kernels.rms_norm(np.zeros((1, 32), np.float32), one[0], np.float32(1e-6), one.copy(), 0, 1)
    kernels.silu_mul(np.zeros((1, 32), np.float32), np.zeros((1, 16), np.uint16), 0, 1)
    zeros, ones, cos = np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros((1, 16), np.float32)
    kernels.angles(zeros, cos[0], np.float32(1.0), cos, cos.copy(), 0, 1)
    pool = np.zeros((1, 1, 2, 1, 8, 32), np.uint16)
    kernels.attend(one[None], pool, 0, zeros, zeros, ones, zeros, zeros, np.float32(1.0), one[None].copy(), 0, 1)


def _compile_int8(kernels: Int8Kernels) -> None:
    """Planes are a plain number, so one kernel serves both."""
    x, out, scales = np.zeros((1, 64), np.uint16), np.zeros((1, 4), np.float32), np.zeros(1, np.float32)
    weight, four = np.zeros((4, 64), np.int8), np.zeros(4, np.float32)
    kernels.multiply(x, 2, weight, four, np.zeros(4, np.int32), four, out, 0, 1)
    kernels.quantize(x, 1, np.zeros((1, 64), np.uint8), scales, 0, 1)
    kernels.finish(four[None], scales, four, four, out, 0, 1)
    kernels.dequantize(weight, four, x.repeat(4, axis=0), 0, 4)
