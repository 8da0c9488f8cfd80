"""Node loops, links, router and dispatch together, with oracle engines and a scripted medium: every token depends on
every byte of KV that was moved."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from contextlib import aclosing

import pytest
from fake_backend import Fault
from local_cluster import PAIR, LocalCluster, prompt_of
from oracle import VOCAB, reference
from write_faults import each_write_fault

from pdcluster.core import errors
from pdcluster.core.messages import Role, Sampling
from pdcluster.transfer.backends.base import Stamp, WriteStatus
from pdcluster_router.core.generation import Generation, TokenChunk

TWO_PAIRS = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 24, 25, 79])
async def test_a_remote_request_gives_the_tokens_of_one_process(length: int) -> None:
    async with LocalCluster(PAIR) as cluster:
        tokens, done = await cluster.run(prompt_of(length), 12)
        assert tokens == reference(prompt_of(length), 12)
        assert done.route.mode == "remote" and done.route.backend == "fake"
        assert done.timeline.transfer_bytes == -(-length // 4) * 64
        await cluster.until_idle()


@pytest.mark.parametrize("looks_ahead", [True, False])
async def test_local_mode_gives_the_same_tokens(looks_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCluster, "looks_ahead", looks_ahead)
    async with LocalCluster({"m0": "mixed"}) as cluster:
        tokens, done = await cluster.run(prompt_of(30), 12)
        assert tokens == reference(prompt_of(30), 12) and done.route.mode == "local"
        num_ahead = cluster.nodes["m0"].engine.num_ahead
        assert num_ahead > 5 if looks_ahead else num_ahead == 0
        await cluster.until_idle()


async def test_many_requests_at_once_all_give_their_own_tokens() -> None:
    async with LocalCluster(TWO_PAIRS, num_pages=128) as cluster:
        gate = asyncio.Semaphore(16)

        async def one(index: int) -> None:
            prompt = prompt_of(1 + index * 7 % 90, seed=index)
            async with gate:
                tokens, _ = await cluster.run(prompt, 1 + index % 13)
            assert tokens == reference(prompt, 1 + index % 13), f"request {index}"

        await asyncio.gather(*(one(index) for index in range(60)))
        await cluster.until_idle()


async def test_a_cached_prefix_is_not_sent_again() -> None:
    async with LocalCluster(PAIR) as cluster:
        prompt = prompt_of(40)
        _, first = await cluster.run(prompt, 3)
        tokens, second = await cluster.run(prompt, 3)
        assert tokens == reference(prompt, 3)
        assert first.cached_tokens == 0 and second.cached_tokens >= 32
        assert second.timeline.transfer_bytes < first.timeline.transfer_bytes
        await cluster.until_idle()


@pytest.mark.parametrize("nodes", [PAIR, {"m0": "mixed"}])
async def test_what_was_cached_is_known_with_the_first_token(nodes: dict[str, Role]) -> None:
    """So that a stop string in it leaves the right usage."""
    async with LocalCluster(nodes) as cluster:
        for cached in (0, 32, 32):
            name, prompt, sampling = (
                f"r{next(cluster.versions)}",
                array("i", prompt_of(36)),
                Sampling(max_tokens=4, seed=1),
            )
            generation = Generation(name, "model", prompt, sampling, 20.0)
            async with aclosing(cluster.dispatch.generate(generation)) as events:
                first = await anext(events)
            assert isinstance(first, TokenChunk) and (first.route.cached_tokens or 0) == cached
        await cluster.until_idle()


async def test_the_pool_of_a_decode_node_may_be_too_small_for_all_at_once() -> None:
    """Refusals, holds and preemptions change nothing in the tokens."""
    async with LocalCluster(PAIR, num_pages=24) as cluster:
        prompts = [prompt_of(30, seed) for seed in range(6)]
        results = await asyncio.gather(*(cluster.run(prompt, 20) for prompt in prompts))
        assert [tokens for tokens, _ in results] == [reference(prompt, 20) for prompt in prompts]
        await cluster.until_idle()


@each_write_fault
@pytest.mark.parametrize("which", ["first", "every third"])
async def test_a_faulty_write_never_changes_a_token(fault: Fault, which: str) -> None:
    async with LocalCluster(TWO_PAIRS) as cluster:
        count = iter(range(10_000))

        def plan(stamp) -> Fault:
            number = next(count)
            return fault if (number == 0 if which == "first" else number % 3 == 0) else Fault()

        cluster.network.plan = plan
        prompts = [prompt_of(10 + 9 * seed, seed) for seed in range(6)]
        results = await asyncio.gather(*(cluster.run(prompt, 8) for prompt in prompts), return_exceptions=True)
        for prompt, result in zip(prompts, results, strict=True):
            if isinstance(result, errors.PdclusterError):
                continue
            assert not isinstance(result, BaseException), result
            assert result[0] == reference(prompt, 8)
        assert sum(not isinstance(result, BaseException) for result in results) >= 4
        cluster.network.plan = lambda stamp: Fault()
        await cluster.until_idle()


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.08])
async def test_a_node_that_dies_costs_no_request(victim: str, after_s: float) -> None:
    async with LocalCluster(TWO_PAIRS) as cluster:
        prompts = [prompt_of(40, seed) for seed in range(6)]
        running = [asyncio.create_task(cluster.run(prompt, 30)) for prompt in prompts]
        await asyncio.sleep(after_s)
        await cluster.nodes[victim].kill()
        cluster.announce()
        results = await asyncio.gather(*running)
        assert [tokens for tokens, _ in results] == [reference(prompt, 30) for prompt in prompts]
        await cluster.until_idle()


async def test_the_last_node_alive_serves_and_a_new_boot_joins() -> None:
    async with LocalCluster(PAIR) as cluster:
        await cluster.nodes["p0"].kill()
        cluster.announce()
        tokens, done = await cluster.run(prompt_of(20), 6)
        assert tokens == reference(prompt_of(20), 6) and done.route.mode == "local"
        cluster.start("p0", "prefill")
        await cluster.until(lambda: len(cluster.router.view().nodes) == 2)
        tokens, done = await cluster.run(prompt_of(20), 6)
        assert tokens == reference(prompt_of(20), 6) and done.route.mode == "remote"
        await cluster.until_idle()


async def test_a_prefill_node_that_hangs_before_the_commit_runs_into_a_deadline() -> None:
    """It holds its link but does nothing: the request ends by its own deadline at the latest, and nothing leaks when
    the node goes on."""
    async with LocalCluster(PAIR) as cluster:
        cluster.nodes["p0"].is_paused = True
        with pytest.raises(errors.PdclusterError):
            await cluster.run(prompt_of(20), 6, deadline_s=0.3)
        cluster.nodes["p0"].is_paused = False
        await cluster.until_idle()


async def test_a_step_that_fails_costs_a_retry_and_not_the_node() -> None:
    async with LocalCluster({"m0": "mixed", "m1": "mixed"}) as cluster:
        cluster.nodes["m0"].engine.fail_steps = 1
        results = await asyncio.gather(*(cluster.run(prompt_of(20, seed), 8) for seed in range(4)))
        assert [tokens for tokens, _ in results] == [reference(prompt_of(20, seed), 8) for seed in range(4)]
        assert max(done.attempts for _, done in results) == 2
        await cluster.until_idle()


async def test_a_client_that_leaves_frees_both_nodes() -> None:
    async with LocalCluster(PAIR) as cluster:
        cluster.nodes["d0"].engine.hold = True
        task = asyncio.create_task(cluster.run(prompt_of(40), 30))
        await cluster.until(lambda: cluster.nodes["d0"].parts.decode.num_legs == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cluster.nodes["d0"].engine.hold = False
        cluster.nodes["d0"].engine.finish()
        await cluster.until_idle()


async def test_a_router_that_dies_frees_its_requests_within_the_lease() -> None:
    async with LocalCluster(PAIR) as cluster:
        cluster.nodes["d0"].engine.hold = True
        task = asyncio.create_task(cluster.run(prompt_of(40), 30))
        await cluster.until(lambda: cluster.nodes["d0"].parts.decode.num_legs == 1)
        cluster.router.close()
        cluster.nodes["d0"].engine.hold = False
        cluster.nodes["d0"].engine.finish()
        with pytest.raises(errors.PdclusterError):
            await task
        await cluster.until_idle()


async def test_a_request_that_can_never_fit_is_refused_with_the_reason() -> None:
    async with LocalCluster({"m0": "mixed"}, num_pages=8) as cluster:
        with pytest.raises(errors.BadRequest, match=r"page|fit|tokens"):
            await cluster.run(prompt_of(100), 4)
        with pytest.raises(errors.BadRequest, match=f"token id {VOCAB} is out of range"):
            await cluster.run([VOCAB], 4)
        await cluster.until_idle()


async def test_a_draining_node_finishes_what_it_has_and_takes_nothing_new() -> None:
    async with LocalCluster({"m0": "mixed", "m1": "mixed"}) as cluster:
        first = cluster.nodes["m0"]
        first.engine.hold = True
        running = asyncio.create_task(cluster.run(prompt_of(20), 10))
        await cluster.until(lambda: first.parts.decode.num_legs + cluster.nodes["m1"].parts.decode.num_legs == 1)
        if not first.parts.decode.num_legs:
            first = cluster.nodes["m1"]
        first.loop.stop()
        first.loop._wait()
        first.engine.hold = False
        first.engine.finish()
        await cluster.until(lambda: any(node.load.draining for node in cluster.router.view().nodes))
        tokens, done = await cluster.run(prompt_of(9), 5)
        assert tokens == reference(prompt_of(9), 5) and done.route.decode != first.me.node
        assert (await running)[0] == reference(prompt_of(20), 10)
        await cluster.until_idle()


async def test_what_runs_at_the_drain_deadline_moves_to_another_node_and_the_node_ends() -> None:
    async with LocalCluster({"m0": "mixed", "m1": "mixed"}) as cluster:
        running = [asyncio.create_task(cluster.run(prompt_of(20, seed), 100)) for seed in range(6)]
        first = cluster.nodes["m0"]
        await cluster.until(lambda: first.parts.decode.num_legs >= 2)
        first.loop._drain_s = 0.0
        first.loop.stop()
        first.loop._wait()
        first.loop.turn()
        assert first.parts.decode.num_legs == 0
        for seed, (tokens, done) in enumerate(await asyncio.gather(*running)):
            assert tokens == reference(prompt_of(20, seed), 100) and done.route.decode == "m1"
        await cluster.until(lambda: first.side.is_idle)
        await cluster.until_idle()


@pytest.mark.parametrize("length", [1, 4, 25, 79])
async def test_the_last_chunk_leaves_in_groups_of_layers(length: int) -> None:
    async with LocalCluster(PAIR, group_s=1e-12) as cluster:
        tokens, done = await cluster.run(prompt_of(length), 12)
        assert tokens == reference(prompt_of(length), 12)
        assert cluster.nodes["p0"].engine.num_bells == 3, "four layers, four groups"
        assert done.timeline.transfer_bytes == -(-length // 4) * 64
        await cluster.until_idle()


async def test_a_step_that_fails_between_two_groups_of_layers_leaves_nothing_behind() -> None:
    async with LocalCluster(TWO_PAIRS, group_s=1e-12) as cluster:
        for node in cluster.nodes.values():
            node.engine.fail_steps = 1
        prompts = [prompt_of(30, seed) for seed in range(3)]
        results = await asyncio.gather(*(cluster.run(prompt, 8) for prompt in prompts))
        assert [tokens for tokens, _ in results] == [reference(prompt, 8) for prompt in prompts]
        await cluster.until_idle()


async def test_a_chunk_that_fails_by_every_medium_leads_to_a_new_ticket_of_another_pair_with_the_right_tokens() -> None:
    """The prefill node still holds the KV, so that nothing is computed again."""
    async with LocalCluster(TWO_PAIRS, media=("best", "other")) as cluster:
        failed: set[tuple[str, str]] = set()

        def plan_of(medium: str) -> Callable[[Stamp], Fault]:
            def plan(stamp: Stamp) -> Fault:
                tickets = [node.parts.writer._open.get(stamp.nonce) for node in cluster.nodes.values()]
                (reader,) = {ticket.peer.node for ticket in tickets if ticket is not None}
                if not failed or reader == next(iter(failed))[0]:
                    failed.add((reader, medium))
                    return Fault(status=WriteStatus.FAILED)
                return Fault()

            return plan

        for name, network in cluster.networks.items():
            network.plan = plan_of(name)
        prompt = prompt_of(40)
        tokens, done = await cluster.run(prompt, 12)
        (unreachable,) = {reader for reader, _ in failed}
        assert {medium for _, medium in failed} == {"best", "other"}, "every rung before the new attempt"
        assert (
            tokens == reference(prompt, 12)
            and done.route.mode == "remote"
            and done.route.decode not in (unreachable, None)
        )
        gave_up = {name: node.parts.writer.counters["given_up"] for name, node in cluster.nodes.items()}
        assert gave_up[str(done.route.prefill)] == 1 and sum(gave_up.values()) == 1
        await cluster.until_idle()
