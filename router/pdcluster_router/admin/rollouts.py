"""Other weights for the nodes of a cluster, some at a time, for one router or several workers.

1. The nodes of a batch load beside what serves. When all of them have, they go over: each takes no new work, ends what
   it has, and comes back as another boot. When one cannot load, none of the batch goes over.
2. A batch leaves each role a node that takes work, where the role has several.
3. A node that fails stops the rollout. What serves the new weights by then goes on serving them.
4. An epoch is announced once: the first node that loads it says the digest that all others must have.
5. Nodes that sleep load without leaving others, and serve what they loaded. A node that sleeps first and cannot load
   wakes with what it had.
6. Weights without another source are passed on from nodes that have them. Each gives them to one node at a time, which
   then gives them to others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from itertools import count
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from pdcluster.core.errors import BadRequest, DeadlineExceeded, NodeLost, Overloaded, PdclusterError, UnknownName
from pdcluster.core.messages import (
    DropWeights,
    PrepareWeights,
    ShareWeights,
    SleepNode,
    SwitchWeights,
    WeightsOrder,
)
from pdcluster.core.weights import NODE_SOURCE, WeightsVersion, check_label, check_source, holder_of
from pdcluster.kv.layout import NATIVE_ENGINE
from pdcluster_router.admin.operations import NodeStatus, NodeWeights, RolloutProgress, WeightsRollout
from pdcluster_router.cluster.events import EventLog

# Longest wait for a node that loads weights, and for one to give up its work where it goes over to others.
WEIGHTS_S = 1800.0
SWITCH_S = 30.0
# For the next boot of a node to take work.
READY_S = 60.0
DROP_S = 5.0
# For nodes that come back, before it is said which of them sleep.
CONNECT_S = 5.0
# For a node to come back asleep. It may write pushed weights to its disk first.
ASLEEP_S = 600.0
MAX_FINISH_S = 86_400.0
MAX_NEWS = 256


class SleepRefused(PdclusterError):
    """A node does not sleep, and serves on."""


class WeightsNodes(Protocol):
    """What a rollout needs of the cluster."""

    async def nodes(self) -> list[NodeStatus]: ...

    async def change_weights(self, name: str, order: WeightsOrder) -> NodeWeights: ...

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until another look is worth it, at most so long."""
        ...


