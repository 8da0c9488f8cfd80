"""The batch-invariant mode: whatever happens to requests beside and between their tokens, these are the same, with the
same logprobs and the same KV, bit for bit in bfloat16. The same cases without the mode show that they can tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE, Shape, build_model, save
from rank_engines import engine_group
from shuffled import Life, Shuffle, alone

from pdcluster.core.messages import Sampling, Shaping
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.kernels.intrinsics import has_wide_product

WIDE = {"hidden_size": 384, "intermediate_size": 640, "vocab_size": 1003}
SHAPES = (
    Shape("qwen3", num_heads=6, num_kv_heads=2, head_dim=64, **WIDE),
    Shape("qwen2", num_heads=8, num_kv_heads=1, head_dim=32, tied=True, **WIDE),
    Shape("llama", num_heads=4, num_kv_heads=4, head_dim=96, **WIDE),
)


@dataclass
class Run:
    alone: list[Life]
    shuffled: list[Life]
    kv_alone: list[torch.Tensor]
    kv_shuffled: list[torch.Tensor]

    def differing(self) -> list[str]:
        """Requests whose tokens, logprobs or KV depend on what happened."""
        return [
            first.name
            for first, second, kv, other in zip(self.alone, self.shuffled, self.kv_alone, self.kv_shuffled, strict=True)
            if first.tokens != second.tokens or first.logprobs != second.logprobs or not torch.equal(kv, other)
        ]

    def events(self) -> set[str]:
        return set().union(*(life.events for life in self.shuffled))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        shape.family: save(build_model(shape, seed=5, dtype=torch.bfloat16), tmp_path_factory.mktemp(shape.family))
        for shape in SHAPES
    }


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def config_of(directory: Path, **changes: object) -> EngineConfig:
    config = EngineConfig(directory, KERNEL_CACHE, dtype="bfloat16", page_tokens=32, num_pages=400, deterministic=True)
    return replace(config, **changes)


def engines_of(stack: ExitStack, directory: Path, *, deterministic: bool = True) -> list[Engine]:
    """Two that differ in whatever must not matter."""
    configs = [
        config_of(directory, deterministic=deterministic),
        config_of(directory, deterministic=deterministic, page_tokens=48, threads=2),
    ]
    engines = [Engine(config) for config in configs]
    for engine in engines:
        stack.callback(engine.close)
    return engines


def lives_of(count: int, seed: int) -> list[Life]:
    """Prompts of all lengths around tiles and pages, some with a prefix in common; greedy, drawn and penalised."""
    die = np.random.default_rng(seed)
    common = die.integers(3, 1003, 400).astype(np.int32)
    lives = []
    for index in range(count):
        length = int(die.choice([1, 2, 8, 31, 32, 33, 64, 65, int(die.integers(1, 300))]))
        prompt = die.integers(3, 1003, length).astype(np.int32)
        if die.random() < 0.5:
            prompt[: length * 3 // 4] = common[: length * 3 // 4]
        lives.append(Life(str(index), prompt, sampling_of(index, int(die.integers(2, 14)))))
    return lives


def sampling_of(index: int, max_tokens: int) -> Sampling:
    temperature = (0.0, 0.8, 1.0)[index % 3]
    top_p, top_k = (0.9 if index % 2 else None), (20 if index % 5 == 0 else None)
    shaping = Shaping(repetition=1.3, presence=0.2) if index % 4 == 0 else None
    return Sampling(
        max_tokens=max_tokens,
        seed=index,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        logprobs=index % 4,
        ignore_eos=True,
        shaping=shaping,
    )


def run_both(engines: list[Engine], count: int, seed: int) -> Run:
    first, second = lives_of(count, seed), lives_of(count, seed)
    kv_alone = alone(engines[0], first)
    return Run(first, second, kv_alone, Shuffle(engines, seed).run(second))


def test_a_request_says_the_same_bits_whatever_happens(stack: ExitStack, checkpoints: dict[str, Path]) -> None:
    run = run_both(engines_of(stack, checkpoints["qwen3"]), 20, seed=1)
    assert run.events() == {"prefix", "recomputed", "handed over"}
    assert run.differing() == []


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_500_requests_say_the_same_bits_whatever_happens(
    stack: ExitStack, checkpoints: dict[str, Path], shape: Shape
) -> None:
    assert run_both(engines_of(stack, checkpoints[shape.family]), 500, seed=2).differing() == []


@pytest.mark.skipif(
    has_wide_product(),
    reason="the usual kernels of a CPU with AVX2 alone add in one order, too, as far as these requests show",
)
def test_without_the_mode_the_same_requests_differ(stack: ExitStack, checkpoints: dict[str, Path]) -> None:
    assert run_both(engines_of(stack, checkpoints["qwen3"], deterministic=False), 20, seed=1).differing() != []


def test_ranks_say_the_same_bits_in_any_batch(checkpoints: dict[str, Path]) -> None:
    with engine_group(config_of(checkpoints["qwen3"]), 2) as group:
        first, second = lives_of(6, seed=3), lives_of(6, seed=3)
        group.pool = group.engines[0].pool
        kv = alone(group, first)
        again = Shuffle([group], seed=3).run(second)
    assert Run(first, second, kv, again).differing() == []
