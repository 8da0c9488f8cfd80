"""What an operator may ask of one router and change in it. Implements Operations; served by `admin.grpc`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from pdcluster.bootstrap.card import MAX_NAME_CHARS, MAX_TEXT_CHARS, NodeCard
from pdcluster.core.errors import BadRequest, ConfigError, DeadlineExceeded, NodeLost, UnknownName
from pdcluster.core.messages import Managed, Role, SleepNode, SwitchWeights, WeightsOrder
from pdcluster.kv.layout import NATIVE_ENGINE
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
    RequestStatus,
    RolloutProgress,
    State,
    WeightsRollout,
)
from pdcluster_router.admin.rollouts import Rollouts, patience_of
from pdcluster_router.cluster.events import Event, EventLog
from pdcluster_router.cluster.node_table import NodeTable
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.core.ids import own_id
from pdcluster_router.explain.recorder import Explainer
from pdcluster_router.explain.records import Explanation
from pdcluster_router.policy.registry import POLICIES, make_policy
from pdcluster_router.policy.selector import PolicyHolder
from pdcluster_router.queueing.pauses import PauseMode, check_pause
from pdcluster_router.request.open_requests import OpenRequest, OpenRequests

# Longest wait for a node's answer to a change.
MANAGE_S = 5.0
# The same for an adapter, whose files are read and checked. A node gives up after 120 s.
ADAPTER_S = 130.0

# A drain looks this often, even without news.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node.

    view: None when the bootstrap lists it without a link or report.
    """

    card: NodeCard
    view: NodeView | None


class PausedRequests(Protocol):
    """What Admin needs of the dispatcher."""

    @property
    def open(self) -> OpenRequests: ...

    @property
    def is_paused(self) -> bool: ...

    async def pause(self, mode: PauseMode, max_pause_s: float) -> int: ...

    def resume(self) -> bool: ...


