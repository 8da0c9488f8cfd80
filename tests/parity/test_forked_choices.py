"""Choices of one prompt equal requests of their own, token for token; the prompt is computed and sent once."""

from __future__ import annotations

import asyncio
from array import array

import msgspec
import numpy as np
import pytest
from checkpoints import KERNEL_CACHE, prompt
from driver import Driver
from local_cluster import LocalCluster
from oracle import reference
from rank_engines import EngineGroup, engine_group
from small_model import MODEL, PAGE, make_kit

from pdcluster.core.messages import Sampling, Shaping
from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster_router.core.generation import Generation

PAIR = {"p0": "prefill", "d0": "decode"}
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 71)
SAMPLINGS = {
    "seeded": Sampling(max_tokens=20, seed=11, temperature=0.9, top_p=0.95, ignore_eos=True),
    "penalties": Sampling(max_tokens=20, seed=3, temperature=0.9, ignore_eos=True, shaping=Shaping(1.2, 0.5, 0.5)),
}


def choices(sampling: Sampling, count: int) -> list[Sampling]:
    return [msgspec.structs.replace(sampling, choice=number) for number in range(count)]


@pytest.fixture(scope="module")
def expected(directory) -> dict[tuple[str, int], list[list[int]]]:
    """Each choice as a request of its own, one after the other on one node."""

    async def alone() -> dict[tuple[str, int], list[list[int]]]:
        async with LocalCluster({"m0": "mixed"}, make_kit=make_kit(directory, token_budget=256)) as cluster:
            found = {}
            for name, sampling in SAMPLINGS.items():
                for length in LENGTHS:
                    tokens = prompt(length, MODEL.vocab_size, seed=5).tolist()
                    found[name, length] = [(await cluster.run(tokens, each))[0] for each in choices(sampling, 4)]
            return found

    return asyncio.run(alone())


@pytest.mark.parametrize("roles", [PAIR, {"m0": "mixed"}], ids=["pair", "one node"])
async def test_choices_equal_requests_of_their_own(directory, expected, roles) -> None:
    async with LocalCluster(
        roles, force="remote" if roles is PAIR else "auto", make_kit=make_kit(directory)
    ) as cluster:
        for (name, length), want in expected.items():
            assert len({tuple(tokens) for tokens in want}) > 1, "the choices differ"
            results = await cluster.run_choices(
                prompt(length, MODEL.vocab_size, seed=5).tolist(), choices(SAMPLINGS[name], 4)
            )
            assert [tokens for tokens, _ in results] == want, f"{name}, prompt of {length}"
        await cluster.until_idle()


async def test_a_prompt_is_computed_and_sent_once() -> None:
    """13 tokens in pages of 4."""
    given = list(range(100, 113))
    async with LocalCluster(PAIR, force="remote") as cluster:
        results = await cluster.run_choices(given, choices(Sampling(max_tokens=9, seed=1), 6))
        assert [tokens for tokens, _ in results] == [reference(given, 9, choice=number) for number in range(6)]
        first, *others = (done for _, done in results)
        assert (first.route.mode, first.route.prefill, first.route.decode) == ("remote", "p0", "d0")
        told = [
            (done.route.mode, done.route.decode, done.timeline.transfer_bytes, done.cached_tokens) for done in others
        ]
        assert told == [("local", "d0", 0, 12)] * 5
        assert cluster.nodes["p0"].side._steps == 1, "one chunk holds the whole prompt"
        await cluster.until_idle()


async def test_choices_of_a_prompt_that_ends_with_its_first_token() -> None:
    given = list(range(100, 113))
    async with LocalCluster(PAIR, force="remote") as cluster:
        results = await cluster.run_choices(given, choices(Sampling(max_tokens=1, seed=1), 5))
        assert [tokens for tokens, _ in results] == [reference(given, 1, choice=number) for number in range(5)]
        await cluster.until_idle()


async def test_more_choices_than_there_are_rows_all_get_their_answer() -> None:
    given = list(range(100, 120))
    async with LocalCluster(PAIR, force="remote") as cluster:
        results = await cluster.run_choices(given, choices(Sampling(max_tokens=5, seed=1), 20))
        assert [tokens for tokens, _ in results] == [reference(given, 5, choice=number) for number in range(20)]
        await cluster.until_idle()