class Rollouts:
    """One at a time; the next one is refused meanwhile."""

    def __init__(self, cluster: WeightsNodes, log: EventLog, clock: Callable[[], float]) -> None:
        self._cluster, self._log, self._clock = cluster, log, clock
        self._running = ""

    async def load(self, wanted: WeightsRollout) -> AsyncGenerator[RolloutProgress, None]:
        """Have nodes serve a version, yielding progress. What a rollout before left undone goes on.

        Raises BadRequest, UnknownName without nodes, Overloaded while another one runs, and PdclusterError when a node
        fails.
        """
        check_wanted(wanted)
        nodes = await self._nodes()
        version = version_of(nodes, wanted)
        share = 100.0 if wanted.canary_percent is None else wanted.canary_percent
        targets = [node for node in in_order(nodes) if node.weights.epoch != version.epoch or node.state == "sleeping"]
        if wanted.canary_percent is not None:
            targets = canaries(nodes, version)
        if wanted.releases_first:
            check_sleep(targets)
        roll = _Roll(self._cluster, version, wanted.source, share, wanted.finish_s, self._clock, len(targets))
        roll.releases_first = wanted.releases_first
        roll.know_holders(nodes)
        async with aclosing(self._run(roll, targets, wanted.max_unavailable)) as steps:
            async for progress in steps:
                yield progress

    async def undo(self, finish_s: float) -> AsyncGenerator[RolloutProgress, None]:
        """Have the nodes of the newest version serve what they served before, under the next epoch."""
        _check_finish(finish_s)
        nodes = await self._nodes()
        version, source = before(nodes)
        newest = max(node.weights.epoch for node in nodes)
        targets = [node for node in in_order(nodes) if node.weights.epoch == newest]
        roll = _Roll(self._cluster, version, source, 100.0, finish_s, self._clock, len(targets))
        roll.know_holders(nodes)
        async with aclosing(self._run(roll, targets, 1)) as steps:
            async for progress in steps:
                yield progress

    async def sleep(self, finish_s: float) -> list[str]:
        """Have all nodes sleep. Raises BadRequest where one cannot, before any does; Overloaded while a rollout runs;
        PdclusterError when a node fails.
        """
        _check_finish(finish_s)
        nodes = [node for node in await self._nodes() if node.state != "sleeping"]
        check_sleep(nodes)
        with self._alone("sleep"):
            await _all(put_to_sleep(self._cluster, node, finish_s, self._clock) for node in nodes)
        return self._noted("sleep", nodes)

    async def wake(self) -> list[str]:
        """Have all nodes that sleep serve what they served, those that are about to, too. Raises as `sleep`."""
        until = self._clock() + CONNECT_S
        while any(node.state == "connecting" for node in await self._nodes()) and self._clock() < until:
            await self._cluster.wait_for_change(until - self._clock())
        nodes = await self._nodes()
        sleeping = [node for node in nodes if node.state == "sleeping"]
        with self._alone("waking"):
            await _all(wake_up(self._cluster, node, nodes, self._clock) for node in sleeping)
        return self._noted("wake", sleeping)

    def _noted(self, kind: Literal["sleep", "wake"], nodes: Sequence[NodeStatus]) -> list[str]:
        names = [node.name for node in nodes]
        if names:
            self._log.add(kind, "", ", ".join(names))
        return names

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if self._running:
            raise Overloaded(f"{self._running} is under way; wait for its end", 5.0)
        self._running = what
        try:
            yield
        finally:
            self._running = ""

    async def _nodes(self) -> list[NodeStatus]:
        nodes = await self._cluster.nodes()
        if not nodes:
            raise UnknownName("no node is known", "nodes")
        return nodes

    async def _run(
        self, roll: _Roll, targets: Sequence[NodeStatus], at_once: int
    ) -> AsyncGenerator[RolloutProgress, None]:
        with self._alone(f"the rollout of {roll.version}"):
            self._log.add("weights", roll.version.label, f"epoch {roll.version.epoch} for {len(targets)} nodes")
            news: asyncio.Queue[RolloutProgress] = asyncio.Queue(MAX_NEWS)
            roll.report = news.put_nowait
            task = asyncio.create_task(roll.run(targets, at_once))
            try:
                while not task.done() or not news.empty():
                    getting = asyncio.ensure_future(news.get())
                    try:
                        await asyncio.wait([task, getting], return_when=asyncio.FIRST_COMPLETED)
                        if getting.done():
                            yield getting.result()
                    finally:
                        getting.cancel()
                await task
                self._log.add("weights", roll.version.label, f"{roll.num_done} nodes serve epoch {roll.version.epoch}")
            finally:
                task.cancel()
                await asyncio.wait({task})


