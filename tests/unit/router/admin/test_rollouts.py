"""Rollouts over nodes of the test, which load and go over as they are told to."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from pdcluster.core.errors import BadRequest, Overloaded, PdclusterError, UnknownName
from pdcluster.core.messages import (
    DropWeights,
    Load,
    PrepareWeights,
    Role,
    ShareWeights,
    SleepNode,
    SwitchWeights,
    WeightsOrder,
)
from pdcluster.core.weights import NODE_SOURCE, FormerWeights, WeightsVersion, holder_of
from pdcluster_router.admin.operations import NodeStatus, NodeWeights, RolloutProgress, WeightsRollout
from pdcluster_router.admin.rollouts import Rollouts
from pdcluster_router.cluster.events import EventLog

DIGESTS = {"": "A", "/b": "B", "/c": "C"}


def node(name: str, role: Role) -> NodeStatus:
    return NodeStatus(
        name, f"{name}-0", role, "ready", f"{name}:1", "m", "cpu", (), 100, 0, Load(*[0] * 11),
        weights=WeightsVersion(digest="A"),
    )  # fmt: skip


class Cluster:
    """Implements rollouts.WeightsNodes. bad: what a node does when asked, by name."""

    def __init__(self, *nodes: NodeStatus) -> None:
        self.by_name = {each.name: each for each in nodes}
        self.bad: dict[str, str] = {}
        self.prepared: dict[str, tuple[WeightsVersion, str]] = {}
        self.orders: list[tuple[str, WeightsOrder]] = []
        # Who gives weights to another node now, and who gave them to whom.
        self.giving: set[str] = set()
        self.given: list[tuple[str, str]] = []
        # Nodes that are late go on then.
        self.goes_on = asyncio.Event()
        # Most nodes of each role that were away at once.
        self.away: set[str] = set()
        self.most_away: dict[str, int] = {}

    async def nodes(self) -> list[NodeStatus]:
        return [
            replace(each, state="cordoned" if name in self.away else each.state) for name, each in self.by_name.items()
        ]

    async def wait_for_change(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def change_weights(self, name: str, order: WeightsOrder) -> NodeWeights:
        self.orders.append((name, order))
        await asyncio.sleep(0)
        if isinstance(order, PrepareWeights):
            if self.bad.get(name) == "load":
                return NodeWeights(name, "half a file")
            if order.source == "/none":
                return NodeWeights(name, "no such source")
            if holder_of(order.source) is not None:
                return await self._pass_on(name, order)
            made = replace(order.version, digest="X" if self.bad.get(name) == "digest" else DIGESTS[order.source])
            self.prepared[name] = made, order.source
            return NodeWeights(name, prepared=made)
        if isinstance(order, SwitchWeights):
            await self._switch(name, order)
            if self.bad.get(name) == "switch":
                return NodeWeights(name, "3 requests did not end")
        elif isinstance(order, SleepNode):
            if self.bad.get(name) == "sleep":
                return NodeWeights(name, "it has no room")
            if self.bad.get(name) == "late":
                await self.goes_on.wait()
            self.by_name[name] = replace(self.by_name[name], state="sleeping")
        elif isinstance(order, ShareWeights):
            self.by_name[name] = replace(self.by_name[name], weights_share=order.share)
        else:
            self.prepared.pop(name, None)
        return NodeWeights(name)

    async def _pass_on(self, name: str, order: PrepareWeights) -> NodeWeights:
        """Each holder gives to one node at a time, which must have them itself by then."""
        holder = holder_of(order.source)
        assert holder is not None and (holder == name or holder not in self.giving)
        is_there = holder in self.prepared or self.by_name[holder].weights.epoch == order.version.epoch
        assert is_there, f"{holder} has nothing to give"
        if holder != name:
            self.giving.add(holder)
            self.given.append((holder, name))
            await asyncio.sleep(0.01)
            self.giving.discard(holder)
        self.prepared[name] = replace(order.version, digest="P"), NODE_SOURCE
        return NodeWeights(name, prepared=self.prepared[name][0])

    async def _switch(self, name: str, order: SwitchWeights) -> None:
        self.away.add(name)
        role = self.by_name[name].role
        num_away = sum(self.by_name[each].role == role for each in self.away)
        self.most_away[role] = max(self.most_away.get(role, 0), num_away)
        await (asyncio.Event().wait() if self.bad.get(name) == "hang" else asyncio.sleep(0.01))
        self.away.discard(name)
        if self.bad.get(name) == "switch":
            return
        if self.bad.get(name) == "killed":
            self.by_name[name] = replace(self.by_name[name], incarnation=f"{name}-again")
            return
        version, source = self.prepared.pop(name)
        assert version.epoch == order.epoch
        was = self.by_name[name]
        former = FormerWeights(was.weights.label, was.weights.digest, was.weights_source)
        self.by_name[name] = replace(
            was, incarnation=f"{name}-{version.epoch}", state="ready" if was.state == "sleeping" else was.state,
            weights=version, weights_share=order.share,
            weights_source=source, weights_former=former,
        )  # fmt: skip

    def served(self) -> dict[str, str]:
        return {name: f"{each.weights.label}@{each.weights.epoch}" for name, each in self.by_name.items()}


def two_and_two() -> Cluster:
    return Cluster(node("p0", "prefill"), node("p1", "prefill"), node("d0", "decode"), node("d1", "decode"))


def rollouts(cluster: Cluster) -> Rollouts:
    return Rollouts(cluster, EventLog(), asyncio.get_running_loop().time)


async def ended(steps: AsyncIterator[RolloutProgress]) -> list[RolloutProgress]:
    return [step async for step in steps]


async def test_every_node_goes_over_one_after_the_other() -> None:
    cluster = two_and_two()
    steps = await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned")))
    assert set(cluster.served().values()) == {"tuned@1"}
    assert cluster.most_away == {"prefill": 1, "decode": 1}
    assert [step.node for step in steps if step.stage == "serving"] == ["d0", "p0", "d1", "p1", ""]
    last = steps[-1]
    assert (last.num_done, last.num_nodes, last.version) == (4, 4, WeightsVersion("tuned", 1, "B"))
    # All but the first are told which digest it must be.
    wanted = [order.version.digest for _, order in cluster.orders if isinstance(order, PrepareWeights)]
    assert wanted == ["", "B", "B", "B"]


async def test_several_at_a_time_leave_each_role_a_node() -> None:
    cluster = two_and_two()
    await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned", max_unavailable=4)))
    assert cluster.most_away == {"prefill": 1, "decode": 1} and set(cluster.served().values()) == {"tuned@1"}


async def test_all_at_once_go_over_when_all_have_loaded() -> None:
    cluster = two_and_two()
    await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned", max_unavailable=0)))
    kinds = [type(order) for _, order in cluster.orders]
    assert kinds == [PrepareWeights] * 4 + [SwitchWeights] * 4 and set(cluster.served().values()) == {"tuned@1"}


async def test_a_lone_node_of_its_role_goes_over_too() -> None:
    cluster = Cluster(node("p0", "prefill"), node("d0", "decode"))
    await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned")))
    assert set(cluster.served().values()) == {"tuned@1"}


@pytest.mark.parametrize("at_once", [1, 0])
@pytest.mark.parametrize("how", ["load", "digest"])
async def test_a_node_that_cannot_load_stops_it_and_nothing_of_its_batch_goes_over(how: str, at_once: int) -> None:
    cluster = two_and_two()
    cluster.bad["d1"] = how
    with pytest.raises(PdclusterError, match=r"stopped with . of 4 nodes done: node d1.*pdctl weights undo"):
        await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned", max_unavailable=at_once)))
    done = {"p0": "tuned@1", "d0": "tuned@1"} if at_once else {"p0": "base@0", "d0": "base@0"}
    assert cluster.served() == done | {"p1": "base@0", "d1": "base@0"}
    assert not cluster.prepared and any(isinstance(order, DropWeights) for _, order in cluster.orders)
    cluster.bad.clear()  # the same order goes on
    await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned", max_unavailable=at_once)))
    assert set(cluster.served().values()) == {"tuned@1"}


async def test_what_a_stopped_rollout_did_is_taken_back() -> None:
    cluster = two_and_two()
    cluster.bad["d1"] = "switch"
    with pytest.raises(PdclusterError, match="3 requests did not end"):
        await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned")))
    await ended(rollouts(cluster).undo(5.0))
    assert cluster.served() == {"p0": "base@2", "d0": "base@2", "p1": "base@0", "d1": "base@0"}
    assert {each.weights.digest for each in cluster.by_name.values()} == {"A"}


async def test_a_whole_rollout_is_taken_back_by_what_nodes_remember() -> None:
    cluster = two_and_two()
    with pytest.raises(BadRequest, match="nothing can be undone"):
        await ended(rollouts(cluster).undo(5.0))
    await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned")))
    await ended(rollouts(cluster).load(WeightsRollout("/c", "third")))
    await ended(rollouts(cluster).undo(5.0))
    assert set(cluster.served().values()) == {"tuned@3"}
    assert {each.weights_source for each in cluster.by_name.values()} == {"/b"}


async def test_a_canary_gets_its_share_until_all_nodes_serve_it() -> None:
    cluster = two_and_two()
    await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned", canary_percent=10.0)))
    assert cluster.served() == {"p0": "tuned@1", "d0": "tuned@1", "p1": "base@0", "d1": "base@0"}
    assert [each.weights_share for each in cluster.by_name.values()] == [10.0, 100.0, 10.0, 100.0]
    await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned", canary_percent=50.0)))
    assert [each.weights_share for each in cluster.by_name.values()] == [50.0, 100.0, 50.0, 100.0]
    cluster.orders.clear()
    await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned")))
    kinds = [type(order) for _, order in cluster.orders]
    assert kinds[:2] == [ShareWeights] * 2, "the others go away only when the canary may have all requests"
    assert set(cluster.served().values()) == {"tuned@1"}
    assert {each.weights_share for each in cluster.by_name.values()} == {100.0}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (WeightsRollout("/b", "no label"), "must have 1 to 64"),
        (WeightsRollout("/b", "t", canary_percent=100.0), "less than 100"),
        (WeightsRollout("/b", "t", max_unavailable=-1), "0 .all. or more"),
        (WeightsRollout("/b", "t", finish_s=float("nan")), "must be 0 to 86400 seconds"),
        (WeightsRollout("/a\tb", "t"), "printable characters"),
        (WeightsRollout("/" + 2000 * "b", "t"), "at most 1024"),
        (WeightsRollout("/b", "base"), "give other weights another label"),
    ],
)
async def test_what_cannot_be_meant_is_refused(wanted: WeightsRollout, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        await ended(rollouts(two_and_two()).load(wanted))


async def test_a_canary_of_a_lone_node_and_a_cluster_without_nodes_are_refused() -> None:
    wanted = WeightsRollout("/b", "t", canary_percent=10.0)
    with pytest.raises(BadRequest, match="two nodes of each role"):
        await ended(rollouts(Cluster(node("p0", "prefill"), node("d0", "decode"))).load(wanted))
    with pytest.raises(UnknownName, match="no node is known"):
        await ended(rollouts(Cluster()).load(wanted))


async def test_one_rollout_at_a_time_and_none_is_left_by_a_caller_who_goes() -> None:
    cluster = two_and_two()
    made = rollouts(cluster)
    steps = made.load(WeightsRollout("/b", "tuned"))
    await anext(steps)
    with pytest.raises(Overloaded, match="the rollout of tuned"):
        await ended(made.load(WeightsRollout("/c", "third")))
    await steps.aclose()
    assert not cluster.prepared and any(isinstance(order, DropWeights) for _, order in cluster.orders)
    await ended(made.load(WeightsRollout("/b", "tuned")))
    assert set(cluster.served().values()) == {"tuned@1"}


async def test_a_caller_who_goes_while_nothing_happens_leaves_no_task() -> None:
    cluster, complaints = two_and_two(), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    cluster.bad = dict.fromkeys(cluster.by_name, "hang")
    calling = asyncio.create_task(ended(rollouts(cluster).load(WeightsRollout("/b", "tuned"))))
    await asyncio.sleep(0.05)
    assert cluster.away
    calling.cancel()
    await asyncio.wait({calling})
    del calling  # and the frames that it has
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("at_once", [0, 1])
async def test_pushed_weights_go_from_node_to_node(at_once: int) -> None:
    cluster = two_and_two()
    cluster.prepared["p1"] = WeightsVersion("pushed", 1, "P"), NODE_SOURCE
    await ended(rollouts(cluster).load(WeightsRollout("node:p1", "pushed", max_unavailable=at_once)))
    assert set(cluster.served().values()) == {"pushed@1"}
    assert sorted(name for _, name in cluster.given) == ["d0", "d1", "p0"]
    assert {each.weights_source for each in cluster.by_name.values()} == {NODE_SOURCE}
    if not at_once:
        assert len({holder for holder, _ in cluster.given}) == 2  # the second one gave, too


async def test_pushed_weights_that_nobody_has_any_more_are_refused() -> None:
    cluster = two_and_two()
    for label, source in (("one", "node:p0"), ("two", "node:p1")):
        name = source.removeprefix("node:")
        epoch = 1 if label == "one" else 2
        cluster.prepared[name] = WeightsVersion(label, epoch, "P"), NODE_SOURCE
        await ended(rollouts(cluster).load(WeightsRollout(source, label, max_unavailable=0)))
    cluster.by_name = {
        name: replace(each, weights=replace(each.weights, digest="Q")) for name, each in cluster.by_name.items()
    }
    with pytest.raises(BadRequest, match=r"no node has the weights one \(epoch 3\) in memory any more"):
        await ended(rollouts(cluster).undo(1.0))


async def test_a_node_that_cannot_change_yet_is_not_forgotten() -> None:
    """Its neighbour takes no work, so another node is the first."""
    cluster = two_and_two()
    cluster.by_name["d1"] = replace(cluster.by_name["d1"], state="cordoned")
    with pytest.raises(PdclusterError, match="no other decode node takes work"):
        await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned")))
    assert cluster.served() == {"p0": "tuned@1", "p1": "tuned@1", "d0": "base@0", "d1": "tuned@1"}
    switched = [name for name, order in cluster.orders if isinstance(order, SwitchWeights)]
    assert sorted(switched) == ["d1", "p0", "p1"]


async def test_all_nodes_sleep_and_wake_with_what_they_had() -> None:
    cluster = two_and_two()
    made = rollouts(cluster)
    assert sorted(await made.sleep(0.0)) == ["d0", "d1", "p0", "p1"]
    assert await made.sleep(0.0) == []
    assert sorted(await made.wake()) == ["d0", "d1", "p0", "p1"] and await made.wake() == []
    assert cluster.served() == dict.fromkeys(cluster.by_name, "base@0")
    assert {each.state for each in cluster.by_name.values()} == {"ready"}


async def test_nodes_wake_with_weights_that_are_in_no_file() -> None:
    """Each has its own on its disk, so none takes them from another one that sleeps."""
    cluster = two_and_two()
    for name, each in cluster.by_name.items():
        cluster.by_name[name] = replace(each, weights=WeightsVersion("pushed", 3, "P"), weights_source=NODE_SOURCE)
    made = rollouts(cluster)
    await made.sleep(0.0)
    await made.wake()
    assert cluster.given == [] and set(cluster.served().values()) == {"pushed@3"}


async def test_where_one_node_cannot_sleep_none_does() -> None:
    cluster = two_and_two()
    cluster.by_name["d1"] = replace(cluster.by_name["d1"], engine="vllm")
    with pytest.raises(BadRequest, match="node d1 runs vllm, which gives no memory back"):
        await rollouts(cluster).sleep(0.0)
    assert cluster.orders == []


async def test_a_node_that_fails_to_sleep_or_to_wake_is_named_and_the_others_do() -> None:
    cluster = two_and_two()
    cluster.bad["p1"] = "sleep"
    made = rollouts(cluster)
    with pytest.raises(PdclusterError, match="node p1: it has no room"):
        await made.sleep(0.0)
    assert [name for name, each in cluster.by_name.items() if each.state == "ready"] == ["p1"]
    cluster.bad = {"d0": "load"}
    with pytest.raises(PdclusterError, match="node d0: half a file; wake it again"):
        await made.wake()
    assert [name for name, each in cluster.by_name.items() if each.state != "ready"] == ["d0"]


async def test_nodes_that_sleep_load_all_at_once() -> None:
    cluster = two_and_two()
    made = rollouts(cluster)
    await made.sleep(0.0)
    await ended(made.load(WeightsRollout("/b", "tuned", max_unavailable=0)))
    assert set(cluster.served().values()) == {"tuned@1"}
    await made.sleep(0.0)
    await ended(made.load(WeightsRollout("/c", "third")))  # one at a time: no other one has to take work
    assert set(cluster.served().values()) == {"third@2"}
    assert {each.state for each in cluster.by_name.values()} == {"ready"}


async def test_a_node_gives_its_memory_back_before_it_loads_and_wakes_where_it_cannot() -> None:
    cluster = two_and_two()
    made = rollouts(cluster)
    cluster.bad["d0"] = "sleep"
    with pytest.raises(PdclusterError, match="node d0: it has no room"):
        await ended(made.load(WeightsRollout("/b", "tuned", releases_first=True)))
    del cluster.bad["d0"]
    steps = await ended(made.load(WeightsRollout("/b", "tuned", releases_first=True)))
    assert set(cluster.served().values()) == {"tuned@1"} and ("p0", "sleeping") in {(s.node, s.stage) for s in steps}
    orders = [type(order) for name, order in cluster.orders if name == "p1"]
    assert orders == [SleepNode, PrepareWeights, SwitchWeights]


async def test_a_node_that_slept_for_a_load_that_fails_has_what_it_had() -> None:
    cluster = two_and_two()
    made = rollouts(cluster)
    with pytest.raises(PdclusterError, match="no such source"):
        await ended(made.load(WeightsRollout("/none", "tuned", releases_first=True)))
    assert set(cluster.served().values()) == {"base@0"}
    assert {each.state for each in cluster.by_name.values()} == {"ready"}


async def test_loading_the_weights_that_sleepers_had_wakes_them() -> None:
    cluster = two_and_two()
    made = rollouts(cluster)
    await ended(made.load(WeightsRollout("/b", "tuned")))
    await made.sleep(0.0)
    await ended(made.load(WeightsRollout("/b", "tuned", max_unavailable=0)))
    assert set(cluster.served().values()) == {"tuned@1"}
    assert {each.state for each in cluster.by_name.values()} == {"ready"}


async def test_waking_changes_no_share_of_other_nodes() -> None:
    cluster = two_and_two()
    cluster.by_name["p0"] = replace(cluster.by_name["p0"], weights_share=20.0)
    made = rollouts(cluster)
    await made.sleep(0.0)
    await made.wake()
    assert {name: each.weights_share for name, each in cluster.by_name.items()} == {
        "p0": 20.0, "p1": 100.0, "d0": 100.0, "d1": 100.0
    }  # fmt: skip


async def test_a_node_that_was_about_to_sleep_for_a_load_that_is_cancelled_wakes() -> None:
    cluster = two_and_two()
    cluster.bad["d0"] = "late"
    made = rollouts(cluster)
    steps = made.load(WeightsRollout("/b", "tuned", releases_first=True))
    while not any(isinstance(order, SleepNode) for _, order in cluster.orders):
        await anext(steps)

    async def falls_asleep() -> None:
        await asyncio.sleep(0.05)
        cluster.by_name["d0"] = replace(cluster.by_name["d0"], incarnation="d0-asleep", state="sleeping")

    async with asyncio.timeout(30), asyncio.TaskGroup() as both:
        both.create_task(falls_asleep())
        both.create_task(steps.aclose())  # type: ignore[arg-type]
    assert {each.state for each in cluster.by_name.values()} == {"ready"}
    assert set(cluster.served().values()) == {"base@0"}


async def test_a_node_that_is_started_again_while_it_falls_asleep_is_named_at_once() -> None:
    cluster = two_and_two()
    cluster.bad["d0"] = "late"
    made = rollouts(cluster)
    asleep = asyncio.ensure_future(made.sleep(0.0))
    await asyncio.sleep(0.05)
    restarted = replace(cluster.by_name["d0"], incarnation="d0-again")

    async def nodes() -> list[NodeStatus]:
        return [restarted if each.name == "d0" else each for each in cluster.by_name.values()]

    cluster.nodes = nodes  # type: ignore[method-assign]
    cluster.goes_on.set()
    async with asyncio.timeout(30):
        with pytest.raises(PdclusterError, match="node d0 came back awake"):
            await asleep


async def test_a_node_that_was_killed_while_it_went_over_is_named_when_it_is_back() -> None:
    cluster = two_and_two()
    cluster.bad["p0"] = "killed"
    async with asyncio.timeout(30):
        with pytest.raises(PdclusterError, match=r"node p0 came back with the weights base \(epoch 0\)"):
            await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned")))
    del cluster.bad["p0"]
    await ended(rollouts(cluster).load(WeightsRollout("/b", "tuned")))
    assert set(cluster.served().values()) == {"tuned@1"}