async def test_a_pool_that_is_too_small_for_all_choices_preempts_and_loses_nothing() -> None:
    given = list(range(100, 111))
    async with LocalCluster({"m0": "mixed"}, num_pages=12) as cluster:
        results = await cluster.run_choices(given, choices(Sampling(max_tokens=25, seed=1), 6))
        assert [tokens for tokens, _ in results] == [reference(given, 25, choice=number) for number in range(6)]
        await cluster.until_idle()


@pytest.mark.parametrize("moment", [0, 1, 4, 40])
async def test_choices_outlive_the_node_that_they_share(moment: int) -> None:
    """Each goes on with what it has said, wherever there is room."""
    given = list(range(100, 113))
    async with LocalCluster({"p0": "prefill", "d0": "decode", "d1": "decode"}, force="remote") as cluster:
        running = asyncio.create_task(cluster.run_choices(given, choices(Sampling(max_tokens=60, seed=1), 4)))
        await cluster.until(lambda: any(node.parts.decode.num_legs for node in cluster.nodes.values()))
        for _ in range(moment):
            await asyncio.sleep(0.0005)
        victim = max((cluster.nodes["d0"], cluster.nodes["d1"]), key=lambda node: node.parts.decode.num_legs)
        await victim.kill()
        cluster.announce()
        results = await running
        assert [tokens for tokens, _ in results] == [reference(given, 60, choice=number) for number in range(4)]
        await cluster.until_idle()
        assert not cluster.dispatch.shared.fork_groups, "nobody waits for a leader"


async def test_a_leader_that_is_cancelled_leaves_its_followers_a_way() -> None:
    given = list(range(100, 113))
    async with LocalCluster(PAIR, force="remote") as cluster:
        name = "r-x"
        first = asyncio.create_task(
            cluster._events(
                Generation(f"{name}-0", "model", array("i", given), Sampling(max_tokens=400, seed=1), 20.0, leads=True)
            )
        )
        sampling = Sampling(max_tokens=9, seed=1, choice=1)
        await asyncio.sleep(0)
        second = asyncio.create_task(
            cluster._events(Generation(f"{name}-1", "model", array("i", given), sampling, 20.0, parent=f"{name}-0"))
        )
        await cluster.until(lambda: cluster.router.ledger.num_requests() == 2)
        first.cancel()
        assert (await second)[0] == reference(given, 9, choice=1)
        await cluster.until_idle()


def test_two_ranks_fork_as_one_engine_does(directory) -> None:
    """Every rank copies its own share of the page."""
    given = prompt(PAGE + 7, MODEL.vocab_size, seed=5)
    first, other = choices(SAMPLINGS["seeded"], 2)
    config = EngineConfig(directory, KERNEL_CACHE, page_tokens=PAGE, num_pages=16)
    alone = Engine(config)
    want = [job.tokens[:3] for job in Driver(alone).run([given, given], [first, other])]
    alone.close()
    with engine_group(config, 2) as engine:
        assert _forked_by_hand(engine, given, first, other) == want


def _forked_by_hand(engine: EngineGroup, given: np.ndarray, first: Sampling, other: Sampling) -> list[list[int]]:
    """Three tokens of the leader and of its fork, which joins a step later."""
    pages = {"a": np.array([3, 5], np.int32), "b": np.array([3, 9], np.int32)}
    said: dict[str, list[int]] = {"a": [], "b": []}

    def step(*rows: Row, copies: tuple[tuple[int, int], ...] = ()) -> None:
        for row in engine.step(StepPlan(rows, copies=copies)).rows:
            assert row.token is not None
            said[row.request].append(row.token)

    def decode(name: str, sampling: Sampling) -> Row:
        last = np.array([said[name][-1] if said[name] else given[-1]], np.int32)
        return Row(name, last, len(given) + len(said[name]) - 1, pages[name], sampling, len(said[name]))

    step(Row("a", given, 0, pages["a"], first))
    step(decode("a", first), decode("b", other), copies=((5, 9),))
    step(decode("a", first), decode("b", other))
    step(decode("b", other))
    return [said["a"], said["b"]]
