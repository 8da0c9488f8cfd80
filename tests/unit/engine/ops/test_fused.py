"""All layers as one kernel call give what the separate calls give, but for how the compiler orders sums."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import checkpoints
import numba
import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE, Shape

from pdcluster.core.messages import Sampling
from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.decoder import Decoder
from pdcluster.engine.kernels import loader
from pdcluster.engine.kernels.layer_arrays import BLOCK
from pdcluster.engine.model.base import LayerProgress
from pdcluster.engine.model.batch import Batch, PlanLimits, build_batch
from pdcluster.engine.model.collective import Alone
from pdcluster.engine.model.config import ModelConfig, read_config
from pdcluster.engine.model.shard import share_of
from pdcluster.engine.model.weights import Weights, load_weights
from pdcluster.engine.ops.attention import AttentionShape
from pdcluster.engine.ops.fused import LEAST_BLOCKS, LEAST_TOKENS, MOST_TOKENS, fits_fused_layers
from pdcluster.engine.ops.linear import MOST_ROWS
from pdcluster.engine.ops.select import CpuOps, TorchOps, select_ops
from pdcluster.processes.kernel_cache import filling

PAGE, PAGES, VOCABULARY = 8, 200, 97
LIMITS = PlanLimits(VOCABULARY, PAGES, PAGE, 800)
# Two steps of bfloat16. Kernels may add up in any order (fastmath), and of a kernel that others call each has a
# compiled copy of its own; which copy runs depends on what a process loaded first. Heads that are normalised, where
# that was seen, are held to one order in `test_select`.
ROUNDING = 2.0**-6
SHAPES = {
    "norms of heads": Shape(
        "qwen3", hidden_size=64, intermediate_size=96, head_dim=32, vocab_size=VOCABULARY, num_layers=3
    ),
    "biases, scaled angles": Shape(
        "qwen2",
        hidden_size=64,
        intermediate_size=160,
        head_dim=32,
        vocab_size=VOCABULARY,
        num_layers=2,
        rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "a lone layer": Shape(
        "llama", hidden_size=64, intermediate_size=96, head_dim=32, vocab_size=VOCABULARY, num_layers=1
    ),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Weights]:
    directory = tmp_path_factory.mktemp("model")
    checkpoints.save(checkpoints.build_model(SHAPES[request.param], seed=8), directory)
    config = read_config(directory)
    return config, load_weights(directory, config, "bfloat16", "cpu")


@pytest.fixture(scope="module", params=["panels", "weights as they are"])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    made = select_ops("cpu", "bfloat16", 1, KERNEL_CACHE)
    assert isinstance(made, CpuOps)
    yield made if request.param == "panels" else without_panels(made)
    made.close()


def without_panels(ops: CpuOps) -> CpuOps:
    """As on a CPU for which there are none, or where there is something faster."""
    assert ops._pairs is not None
    with filling(Path(numba.config.CACHE_DIR), "rows"):  # type: ignore[attr-defined]
        loader._compile_products(ops._pairs, in_panels=False)
    return CpuOps(ops._kernels, ops._pairs, ops._parallel, pack=True, panels=False)


class Separate(CpuOps):
    def fused_layers(self, weights: object, shape: object, pages: object, rope: object) -> None:
        return None


def pool(config: ModelConfig) -> torch.Tensor:
    size = PAGES, config.num_layers, 2, config.num_kv_heads, PAGE, config.head_dim
    return torch.randn(*size, generator=torch.Generator().manual_seed(1)).bfloat16()


def decoder(model: tuple[ModelConfig, Weights], pages: torch.Tensor, ops: CpuOps) -> Decoder:
    config, weights = model
    return Decoder(config, weights, pages, ops, share_of(config, 0, 1), Alone())


def batch(rows: Sequence[tuple[int, int]]) -> Batch:
    """rows: what each has in its pages, and how many tokens it brings."""
    rng, free, planned = (
        np.random.default_rng(len(rows)),
        np.random.default_rng(5).permutation(PAGES).astype(np.int32),
        [],
    )
    for index, (context, new) in enumerate(rows):
        pages, free = np.split(free, [-(-(context + new) // PAGE)])
        planned.append(
            Row(
                str(index),
                rng.integers(0, VOCABULARY, new).astype(np.int32),
                context,
                pages,
                Sampling(max_tokens=1, seed=0),
            )
        )
    return build_batch(StepPlan(tuple(planned)), LIMITS, "cpu")


def decodes(*contexts: int) -> list[tuple[int, int]]:
    return [(context, 1) for context in contexts]


def assert_same_as_separate_calls(model: tuple[ModelConfig, Weights], ops: CpuOps, slots: Batch) -> None:
    separate = Separate(ops._kernels, ops._pairs, ops._parallel, pack=True, panels=ops._panels is not None)
    found = []
    for chosen in (ops, separate):
        pages, progress = pool(model[0]), LayerProgress()
        computed = decoder(model, pages, chosen)
        assert (computed._fused is not None and computed._fused.takes(slots)) == (chosen is ops)
        wanted = (slots.begins[1:] - 1).tolist()
        found.append((computed.forward(slots, progress, wanted), pages))
        assert progress.layers_done == model[0].num_layers
        progress.close()
    (given, pages), (expected, expected_pages) = found
    # A small value is what terms as large as the others leave, so a step is one of these.
    usual = expected.hidden().abs().mean().item()
    assert given.hidden().abs().max() > 0 and usual < 5.0
    torch.testing.assert_close(given.hidden(), expected.hidden(), rtol=ROUNDING, atol=ROUNDING * usual)
    logits = given.logits()
    assert logits.shape == (slots.num_rows, VOCABULARY) and expected.best is None
    alike = computed.logits(
        given.hidden()[wanted]
    )  # of the same states: a step of bfloat16 in one of them is more than that in a sum of them all
    torch.testing.assert_close(logits, alike, rtol=ROUNDING, atol=ROUNDING)
    assert given.best is not None and given.best.tolist() == logits.argmax(dim=-1).tolist()
    written = torch.zeros(pages.shape, dtype=torch.bool)
    written[slots.slot_pages, :, :, :, slots.slot_offsets] = True
    assert torch.equal(pages[~written], expected_pages[~written])
    torch.testing.assert_close(pages[written], expected_pages[written], rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("contexts", [[0], [7], [3, 90, 8], [5] * 9, list(range(MOST_ROWS))], ids=str)
def test_rows_that_decode(model: tuple[ModelConfig, Weights], ops: CpuOps, contexts: list[int]) -> None:
    assert_same_as_separate_calls(model, ops, batch(decodes(*contexts)))


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 3)],
        [(0, 130)],
        [(70, LEAST_TOKENS + 1)],
        [(LEAST_BLOCKS * BLOCK - 1, 2)],
        [(9, 1), (0, 40), (64, 64), (5, 2)],
        [(9, 1), (120, 1), (31, 190), (4, 1)],
        decodes(*range(MOST_ROWS + 5)),
    ],
    ids=str,
)
def test_prompts_beside_rows_that_decode(
    model: tuple[ModelConfig, Weights], ops: CpuOps, rows: list[tuple[int, int]]
) -> None:
    if ops._panels is None:
        pytest.skip("without panels prompts take the separate calls")
    assert_same_as_separate_calls(model, ops, batch(rows))


def test_scratch_of_a_larger_step_serves_smaller_ones(model: tuple[ModelConfig, Weights], ops: CpuOps) -> None:
    if ops._panels is None:
        pytest.skip("without panels prompts take the separate calls")
    steps = [batch(decodes(9)), batch([(3, 1), (0, 400)]), batch([(50, 1), (600, 9)]), batch(decodes(9))]
    used = decoder(model, pages := pool(model[0]), ops)
    for step in steps:
        pages.copy_(pool(model[0]))
        found = used.forward(step, LayerProgress(), [0])
        expected = decoder(model, pool(model[0]), ops).forward(step, LayerProgress(), [0])
        assert torch.equal(found.hidden(), expected.hidden()) and torch.equal(found.logits(), expected.logits())


def test_what_has_no_kernel_or_too_many_tokens_takes_the_separate_calls(
    model: tuple[ModelConfig, Weights], ops: CpuOps
) -> None:
    fused = decoder(model, pool(model[0]), ops)._fused
    assert fused is not None
    assert fused.takes(batch(decodes(4, 9)))
    assert (
        fused.takes(batch([(4, 3)])) == fused.takes(batch(decodes(*[0] * (MOST_ROWS + 1)))) == (ops._panels is not None)
    )
    long = dataclasses.replace(batch([(4, 3)]), tokens=np.zeros(MOST_TOKENS + 1, np.int64))
    assert not fused.takes(long)


def test_a_step_rings_after_the_layers_that_it_was_asked_to(
    model: tuple[ModelConfig, Weights], ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    monkeypatch.setattr(os, "eventfd_write", lambda fd, value: heard.append(progress.layers_done))
    computed, progress = decoder(model, pool(model[0]), ops), LayerProgress()
    last = model[0].num_layers
    for milestones in (tuple({1, last}), (last,), ()):
        heard.clear()
        progress.begin(milestones)
        computed.forward(batch(decodes(3, 4)), progress)
        assert heard == sorted(milestones) and progress.layers_done == last
    computed.forward(batch(decodes(3, 4)), progress)  # launched behind it, without milestones
    assert progress.layers_done == 2 * last


def test_a_layer_is_counted_when_its_kv_is_in_the_pool(model: tuple[ModelConfig, Weights], ops: CpuOps) -> None:
    """The counter lies where a layer's values go, which write over what was counted before them: this layer and those
    behind it are left."""
    slots, num_layers = batch(decodes(3, 40)), model[0].num_layers
    decoder(model, expected := pool(model[0]), ops).forward(slots, LayerProgress())
    for layer in range(num_layers):
        progress, pages = LayerProgress(), pool(model[0])
        place = int(slots.slot_pages[1]), layer, 1, 0, int(slots.slot_offsets[1])
        progress.counter = loader.as_array(pages)[place].view(np.uint64)[:1]
        decoder(model, pages, ops).forward(slots, progress)
        assert progress.counter[0] == loader.as_array(expected)[place].view(np.uint64)[0] + np.uint64(
            num_layers - layer
        )
        progress.close()


def test_models_without_such_a_kernel_do_without(model: tuple[ModelConfig, Weights], ops: CpuOps) -> None:
    config, weights = model
    shape, pages = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, 1e-6), pool(config)
    odd = dataclasses.replace(weights.layers[0], down=torch.zeros(64, 48, dtype=torch.bfloat16))
    two_kinds = dataclasses.replace(weights, layers=(*weights.layers, odd))
    narrow = dataclasses.replace(weights, head=torch.zeros(3, 64, dtype=torch.bfloat16))
    threads = select_ops("cpu", "bfloat16", 2, KERNEL_CACHE)
    try:
        assert fits_fused_layers(weights, shape, pages)
        assert not fits_fused_layers(two_kinds, shape, pages)
        assert not fits_fused_layers(narrow, shape, pages)
        assert not fits_fused_layers(weights, dataclasses.replace(shape, head_dim=48), pages)
        assert not fits_fused_layers(weights, shape, pages[:, :, :, :, :4])
        assert TorchOps().fused_layers(weights, shape, pages, config.rope) is None
        assert threads.fused_layers(weights, shape, pages, config.rope) is None
    finally:
        threads.close()


def test_the_kernel_is_compiled_at_the_start(model: tuple[ModelConfig, Weights], ops: CpuOps) -> None:
    """For the very types that steps bring. What this process compiled says nothing: other tests may have done it."""
    compiled, called = set(), set()
    start = SimpleNamespace(**{name: lambda *_: None for name in ("pack_panels", "multiply_panels", "linear_rows")})
    start.PANEL = ops._pairs.PANEL if ops._pairs is not None else 0
    start.compute_layers = lambda *arguments: compiled.add(tuple(map(numba.typeof, arguments)))
    loader._compile_products(cast(loader.PairKernels, start), in_panels=ops._panels is not None)
    used = decoder(model, pool(model[0]), ops)
    assert used._fused is not None
    used._fused._kernel = lambda *arguments: called.add(tuple(map(numba.typeof, arguments)))
    for rows in (decodes(3, 4), decodes(0), [(3, 1), (0, 70)], [(0, 9)]):
        if used._fused.takes(step := batch(rows)):
            used.forward(step, LayerProgress(), [0])
    assert called == compiled and len(called) == 1


@pytest.mark.parametrize(
    "logits",
    [
        [3.0],
        [1.0, 3.0, 2.0, 3.0],
        [-5.0, -2.0, -2.5],
        [-1.0, -0.0, 0.0],
        [0.0, -0.0],
        [-3.0] * 700,
        [0.0] * 256 + [1.0] + [0.0] * 300 + [1.0],
        [-1.0] * 599 + [-0.5],
        [float("-inf"), -1e38, float("-inf")],
        [1e38, 3.38e38],
    ],
    ids=str,
)
def test_the_best_of_a_row_is_the_first_of_equals(ops: CpuOps, logits: list[float]) -> None:
    from pdcluster.engine.kernels.fused_step import find_best

    row = torch.tensor(logits)
    assert find_best(row.numpy().view(np.int32)) == row.argmax().item()


@pytest.mark.parametrize(
    "bits",
    [
        (0x3F80, 0x7FC0, 0x7F80),
        (0x3F80, 0xFFC0, 0x7F80),
        (0xFFC0, 0x7FC0),
        (0x7FC0, 0x7FFF),
        (0xFF80, 0xFFC0),
        (*[0xFFC0] * 300, 0x3F80),
        (*[0x3F80] * 599, 0x7F81),
        (0x3F80, 0x7F80),
        (0xFF80, 0xFF80),
    ],
    ids=[
        "plus",
        "minus",
        "both signs",
        "two kinds",
        "beside minus infinity",
        "many",
        "last",
        "infinity",
        "only minus infinity",
    ],
)
def test_a_row_that_is_not_of_numbers_has_no_best(ops: CpuOps, bits: tuple[int, ...]) -> None:
    """Else a greedy row would hide broken weights."""
    from pdcluster.engine.kernels.fused_step import find_best

    assert find_best((np.array(bits, np.uint32) << 16).view(np.int32)) == -1