class Admin:
    """Owned by the router's event loop."""

    def __init__(
        self,
        cluster: NodeTable,
        dispatch: PausedRequests,
        policies: PolicyHolder,
        log: EventLog,
        explainer: Explainer,
        clock: Callable[[], float],
    ) -> None:
        self.cluster = cluster
        self.log = log
        self._explainer = explainer
        self._dispatch, self._open = dispatch, dispatch.open
        self._policies = policies
        self._clock = clock
        self._drains = drains.Drains(self, log, clock)
        self._rollouts = Rollouts(self, log, clock)

    # ------------------------------------------------------------ nodes

    async def nodes(self) -> list[NodeStatus]:
        return [_status(found) for found in self._known()]

    async def node(self, name: str) -> NodeStatus:
        return _status(self._find(name))

    def _known(self) -> list[KnownNode]:
        views = {view.endpoint.incarnation: view for view in self.cluster.view().nodes}
        return [KnownNode(card, views.get(card.incarnation)) for card in self.cluster.listed()]

    def _find(self, name: str) -> KnownNode:
        nodes = self._known()
        for found in nodes:
            if name in (found.card.node, found.card.incarnation):
                return found
        known = ", ".join(sorted(found.card.node for found in nodes)) or "none"
        raise UnknownName(f"no node is called {name[:200]!r}; known: {known}", "node")

    async def cordon(self, name: str, *, cordoned: bool) -> NodeStatus:
        found = await self._manage(name, cordoned=cordoned)
        if not cordoned:
            self._drains.end(found.card.incarnation)
        self.log.add(
            "cordon" if cordoned else "uncordon",
            found.card.node,
            "takes no new work" if cordoned else "takes work again",
        )
        return _status(found)

    async def set_role(self, name: str, role: Role, why: str = "asked by an operator") -> NodeStatus:
        before = self._find(name)
        found = await self._manage(name, role=role)
        was = before.view.role if before.view is not None else before.card.role
        if was != role:
            self.log.add("role", found.card.node, f"{was} becomes {role}: {why}")
        return _status(found)

    def drain(self, name: str, deadline_s: float) -> AsyncIterator[DrainProgress]:
        return self._drains.drain(name, deadline_s)

    async def move(self, name: str) -> int:
        """Have a node give its work to other nodes. Returns how many requests moved."""
        found = self._find(name)
        answer = await self._ask(found, moves=True)
        return answer.num_moved

    async def change_adapter(self, name: str, path: str | None, nodes: tuple[str, ...]) -> list[NodeAdapter]:
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise BadRequest(f"an adapter's name has 1 to {MAX_NAME_CHARS} printable characters", "name")
        if path is not None and not 0 < len(path) <= MAX_TEXT_CHARS:
            raise BadRequest(f"an adapter's path has 1 to {MAX_TEXT_CHARS} characters", "path")
        asked = [self._find(node) for node in nodes] or self._known()
        if not asked:
            raise UnknownName("no node is known", "nodes")
        if path is None and not any(found.card.adapter(name) for found in asked):
            raise UnknownName(f"none of these nodes has the adapter {name}", "name")
        told = await asyncio.gather(*(self._change_adapter(found.card, name, path) for found in asked))
        await self._see_adapter(name, {each.node: each.digest for each in told if not each.error})
        done = ", ".join(each.node for each in told if not each.error)
        if done:
            self.log.add("adapter", name, f"{'unloaded from' if path is None else 'loaded at'} {done}")
        return told

    async def _change_adapter(self, card: NodeCard, name: str, path: str | None) -> NodeAdapter:
        if not card.capabilities.adapters:
            if path is None:
                return NodeAdapter(card.node)
            way_out = (
                "start it with vLLM's --enable-lora"
                if card.engine != NATIVE_ENGINE
                else "its engine is native; nodes with --engine vllm have"
            )
            return NodeAdapter(card.node, f"node {card.node} has no LoRA adapters: {way_out}")
        try:
            answer = await self.cluster.manage_adapter(card.incarnation, name, path, ADAPTER_S)
        except TimeoutError:
            return NodeAdapter(card.node, f"node {card.node} did not answer within {ADAPTER_S:g} s; see its log")
        except NodeLost as error:
            return NodeAdapter(card.node, str(error))
        return NodeAdapter(card.node, answer.error, answer.digest)

    async def _see_adapter(self, name: str, digests: Mapping[str, str]) -> None:
        """Wait a little until the nodes' cards say it here, too, so that the next request finds it so."""
        until = self._clock() + MANAGE_S
        while self._clock() < until:
            cards = [card for card in self.cluster.listed() if card.node in digests]
            if all(_digest_of(card, name) == digests[card.node] for card in cards):
                return
            await self.wait_for_change(until - self._clock())

    async def change_weights(self, name: str, order: WeightsOrder) -> NodeWeights:
        """Raises UnknownName, NodeLost, DeadlineExceeded."""
        card = self._find(name).card
        timeout_s = patience_of(order, card.fingerprint.engine)
        try:
            answer = await self.cluster.manage_weights(card.incarnation, order, timeout_s)
        except NodeLost:
            if isinstance(order, SwitchWeights | SleepNode):
                return NodeWeights(card.node)  # it goes over
            raise
        except TimeoutError:
            raise DeadlineExceeded(
                f"node {card.node} did not answer within {timeout_s:g} s; see its log", "handshake"
            ) from None
        return NodeWeights(card.node, answer.error, answer.prepared, answer.target)

    async def pause(self, mode: PauseMode, max_pause_s: float) -> int:
        check_pause(max_pause_s)
        self.log.add("pause", "", f"{mode}, for {max_pause_s:g} s at most")
        return await self._dispatch.pause(mode, max_pause_s)

    async def resume(self) -> bool:
        was_paused = self._dispatch.resume()
        if was_paused:
            self.log.add("resume", "", "requests go on")
        return was_paused

    async def is_paused(self) -> bool:
        return self._dispatch.is_paused

    async def sleep(self, finish_s: float) -> list[str]:
        return await self._rollouts.sleep(finish_s)

    async def wake(self) -> list[str]:
        return await self._rollouts.wake()

    def load_weights(self, wanted: WeightsRollout) -> AsyncGenerator[RolloutProgress, None]:
        return self._rollouts.load(wanted)

    def undo_weights(self, finish_s: float) -> AsyncGenerator[RolloutProgress, None]:
        return self._rollouts.undo(finish_s)

    async def wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(min(timeout_s, LOOK_S)):
                await self.cluster.wait_for_change(self.cluster.version)
        except TimeoutError:
            return

    async def _manage(self, name: str, *, role: Role | None = None, cordoned: bool | None = None) -> KnownNode:
        found = self._find(name)
        return _after(found, await self._ask(found, role=role, cordoned=cordoned))

    async def _ask(
        self, found: KnownNode, *, role: Role | None = None, cordoned: bool | None = None, moves: bool = False
    ) -> Managed:
        try:
            return await self.cluster.manage(
                found.card.incarnation, role=role, cordoned=cordoned, moves=moves, timeout_s=MANAGE_S
            )
        except TimeoutError:
            raise DeadlineExceeded(
                f"node {found.card.node} did not answer within {MANAGE_S:g} s; see its log", "handshake"
            ) from None

    # ------------------------------------------------------------ requests

    async def requests(self, node: str = "") -> RequestList:
        """Requests on one node, or all. Raises UnknownName for an unknown node."""
        now, node = self._clock(), self._find(node).card.node if node else ""
        return RequestList(
            tuple(
                _request(found, now) for found in self._open.all() if not node or node in (found.prefill, found.decode)
            )
        )

    async def cancel(self, request: str, reason: str) -> int:
        """Cancel by id, else by the client's name. Raises UnknownName when no open request has it."""
        called = [name for name in (request, own_id(request)) if self._open.matching(name)][:1]
        if not called:
            alike = frozenset(self._explainer.called(request))
            called = [entry.request for entry in self._open.all() if entry.request in alike]
        if not called:
            raise UnknownName(
                f"no open request is called {request[:200]!r}; it has ended, or another router has it", "id"
            )
        num_cancelled = sum(self._open.cancel(name, reason or "no reason given") for name in called)
        if num_cancelled:
            self.log.add("cancel", request, reason or "no reason given")
        return num_cancelled

    async def explain(self, request: str) -> list[Explanation]:
        """Why a request, or each of its choices, went where it went. Raises UnknownName when unknown."""
        found = self._explainer.explain_all(request, own_id(request))
        if not found:
            raise UnknownName(
                f"nothing is known of request {request[:200]!r}; it is too long ago, or another router has it", "id"
            )
        return found

    # ------------------------------------------------------------ policy

    async def policy(self) -> PolicyStatus:
        live, shadow = self._policies.live, self._policies.shadow
        if shadow is None:
            return PolicyStatus(live.name, "", POLICIES)
        return PolicyStatus(live.name, shadow.name, POLICIES, *self._explainer.agreement(shadow.name))

    async def set_policy(self, *, live: str | None, shadow: str | None, dry_run: bool) -> PolicyStatus:
        """Set policies from the next decision on; shadow "" removes it. Raises BadRequest for an unknown one, and then
        changes nothing.
        """
        try:
            made = make_policy(live) if live is not None else self._policies.live
            watching = self._policies.shadow if shadow is None else make_policy(shadow) if shadow else None
        except ConfigError as error:
            raise BadRequest(str(error), "policy") from error
        if not dry_run:
            if live is not None:
                self.log.add("policy", "", f"{self._policies.live.name} becomes {live}")
            if shadow is not None:
                self.log.add("policy", "", f"the shadow is {shadow or 'none'}")
            self._policies.live, self._policies.shadow = made, watching
        return await self.policy()

    # ------------------------------------------------------------ caches and events

    async def cache(self, *, digests: bool) -> CacheStatus:
        """The prefix index.

        digests: reads every row: half a second for ten million.
        """
        caches, index = self.cluster.caches, self.cluster.caches.index
        nodes = tuple(
            CachedNode(
                card.node,
                card.incarnation,
                index.num_blocks(card.incarnation),
                caches.is_exact(card.incarnation),
                index.digest(card.incarnation) if digests else "",
            )
            for card in self.cluster.cards()
        )
        return CacheStatus(index.num_entries, index.num_bytes, nodes)

    def events(self, since: int, *, follow: bool) -> AsyncIterator[Event]:
        return self.log.follow(since) if follow else self.log.kept(since)


