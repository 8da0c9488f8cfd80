"""Decode nodes that are full or stand still: they refuse by message, prefill nodes park what is finished up to their
limit, nothing times out before its own deadline, and everything goes on when there is room again."""

from __future__ import annotations

import asyncio

import pytest
from local_cluster import PAIR, LocalCluster, LocalNode, prompt_of
from oracle import OracleEngine, reference

from pdcluster.core import errors
from pdcluster.core.messages import Refused, Reserve, Reserved
from pdcluster_router.core import room
from pdcluster_router.core.stages import StageDeadlines

PATIENT = StageDeadlines(handshake_s=0.5, transfer_s=1.0, hold_s=0.01, queue_s=30.0, liveness_s=30.0)


class Watched(LocalCluster):
    """Counts what decode nodes answer to Reserve, and what prefill nodes refuse."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.stages = PATIENT
        self.reserves = self.reserved = 0
        self.refused: list[Refused] = []

    async def _start_all(self) -> None:
        await super()._start_all()
        send = self.router.send

        def count_sent(to, message) -> None:
            self.reserves += isinstance(message, Reserve)
            send(to, message)

        self.router.send = count_sent
        self.router._handlers[Refused] = self._keeping(self.router._handlers[Refused])
        reader_of = self.router.ledger.reader_of
        self.router.ledger.reader_of = lambda request: self._counting(reader_of(request))

    def _keeping(self, handle):
        def keep(state, message) -> None:
            self.refused.append(message)
            handle(state, message)

        return keep

    def _counting(self, read):
        def count(incarnation, message) -> None:
            self.reserved += isinstance(message, Reserved)
            read(incarnation, message)

        return None if read is None else count

    def refusals(self, leg: str) -> list[Refused]:
        return [message for message in self.refused if message.leg == leg]


def hold(node: LocalNode) -> None:
    assert isinstance(node.engine, OracleEngine)
    node.engine.hold = True


def resume(node: LocalNode) -> None:
    assert isinstance(node.engine, OracleEngine)
    node.engine.hold = False
    node.engine.finish()


@pytest.fixture
def heedless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that sends whatever parks on the nodes already, as several do together that know nothing of each
    other."""
    monkeypatch.setattr(room, "AHEAD", 0)


async def test_while_decode_stands_still_prefill_computes_up_to_its_limit_and_then_refuses(heedless: None) -> None:
    """32 prompts of 5 pages, 8 rows on the decode node, 32 of 64 pages to park in."""
    async with Watched(PAIR, num_pages=64, force="remote") as cluster:
        prefill, decode = cluster.nodes["p0"], cluster.nodes["d0"]
        hold(decode)
        prompts = [prompt_of(20, seed) for seed in range(32)]
        running = [asyncio.create_task(cluster.run(prompt, 6)) for prompt in prompts]
        await cluster.until(lambda: bool(cluster.refusals("prefill")) or prefill.parts.scheduler.load().waiting > 0)
        await cluster.until(lambda: prefill.parts.prefill.num_parked_pages >= 32)
        late = [asyncio.create_task(cluster.run(prompt_of(20, seed), 6)) for seed in range(32, 36)]
        await cluster.until(lambda: bool(cluster.refusals("prefill")))
        await asyncio.sleep(1.5)  # longer than the clocks of handshake and transfer
        assert 32 <= prefill.parts.prefill.num_parked_pages < 32 + 3 * 5, (
            "those that ran when it was full are the only ones beyond the limit"
        )
        assert not any(task.done() for task in running + late), "whoever waits for room has lost nothing"
        load = next(node.load for node in cluster.router.view().nodes if node.name == "p0")
        assert load.pages_parked == prefill.parts.prefill.num_parked_pages, "routers see it"
        await cluster.until(
            lambda: cluster.reserves == cluster.reserved + len(cluster.refusals("reserve"))
        )  # none was given up by a clock
        resume(decode)
        results = await asyncio.gather(*running, *late)
        for seed, (tokens, done) in enumerate(results):
            assert tokens == reference(prompt_of(20, seed), 6) and done.attempts == 1
        await cluster.until_idle()
        assert prefill.parts.prefill.num_parked_pages == 0 and prefill.parts.scheduler.admit_remote


