"""Engines with weights of eight bits against a model of transformers whose weights are quantised by this file's own
lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoints import KERNEL_CACHE, Shape
from driver import Driver, greedy
from rank_engines import engine_group

from pdcluster.core.errors import ConfigError
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.ops.quantized import Quantization

PAGE, LENGTH = 16, 90
# Of models.
SEEDS = (5, 6, 7, 8)
SCHEMES: tuple[Quantization, ...] = ("int8", "w8a8_int8")
SHAPES = [
    Shape("qwen3", num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=128),
    Shape("qwen2", num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=128, tied=True, intermediate_size=160),
]


def rounded(values: torch.Tensor) -> torch.Tensor:
    """To 127 steps of each row's largest."""
    step = values.abs().amax(dim=-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(values / step) * step, values)


def reference(model: torch.nn.Module, scheme: Quantization) -> torch.nn.Module:
    """In float32, so that what differs is the engine's bfloat16."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and "lm_head" not in name:
            layer.weight.data = rounded(layer.weight.data)
            if scheme == "w8a8_int8":
                layer.forward = lambda x, layer=layer: F.linear(rounded(x), layer.weight, layer.bias)  # type: ignore[method-assign]
    return model


def logprobs(engine, prompt, **changes) -> np.ndarray:
    (job,) = Driver(engine).run([prompt], [greedy(8, prompt_logprobs=0)], **changes)
    return np.array([entry.logprob for entry in job.prompt_logprobs])


def differences(shape: Shape, scheme: Quantization, seed: int, folder: Path) -> np.ndarray:
    """Mean differences of one model: bfloat16 from float32, then the quantised engine's from its own reference in one
    chunk, in several and token by token, then that of quantisation itself.
    """
    build = lambda: checkpoints.build_model(shape, seed=seed, dtype=torch.bfloat16)  # noqa: E731
    prompt = checkpoints.prompt(LENGTH, shape.vocab_size)
    exact = np.array(checkpoints.greedy(build().float(), prompt, 1).prompt_logprobs)
    truth = np.array(checkpoints.greedy(reference(build().float(), scheme), prompt, 1).prompt_logprobs)
    config = EngineConfig(checkpoints.save(build(), folder), KERNEL_CACHE, page_tokens=PAGE, num_pages=16)
    plain = Engine(config)
    apart = [logprobs(plain, prompt) - exact]
    plain.close()
    engine = Engine(replace(config, quantization=scheme))
    apart += [logprobs(engine, prompt, **changes) - truth for changes in ({}, {"chunk": 13}, {"chunk": 1})]
    engine.close()
    return np.array([np.abs(each).mean() for each in (*apart, truth - exact)])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_engine_gives_what_its_quantised_weights_give(shape: Shape, scheme: Quantization, tmp_path: Path) -> None:
    """As near as bfloat16 is to float32 without quantisation; and quantisation itself is seen beside that. The mean of
    several models: how far a single one is off depends on the CPU.
    """
    torch.set_num_threads(1)
    each = [differences(shape, scheme, seed, tmp_path / str(seed)) for seed in SEEDS]
    noise, *found, quantised = np.mean(each, axis=0)
    # Where an activation falls on the edge of two steps, bfloat16 decides otherwise than float32 does. The mean of four
    # models is 4.7 times the noise on AMD (avx512_bf16), and less where AMX rounds the sums.
    assert max(found) <= (1.5 if scheme == "int8" else 5.5) * noise + 0.002
    assert quantised > 0.0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_stay_as_near_to_the_exact_model_as_one_engine(scheme: Quantization, tmp_path) -> None:
    shape = Shape("qwen3", num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=128)
    model = checkpoints.build_model(shape, seed=5, dtype=torch.bfloat16)
    exact = np.array(checkpoints.greedy(model.float(), checkpoints.prompt(LENGTH, shape.vocab_size), 1).prompt_logprobs)
    path = checkpoints.save(model.bfloat16(), tmp_path)
    config = EngineConfig(path, KERNEL_CACHE, page_tokens=PAGE, num_pages=16, quantization=scheme)
    prompt = checkpoints.prompt(LENGTH, shape.vocab_size)
    alone = Engine(config)
    single = np.abs(logprobs(alone, prompt) - exact).mean()
    alone.close()
    with engine_group(config, 2) as engine:
        assert np.abs(logprobs(engine, prompt) - exact).mean() <= 1.5 * single + 0.005


def test_the_batch_invariant_mode_refuses_quantised_weights(tmp_path) -> None:
    path = checkpoints.save(checkpoints.build_model(SHAPES[0], seed=5, dtype=torch.bfloat16), tmp_path)
    with pytest.raises(ConfigError, match="int8 is not supported with deterministic"):
        Engine(EngineConfig(path, KERNEL_CACHE, num_pages=4, quantization="int8", deterministic=True))