def _request(found: OpenRequest, now: float) -> RequestStatus:
    return RequestStatus(
        id=found.request,
        model=found.model,
        state=found.state,
        mode=found.mode or "",
        prefill=found.prefill or "",
        decode=found.decode or "",
        prompt_tokens=found.num_prompt,
        output_tokens=found.num_output,
        attempts=found.attempts,
        age_s=now - found.started,
        placed_s=None if found.placed_at is None else found.placed_at - found.started,
        ttft_s=None if found.first_token_at is None else found.first_token_at - found.started,
    )


def _state(card: NodeCard, view: NodeView | None) -> State:
    if view is None:
        return "connecting"
    if card.sleeping:
        return "sleeping"
    if view.load is not None and view.load.stuck:
        return "stuck"
    return "ready" if view.accepts_work else "cordoned"


def _status(found: KnownNode) -> NodeStatus:
    card, view = found.card, found.view
    return NodeStatus(
        name=card.node,
        incarnation=card.incarnation,
        role=view.role if view is not None else card.role,
        state=_state(card, view),
        address=card.address,
        model=card.model,
        device=card.device,
        backends=card.backends,
        max_len=card.max_len,
        in_flight=view.in_flight if view is not None else 0,
        load=view.load if view is not None else None,
        version=card.version,
        models=card.models,
        engine=card.engine,
        capabilities=card.capabilities,
        adapters=card.adapters,
        weights=card.weights_version,
        weights_share=card.weights_share,
        weights_source=card.weights_source,
        weights_former=card.weights_former,
    )


def _digest_of(card: NodeCard, name: str) -> str:
    adapter = card.adapter(name)
    return "" if adapter is None else adapter.digest


def _after(found: KnownNode, answer: Managed) -> KnownNode:
    """The node as its answer says. Its next report says the same."""
    view = found.view
    if view is None or view.load is None:
        return found
    load = msgspec.structs.replace(view.load, role=answer.role, draining=answer.cordoned)
    return replace(found, view=msgspec.structs.replace(view, role=answer.role, is_cordoned=answer.cordoned, load=load))
