"""Router, one prefill and one decode node that run vLLM: right tokens for what clients ask, through the hand-over.

A greedy token is right when its logit is within 1e-3 of the best one that transformers computes in float32.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm_cluster import VllmCluster, running_cluster

from pdcluster.checkpoint.bundled import path as bundled_model
from tests.chaos.vllm_nodes import ARGS, GreedyOracle

BLOCK = 32
LENGTHS = (1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 255, 256, 257, 500, 1000, 2500)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with running_cluster(
        folder, bundled_model(), ("prefill", "decode"), "--set", "router.mode=remote",
        arguments=(*ARGS, f"--block-size={BLOCK}"),
    ) as found:  # fmt: skip
        yield found


@pytest.fixture(scope="module")
def oracle() -> GreedyOracle:
    return GreedyOracle()


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(5, 500) for _ in range(length)]


def tokens_of(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_are_right(cluster: VllmCluster, oracle: GreedyOracle, length: int) -> None:
    prompt = prompt_of(length, length)
    answer = cluster.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True)
    tokens = tokens_of(answer)
    assert len(tokens) == 24 and not oracle.wrong_tokens(prompt, tokens)
    route = answer["usage"]["pdcluster"]
    assert (route["mode"], route["transfer"], route["attempts"]) == ("remote", "nixl", 1)


def test_tokens_are_right_under_load(cluster: VllmCluster, oracle: GreedyOracle) -> None:
    prompts = [prompt_of(random.Random(seed).randrange(1, 400), seed) for seed in range(24)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(lambda prompt: cluster.complete(prompt, max_tokens=16, temperature=0, ignore_eos=True), prompts)
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert not oracle.wrong_tokens(prompt, tokens_of(answer))


def test_the_second_prompt_with_a_prefix_finds_it_cached(cluster: VllmCluster) -> None:
    prefix = prompt_of(600, 77)
    cluster.complete(prefix, max_tokens=2, temperature=0)
    answer = cluster.complete([*prefix, *prompt_of(20, 78)], max_tokens=2, temperature=0)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 576


def test_a_seed_draws_the_same_tokens_again_and_choices_differ(cluster: VllmCluster) -> None:
    prompt, fields = prompt_of(50, 3), {"max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    first, again = cluster.complete(prompt, n=2, **fields), cluster.complete(prompt, n=2, **fields)
    drawn = [choice["token_ids"] for choice in first["choices"]]
    assert drawn == [choice["token_ids"] for choice in again["choices"]] and drawn[0] != drawn[1]


def test_one_token_a_stop_token_and_logprobs(cluster: VllmCluster) -> None:
    prompt = prompt_of(40, 9)
    free = tokens_of(cluster.complete(prompt, max_tokens=6, temperature=0, ignore_eos=True))
    assert tokens_of(cluster.complete(prompt, max_tokens=1, temperature=0, ignore_eos=True)) == free[:1]
    stop = cluster.complete(prompt, max_tokens=6, temperature=0, ignore_eos=True, stop_token_ids=[free[2]], logprobs=2)
    choice = stop["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["token_ids"] == free[: free.index(free[2]) + 1]
    assert all(value <= 0.0 for value in choice["logprobs"]["token_logprobs"])


def test_a_schema_and_penalties(cluster: VllmCluster) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = cluster.client.post(
        "/v1/chat/completions",
        json={
            "model": cluster.name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        },
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert isinstance(json.loads(answer.json()["choices"][0]["message"]["content"])["a"], int)
    tokens = tokens_of(
        cluster.complete(
            prompt_of(30, 4), max_tokens=20, temperature=0, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0
        )
    )
    assert len(set(tokens)) > 10


def test_what_does_not_map_is_refused_by_name(cluster: VllmCluster) -> None:
    answer = cluster.client.post(
        "/v1/completions", json={"model": cluster.name, "prompt": [7] * 20, "max_tokens": 2, "prompt_logprobs": 1}
    )
    assert answer.status_code == 400 and "prompt_logprobs" in answer.text
