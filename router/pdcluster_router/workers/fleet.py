"""All workers of a router as one: implements Operations by asking workers side by side, with deadlines, and merging.

Requests and explanations are asked of the worker that the id names, else of all. A node's cordon or role goes through
any worker. A policy is set on all, and again on a worker that starts later. A dead or stuck worker is named and not
waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from pdcluster.core.errors import PdclusterError, ProtocolError, Unavailable, UnknownName
from pdcluster.core.messages import Role, WeightsOrder
from pdcluster.processes.tasks import beside
from pdcluster.telemetry.health import Verdict
from pdcluster_router.admin import drains
from pdcluster_router.admin.operations import (
    CachedNode,
    CacheStatus,
    DrainProgress,
    NodeAdapter,
    NodeStatus,
    NodeWeights,
    PolicyStatus,
    RequestList,
    RolloutProgress,
    WeightsRollout,
)
from pdcluster_router.admin.rollouts import Rollouts, patience_of
from pdcluster_router.cluster.events import Event, EventLog
from pdcluster_router.core.ids import worker_of
from pdcluster_router.explain.records import Explanation
from pdcluster_router.queueing.pauses import PauseMode, check_pause
from pdcluster_router.workers import frames
from pdcluster_router.workers.channel import Channel, WorkerSilent
from pdcluster_router.workers.exposition import Family, exposition

logger = logging.getLogger(__name__)

# Longest wait for a worker's answer.
ASK_S = 2.0

# Where a node must answer, too.
MANAGE_S = 6.0
ADAPTER_ASK_S = 140.0

# A drain looks at all workers this often.
LOOK_S = 0.1

T = TypeVar("T")


@dataclass(slots=True)
class WorkerAnswers(Generic[T]):
    """Answers by worker.

    errors: what workers raised.
    silent: workers that did not answer.
    """

    told: dict[int, T] = field(default_factory=dict)
    errors: dict[int, PdclusterError] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)

    def required(self) -> dict[int, T]:
        """The answers. Raises a worker's error where there are none."""
        if not self.told:
            for error in self.errors.values():
                raise error
        return self.told