class _Roll:
    """One rollout while it runs."""

    def __init__(
        self,
        cluster: WeightsNodes,
        version: WeightsVersion,
        source: str,
        share: float,
        finish_s: float,
        clock: Callable[[], float],
        num_nodes: int,
    ) -> None:
        self._cluster, self._source, self._share, self._finish_s = cluster, source, share, finish_s
        self._clock, self._began, self._num_nodes = clock, clock(), num_nodes
        self.version = version
        self.releases_first, self.shares_all = False, True
        self.way_out = "see pdctl weights status, load again to go on, or take it back with pdctl weights undo"
        self.num_done = 0
        self.report: Callable[[RolloutProgress], None] = _ignore
        # Nodes that have the version in memory and give it to nobody now (rule 6).
        self._holders: asyncio.Queue[str] = asyncio.Queue()
        self._is_passed_on = holder_of(source) is not None
        self._has: set[str] = set()
        # Nodes that were told to sleep, to load.
        self._released: set[str] = set()

    def know_holders(self, nodes: Sequence[NodeStatus]) -> None:
        """Raises BadRequest where the version has no other source and nobody has it."""
        if not self._is_passed_on:
            return
        alike = [node for node in nodes if node.weights.epoch and _is_same(node.weights, self.version)]
        names = [node.name for node in alike if node.state != "sleeping"]
        if (named := holder_of(self._source)) and named not in names:
            names.insert(0, named)
        if not names and not alike:  # a node that sleeps has its own
            raise BadRequest(
                f"no node has the weights {self.version} in memory any more; push or load them again", "source"
            )
        for name in names:
            self._add_holder(name)

    def _add_holder(self, name: str) -> None:
        if name not in self._has:
            self._has.add(name)
            self._holders.put_nowait(name)

    async def run(self, targets: Sequence[NodeStatus], at_once: int) -> None:
        left = list(targets)
        if self.shares_all:
            await self._share_all()  # first: the nodes of a canary serve all requests while the others change
        while left:
            batch = next_batch(left, await self._cluster.nodes(), at_once)
            if at_once and not self.version.digest:
                batch = batch[:1]
            await self._change(batch)
            left = [node for node in left if node not in batch]
        self._say("", "serving")

    async def _share_all(self) -> None:
        """Every node that serves the version says its share."""
        for node in await self._cluster.nodes():
            if node.weights.epoch == self.version.epoch and node.weights_share != self._share:
                await self._cluster.change_weights(node.name, ShareWeights(0, self._share))

    async def _change(self, batch: Sequence[NodeStatus]) -> None:
        """Rule 1."""
        try:
            if self.releases_first:
                await _all(self._release(node) for node in batch)
            await _all(self._prepare(node) for node in batch)
            await _all(self._switch(node) for node in batch)
        except BaseException as error:  # a caller that goes, too: what is not served keeps no memory
            await _all(self._drop(node) for node in batch)
            if self.releases_first:
                await _all(self._wake(node) for node in batch)
            if isinstance(error, PdclusterError):
                raise PdclusterError(self._stopped(error)) from error
            raise

    async def _release(self, node: NodeStatus) -> None:
        if node.state != "sleeping":
            self._say(node.name, "sleeping", node)
            self._released.add(node.name)
            try:
                await put_to_sleep(self._cluster, node, self._finish_s, self._clock)
            except SleepRefused:
                self._released.discard(node.name)
                raise

    async def _wake(self, node: NodeStatus) -> None:
        """Of a node that slept to load, or is about to: have it serve what it had. The load that nobody wants any more
        may still run there.
        """
        until = self._clock() + READY_S
        while node.name in self._released and self._clock() < until:
            found = await self._find(node.name)
            if found is not None and found.state == "sleeping":
                with suppress(PdclusterError):  # the error that led here says more
                    await wake_up(self._cluster, found, [found], self._clock)
                    return
            elif found is not None and found.state == "ready" and found.incarnation != node.incarnation:
                return
            await self._cluster.wait_for_change(until - self._clock())

    async def _drop(self, node: NodeStatus) -> None:
        with suppress(PdclusterError, TimeoutError):  # a node that is gone has nothing ready
            async with asyncio.timeout(DROP_S):
                await self._cluster.change_weights(node.name, DropWeights(0))

    def _stopped(self, error: PdclusterError) -> str:
        return (
            f"the rollout of {self.version} stopped with {self.num_done} of {self._num_nodes} nodes done: {error}; "
            f"{self.way_out}"
        )

    async def _prepare(self, node: NodeStatus) -> None:
        self._say(node.name, "loading")
        answer = await self._load(node)
        if answer.error or answer.prepared is None:
            raise PdclusterError(f"node {node.name}: {answer.error or 'it has nothing ready'}")
        if not self.version.digest:
            self.version = answer.prepared
        elif answer.prepared.digest != self.version.digest:
            raise PdclusterError(
                f"node {node.name} loaded weights {answer.prepared.digest}, others {self.version.digest}; the source "
                "differs from machine to machine"
            )
        if self._is_passed_on:
            self._add_holder(node.name)

    async def _load(self, node: NodeStatus) -> NodeWeights:
        is_its_own = node.state == "sleeping" and _is_same(node.weights, self.version)
        if not self._is_passed_on or is_its_own or node.name in self._has:
            source = NODE_SOURCE + node.name if self._is_passed_on else self._source
            return await self._cluster.change_weights(node.name, PrepareWeights(0, self.version, source))
        holder = await self._holders.get()
        try:
            source = NODE_SOURCE + holder
            return await self._cluster.change_weights(node.name, PrepareWeights(0, self.version, source))
        finally:
            self._holders.put_nowait(holder)

    async def _switch(self, node: NodeStatus) -> None:
        self._say(node.name, "ending", node)
        before = await self._find(node.name)
        order = SwitchWeights(0, self.version.epoch, self._finish_s, self._share)
        asked = asyncio.ensure_future(self._cluster.change_weights(node.name, order))
        try:
            while not asked.done():
                await asyncio.wait([asked], timeout=1.0)
                found = await self._find(node.name)
                if not asked.done() and found is not None:
                    self._say(node.name, "ending", found)
            answer = await asked
        finally:
            asked.cancel()
        if answer.error:
            raise PdclusterError(f"node {node.name}: {answer.error}")
        await self._wait_until_ready(node.name, "" if before is None else before.incarnation)
        self.num_done += 1
        self._say(node.name, "serving")

    async def _wait_until_ready(self, name: str, before: str) -> None:
        """before: the incarnation that went over."""
        until = self._clock() + READY_S
        while (
            (found := await self._find(name)) is None
            or found.state in ("connecting", "sleeping")
            or (found.weights.epoch != self.version.epoch)
        ):
            if found is not None and found.state == "ready" and found.incarnation != before:
                raise NodeLost(
                    f"node {name} came back with the weights {found.weights}: it was started again meanwhile"
                )
            if self._clock() > until:
                raise NodeLost(f"node {name} did not come back within {READY_S:g} s; see its log")
            await self._cluster.wait_for_change(until - self._clock())

    async def _find(self, name: str) -> NodeStatus | None:
        """The newest boot of a node."""
        found = [node for node in await self._cluster.nodes() if node.name == name]
        return max(found, key=lambda node: node.weights.epoch, default=None)

    def _say(self, name: str, stage: str, node: NodeStatus | None = None) -> None:
        load = None if node is None else node.load
        with suppress(asyncio.QueueFull):  # whoever reads sees a later one
            self.report(
                RolloutProgress(
                    node=name,
                    stage=stage,
                    version=self.version,
                    num_done=self.num_done,
                    num_nodes=self._num_nodes,
                    running=0 if load is None else load.running + load.waiting,
                    context_tokens=0 if load is None else load.context_tokens,
                    seconds=self._clock() - self._began,
                )
            )


