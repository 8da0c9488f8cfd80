"""What the attention of rows that decode is built of on CPUs with AVX2, each block against float64 on whatever CPU the
test has."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from pdcluster.engine.kernels.attention_rows_avx2 import HALF, TOKENS, score_tile_of, share_scores, weigh_tile_of
from pdcluster.engine.kernels.intrinsics import address

RNG = np.random.default_rng
# In what a block leaves alone.
BEHIND = 7.0


def words(*size: int) -> NDArray[np.uint16]:
    return (RNG(sum(size)).standard_normal(size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def wide(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def halves(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each 16 dimensions the even ones before the odd ones."""
    return np.ascontiguousarray(rows.reshape(len(rows), -1, HALF, 2).transpose(0, 1, 3, 2).reshape(len(rows), -1))


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("head_dim", [16, 32, 80, 128])
def test_scores_of_four_keys(num_rows: int, head_dim: int) -> None:
    tile = score_tile_of(num_rows)

    @numba.njit
    def run(keys: Any, rows: Any, out: Any) -> None:
        at, bytes_of_row = address(keys), 4 * rows.shape[1]
        tile(
            at,
            2 * keys.shape[1],
            address(rows),
            bytes_of_row,
            rows.shape[1] // 16,
            address(out),
            4 * out.shape[1],
            at,
            0,
        )

    keys, rows = words(TOKENS, head_dim), wide(words(num_rows, head_dim))
    out = np.full((num_rows, TOKENS + 1), BEHIND, np.float32)
    run(keys, halves(rows), out)
    np.testing.assert_allclose(out[:, :TOKENS], rows.astype(np.float64) @ wide(keys).T, rtol=1e-5, atol=1e-4)
    assert (out[:, TOKENS:] == BEHIND).all()


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, TOKENS])
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_values_are_weighed_and_added(num_rows: int, num_tokens: int, head_dim: int) -> None:
    tile = weigh_tile_of(num_rows, num_tokens)

    @numba.njit
    def run(values: Any, shares: Any, sums: Any) -> None:
        at, steps = address(values), (4 * shares.shape[1], values.shape[1] // 16)
        tile(at, 2 * values.shape[1], address(shares), steps[0], steps[1], address(sums), 4 * sums.shape[1], at, 0)

    values, shares = words(num_tokens, head_dim), RNG(1).random((num_rows, 9)).astype(np.float32)
    sums = np.full((num_rows, head_dim + 3), BEHIND, np.float32)
    run(values, shares, sums)
    expected = BEHIND + shares[:, :num_tokens].astype(np.float64) @ wide(values)
    np.testing.assert_allclose(sums[:, :head_dim], halves(expected.astype(np.float32)), rtol=1e-5, atol=1e-5)
    assert (sums[:, head_dim:] == BEHIND).all()


@pytest.mark.parametrize("num_vectors", [1, 3, 4])
@pytest.mark.parametrize("best_at", [0, 5, 7])
@pytest.mark.parametrize("top", [-1e30, -3.0, 0.5, 40.0])
def test_shares_under_a_new_maximum_or_the_old_one(num_vectors: int, best_at: int, top: float) -> None:
    @numba.njit
    def run(scores: Any, scale: Any, top: Any, total: Any) -> Any:
        return share_scores(address(scores), scores.shape[0] // HALF, scale, top, total)

    scores = RNG(num_vectors).standard_normal(HALF * num_vectors + HALF).astype(np.float32)
    scores[HALF * (num_vectors - 1) + best_at] = 9
    given, scale, total = scores[:-HALF].copy(), 0.3, 2.5
    best, correction, added = run(scores[:-HALF], np.float32(scale), np.float32(top), np.float32(total))
    most = max(given.max() * scale, top)
    shares = np.exp(given.astype(np.float64) * scale - most)
    assert best == pytest.approx(most, rel=1e-6)
    assert correction == pytest.approx(np.exp(top - most), rel=1e-4, abs=1e-37)
    np.testing.assert_allclose(scores[:-HALF], shares, rtol=1e-4, atol=1e-37)
    assert added == pytest.approx(total * np.exp(top - most) + shares.sum(), rel=1e-4)
