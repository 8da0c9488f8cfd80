"""An engine cut over ranks gives the tokens of one engine, and those are transformers' tokens: float32, greedy and
seeded."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE, Shape
from driver import Driver, greedy
from rank_engines import engine_group

from pdcluster.core.messages import Sampling
from pdcluster.engine.engine import Engine, EngineConfig

PAGE = 16
NUM_TOKENS = 32
LENGTHS = (1, PAGE, PAGE + 1, 71)
SHAPES = [
    Shape("qwen3", num_heads=4, num_kv_heads=4, head_dim=32),
    Shape(
        "llama",
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=100,
        config={"attention_bias": True, "mlp_bias": True},
    ),
    Shape("qwen2", num_heads=4, num_kv_heads=1, head_dim=64, tied=True, vocab_size=512),
    Shape("mistral", num_heads=8, num_kv_heads=4, head_dim=32, vocab_size=997),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_ranks_gives_the_same_tokens(shape: Shape, tmp_path) -> None:
    torch.set_num_threads(1)
    model = checkpoints.build_model(shape, seed=11)
    config = EngineConfig(checkpoints.save(model, tmp_path), KERNEL_CACHE, page_tokens=PAGE, num_pages=64)
    prompts, expected = [], []
    for length in LENGTHS:
        candidates = (checkpoints.prompt(length, shape.vocab_size, seed) for seed in range(40))
        tries = ((prompt, checkpoints.greedy(model, prompt, NUM_TOKENS)) for prompt in candidates)
        prompt, reference = next((prompt, reference) for prompt, reference in tries if reference.least_gap >= 1e-3)
        prompts.append(prompt)
        expected.append(reference)
    seeded = [
        Sampling(max_tokens=NUM_TOKENS, seed=5 + i, temperature=0.8, top_k=40, top_p=0.95, ignore_eos=True)
        for i in range(len(prompts))
    ]
    logged = [greedy(NUM_TOKENS, prompt_logprobs=0, ignore_eos=True)] * len(prompts)
    alone = Engine(config)
    drawn = [job.tokens for job in Driver(alone).run(prompts, seeded)]
    alone.close()
    for size in (2, 4):
        with engine_group(config, size) as engine:
            assert engine.engines[0].layout.num_kv_heads == max(1, shape.num_kv_heads // size)
            digests = {(each.weights_digest, each.weight_groups) for each in engine.engines}
            assert digests == {(alone.weights_digest, alone.weight_groups)}, (
                "of the whole checkpoint, whatever the share"
            )
            for chunk, stagger in ((1 << 20, 0), (13, 2)):
                jobs = Driver(engine).run(prompts, logged, chunk=chunk, stagger=stagger)
                assert [job.tokens for job in jobs] == [reference.tokens for reference in expected], f"{size} ranks"
                for job, reference in zip(jobs, expected, strict=True):
                    assert [entry.logprob for entry in job.prompt_logprobs] == pytest.approx(
                        reference.prompt_logprobs, abs=1e-4
                    )
            assert [job.tokens for job in Driver(engine).run(prompts, seeded)] == drawn, f"{size} ranks, seeded"


def test_ranks_in_bfloat16_stay_as_near_to_float32_as_one_engine(tmp_path) -> None:
    shape = Shape("qwen3", num_heads=4, num_kv_heads=2, head_dim=32)
    rounded = checkpoints.build_model(shape, seed=5, dtype=torch.bfloat16)
    exact = checkpoints.build_model(shape, seed=5, dtype=torch.bfloat16).float()
    truth = np.array(checkpoints.greedy(exact, checkpoints.prompt(90, 331), 1).prompt_logprobs)
    config = EngineConfig(checkpoints.save(rounded, tmp_path), KERNEL_CACHE, page_tokens=PAGE, num_pages=16)

    def error(engine) -> float:
        (job,) = Driver(engine).run([checkpoints.prompt(90, 331)], [greedy(4, prompt_logprobs=0)])
        return float(np.abs(np.array([entry.logprob for entry in job.prompt_logprobs]) - truth).mean())

    alone = Engine(config)
    single = error(alone)
    alone.close()
    with engine_group(config, 2) as engine:
        assert error(engine) <= 1.5 * single + 0.01
