"""Later turns of a conversation on whole clusters: prefill fetches from decode what decode already has. Every token
depends on every byte of KV."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
from fake_backend import Fault
from local_cluster import LocalCluster, oracle_kit
from oracle import VOCAB, reference
from write_faults import each_write_fault

from pdcluster.core import errors
from pdcluster.core.messages import Commit, Fetch, NodeMessage
from pdcluster.kv.hashing import extend
from pdcluster.transfer.backends.base import Stamp
from pdcluster_router.policy.pull import PullRule

PAIR = {"p0": "prefill", "d0": "decode"}
TWO_PAIRS = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
FIRST, ANSWER, NEXT = 40, 30, 9
# Tokens that only decode has: the last output token has no KV.
PULLED = (FIRST + ANSWER - 1) // 4 * 4 - FIRST


def words(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(VOCAB) for _ in range(length)]


async def first_turn(cluster: LocalCluster, seed: int = 0) -> list[int]:
    """The prompt of the second turn, once the router knows who holds what of it."""
    prompt = words(FIRST, seed)
    tokens, _ = await cluster.run(prompt, ANSWER)
    assert tokens == reference(prompt, ANSWER)
    second = prompt + tokens + words(NEXT, seed)
    chain = cluster.dispatch.shared.models.chain("model", b"")
    hashes = extend(b"", second, root=chain.root, block_tokens=chain.block_tokens)
    await cluster.until(
        lambda: max(cluster.router.cached(hashes).values(), default=0) * chain.block_tokens == FIRST + PULLED
    )
    return second


def counted(cluster: LocalCluster, what: str) -> int:
    return sum(node.parts.fetch.counters[what] for node in cluster.nodes.values() if node.is_alive)


def on_message(node: object, kind: type[NodeMessage], act: object) -> None:
    """Call `act` when the node is about to handle such a message."""
    handle = node.loop.handle  # type: ignore[attr-defined]

    def watched(received: object) -> None:
        if isinstance(received.message, kind):  # type: ignore[attr-defined]
            act()  # type: ignore[operator]
        handle(received)

    node.loop.handle = watched  # type: ignore[attr-defined]


@pytest.mark.parametrize("roles", [PAIR, TWO_PAIRS], ids=["pair", "two pairs"])
async def test_the_second_turn_pulls_what_decode_wrote(roles: dict) -> None:
    async with LocalCluster(roles, force="remote") as cluster:
        second = await first_turn(cluster)
        tokens, done = await cluster.run(second, 12)
        assert tokens == reference(second, 12)
        assert counted(cluster, "ok") == 1 and done.cached_tokens == FIRST + PULLED
        assert done.timeline.pulled_tokens >= PULLED, "all of it if the other prefill node was chosen"
        await cluster.until_idle()


async def test_many_conversations_at_once_all_get_their_own_tokens() -> None:
    async with LocalCluster(TWO_PAIRS, num_pages=160, force="remote") as cluster:

        async def talk(seed: int) -> None:
            prompt = words(20 + seed, seed)
            for turn in range(4):
                tokens, _ = await cluster.run(prompt, 9)
                assert tokens == reference(prompt, 9), f"conversation {seed}, turn {turn}"
                prompt = prompt + tokens + words(5, seed + turn)
                await asyncio.sleep(0.01)

        await asyncio.gather(*(talk(seed) for seed in range(8)))
        assert counted(cluster, "ok") >= 8
        await cluster.until_idle()


async def test_metrics_tell_of_pulls() -> None:
    async with LocalCluster(PAIR, force="remote") as cluster:
        await cluster.run(await first_turn(cluster), 3)
        await cluster.until(
            lambda: any(("ok", 1) in node.load.pulls for node in cluster.router.view().nodes if node.load is not None)
        )


@each_write_fault
@pytest.mark.parametrize("which", ["first", "all of the pull"])
async def test_a_faulty_write_of_a_pull_never_changes_a_token_and_never_fails_a_request(
    fault: Fault, which: str
) -> None:
    async with LocalCluster(PAIR, force="remote") as cluster:
        second = await first_turn(cluster)
        nonces: list[int] = []
        on_message(
            cluster.nodes["d0"], Fetch, lambda: nonces.append(next(iter(cluster.nodes["p0"].parts.fetch._pulls)))
        )
        count = iter(range(10_000))
        cluster.network.plan = lambda stamp: (
            fault if stamp.nonce in nonces and (which != "first" or next(count) == 0) else Fault()
        )
        tokens, done = await cluster.run(second, 8)
        assert tokens == reference(second, 8) and done.attempts == 1
        assert nonces and counted(cluster, "ok") + counted(cluster, "failed") == 1
        cluster.network.plan = lambda stamp: Fault()
        await cluster.until_idle()


async def test_a_pull_of_which_a_part_verified_gives_nothing_and_takes_nothing_from_what_was_cached() -> None:
    """All or nothing: its first chunk is whole, its others never are."""
    cluster = LocalCluster(PAIR, force="remote")
    cluster.transfer = replace(cluster.transfer, chunk_bytes=2 * oracle_kit(1).shape.pages.page_bytes)
    async with cluster:
        second = await first_turn(cluster)
        chunks: Counter[int] = Counter()

        def plan(stamp: Stamp) -> Fault:
            is_pull = stamp.nonce in cluster.nodes["p0"].parts.fetch._pulls
            chunks.update([stamp.chunk] if is_pull else [])
            return Fault(flip_byte=5) if is_pull and stamp.chunk else Fault()

        cluster.network.plan = plan
        tokens, done = await cluster.run(second, 8)
        assert tokens == reference(second, 8) and done.attempts == 1
        assert (
            chunks[0] == 1
            and len(chunks) > 2
            and min(count for chunk, count in chunks.items() if chunk) == 1 + cluster.transfer.rounds
        )
        assert counted(cluster, "failed") == 1 and done.timeline.pulled_tokens == 0
        assert done.cached_tokens == FIRST, "what prefill had itself, and no more"
        cluster.network.plan = lambda stamp: Fault()
        await cluster.until_idle()


@pytest.mark.parametrize("moment", [Fetch, Commit], ids=["fetch", "commit"])
async def test_a_holder_that_dies_during_the_pull_costs_no_request(moment: type[NodeMessage]) -> None:
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    async with LocalCluster(roles, force="remote") as cluster:
        second = await first_turn(cluster)
        holder = max(("d0", "d1"), key=lambda name: cluster.nodes[name].parts.pages.num_cached)
        deaths: list[asyncio.Task[None]] = []

        def die() -> None:
            if not deaths:
                cluster.nodes[holder].is_alive = False
                deaths.append(asyncio.create_task(cluster.nodes[holder].kill()))

        on_message(cluster.nodes[holder if moment is Fetch else "p0"], moment, die)
        running = asyncio.create_task(cluster.run(second, 12))
        await cluster.until(lambda: bool(deaths))
        await deaths[0]
        cluster.announce()
        tokens, _ = await running
        assert tokens == reference(second, 12)
        await cluster.until_idle()


async def test_a_holder_that_lost_the_prefix_meanwhile_declines() -> None:
    async with LocalCluster(PAIR, force="remote") as cluster:
        second = await first_turn(cluster)
        pages = cluster.nodes["d0"].parts.pages
        taken = pages.allocate(pages.num_available)
        assert taken is not None
        pages.release(taken)  # everything that was cached is evicted, and no report has said so yet
        tokens, done = await cluster.run(second, 12)
        assert tokens == reference(second, 12) and done.attempts == 1
        assert counted(cluster, "declined") == 1 and done.timeline.pulled_tokens == 0
        await cluster.until_idle()


async def test_a_client_that_leaves_during_the_pull_frees_both_nodes() -> None:
    async with LocalCluster(PAIR, force="remote") as cluster:
        second = await first_turn(cluster)
        cluster.network.plan = lambda stamp: Fault(delay_s=0.2)
        running = asyncio.create_task(cluster.run(second, 12))
        await cluster.until(lambda: cluster.nodes["d0"].parts.export.num_pinned > 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await cluster.until(lambda: counted(cluster, "cancelled") == 1)
        await cluster.until_idle()


async def test_the_puller_dies_and_another_node_takes_over() -> None:
    async with LocalCluster(TWO_PAIRS, force="remote") as cluster:
        second = await first_turn(cluster)
        cluster.network.plan = lambda stamp: Fault(delay_s=0.1)
        running = asyncio.create_task(cluster.run(second, 12))
        await cluster.until(lambda: any(node.parts.fetch.num_open for node in cluster.nodes.values()))
        puller = next(node for node in cluster.nodes.values() if node.parts.fetch.num_open)
        await puller.kill()
        cluster.announce()
        tokens, done = await running
        assert tokens == reference(second, 12) and done.attempts == 2
        await cluster.until_idle()


async def test_pulls_can_be_switched_off() -> None:
    async with LocalCluster(PAIR, force="remote") as cluster:
        cluster.dispatch.shared.selector.holder.pulls = PullRule("never")
        second = await first_turn(cluster)
        tokens, done = await cluster.run(second, 12)
        assert tokens == reference(second, 12)
        assert not sum(
            (node.parts.fetch.counters for node in cluster.nodes.values()),
            start=type(cluster.nodes["p0"].parts.fetch.counters)(),
        )
        assert done.timeline.pulled_tokens == 0
        await cluster.until_idle()


async def test_the_deadline_of_a_request_is_not_moved_by_its_pull() -> None:
    async with LocalCluster(PAIR, force="remote") as cluster:
        second = await first_turn(cluster)
        cluster.network.plan = lambda stamp: Fault(delay_s=0.6)
        with pytest.raises(errors.DeadlineExceeded):
            await cluster.run(second, 12, deadline_s=0.2)
        cluster.network.plan = lambda stamp: Fault()
        await cluster.until_idle()
