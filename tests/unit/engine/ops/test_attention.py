"""One contract for every way to attend over pages: the CPU implementation against plain torch, over mixed batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE

from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.kernels.loader import (
    Kernels,
    PairKernels,
    Parallel,
    load_invariant_kernels,
    load_kernels,
    load_pair_kernels,
)
from pdcluster.engine.model.batch import Batch, PlanLimits, build_batch
from pdcluster.engine.ops.attention import Angles, Attention, AttentionShape, HeadNorms, ReferenceAttention
from pdcluster.engine.ops.attention_cpu import QUERY_BLOCK, CpuAttention
from pdcluster.engine.ops.batch_invariant import InvariantAttention
from pdcluster.kv.layout import DType
from pdcluster.kv.pool import TORCH_DTYPE

PAGE = 8
TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Sequence:
    """start tokens are cached, count are computed."""

    start: int
    count: int


MIXES = {
    "one decode": [Sequence(0, 1)],
    "decodes of many lengths": [Sequence(length, 1) for length in (0, 6, 7, 8, 9, 100)],
    "decodes of hundreds of tokens": [Sequence(300, 1), Sequence(167, 1)],
    "a whole prompt": [Sequence(0, 21)],
    "a chunk behind a prefix": [Sequence(13, 11)],
    "a prompt longer than a block of queries behind a prefix": [Sequence(5, QUERY_BLOCK + 9)],
    "decodes beside chunks": [Sequence(3, 1), Sequence(40, 1), Sequence(0, 17), Sequence(16, 5), Sequence(9, 2)],
}
SHAPES = [
    AttentionShape(4, 4, 32, 1e-6),
    AttentionShape(4, 2, 64, 1e-6),
    AttentionShape(8, 2, 96, 1e-6),
    AttentionShape(8, 1, 128, 1e-6),
]


def kernels(dtype: DType) -> Kernels:
    found = load_kernels(KERNEL_CACHE, dtype)
    assert found is not None
    return found


def build(name: str, shape: AttentionShape, pages: torch.Tensor, dtype: DType, threads: int = 1) -> Attention:
    if name == "reference":
        return ReferenceAttention(shape, pages)
    if name == "invariant":
        return InvariantAttention(shape, pages, kernels(dtype), load_invariant_kernels(), Parallel(threads))
    return CpuAttention(shape, pages, kernels(dtype), pair_kernels(dtype) if name == "cpu" else None, Parallel(threads))


def pair_kernels(dtype: DType) -> PairKernels | None:
    if dtype != "bfloat16":
        return None
    kernels(dtype)
    found = load_pair_kernels()
    assert found is not None
    return found


def batch_of(mix: list[Sequence], num_pages: int) -> Batch:
    free = np.random.default_rng(1).permutation(num_pages).astype(np.int32)
    rows = []
    for sequence in mix:
        needed = -(-(sequence.start + sequence.count) // PAGE)
        rows.append(Row("r", np.zeros(sequence.count, np.int32), sequence.start, free[:needed]))
        free = free[needed:]
    return build_batch(StepPlan(tuple(rows)), PlanLimits(1, num_pages, PAGE, 4096), "cpu")


@dataclass(frozen=True)
class Scene:
    """Random pages (holding the cached prefixes), qkv and angles for a batch."""

    batch: Batch
    pages: torch.Tensor
    qkv: torch.Tensor
    angles: Angles
    norms: HeadNorms


def scene(mix: list[Sequence], shape: AttentionShape, dtype: DType) -> Scene:
    generator = torch.Generator().manual_seed(3)
    batch = batch_of(mix, 64)
    tokens = batch.token_ids.shape[0]

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(TORCH_DTYPE[dtype])

    phase = batch.positions[:, None] * torch.linspace(1.0, 0.01, shape.head_dim // 2)
    return Scene(
        batch,
        noise(64, 2, 2, shape.num_kv_heads, PAGE, shape.head_dim),
        noise(tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim),
        Angles(phase.cos(), phase.sin()),
        HeadNorms(1 + noise(shape.head_dim) / 4, 1 + noise(shape.head_dim) / 4),
    )


def dense(scene: Scene, shape: AttentionShape, layer: int, normed: bool) -> torch.Tensor:
    """Attention without pages: one row at a time, one query at a time, in float64."""
    heads = scene.qkv.double().view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)

    def turn(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        if normed:
            x = x / (x.pow(2).mean(-1, keepdim=True) + shape.eps).sqrt() * norm.double()
        half = shape.head_dim // 2
        cos, sin = scene.angles.cos.double()[:, None], scene.angles.sin.double()[:, None]
        return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)

    q, k = turn(q, scene.norms.q), turn(k, scene.norms.k)
    out = []
    for span in scene.batch.spans:
        cached = (
            scene.pages[torch.from_numpy(span.pages), layer]
            .double()
            .permute(1, 2, 0, 3, 4)
            .flatten(2, 3)[:, :, : span.start]
        )
        for token in range(span.begin, span.end):
            keys = torch.cat([cached[0], k[span.begin : token + 1].transpose(0, 1)], 1).repeat_interleave(
                shape.num_heads // shape.num_kv_heads, 0
            )
            values = torch.cat([cached[1], v[span.begin : token + 1].transpose(0, 1)], 1).repeat_interleave(
                shape.num_heads // shape.num_kv_heads, 0
            )
            weights = ((keys @ q[token][:, :, None])[..., 0] * shape.scale).softmax(-1)
            out.append((weights[:, None] @ values)[:, 0].flatten())
    return torch.stack(out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["reference", "cpu", "cpu without pairs"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_pages_equals_attention_without_pages(
    name: str, mix: str, shape: AttentionShape, dtype: DType
) -> None:
    given = scene(MIXES[mix], shape, dtype)
    normed = shape.num_heads == 8
    expected = dense(given, shape, 1, normed)
    found = build(name, shape, given.pages, dtype).run(
        given.qkv, given.norms if normed else None, given.angles, 1, given.batch
    )
    assert found.dtype == given.qkv.dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["reference", "cpu", "cpu without pairs"])
def test_products_that_nothing_rounded_are_taken_as_they_are(name: str) -> None:
    """The same numbers in float32 give the same bits, in the type of the pages; numbers between two of bfloat16 give
    others."""
    given = scene(MIXES["decodes beside chunks"], SHAPES[0], "bfloat16")
    found = []
    between = 1 + 2**-8 * torch.rand(given.qkv.shape, generator=torch.Generator().manual_seed(1))
    for qkv in (given.qkv, given.qkv.float(), given.qkv.float() * between):
        pages = given.pages.clone()
        attended = build(name, SHAPES[0], pages, "bfloat16").run(qkv, given.norms, given.angles, 1, given.batch)
        assert attended.dtype == torch.bfloat16
        found.append((attended, pages))
    (rounded, pages), (exact, exact_pages), (_, other_pages) = found
    assert torch.equal(rounded, exact) and torch.equal(pages, exact_pages)
    assert not torch.equal(pages, other_pages)


@pytest.mark.parametrize("mix", ["a chunk behind a prefix", "decodes beside chunks"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_invariant_attention_equals_attention_without_pages(mix: str, shape: AttentionShape) -> None:
    given = scene(MIXES[mix], shape, "bfloat16")
    expected = dense(given, shape, 1, True)
    found = build("invariant", shape, given.pages, "bfloat16", threads=2).run(
        given.qkv, given.norms, given.angles, 1, given.batch
    )
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", ["reference", "cpu", "cpu without pairs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_slots_of_the_step_are_written(name: str, dtype: DType) -> None:
    shape = SHAPES[1]
    given = scene(MIXES["decodes beside chunks"], shape, dtype)
    before = given.pages.clone()
    build(name, shape, given.pages, dtype).run(given.qkv, None, given.angles, 1, given.batch)
    changed = (given.pages != before).flatten(5).any(-1).any(3).any(2)
    expected = torch.zeros(64, 2, PAGE, dtype=torch.bool)
    expected[given.batch.slot_pages, 1, given.batch.slot_offsets] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_implementations_leave_the_same_keys_and_values_in_the_pages(dtype: DType) -> None:
    shape = SHAPES[2]
    pools = []
    for name in ("reference", "cpu"):
        given = scene(MIXES["decodes beside chunks"], shape, dtype)
        build(name, shape, given.pages, dtype).run(given.qkv, given.norms, given.angles, 0, given.batch)
        pools.append(given.pages.float())
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-2 if dtype == "bfloat16" else 1e-6, atol=1e-6)


def test_scores_far_from_zero_do_not_overflow() -> None:
    shape = SHAPES[1]
    for name in ("reference", "cpu"):
        given = scene(MIXES["decodes beside chunks"], shape, "float32")
        given.qkv.mul_(1000.0)
        found = build(name, shape, given.pages, "float32").run(given.qkv, None, given.angles, 1, given.batch)
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", [0, 16, 63, 64, 100])
def test_a_key_that_is_no_number_spoils_all_who_see_it(place: int, dtype: DType) -> None:
    shape = SHAPES[1]
    given = scene([Sequence(0, 130)], shape, dtype)
    keys = shape.num_heads * shape.head_dim
    given.qkv[place, keys : keys + shape.num_kv_heads * shape.head_dim] = torch.nan
    found = build("cpu", shape, given.pages, dtype).run(given.qkv, None, given.angles, 1, given.batch)
    assert torch.isnan(found[place:]).all()


def test_threads_do_not_change_the_result() -> None:
    shape = SHAPES[1]
    mix = [Sequence(length, 1) for length in range(40)] + [Sequence(150, 70)]
    results = []
    for threads in (1, 3):
        given = scene(mix[:20] + mix[-1:], shape, "float32")
        results.append(
            build("cpu", shape, given.pages, "float32", threads).run(
                given.qkv, given.norms, given.angles, 0, given.batch
            )
        )
    assert torch.equal(*results)


def test_scratch_of_an_earlier_row_does_not_reach_a_later_one() -> None:
    """A long row first, then a shorter one over the same scratch: pages end inside a tile that still holds old keys."""
    shape = SHAPES[1]
    mix = [Sequence(50, 60), Sequence(2, 9)]
    given = scene(mix, shape, "float32")
    expected = dense(given, shape, 0, False)
    found = build("cpu", shape, given.pages, "float32").run(given.qkv, None, given.angles, 0, given.batch)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("length", [1, 7, 8, 263])
def test_what_lies_in_a_page_behind_the_last_token_does_not_matter(length: int) -> None:
    shape = SHAPES[2]
    results = []
    for rest in (0.0, float("nan")):
        given = scene([Sequence(length, 1)], shape, "bfloat16")
        (span,) = given.batch.spans
        used = torch.from_numpy(span.pages).long()
        empty = torch.full_like(given.pages, rest)
        tokens = given.pages[used].movedim(4, 1).flatten(0, 1)[:length]
        empty[used] = (
            torch.cat([tokens, empty[used].movedim(4, 1).flatten(0, 1)[length:]])
            .unflatten(0, (len(used), PAGE))
            .movedim(1, 4)
        )
        results.append(build("cpu", shape, empty, "bfloat16").run(given.qkv, None, given.angles, 0, given.batch))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)
