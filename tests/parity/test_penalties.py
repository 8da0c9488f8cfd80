"""Penalties, biases and bad words, token for token: transformers' logits processors and a plain sum, against one node,
a pair, ranks, a pool that is too small, and a stream that moves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE, prompt
from driver import Driver
from local_cluster import LocalCluster
from rank_engines import engine_group
from small_model import MODEL, PAGE, make_kit
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from pdcluster.core.messages import Sampling, Shaping
from pdcluster.engine.engine import EngineConfig

EOS = 2
OUTPUT = 40
LENGTHS = (PAGE - 1, 3 * 24 + 7)
WORDS = tuple((token,) for token in range(20, 26)) + tuple(
    (first, last) for first in range(40, 52) for last in range(3, 120, 2)
)
SHAPINGS = {
    "repetition": Shaping(repetition=1.4),
    "frequency": Shaping(frequency=1.2),
    "presence": Shaping(presence=2.0),
    "encouraged": Shaping(repetition=0.8, presence=-0.3),
    "bias": Shaping(biases=((EOS, 30.0), (7, 6.0), (9, -100.0))),
    "bad words": Shaping(bad_words=WORDS[:256]),
    "all": Shaping(1.2, 0.6, 0.4, ((EOS, 30.0), (7, 6.0)), WORDS[:200]),
}
# Where EOS has a bias, it is the best token from there on.
MIN_TOKENS = 25


def sampling_of(shaping: Shaping, **fields: object) -> Sampling:
    return Sampling(
        **{"max_tokens": OUTPUT, "seed": 0, "temperature": 0.0, "min_tokens": MIN_TOKENS, "shaping": shaping, **fields}
    )  # type: ignore[arg-type]


@torch.no_grad()
def reference(model: PreTrainedModel, token_ids: np.ndarray, shaping: Shaping) -> tuple[list[int], float]:
    """Greedy, and the least gap between the two best."""
    given = torch.from_numpy(token_ids.astype(np.int64))[None]
    repetition = RepetitionPenaltyLogitsProcessor(shaping.repetition)
    least = MinNewTokensLengthLogitsProcessor(given.shape[1], MIN_TOKENS, [EOS])
    words = NoBadWordsLogitsProcessor([list(word) for word in shaping.bad_words]) if shaping.bad_words else None
    tokens: list[int] = []
    gap = float("inf")
    while len(tokens) < OUTPUT and EOS not in tokens:
        output = torch.tensor([tokens], dtype=torch.int64)
        said = torch.cat((given, output), 1)
        scores = repetition(said, model(input_ids=said).logits[:, -1].float())
        counts = torch.bincount(output[0], minlength=MODEL.vocab_size)[None]
        scores = scores - shaping.frequency * counts - shaping.presence * (counts > 0)
        for token, bias in shaping.biases:
            scores[0, token] += bias
        scores = least(said, words(output, scores) if words is not None else scores)
        best = scores[0].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens, gap


@pytest.fixture(scope="module")
def cases(model) -> dict[str, list[tuple[list[int], list[int]]]]:
    """By shaping: prompts, and what the reference says to each; none where the reference itself is a coin toss."""
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    for name, shaping in SHAPINGS.items():
        for length in LENGTHS:
            tries = (
                (given, *reference(model, given, shaping))
                for given in (prompt(length, MODEL.vocab_size, seed) for seed in range(40))
            )
            given, tokens, _ = next(each for each in tries if each[2] >= 1e-3)
            found.setdefault(name, []).append((given.tolist(), tokens))
    return found


async def check(cluster: LocalCluster, cases: dict[str, list[tuple[list[int], list[int]]]]) -> None:
    """All at once, so that rows of every kind share their steps. Nodes here know no EOS that ends a row, so they go on
    where the reference stops."""
    asked = [(name, given, tokens) for name, pairs in cases.items() for given, tokens in pairs]
    results = await asyncio.gather(*(cluster.run(given, sampling_of(SHAPINGS[name])) for name, given, _ in asked))
    for (name, given, tokens), (got, _) in zip(asked, results, strict=True):
        assert got[: len(tokens)] == tokens, f"{name}, prompt of {len(given)}"
    await cluster.until_idle()


def test_the_cases_reach_what_they_are_about(model, cases) -> None:
    for name, shaping in SHAPINGS.items():
        for given, tokens in cases[name]:
            assert tokens != reference(model, np.array(given), Shaping())[0], f"{name} changes something"
            if dict(shaping.biases).get(EOS):
                assert tokens.index(EOS) == MIN_TOKENS, "the first moment at which it may end"


async def test_one_node_says_what_the_reference_says(directory, cases) -> None:
    async with LocalCluster({"m0": "mixed"}, make_kit=make_kit(directory)) as cluster:
        await check(cluster, cases)


async def test_a_pair_says_what_the_reference_says(directory, cases) -> None:
    async with LocalCluster({"p0": "prefill", "d0": "decode"}, force="remote", make_kit=make_kit(directory)) as cluster:
        await check(cluster, cases)


async def test_preemption_forgets_nothing(directory, cases) -> None:
    async with LocalCluster({"m0": "mixed"}, num_pages=16, make_kit=make_kit(directory, reserve_tokens=0)) as cluster:
        await check(cluster, cases)
        assert cluster.nodes["m0"].parts.scheduler.num_preemptions > 0, "the pool was meant to be too small"


async def test_a_stream_that_moves_counts_what_it_said_before(directory, cases) -> None:
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    async with LocalCluster(roles, force="remote", make_kit=make_kit(directory)) as cluster:
        running = asyncio.create_task(check(cluster, cases))
        await cluster.until(
            lambda: any(
                leg.output.num_output > 5 for node in cluster.nodes.values() for leg in node.parts.decode._legs.values()
            )
        )
        victim = max(cluster.nodes.values(), key=lambda node: node.parts.decode.num_legs)
        assert victim.parts.decode.num_legs
        await victim.kill()
        cluster.announce()
        await running


async def test_seeded_rows_draw_the_same_on_a_pair_as_on_one_node(directory, cases) -> None:
    prompts = [(name, given) for name, pairs in cases.items() for given, _ in pairs]
    samplings = [
        sampling_of(SHAPINGS[name], temperature=0.9, top_p=0.95, seed=place) for place, (name, _) in enumerate(prompts)
    ]

    async def answers(roles: dict, **options: object) -> list[list[int]]:
        async with LocalCluster(roles, make_kit=make_kit(directory), **options) as cluster:
            found = await asyncio.gather(
                *(cluster.run(given, sampling) for (_, given), sampling in zip(prompts, samplings, strict=True))
            )
            return [tokens for tokens, _ in found]

    assert await answers({"m0": "mixed"}) == await answers({"p0": "prefill", "d0": "decode"}, force="remote")


def test_two_ranks_say_what_the_reference_says(directory, cases) -> None:
    config = EngineConfig(directory, KERNEL_CACHE, page_tokens=PAGE, num_pages=128)
    asked = [
        (np.array(given, np.int32), SHAPINGS[name], tokens) for name, pairs in cases.items() for given, tokens in pairs
    ]
    with engine_group(config, 2) as engine:
        jobs = Driver(engine).run(
            [given for given, _, _ in asked], [sampling_of(shaping) for _, shaping, _ in asked], chunk=31, stagger=1
        )
    for job, (_, _, tokens) in zip(jobs, asked, strict=True):
        assert job.tokens[: len(tokens)] == tokens
