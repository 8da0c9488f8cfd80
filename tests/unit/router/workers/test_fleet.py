"""Several workers as one: who is asked what, how answers are merged, and that a dead or stuck worker is named and not
waited for."""

from __future__ import annotations

import asyncio

import pytest
from worker_endpoints import ScriptedWorker, node_status, two_workers

from pdcluster.core.errors import BadRequest, DeadlineExceeded, PdclusterError, Unavailable, UnknownName
from pdcluster.telemetry.health import Verdict
from pdcluster_router.admin.operations import CachedNode, CacheStatus, NodeAdapter, NodeStatus
from pdcluster_router.explain.records import Explanation
from pdcluster_router.workers import fleet as fleet_module


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stuck worker is given up soon."""
    monkeypatch.setattr(fleet_module, "ASK_S", 0.3)


async def test_requests_of_all_workers_are_listed_oldest_first() -> None:
    async with two_workers(
        ScriptedWorker(open={"w0-a-0": 1.0, "w0-b-0": 5.0}), ScriptedWorker(open={"w1-c-0": 3.0})
    ) as workers:
        found = await workers.fleet.requests()
        assert [request.id for request in found.requests] == ["w0-b-0", "w1-c-0", "w0-a-0"] and found.silent == ()


LIKE_OURS = "w1-0123456789abcdef01234567"


async def test_a_dead_worker_is_named_and_the_others_are_listed() -> None:
    async with two_workers(ScriptedWorker(open={"w0-a-0": 1.0}), ScriptedWorker(open={"w1-c-0": 3.0})) as workers:
        await workers.die(1)
        found = await workers.fleet.requests()
        assert [request.id for request in found.requests] == ["w0-a-0"] and found.silent == ("worker 1",)


async def test_requests_on_a_node_are_listed_by_who_knows_it_and_one_that_nobody_knows_is_an_error() -> None:
    first, second = (
        ScriptedWorker(open={"w0-a-0": 1.0}, node_list=[]),
        ScriptedWorker(open={"w1-c-0": 3.0}, node_list=[node_status("n0", 1)]),
    )
    async with two_workers(first, second) as workers:
        assert [request.id for request in (await workers.fleet.requests("n0")).requests] == ["w1-c-0"]
        with pytest.raises(UnknownName, match="no node is called zz"):
            await workers.fleet.requests("zz")


async def test_a_stuck_worker_is_given_up_at_the_deadline_and_named() -> None:
    async with two_workers(ScriptedWorker(open={"w0-a-0": 1.0}), ScriptedWorker(is_stuck=True)) as workers:
        found = await workers.fleet.requests()
        assert [request.id for request in found.requests] == ["w0-a-0"] and found.silent == ("worker 1",)


async def test_a_worker_that_dies_while_it_is_asked_is_not_waited_for() -> None:
    async with two_workers(second=ScriptedWorker(is_stuck=True)) as workers:
        asking = asyncio.create_task(workers.fleet.requests())
        await workers.until(lambda: "requests" in workers.scripted[1].asked)
        await workers.die(1)
        assert (await asking).silent == ("worker 1",)


async def test_without_any_worker_every_question_says_so() -> None:
    async with two_workers() as workers:
        await workers.die(0)
        await workers.die(1)
        for question in (
            workers.fleet.nodes(),
            workers.fleet.cordon("n0", cordoned=True),
            workers.fleet.cancel("r", ""),
            workers.fleet.policy(),
        ):
            with pytest.raises(Unavailable, match="none of the 2 workers answers"):
                await question


async def test_a_request_is_cancelled_by_the_worker_that_its_id_names() -> None:
    request = "w1-42474cff8be94e1d52277be5-0"
    async with two_workers(ScriptedWorker(), ScriptedWorker(open={request: 3.0})) as workers:
        assert await workers.fleet.cancel(request, "enough") == 1
        assert workers.scripted[0].asked == [] and workers.scripted[1].open == {}
        with pytest.raises(UnknownName, match=request):
            await workers.fleet.cancel(request, "again")


async def test_what_clients_of_several_workers_call_alike_is_cancelled_on_all_even_if_it_looks_like_an_id() -> None:
    async with two_workers(ScriptedWorker(open={"w1-job": 9.0}), ScriptedWorker(open={"w1-job": 3.0})) as workers:
        assert await workers.fleet.cancel("w1-job", "enough") == 2


async def test_a_name_that_no_worker_gave_is_asked_of_all() -> None:
    told = [Explanation("w1-a-0", 5.0)], [Explanation("w0-b-0", 9.0)]
    async with two_workers(
        ScriptedWorker(explained={"mine": told[0], LIKE_OURS: told[0]}), ScriptedWorker(explained={"mine": told[1]})
    ) as workers:
        assert [found.request for found in await workers.fleet.explain("mine")] == ["w0-b-0", "w1-a-0"], (
            "the latest first"
        )
        assert len(await workers.fleet.explain(LIKE_OURS)) == 1, "a client may call its requests as we do"


async def test_what_a_silent_worker_may_know_is_not_said_to_be_unknown() -> None:
    async with two_workers() as workers:
        with pytest.raises(UnknownName):
            await workers.fleet.explain("w1-x-0")
        await workers.die(1)
        with pytest.raises(Unavailable, match="worker 1 did not: ask again"):
            await workers.fleet.explain("w1-x-0")


async def test_nodes_are_merged_as_the_worker_sees_them_that_knows_least() -> None:
    first = ScriptedWorker(node_list=[node_status("n0", 2, draining=True), node_status("n1", 1)])
    second = ScriptedWorker(node_list=[node_status("n0", 3)])
    async with two_workers(first, second) as workers:
        by_name = {node.name: node for node in await workers.fleet.nodes()}
        assert (by_name["n0"].in_flight, by_name["n0"].state, by_name["n1"].in_flight) == (5, "ready", 1)
        assert (await workers.fleet.node("n0-boot")).name == "n0"
        with pytest.raises(UnknownName, match="known: n0, n1"):
            await workers.fleet.node("n7")


async def test_a_drain_is_over_when_no_worker_has_anything_on_the_node() -> None:
    first = ScriptedWorker(node_list=[node_status("n0", 0, draining=True)])
    second = ScriptedWorker(node_list=[node_status("n0", 1, draining=True)])
    async with two_workers(first, second) as workers:
        progress = workers.fleet.drain("n0", 30.0)
        assert not (await anext(progress)).is_done
        second.node_list = [node_status("n0", 0, draining=True)]
        assert [told.is_done async for told in progress] == [True]
        assert [event.kind for event in workers.fleet.log.since(0)] == ["drain", "drained"]
        assert first.asked.count("cordon") == 1 and "cordon" not in second.asked, "a node tells all workers itself"


async def test_a_drain_of_a_node_that_stays_at_work_ends_at_its_deadline() -> None:
    moments = iter((0.0, 99.0, 99.0))
    first = ScriptedWorker(node_list=[node_status("n0", 0, draining=True, running=3)])
    told: list[tuple[int, int]] = []
    async with two_workers(first, first, clock=lambda: next(moments, 200.0)) as workers:
        with pytest.raises(DeadlineExceeded, match="still at work 10 s after its requests moved"):
            async for progress in workers.fleet.drain("n0", 1.0):
                told.append((progress.running, progress.num_moved))
        assert told == [(3, 0), (3, 3)] and first.asked.count("move") == 1
        assert [event.kind for event in workers.fleet.log.since(0)] == ["drain", "moved"]


async def test_what_a_node_must_answer_goes_through_any_worker_that_is_there() -> None:
    async with two_workers() as workers:
        await workers.die(0)
        assert (await workers.fleet.cordon("n0", cordoned=True)).name == "n0"
        assert (await workers.fleet.set_role("n0", "decode")).name == "n0"
        assert await workers.fleet.change_adapter("sql", "d1", ("n0",)) == [NodeAdapter("n0", digest="d1")]
        with pytest.raises(UnknownName):
            await workers.fleet.cordon("n9", cordoned=True)


async def test_a_policy_is_set_on_all_or_on_none() -> None:
    async with two_workers() as workers:
        with pytest.raises(BadRequest, match="fortune"):
            await workers.fleet.set_policy(live="fortune", shadow=None, dry_run=False)
        assert (await workers.fleet.set_policy(live="random", shadow=None, dry_run=True)).live == "seconds"
        assert {worker.live for worker in workers.scripted.values()} == {"seconds"}
        assert (await workers.fleet.set_policy(live="random", shadow="seconds", dry_run=False)).live == "random"
        assert {(worker.live, worker.shadow) for worker in workers.scripted.values()} == {("random", "seconds")}


async def test_a_worker_that_comes_later_gets_the_policy_that_was_set() -> None:
    async with two_workers() as workers:
        await workers.die(1)
        await workers.fleet.set_policy(live="random", shadow=None, dry_run=False)
        again = await workers.join(1)
        await workers.until(lambda: again.live == "random")
        assert again.shadow == "" and again.asked == ["set policy"]


async def test_events_of_all_workers_are_numbered_together_and_say_whose_they_are() -> None:
    async with two_workers() as workers:
        workers.scripted[1].log.add("node-up", "n0", "mixed at n0:1")
        await workers.until(lambda: len(workers.fleet.log.since(0)) == 1)
        workers.scripted[0].log.add("node-lost", "n0", "silence")
        following = workers.fleet.events(0, follow=True)
        told = [await anext(following), await anext(following)]
        assert [(event.sequence, event.kind, event.subject, event.message) for event in told] == [
            (1, "node-up", "n0", "worker 1: mixed at n0:1"),
            (2, "node-lost", "n0", "worker 0: silence"),
        ]
        assert [event.sequence async for event in workers.fleet.events(1, follow=False)] == [2]


@pytest.mark.parametrize("second", ["1:a", "1:b"])
async def test_caches_are_told_by_worker_and_nothing_is_exact_on_which_they_differ(second: str) -> None:
    views = [CacheStatus(1, 100, (CachedNode("n0", "n0-boot", 1, True, digest),)) for digest in ("1:a", second)]
    async with two_workers(ScriptedWorker(cache_status=views[0]), ScriptedWorker(cache_status=views[1])) as workers:
        found = await workers.fleet.cache(digests=True)
        assert (found.entries, found.bytes, [view.worker for view in found.views]) == (1, 200, ["0", "1"])
        assert [node.is_exact for node in found.nodes] == [second == "1:a"]


async def test_a_bug_in_a_worker_is_an_error_of_its_question_only(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedWorker):
        async def policy(self):
            raise ZeroDivisionError("a bug")

    async with two_workers(Broken()) as workers:
        with pytest.raises(PdclusterError, match="internal error: a bug"):
            await workers.fleet.policy()
        assert "ZeroDivisionError" in caplog.text
        assert len(await workers.fleet.nodes()) == 1


async def test_a_stranger_on_the_control_socket_is_turned_away() -> None:
    async with two_workers() as workers:
        reader, writer = await asyncio.open_unix_connection(str(workers._path))
        writer.write(b"\xff\xff\xff\xffGET / HTTP/1.1")
        assert await reader.read() == b""
        writer.close()
        assert len((await workers.fleet.requests()).silent) == 0


async def test_one_scrape_is_labelled_by_worker_and_tells_nodes_once() -> None:
    async with two_workers() as workers:
        text = (await workers.endpoints[0].exposition()).decode()
        for line in (
            'pdcluster_things_total{kind="good",worker="0"} 1.0',
            'pdcluster_things_total{kind="good",worker="1"} 2.0',
            'pdcluster_node_up{node="n0"} 1.0',
            'pdcluster_node_in_flight{node="n0"} 4.0',
            'pdcluster_worker_up{worker="1"} 1.0',
            'pdcluster_worker_restarts_total{worker="1"} 0.0',
        ):
            assert line in text.splitlines()
        assert "n1" not in text, "what not all workers know of nodes is not told"
        await workers.die(1)
        await workers.join(1)
        await workers.die(1)
        after = (await workers.endpoints[0].exposition()).decode().splitlines()
        assert (
            'pdcluster_worker_up{worker="1"} 0.0' in after
            and 'pdcluster_worker_restarts_total{worker="1"} 1.0' in after
        )
        assert 'pdcluster_node_waiting{node="n1"} 7.0' not in after


async def test_one_degraded_worker_is_seen_behind_a_good_one() -> None:
    """Such as one that alone could not read the tenants again: a removed key works on there."""
    old = ScriptedWorker()
    old.verdict = Verdict(True, "degraded", ["the files of tenants cannot be used"], {"can_serve": True})
    for scripted in ((ScriptedWorker(), old), (old, ScriptedWorker())):
        async with two_workers(*scripted) as workers:
            verdict = await workers.fleet.readiness()
            assert (verdict.is_good, verdict.status) == (True, "degraded")
            assert verdict.reasons == ["the files of tenants cannot be used"]


async def test_readiness_and_caches_of_workers_that_all_answer_with_an_error_say_which() -> None:
    class Failing(ScriptedWorker):
        async def readiness(self) -> Verdict:
            raise PdclusterError("the view is broken")

        async def cache(self, *, digests: bool) -> CacheStatus:
            raise PdclusterError("the index is broken")

        async def nodes(self) -> list[NodeStatus]:
            raise PdclusterError("the table is broken")

    async with two_workers(Failing(), Failing()) as workers:
        verdict = await workers.fleet.readiness()
        assert not verdict.is_good and verdict.reasons == ["the view is broken"]
        with pytest.raises(PdclusterError, match="the index is broken"):
            await workers.fleet.cache(digests=False)
        with pytest.raises(PdclusterError, match="the table is broken"):
            await workers.fleet.nodes()
