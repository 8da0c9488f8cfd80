"""Attention of rows that decode, in bfloat16, on whatever CPU the test has, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from checkpoints import KERNEL_CACHE
from numpy.typing import NDArray

from pdcluster.engine.kernels import loader
from pdcluster.processes.kernel_cache import filling

Words = NDArray[np.uint16]
NO_NUMBER = 0x7FC0
LAYER, NUM_LAYERS = 1, 3


@pytest.fixture(scope="module")
def attend() -> Any:
    assert loader.load_kernels(KERNEL_CACHE, "bfloat16") is not None
    with filling(Path(numba.config.CACHE_DIR), "row attention"):  # type: ignore[attr-defined]
        from pdcluster.engine.kernels import attention_rows as module

        attend_all(module.attend_rows, scene([1], 1, 1, 32, 8))
        return module.attend_rows


@dataclass(frozen=True)
class Scene:
    """Rows over pages in any order; whatever is no token of theirs is no number."""

    queries: Words
    pool: Words
    pages: NDArray[np.int64]
    first_page: NDArray[np.int64]
    lengths: NDArray[np.int64]


def words(random: np.random.Generator, *size: int) -> Words:
    return (random.standard_normal(size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def wide(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def scene(lengths: list[int], num_kv_heads: int, group: int, head_dim: int, page_tokens: int) -> Scene:
    random = np.random.default_rng(sum(lengths) + 31 * head_dim + group)
    needed = [-(-length // page_tokens) for length in lengths]
    first = np.concatenate([[0], np.cumsum(needed)[:-1]]).astype(np.int64)
    pages = random.permutation(sum(needed) + 2).astype(np.int64)[: sum(needed)]
    pool = np.full((sum(needed) + 2, NUM_LAYERS, 2, num_kv_heads, page_tokens, head_dim), NO_NUMBER, np.uint16)
    for row, length in enumerate(lengths):
        for t in range(length):
            pool[pages[first[row] + t // page_tokens], LAYER, :, :, t % page_tokens] = words(
                random, 2, num_kv_heads, head_dim
            )
    return Scene(
        words(random, len(lengths), num_kv_heads * group, head_dim), pool, pages, first, np.array(lengths, np.int64)
    )


def attend_all(kernel: Any, scene: Scene, bounds: list[int] | None = None, scale: float = 0.2) -> Words:
    """In one call, or in one for each stretch of tasks between two bounds."""
    out = np.full_like(scene.queries, NO_NUMBER)
    tasks = [0, len(scene.lengths) * scene.pool.shape[3]] if bounds is None else bounds
    for lo, hi in pairwise(tasks):
        kernel(
            scene.queries,
            scene.pool,
            LAYER,
            scene.pages,
            scene.first_page,
            scene.lengths,
            np.float32(scale),
            out,
            lo,
            hi,
        )
    return out


def expected(scene: Scene, scale: float = 0.2) -> NDArray[np.float64]:
    """Row by row and head by head, a softmax over all tokens at once."""
    num_rows, num_heads, head_dim = scene.queries.shape
    num_kv_heads, page_tokens = scene.pool.shape[3], scene.pool.shape[4]
    found = np.zeros((num_rows, num_heads, head_dim))
    for row, length in enumerate(scene.lengths):
        pages = scene.pages[scene.first_page[row] :][: -(-length // page_tokens)]
        for head in range(num_heads):
            cells = wide(scene.pool[pages, LAYER, :, head * num_kv_heads // num_heads]).astype(np.float64)
            keys, values = cells.transpose(1, 0, 2, 3).reshape(2, -1, head_dim)[:, :length]
            scores = keys @ wide(scene.queries[row, head]).astype(np.float64) * scale
            shares = np.exp(scores - scores.max())
            found[row, head] = shares / shares.sum() @ values
    return found


def assert_attended(found: Words, scene: Scene, scale: float = 0.2) -> None:
    np.testing.assert_allclose(wide(found), expected(scene, scale), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("head_dim", "page_tokens"), [(32, 8), (64, 32), (96, 16), (128, 32)])
def test_contexts_that_end_anywhere_in_a_page(attend: Any, group: int, head_dim: int, page_tokens: int) -> None:
    lengths = [*range(1, 10), page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens + 3, 5 * page_tokens]
    some = scene(lengths, 2, group, head_dim, page_tokens)
    assert_attended(attend_all(attend, some), some)


@pytest.mark.parametrize("num_rows", range(1, 10))
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_any_number_of_rows_and_kv_heads(attend: Any, num_rows: int, num_kv_heads: int) -> None:
    some = scene([40 + 7 * row for row in range(num_rows)], num_kv_heads, 2, 64, 16)
    assert_attended(attend_all(attend, some), some)


@pytest.mark.parametrize("length", [255, 256, 257, 700])
def test_contexts_of_hundreds_of_tokens(attend: Any, length: int) -> None:
    some = scene([length, 3], 2, 2, 128, 32)
    assert_attended(attend_all(attend, some), some)


@pytest.mark.parametrize("scale", [1e-3, 3.0])
def test_shares_that_are_nearly_equal_and_such_that_one_token_has_all(attend: Any, scale: float) -> None:
    some = scene([77, 32, 200], 2, 3, 64, 32)
    assert_attended(attend_all(attend, some, scale=scale), some, scale)


def test_tasks_may_be_cut_anywhere(attend: Any) -> None:
    some = scene([33, 5, 64], 3, 2, 64, 32)
    whole = attend_all(attend, some)
    for bounds in ([0, 1, 9], [0, 4, 5, 9], [0, 2, 2, 7, 9], [*range(10)]):
        assert np.array_equal(attend_all(attend, some, bounds), whole)


def test_tasks_outside_of_the_range_are_left_alone(attend: Any) -> None:
    some = scene([33, 5], 4, 2, 32, 8)
    found = attend_all(attend, some, [3, 6])
    whole = attend_all(attend, some)
    assert np.array_equal(found[0, 6:], whole[0, 6:]) and np.array_equal(found[1, :4], whole[1, :4])
    assert (found[0, :6] == NO_NUMBER).all() and (found[1, 4:] == NO_NUMBER).all()


def test_a_row_does_not_depend_on_the_rows_beside_it(attend: Any) -> None:
    some = scene([129, 32, 1, 300, 64, 65, 31, 8, 50], 2, 2, 128, 32)
    whole = attend_all(attend, some)
    for row in range(len(some.lengths)):
        alone = Scene(
            some.queries[row : row + 1],
            some.pool,
            some.pages,
            some.first_page[row : row + 1],
            some.lengths[row : row + 1],
        )
        assert np.array_equal(attend_all(attend, alone)[0], whole[row])