def check_sleep(nodes: Sequence[NodeStatus]) -> None:
    """Raises BadRequest where one of them never sleeps."""
    for node in nodes:
        if node.engine != NATIVE_ENGINE:
            raise BadRequest(
                f"node {node.name} runs {node.engine}, which gives no memory back on this device; stop the node "
                "instead, or leave sleep out",
                "nodes",
            )


async def put_to_sleep(cluster: WeightsNodes, node: NodeStatus, finish_s: float, clock: Callable[[], float]) -> None:
    """Returns once the node sleeps. Raises SleepRefused, NodeLost, DeadlineExceeded."""
    answer = await cluster.change_weights(node.name, SleepNode(0, finish_s))
    if answer.error:
        raise SleepRefused(f"node {node.name}: {answer.error}")
    until = clock() + ASLEEP_S
    while True:
        boots = [each for each in await cluster.nodes() if each.name == node.name]
        if any(each.state == "sleeping" for each in boots):
            return
        if any(each.state == "ready" and each.incarnation != node.incarnation for each in boots):
            raise NodeLost(f"node {node.name} came back awake: it was started again; see its log")
        if clock() > until:
            raise NodeLost(f"node {node.name} did not come back asleep within {ASLEEP_S:g} s; see its log")
        await cluster.wait_for_change(until - clock())


async def wake_up(
    cluster: WeightsNodes, node: NodeStatus, nodes: Sequence[NodeStatus], clock: Callable[[], float]
) -> None:
    """Have a node serve what it had before it slept. nodes: others may have that in memory. Raises PdclusterError."""
    roll = _Roll(cluster, node.weights, node.weights_source, node.weights_share, 0.0, clock, 1)
    roll.shares_all = False
    roll.way_out = "wake it again with pdctl wake, or load weights with pdctl weights load"
    roll.know_holders(nodes)
    await roll.run([node], 0)


def _is_same(found: WeightsVersion, wanted: WeightsVersion) -> bool:
    """Whether a node with these weights can give the wanted ones."""
    is_named = (found.label, found.epoch) == (wanted.label, wanted.epoch)
    return is_named or (found.digest != "" and found.digest == wanted.digest)


def _ignore(progress: RolloutProgress) -> None:
    """Nobody looks."""


async def _all(changes: Any) -> None:
    """Run all to their ends; raises what the first failed one raised."""
    tasks: list[Coroutine[Any, Any, None]] = list(changes)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def check_wanted(wanted: WeightsRollout) -> None:
    """Raises BadRequest for what no cluster could serve."""
    check_label(wanted.label)
    percent = wanted.canary_percent
    if percent is not None and not 0.0 < percent < 100.0:
        raise BadRequest(f"canary is {percent:g} %; it must be more than 0 and less than 100", "canary_percent")
    if wanted.max_unavailable < 0:
        raise BadRequest(f"max_unavailable is {wanted.max_unavailable}; it must be 0 (all) or more", "max_unavailable")
    _check_finish(wanted.finish_s)
    check_source(wanted.source)


