"""Disaggregated = local = chunked differently = prefix-cached = preempted, token for token, with a real model in fp32,
greedy and seeded."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from pathlib import Path

import pytest
import small_model
import torch
from checkpoints import Shape, build_model, greedy, prompt, save
from local_cluster import LocalCluster
from small_model import PAGE

from pdcluster.core.messages import Sampling
from pdcluster.kv.hashing import block_hashes
from pdcluster.node.native.engine_side import NativeSide
from pdcluster.transfer.paths.choose import create_backends

MODEL = Shape("qwen3", num_heads=4, num_kv_heads=2, head_dim=32, num_layers=3)
make_kit = partial(small_model.make_kit, vocab_size=MODEL.vocab_size)
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * 24 + 7)
OUTPUT = 24
PAIR = {"p0": "prefill", "d0": "decode"}


@pytest.fixture(
    autouse=True, params=[pytest.param(True, id="ahead"), pytest.param(False, id="in-turn", marks=pytest.mark.full)]
)
def looks_ahead(request, monkeypatch) -> None:
    """Steps planned before the tokens of the last one are known, and steps that wait for them."""
    monkeypatch.setattr(LocalCluster, "looks_ahead", request.param)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return build_model(MODEL, seed=3)


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


def samplings() -> dict[str, Sampling]:
    return {
        "greedy": Sampling(max_tokens=OUTPUT, seed=0, temperature=0.0, ignore_eos=True),
        "seeded": Sampling(
            max_tokens=OUTPUT, seed=11, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, ignore_eos=True
        ),
    }


async def answers(cluster: LocalCluster, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    results = await asyncio.gather(*(cluster.run(tokens, sampling) for tokens in prompts))
    return [tokens for tokens, _ in results]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt(length, MODEL.vocab_size, seed=5).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(directory, prompts) -> dict[str, list[list[int]]]:
    """One node, one request at a time, whole prompts in one step."""

    async def alone() -> dict[str, list[list[int]]]:
        async with LocalCluster({"m0": "mixed"}, make_kit=make_kit(directory, token_budget=256)) as cluster:
            found: dict[str, list[list[int]]] = {}
            for name, sampling in samplings().items():
                found[name] = [(await cluster.run(tokens, sampling))[0] for tokens in prompts]
            return found

    return asyncio.run(alone())


def test_one_node_is_transformers(model, prompts, expected) -> None:
    for tokens, got in zip(prompts, expected["greedy"], strict=True):
        want = greedy(model, torch.tensor(tokens).numpy(), OUTPUT)
        assert want.least_gap >= 1e-3, "the reference itself must not be a coin toss"
        assert got == want.tokens


@pytest.mark.parametrize("name", ["greedy", "seeded"])
@pytest.mark.parametrize("backend", ["fake", "shm", "tcp", "mooncake"])
@pytest.mark.parametrize("group_s", [1.0, 1e-12], ids=["whole", "by-layer"])
async def test_disaggregated_equals_local(
    directory, prompts, expected, name: str, backend: str, group_s: float
) -> None:
    make_backend = (
        None
        if backend == "fake"
        else lambda me: create_backends(backend, me, host="127.0.0.1", staging_bytes=1 << 22)[backend]
    )
    async with LocalCluster(
        PAIR, force="remote", make_kit=make_kit(directory), make_backend=make_backend, group_s=group_s
    ) as cluster:
        assert await answers(cluster, prompts, samplings()[name]) == expected[name]
        assert await answers(cluster, prompts, samplings()[name]) == expected[name], (
            "and again with every prefix cached"
        )
        await cluster.until_idle()


@pytest.fixture(scope="module")
def second_turns(model, directory, prompts, expected) -> dict[str, tuple[list[list[int]], list[list[int]]]]:
    """Prompts that go on from the answers, and what one node without a cache says to them."""

    async def alone(turn: list[int], sampling: Sampling) -> list[int]:
        async with LocalCluster({"m0": "mixed"}, make_kit=make_kit(directory, token_budget=256)) as cluster:
            return (await cluster.run(turn, sampling))[0]

    found = {}
    for name, sampling in samplings().items():
        turns = [
            first + answer + prompt(7, MODEL.vocab_size, seed=9).tolist()
            for first, answer in zip(prompts, expected[name], strict=True)
        ]
        found[name] = turns, [asyncio.run(alone(turn, sampling)) for turn in turns]
    assert min(greedy(model, torch.tensor(turn).numpy(), OUTPUT).least_gap for turn in found["greedy"][0]) >= 1e-3
    return found


@pytest.mark.parametrize("name", ["greedy", "seeded"])
@pytest.mark.parametrize("backend", ["fake", "shm", "tcp", "mooncake"])
async def test_a_second_turn_over_pulled_kv_equals_one_that_is_computed(
    directory, prompts, expected, second_turns, name, backend
) -> None:
    make_backend = (
        None
        if backend == "fake"
        else lambda me: create_backends(backend, me, host="127.0.0.1", staging_bytes=1 << 22)[backend]
    )
    turns, answered = second_turns[name]
    async with LocalCluster(PAIR, force="remote", make_kit=make_kit(directory), make_backend=make_backend) as cluster:
        assert await answers(cluster, prompts, samplings()[name]) == expected[name]
        await cluster.until_idle()
        chains = [
            (block_hashes(turn, block_tokens=PAGE), (len(first) + OUTPUT - 1) // PAGE)
            for turn, first in zip(turns, prompts, strict=True)
        ]
        await cluster.until(
            lambda: all(max(cluster.router.cached(hashes).values(), default=0) == depth for hashes, depth in chains)
        )
        assert await answers(cluster, turns, samplings()[name]) == answered
        assert cluster.nodes["p0"].parts.fetch.counters["ok"] == len(turns), "each of them was pulled"
        await cluster.until_idle()


@pytest.mark.parametrize("name", ["greedy", "seeded"])
@pytest.mark.parametrize("token_budget", [9, 40])
async def test_chunks_of_another_size_change_nothing(
    directory, prompts, expected, name: str, token_budget: int
) -> None:
    async with LocalCluster({"m0": "mixed"}, make_kit=make_kit(directory, token_budget=token_budget)) as cluster:
        assert await answers(cluster, prompts, samplings()[name]) == expected[name]
        await cluster.until_idle()


@pytest.mark.parametrize("name", ["greedy", "seeded"])
async def test_preemption_changes_nothing(directory, prompts, expected, name: str) -> None:
    async with LocalCluster({"m0": "mixed"}, num_pages=13, make_kit=make_kit(directory, reserve_tokens=0)) as cluster:
        assert await answers(cluster, prompts, samplings()[name]) == expected[name]
        assert cluster.nodes["m0"].parts.scheduler.num_preemptions > 0, "the pool was meant to be too small"
        await cluster.until_idle()


@pytest.mark.parametrize("name", ["greedy", "seeded"])
async def test_a_stream_that_moves_to_another_node_changes_nothing(directory, prompts, expected, name: str) -> None:
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    async with LocalCluster(roles, make_kit=make_kit(directory)) as cluster:
        running = asyncio.create_task(answers(cluster, prompts, samplings()[name]))
        await cluster.until(lambda: any(node.parts.decode.num_legs for node in cluster.nodes.values()))
        await asyncio.sleep(0.03)
        victim = max(cluster.nodes.values(), key=lambda node: node.parts.decode.num_legs)
        await victim.kill()
        cluster.announce()
        assert await running == expected[name]
        await cluster.until_idle()


async def test_a_loop_that_is_late_for_a_bell_sends_only_what_was_computed(directory, monkeypatch) -> None:
    """The loop and the engine's thread race for the CPU: a milestone of one step read during the next one must not send KV
    that is not there yet."""
    many = [prompt(17 + index % 8, MODEL.vocab_size, seed=index).tolist() for index in range(48)]
    sampling = Sampling(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True)
    async with LocalCluster({"m0": "mixed"}, num_pages=512, make_kit=make_kit(directory, token_budget=256)) as cluster:
        want = [(await cluster.run(tokens, sampling))[0] for tokens in many]
    watch, late = NativeSide._watch_layers, random.Random(7)

    def late_watch(loop: NativeSide) -> None:
        watch(loop)
        if loop._in_flight and late.random() < 0.5:
            time.sleep(0.01)

    monkeypatch.setattr(NativeSide, "_watch_layers", late_watch)
    async with LocalCluster(
        PAIR, force="remote", num_pages=512, make_kit=make_kit(directory), group_s=1e-12
    ) as cluster:
        worker = cluster.nodes["p0"].engine._worker
        compute = worker._compute
        monkeypatch.setattr(worker, "_compute", lambda plan: (time.sleep(0.003), compute(plan))[1])
        got = [
            tokens for start in range(0, 48, 6) for tokens in await answers(cluster, many[start : start + 6], sampling)
        ]
        assert got == want
        await cluster.until_idle()
