"""What attention multiplies by on CPUs that multiply floats as fast as pairs, against float32 on any CPU;
`test_attention` has the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from checkpoints import KERNEL_CACHE
from numpy.typing import NDArray

from pdcluster.engine.kernels import loader
from pdcluster.engine.kernels.layer_arrays import BLOCK
from pdcluster.processes.kernel_cache import filling

RNG = np.random.default_rng


def words(*size: int) -> NDArray[np.uint16]:
    return (RNG(sum(size)).standard_normal(size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def wide(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pairs_of_rows(dense: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """[rows, columns] → [pairs of rows, columns]."""
    return np.ascontiguousarray(dense[::2].astype(np.uint32) | dense[1::2].astype(np.uint32) << 16)


@pytest.fixture(scope="module")
def blocks() -> Any:
    assert loader.load_kernels(KERNEL_CACHE, "bfloat16") is not None
    with filling(Path(numba.config.CACHE_DIR), "wide attention"):  # type: ignore[attr-defined]
        from pdcluster.engine.kernels import attention_chunks

        return attention_chunks


@pytest.mark.parametrize("rows", [1, 6, 20])
@pytest.mark.parametrize("seen", [1, 16, 17, BLOCK])
def test_scores_of_the_keys_of_a_block_that_are_seen(blocks: Any, rows: int, seen: int) -> None:
    take_query, block_scores = blocks.take_wide, blocks.wide_scores

    @numba.njit
    def run(given: Any, queries: Any, keys: Any, seen: int, scores: Any) -> None:
        for r in range(given.shape[0]):
            take_query(given[r], queries, r)
        block_scores(queries, keys, given.shape[0], seen, scores)

    given, keys, scores = words(rows, 64), words(64, BLOCK), np.full((24, BLOCK), 7, np.float32)
    run(given, np.zeros((24, 64), np.float32), pairs_of_rows(keys), seen, scores)
    np.testing.assert_allclose(scores[:rows, :seen], (wide(given) @ wide(keys))[:, :seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 6, 20])
@pytest.mark.parametrize(("seen", "head_dim"), [(1, 32), (2, 64), (33, 96), (BLOCK, 128)])
def test_values_of_a_block_that_are_seen_are_added(blocks: Any, rows: int, seen: int, head_dim: int) -> None:
    """What is not seen has no share, so only a pair's second value may be read too much."""
    block_sums = blocks.wide_sums

    @numba.njit
    def run(shares: Any, values: Any, rows: int, seen: int, sums: Any) -> None:
        block_sums(shares, values, rows, seen, sums)

    shares, values, sums = (
        RNG(1).random((24, BLOCK)).astype(np.float32),
        words(BLOCK, head_dim),
        np.ones((24, head_dim), np.float32),
    )
    shares[:, seen:] = 0
    run(shares, pairs_of_rows(values), rows, seen, sums)
    np.testing.assert_allclose(sums[:rows], (1 + shares @ wide(values))[:rows], rtol=1e-4, atol=1e-4)