def _check_finish(finish_s: float) -> None:
    if not 0.0 <= finish_s <= MAX_FINISH_S:  # which no NaN is
        raise BadRequest(f"finish_s is {finish_s:g}; it must be 0 to {MAX_FINISH_S:g} seconds", "finish_s")


def patience_of(order: WeightsOrder, engine: str = "") -> float:
    """How long a node may take to do what is asked of its weights. engine: of the node; "": of any. One that has no
    room for two sets of weights reads the others when it goes over.
    """
    if not isinstance(order, SwitchWeights | SleepNode):
        return WEIGHTS_S
    return order.finish_s + (SWITCH_S if engine == NATIVE_ENGINE else WEIGHTS_S)


def version_of(nodes: Sequence[NodeStatus], wanted: WeightsRollout) -> WeightsVersion:
    """The version that is to be served: one that some nodes have, or the next epoch."""
    newest = max(node.weights.epoch for node in nodes)
    alike = [node for node in nodes if node.weights.label == wanted.label]
    if not alike:
        return WeightsVersion(wanted.label, newest + 1)
    known = max(alike, key=lambda node: node.weights.epoch)
    if known.weights_source != wanted.source and None in map(holder_of, (known.weights_source, wanted.source)):
        raise BadRequest(
            f"the label {wanted.label!r} is that of weights from {known.weights_source or 'the start'!r}; give other "
            "weights another label",
            "label",
        )
    return known.weights if known.weights.epoch == newest else replace(known.weights, epoch=newest + 1)


def before(nodes: Sequence[NodeStatus]) -> tuple[WeightsVersion, str]:
    """What the nodes of the newest version served before, as the next epoch, and its source. Raises BadRequest."""
    newest = max(node.weights.epoch for node in nodes)
    others = [node for node in nodes if node.weights.epoch != newest]
    if others:
        other = max(others, key=lambda node: node.weights.epoch)
        return replace(other.weights, epoch=newest + 1), other.weights_source
    formers = {node.weights_former for node in nodes}
    former = formers.pop()
    if formers or former is None:
        what = "nodes served different weights before" if formers else "they serve the first weights that they had"
        raise BadRequest(f"nothing can be undone: {what}; load weights by their source", "label")
    return WeightsVersion(former.label, newest + 1, former.digest), former.source


def in_order(nodes: Sequence[NodeStatus]) -> list[NodeStatus]:
    """One node of each role first, so that the new version soon has all that it needs."""
    by_role: dict[str, count[int]] = {}
    ranks = {
        node.incarnation: next(by_role.setdefault(node.role, count()))
        for node in sorted(nodes, key=lambda node: node.name)
    }
    return sorted(nodes, key=lambda node: (ranks[node.incarnation], node.role, node.name))


def canaries(nodes: Sequence[NodeStatus], version: WeightsVersion) -> list[NodeStatus]:
    """One node of each role. Raises BadRequest where none would be left."""
    chosen: dict[str, NodeStatus] = {}
    for node in in_order(nodes):
        chosen.setdefault(node.role, node)
    lonely = [role for role in chosen if sum(node.role == role for node in nodes) < 2]
    if lonely:
        raise BadRequest(
            f"a canary needs two nodes of each role, and there is one {lonely[0]} node; start another, or load without "
            "a canary",
            "canary_percent",
        )
    return [node for node in chosen.values() if node.weights.epoch != version.epoch]


def next_batch(left: Sequence[NodeStatus], nodes: Sequence[NodeStatus], at_once: int) -> list[NodeStatus]:
    """Rule 2. at_once: 0 for all."""
    if not at_once:
        return list(left)
    batch: list[NodeStatus] = []
    for node in left:
        staying = [
            each for each in nodes
            if each.role == node.role and each.state == "ready"
            and each.name != node.name and each.name not in {chosen.name for chosen in batch}
        ]  # fmt: skip
        is_alone = sum(each.role == node.role for each in nodes) == 1
        if len(batch) < at_once and (staying or is_alone or node.state == "sleeping"):
            batch.append(node)
    if not batch:
        raise DeadlineExceeded(
            f"no node can change: no other {left[0].role} node takes work; see pdctl get nodes", "room"
        )
    return batch