class Fleet:
    """Owned by the supervisor's event loop."""

    def __init__(self, num_workers: int, clock: Callable[[], float]) -> None:
        self.log = EventLog()
        self._drains = drains.Drains(self, self.log, clock)
        self._rollouts = Rollouts(self, self.log, clock)
        self._channels: dict[int, Channel | None] = dict.fromkeys(range(num_workers))
        self._starts = dict.fromkeys(range(num_workers), 0)
        self._policy = frames.SetPolicy(None, None, False)
        # When the pause ends by itself; None: there is none.
        self._paused_until: float | None = None
        self._clock = clock

    # ------------------------------------------------------------ workers that come and go

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a worker, until it ends."""
        try:
            joined = await asyncio.wait_for(frames.read(reader), ASK_S)
        except (ProtocolError, TimeoutError):
            joined = None
        if not isinstance(joined, frames.Joined) or joined.worker not in self._channels:
            writer.close()  # not one of our workers
            return
        number = joined.worker
        channel = Channel(f"worker {number}", reader, writer, self._answer, lambda event: self._hear(number, event))
        former, self._channels[number] = self._channels[number], channel
        if former is not None:
            former.close()
        self._starts[number] += 1
        try:
            async with beside(self._set_again(channel), f"policies of {channel.name}"):
                await channel.run()
        finally:
            if self._channels[number] is channel:
                self._channels[number] = None

    def is_there(self, number: int) -> bool:
        return self._channels[number] is not None

    def close(self) -> None:
        for channel in self._channels.values():
            if channel is not None:
                channel.close()

    async def _set_again(self, channel: Channel) -> None:
        """Set what an operator set before this worker started."""
        left_s = 0.0 if self._paused_until is None else self._paused_until - self._clock()
        try:
            if left_s > 0.0:
                await channel.ask(frames.AskPause("keep", left_s), int, left_s)
            if self._policy.live is not None or self._policy.shadow is not None:
                await channel.ask(self._policy, PolicyStatus, ASK_S)
        except PdclusterError as error:
            logger.warning("%s did not take what an operator set: %s; set it again", channel.name, error)

    def _hear(self, number: int, event: Event) -> None:
        self.log.add(event.kind, event.subject, f"worker {number}: {event.message}")

    async def exposition(self) -> bytes:
        """The metrics of all workers that answer."""
        answers = await self._ask_all(frames.AskMetrics(), list[Family])
        restarts = {str(number): max(starts - 1, 0) for number, starts in self._starts.items()}
        return exposition({str(number): told for number, told in answers.told.items()}, restarts)

    async def readiness(self) -> Verdict:
        """As good as the best worker, since each of them serves; degraded while one of them is gone or degraded."""
        try:
            answers = await self._ask_all(frames.AskReadiness(), Verdict)
            told = answers.required()
        except PdclusterError as error:
            return Verdict(False, "not ready", [str(error)], {"can_serve": False})
        best = max(told.values(), key=lambda verdict: (verdict.is_good, bool(verdict.facts.get("can_serve"))))
        if not best.is_good:
            return best
        reasons = [reason for verdict in told.values() if verdict.status == "degraded" for reason in verdict.reasons]
        if answers.silent:
            reasons.append(f"{', '.join(answers.silent)} did not answer")
        return Verdict(True, "degraded", list(dict.fromkeys(reasons)), best.facts) if reasons else best

    async def _answer(self, question: frames.AnyQuestion) -> object:
        if not isinstance(question, frames.AskExposition):
            raise ProtocolError(f"a supervisor does not answer {type(question).__name__}")
        return await self.exposition()

    # ------------------------------------------------------------ asking

    async def _ask(self, number: int, question: frames.AnyQuestion, kind: type[T], timeout_s: float = ASK_S) -> T:
        channel = self._channels[number]
        if channel is None:
            raise WorkerSilent(f"worker {number} is gone; it is being started again")
        return await channel.ask(question, kind, timeout_s)

    async def _ask_all(self, question: frames.AnyQuestion, kind: type[T], timeout_s: float = ASK_S) -> WorkerAnswers[T]:
        """Ask all workers. Raises Unavailable when none answers."""
        answers: WorkerAnswers[T] = WorkerAnswers()

        async def ask(number: int) -> None:
            try:
                answers.told[number] = await self._ask(number, question, kind, timeout_s)
            except WorkerSilent:
                answers.silent.append(f"worker {number}")
            except PdclusterError as error:
                answers.errors[number] = error

        await asyncio.gather(*map(ask, self._channels))
        answers.told = dict(sorted(answers.told.items()))
        answers.silent.sort()
        if not answers.told and not answers.errors:
            raise Unavailable(f"none of the {len(self._channels)} workers answers; see the router's log")
        return answers

    async def _ask_any(self, question: frames.AnyQuestion, kind: type[T], timeout_s: float) -> T:
        """The first answer of any worker."""
        for number in self._channels:
            try:
                return await self._ask(number, question, kind, timeout_s)
            except WorkerSilent:
                continue
        raise Unavailable(f"none of the {len(self._channels)} workers answers; see the router's log")

    async def _ask_holder(self, request: str, question: frames.AnyQuestion, kind: type[T]) -> dict[int, T]:
        """Ask the worker that the id names, or whoever else knows the request."""
        named = worker_of(request)
        if named in self._channels:
            try:
                return {named: await self._ask(named, question, kind)}
            except (WorkerSilent, UnknownName):
                pass  # then all are asked; a client's name may look like an id
        answers = await self._ask_all(question, kind)
        if answers.told:
            return answers.told
        for error in answers.errors.values():
            if not isinstance(error, UnknownName):
                raise error
        if answers.silent:
            raise Unavailable(
                f"request {request[:200]!r} is not known to the workers that answer; {', '.join(answers.silent)} did "
                "not: ask again"
            )
        raise next(iter(answers.errors.values()))

    # ------------------------------------------------------------ nodes

    async def nodes(self) -> list[NodeStatus]:
        answers = await self._ask_all(frames.AskNodes(), list[NodeStatus])
        seen: dict[str, list[NodeStatus]] = {}
        for nodes in answers.required().values():
            for node in nodes:
                seen.setdefault(node.incarnation, []).append(node)
        return [merged(views) for views in seen.values()]

    async def node(self, name: str) -> NodeStatus:
        nodes = await self.nodes()
        for found in nodes:
            if name in (found.name, found.incarnation):
                return found
        known = ", ".join(sorted(found.name for found in nodes)) or "none"
        raise UnknownName(f"no node is called {name[:200]!r}; known: {known}", "node")

    async def cordon(self, name: str, *, cordoned: bool) -> NodeStatus:
        found = await self._ask_any(frames.AskCordon(name, cordoned), NodeStatus, MANAGE_S)
        if not cordoned:
            self._drains.end(found.incarnation)
        return found

    async def set_role(self, name: str, role: Role) -> NodeStatus:
        return await self._ask_any(frames.AskRole(name, role), NodeStatus, MANAGE_S)

    async def move(self, name: str) -> int:
        return await self._ask_any(frames.AskMove(name), int, MANAGE_S)

    async def change_adapter(self, name: str, path: str | None, nodes: tuple[str, ...]) -> list[NodeAdapter]:
        return await self._ask_any(frames.AskAdapter(name, path, nodes), list[NodeAdapter], ADAPTER_ASK_S)

    async def change_weights(self, name: str, order: WeightsOrder) -> NodeWeights:
        return await self._ask_any(frames.AskWeights(name, order), NodeWeights, patience_of(order) + MANAGE_S)

    async def pause(self, mode: PauseMode, max_pause_s: float) -> int:
        check_pause(max_pause_s)
        self._paused_until = self._clock() + max_pause_s
        return sum(await self._all(frames.AskPause(mode, max_pause_s), int, max_pause_s + MANAGE_S))

    async def resume(self) -> bool:
        self._paused_until = None
        return any(await self._all(frames.AskResume(), bool, MANAGE_S))

    async def is_paused(self) -> bool:
        return all(await self._all(frames.AskPaused(), bool, ASK_S))

    async def _all(self, question: frames.AnyQuestion, kind: type[T], timeout_s: float) -> list[T]:
        """The answers of all workers. Raises what one raised, and Unavailable where one is silent."""
        answers = await self._ask_all(question, kind, timeout_s)
        for error in answers.errors.values():
            raise error
        if answers.silent:
            raise Unavailable(f"{', '.join(answers.silent)} did not answer; ask again")
        return list(answers.required().values())

    async def sleep(self, finish_s: float) -> list[str]:
        return await self._rollouts.sleep(finish_s)

    async def wake(self) -> list[str]:
        return await self._rollouts.wake()

    def load_weights(self, wanted: WeightsRollout) -> AsyncGenerator[RolloutProgress, None]:
        return self._rollouts.load(wanted)

    def undo_weights(self, finish_s: float) -> AsyncGenerator[RolloutProgress, None]:
        return self._rollouts.undo(finish_s)

    def drain(self, name: str, deadline_s: float) -> AsyncIterator[DrainProgress]:
        return self._drains.drain(name, deadline_s)

    async def wait_for_change(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, LOOK_S))

    # ------------------------------------------------------------ requests

    async def requests(self, node: str = "") -> RequestList:
        answers = await self._ask_all(frames.AskRequests(node), RequestList)
        found = [request for told in answers.required().values() for request in told.requests]
        return RequestList(tuple(sorted(found, key=lambda request: -request.age_s)), tuple(answers.silent))

    async def cancel(self, request: str, reason: str) -> int:
        return sum((await self._ask_holder(request, frames.AskCancel(request, reason), int)).values())

    async def explain(self, request: str) -> list[Explanation]:
        told = await self._ask_holder(request, frames.AskExplain(request), list[Explanation])
        found = [explanation for explanations in told.values() for explanation in explanations]
        return found if len(told) == 1 else sorted(found, key=lambda explanation: -explanation.arrived)

    # ------------------------------------------------------------ policy

    async def policy(self) -> PolicyStatus:
        answers = await self._ask_all(frames.AskPolicy(), PolicyStatus)
        for error in answers.errors.values():
            raise error
        told = list(answers.told.values())
        alike = [each for each in told if each.shadow == told[0].shadow]
        return msgspec.structs.replace(
            told[0],
            shadow_agreed=sum(each.shadow_agreed for each in alike),
            shadow_watched=sum(each.shadow_watched for each in alike),
        )

    async def set_policy(self, *, live: str | None, shadow: str | None, dry_run: bool) -> PolicyStatus:
        """Set policies after one worker has checked them. A silent worker gets them when it starts again."""
        checked = await self._ask_any(frames.SetPolicy(live, shadow, True), PolicyStatus, ASK_S)
        if dry_run:
            return checked
        before = self._policy
        self._policy = frames.SetPolicy(
            before.live if live is None else live, before.shadow if shadow is None else shadow, False
        )
        answers = await self._ask_all(frames.SetPolicy(live, shadow, False), PolicyStatus)
        for number, error in answers.errors.items():
            raise PdclusterError(f"worker {number} keeps its policy, the others changed: {error}; set it again")
        return next(iter(answers.told.values()))

    # ------------------------------------------------------------ caches and events

    async def cache(self, *, digests: bool) -> CacheStatus:
        answers = await self._ask_all(frames.AskCacheState(digests), CacheStatus)
        views = tuple(msgspec.structs.replace(told, worker=str(number)) for number, told in answers.required().items())
        fullest = max(views, key=lambda view: view.entries)
        nodes = (
            fullest.nodes
            if agreeing(views)
            else tuple(msgspec.structs.replace(node, is_exact=False) for node in fullest.nodes)
        )
        return CacheStatus(
            fullest.entries, sum(view.bytes for view in views), nodes, views=views, silent=tuple(answers.silent)
        )

    def events(self, since: int, *, follow: bool) -> AsyncIterator[Event]:
        return self.log.follow(since) if follow else self.log.kept(since)


def merged(views: Sequence[NodeStatus]) -> NodeStatus:
    """Nodes as the least informed worker sees them: ready when ready for all, draining once all know."""
    in_flight = sum(view.in_flight for view in views)
    waiting = [view for view in views if view.load is None] or [
        view for view in views if view.load is not None and not view.load.draining
    ]
    found = (waiting or list(views))[0]
    return msgspec.structs.replace(found, in_flight=in_flight)


def agreeing(views: Sequence[CacheStatus]) -> bool:
    """Whether all workers report the same of every node."""

    def facts(nodes: Sequence[CachedNode]) -> set[tuple[str, int, bool, str]]:
        return {(node.incarnation, node.blocks, node.is_exact, node.digest) for node in nodes}

    return all(facts(view.nodes) == facts(views[0].nodes) for view in views)
