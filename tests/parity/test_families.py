"""The engine gives the tokens that transformers gives: float32, greedy, every family, shapes that stress each branch of
the code.

Equality is not luck: the best two logits of the reference are at least GAP apart at every step of every case (prompts
are chosen so).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE, LINEAR, LLAMA3, YARN, Expected, Shape
from driver import Driver, greedy
from transformers import PreTrainedModel

from pdcluster.engine.engine import Engine, EngineConfig

PAGE = 16
CHUNK = 32
NUM_TOKENS = 64
GAP = 1e-3
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * CHUNK + 7)

HEADS = [(4, 4), (4, 2), (8, 2), (8, 1)]
DIMS = [32, 64, 96, 128]
ROPES: list[dict[str, object]] = [{"rope_type": "default"}, LLAMA3, LINEAR, YARN]
BIASES: dict[str, list[dict[str, object]]] = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True}],
    "qwen2": [{}],
    "qwen3": [{}, {"attention_bias": True}],
    "mistral": [{}],
}


def matrix() -> list[Shape]:
    """Every family with every GQA ratio and head dim; tying, vocabulary, rope and biases go round with different
    periods."""
    shapes = []
    for index, (family, heads, dim) in enumerate(itertools.product(checkpoints.FAMILIES, HEADS, DIMS)):
        turn = index + index // 4 + index // 16
        shapes.append(
            Shape(
                family,
                *heads,
                dim,
                vocab_size=(331, 512, 997)[index % 3],
                tied=turn % 2 == 1,
                rope=ROPES[turn % 4],
                config=BIASES[family][(index // 2) % len(BIASES[family])],
            )
        )
    return shapes


def sample(count_per_family: int) -> list[Shape]:
    chosen = random.Random(3)
    return [
        shape
        for family in checkpoints.FAMILIES
        for shape in chosen.sample([s for s in matrix() if s.family == family], count_per_family)
    ]


def case_list() -> list[object]:
    quick = sample(3)
    return [
        pytest.param(shape, id=str(shape), marks=[] if shape in quick else [pytest.mark.full]) for shape in matrix()
    ]


@dataclass
class Case:
    model: PreTrainedModel
    engine: Engine
    driver: Driver


@pytest.fixture(scope="module", params=case_list())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    torch.set_num_threads(1)
    shape: Shape = request.param
    model = checkpoints.build_model(shape, seed=11)
    directory = checkpoints.save(model, tmp_path_factory.mktemp("model"), shard_size="100KB" if shape.tied else "1GB")
    engine = Engine(EngineConfig(directory, KERNEL_CACHE, page_tokens=PAGE, num_pages=64))
    yield Case(model, engine, Driver(engine))
    engine.close()


def prompts_with_gap(case: Case, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[np.ndarray, Expected]]:
    """For each length the first of a few random prompts whose continuation is decided clearly at every step."""
    return [prompt_with_gap(case.model, length, case.engine.config.vocab_size) for length in lengths]


def prompt_with_gap(model: PreTrainedModel, length: int, vocab_size: int) -> tuple[np.ndarray, Expected]:
    for seed in range(40):
        prompt = checkpoints.prompt(length, vocab_size, seed)
        expected = checkpoints.greedy(model, prompt, NUM_TOKENS)
        if expected.least_gap >= GAP:
            return prompt, expected
    raise AssertionError(f"no prompt of {length} tokens keeps the logits {GAP} apart; choose another scale of weights")


def test_greedy_tokens_and_prompt_logprobs_equal_those_of_transformers_however_the_batch_is_made(case: Case) -> None:
    chosen = prompts_with_gap(case)
    prompts, expected = [prompt for prompt, _ in chosen], [result for _, result in chosen]
    samplings = [greedy(NUM_TOKENS, prompt_logprobs=0)] * len(prompts)
    ways = {
        "alone": [case.driver.run([prompt], samplings[:1], chunk=CHUNK)[0] for prompt in prompts],
        "in one chunk, in one batch": case.driver.run(prompts, samplings),
        "in odd chunks, joining a running batch": case.driver.run(prompts, samplings, chunk=13, stagger=2),
    }
    for way, jobs in ways.items():
        for job, reference in zip(jobs, expected, strict=True):
            where = f"{way}, prompt of {len(job.prompt)}"
            assert job.tokens == reference.tokens, where
            found = [entry.logprob for entry in job.prompt_logprobs]
            assert found == pytest.approx(reference.prompt_logprobs, abs=1e-4), where


def test_the_matrix_covers_what_it_says() -> None:
    shapes = matrix()
    assert len(shapes) == 64
    for family in checkpoints.FAMILIES:
        own = [shape for shape in shapes if shape.family == family]
        assert {(shape.num_heads // shape.num_kv_heads, shape.head_dim) for shape in own} == set(
            itertools.product((1, 2, 4, 8), DIMS)
        )
        assert {shape.tied for shape in own} == {True, False}
        assert {shape.rope["rope_type"] for shape in own} == {"default", "llama3", "linear", "yarn"}
        assert any(shape.vocab_size % 2 for shape in own)
    assert {shape.family for shape in sample(3)} == set(checkpoints.FAMILIES)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16_is(family: str, tmp_path: Path) -> None:
    """Both round differently, so tokens may differ; the error against float32 must not be larger than the reference's
    own."""
    shape = replace(Shape(family), num_layers=3)
    rounded = checkpoints.build_model(shape, seed=5, dtype=torch.bfloat16)
    exact = checkpoints.build_model(shape, seed=5, dtype=torch.bfloat16).float()
    prompt = checkpoints.prompt(90, shape.vocab_size)
    engine = Engine(EngineConfig(checkpoints.save(rounded, tmp_path), KERNEL_CACHE, page_tokens=PAGE, num_pages=16))
    try:
        assert engine.layout.dtype == "bfloat16"
        jobs = [Driver(engine).run([prompt], [greedy(4, prompt_logprobs=0)], chunk=chunk)[0] for chunk in (1, 40, 90)]
    finally:
        engine.close()
    truth = np.array(checkpoints.greedy(exact, prompt, 1).prompt_logprobs)
    theirs = np.abs(np.array(checkpoints.greedy(rounded, prompt, 1).prompt_logprobs) - truth)
    for job in jobs:
        ours = np.abs(np.array([entry.logprob for entry in job.prompt_logprobs]) - truth)
        assert ours.mean() <= 1.25 * theirs.mean() + 0.01
        assert ours.max() <= 2.0 * theirs.max() + 0.05