async def test_refusals_say_why_and_when_to_come_back(heedless: None) -> None:
    async with Watched(PAIR, num_pages=64, force="remote") as cluster:
        prefill, decode = cluster.nodes["p0"], cluster.nodes["d0"]
        hold(decode)
        running = [asyncio.create_task(cluster.run(prompt_of(20, seed), 6)) for seed in range(24)]
        await cluster.until(lambda: prefill.parts.prefill.num_parked_pages >= 32)
        running.append(asyncio.create_task(cluster.run(prompt_of(20, 24), 6)))
        await cluster.until(lambda: bool(cluster.refusals("prefill")) and bool(cluster.refusals("reserve")))
        parked, full = cluster.refusals("prefill")[0], cluster.refusals("reserve")[0]
        assert parked.retryable and "finished KV of" in parked.reason and 0 < parked.retry_after_s <= 1
        assert (
            full.retryable
            and ("rows are taken" in full.reason or "no room" in full.reason)
            and 0 < full.retry_after_s <= 2
        )
        resume(decode)
        await asyncio.gather(*running)
        await cluster.until_idle()


async def test_a_request_that_one_prefill_node_refuses_runs_on_the_other() -> None:
    async with Watched({"p0": "prefill", "p1": "prefill", "d0": "decode"}, num_pages=64, force="remote") as cluster:
        decode = cluster.nodes["d0"]
        hold(decode)
        running = [asyncio.create_task(cluster.run(prompt_of(20, seed), 6)) for seed in range(30)]
        parked = [cluster.nodes[name].parts.prefill for name in ("p0", "p1")]
        await cluster.until(lambda: all(side.num_parked_pages >= 20 for side in parked))
        resume(decode)
        results = await asyncio.gather(*running)
        assert [tokens for tokens, _ in results] == [reference(prompt_of(20, seed), 6) for seed in range(30)]
        assert {done.route.prefill for _, done in results} == {"p0", "p1"}
        await cluster.until_idle()


async def test_two_mixed_nodes_that_park_for_each_other_do_not_wait_for_ever() -> None:
    async with Watched({"m0": "mixed", "m1": "mixed"}, num_pages=40, force="remote") as cluster:
        prompts = [prompt_of(26, seed) for seed in range(24)]
        results = await asyncio.gather(*(cluster.run(prompt, 8) for prompt in prompts))
        assert [tokens for tokens, _ in results] == [reference(prompt, 8) for prompt in prompts]
        await cluster.until_idle()


async def test_kv_that_nobody_has_room_for_is_given_up_after_its_parking_time_and_the_request_lives_on() -> None:
    async with Watched(PAIR, num_pages=64, force="remote") as cluster:
        prefill, decode = cluster.nodes["p0"], cluster.nodes["d0"]
        prefill.parts.prefill._parking.deadline_s = 0.1
        hold(decode)
        running = [asyncio.create_task(cluster.run(prompt_of(20, seed), 6)) for seed in range(12)]
        await cluster.until(lambda: bool(cluster.refusals("reserve")))
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in running)
        resume(decode)
        results = await asyncio.gather(*running)
        assert [tokens for tokens, _ in results] == [reference(prompt_of(20, seed), 6) for seed in range(12)]
        assert {done.attempts for _, done in results} == {1}, "waiting for room is no failure"
        await cluster.until_idle()


async def test_a_request_that_finds_no_room_until_its_deadline_ends_by_that_deadline() -> None:
    async with Watched(PAIR, num_pages=64, force="remote") as cluster:
        hold(cluster.nodes["d0"])
        running = [asyncio.create_task(cluster.run(prompt_of(20, seed), 6)) for seed in range(8)]
        await cluster.until(lambda: cluster.nodes["d0"].parts.decode.num_legs == 8)
        with pytest.raises(errors.DeadlineExceeded, match="request"):
            await cluster.run(prompt_of(20, 9), 6, deadline_s=0.4)
        resume(cluster.nodes["d0"])
        await asyncio.gather(*running)
        await cluster.until_idle()
