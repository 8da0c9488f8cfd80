"""What an operator may ask of a router and change through it, in plain values. Served over gRPC by `admin_api`; decides nothing by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import msgspec

from pdcluster.bootstrap.card import NodeCard
from pdcluster.errors import BadRequest, ConfigError, DeadlineExceeded, UnknownName
from pdcluster.messages import Managed, Role
from pdcluster_router.chooser import PolicyHolder
from pdcluster_router.cluster import Cluster
from pdcluster_router.events import EventLog
from pdcluster_router.explain import Explainer, Explanation
from pdcluster_router.open_requests import OpenRequest, OpenRequests
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.view import NodeView

MANAGE_S = 5.0
"""Longest wait for a node's answer to a wish."""

LOOK_S = 1.0
"""A drain looks this often, even when nothing is heard."""


@dataclass(frozen=True, slots=True)
class KnownNode:
    """view None: the bootstrap lists it, but there is no link or no report yet."""

    card: NodeCard
    view: NodeView | None


@dataclass(frozen=True, slots=True)
class Progress:
    waiting: int
    running: int
    pages_parked: int
    is_done: bool


class Admin:
    """Owned by the router's event loop."""

    def __init__(
        self,
        cluster: Cluster,
        requests: OpenRequests,
        policies: PolicyHolder,
        events: EventLog,
        explainer: Explainer,
        clock: Callable[[], float],
    ) -> None:
        self.cluster = cluster
        self._explainer = explainer
        self.requests = requests
        self.policies = policies
        self.events = events
        self._clock = clock

    # ------------------------------------------------------------ nodes

    def nodes(self) -> list[KnownNode]:
        views = {view.endpoint.incarnation: view for view in self.cluster.view().nodes}
        return [KnownNode(card, views.get(card.incarnation)) for card in self.cluster.listed()]

    def node(self, name: str) -> KnownNode:
        """Raises UnknownName."""
        nodes = self.nodes()
        for found in nodes:
            if name in (found.card.node, found.card.incarnation):
                return found
        known = ", ".join(sorted(found.card.node for found in nodes)) or "none"
        raise UnknownName(f"no node is called {name[:200]!r}; known: {known}", "node")

    async def cordon(self, name: str, *, cordoned: bool) -> KnownNode:
        found = await self._manage(name, cordoned=cordoned)
        self.events.add("cordon" if cordoned else "uncordon", found.card.node, "takes no new work" if cordoned else "takes work again")
        return found

    async def set_role(self, name: str, role: Role, why: str = "asked by an operator") -> KnownNode:
        before = self.node(name)
        found = await self._manage(name, role=role)
        was = before.view.role if before.view is not None else before.card.role
        if was != role:
            self.events.add("role", found.card.node, f"{was} becomes {role}: {why}")
        return found

    async def drain(self, name: str, deadline_s: float) -> AsyncIterator[Progress]:
        """Cordon, then report whenever it changed what is left. Raises DeadlineExceeded when something runs after deadline_s."""
        deadline = self._clock() + deadline_s
        found = await self.cordon(name, cordoned=True)
        self.events.add("drain", found.card.node, f"within {deadline_s:g} s")
        told: Progress | None = None
        while True:
            seen = self.cluster.version
            progress = _progress(self.node(found.card.incarnation))
            if progress is not None and progress != told:
                told = progress
                yield progress
            if progress is not None and progress.is_done:
                self.events.add("drained", found.card.node, "nothing runs there; it may be stopped")
                return
            await self._changed(seen, deadline, found.card.node)

    async def _changed(self, seen: int, deadline: float, node: str) -> None:
        left = deadline - self._clock()
        if left <= 0:
            way_out = "it stays cordoned; drain it again, or cancel its requests"
            raise DeadlineExceeded(f"node {node} is still at work at the deadline; {way_out}", "request")
        try:
            async with asyncio.timeout(min(left, LOOK_S)):
                await self.cluster.wait_for_change(seen)
        except TimeoutError:
            return

    async def _manage(self, name: str, *, role: Role | None = None, cordoned: bool | None = None) -> KnownNode:
        found = self.node(name)
        try:
            answer = await self.cluster.manage(found.card.incarnation, role=role, cordoned=cordoned, timeout_s=MANAGE_S)
        except TimeoutError:
            raise DeadlineExceeded(f"node {found.card.node} did not answer within {MANAGE_S:g} s; see its log", "handshake") from None
        return _after(found, answer)

    # ------------------------------------------------------------ requests

    def requests_on(self, node: str = "") -> list[OpenRequest]:
        """Of this router, oldest first; those on one node, or all."""
        return [found for found in self.requests.all() if not node or node in (found.prefill, found.decode)]

    def age_s(self, request: OpenRequest) -> float:
        return self._clock() - request.started

    def cancel(self, request: str, reason: str) -> int:
        """Raises UnknownName when no open request has that id."""
        if not self.requests.matching(request):
            raise UnknownName(f"no open request is called {request[:200]!r}; it has ended, or another router has it", "id")
        num_cancelled = self.requests.cancel(request, reason or "no reason given")
        if num_cancelled:
            self.events.add("cancel", request, reason or "no reason given")
        return num_cancelled

    def explain(self, request: str) -> list[Explanation]:
        """Why a request, or each of its choices, went where it went. Raises UnknownName when that is not known (any more)."""
        found = self._explainer.explain_all(request)
        if not found:
            raise UnknownName(f"nothing is known of request {request[:200]!r}; it is too long ago, or another router has it", "id")
        return found

    # ------------------------------------------------------------ policy

    def set_policy(self, *, live: str | None, shadow: str | None, dry_run: bool) -> None:
        """From the next decision on; shadow "" removes it. Raises BadRequest for one that does not exist, and then changes nothing."""
        try:
            made = make_policy(live) if live is not None else self.policies.live
            watching = self.policies.shadow if shadow is None else make_policy(shadow) if shadow else None
        except ConfigError as error:
            raise BadRequest(str(error), "policy") from error
        if dry_run:
            return
        if live is not None:
            self.events.add("policy", "", f"{self.policies.live.name} becomes {live}")
        if shadow is not None:
            self.events.add("policy", "", f"the shadow is {shadow or 'none'}")
        self.policies.live, self.policies.shadow = made, watching


def _progress(found: KnownNode) -> Progress | None:
    """None while the node has not reported since it was cordoned."""
    view = found.view
    if view is None or view.load is None or not view.load.draining:
        return None
    load = view.load
    is_done = not (load.waiting or load.running or load.pages_parked or load.slots_used or view.in_flight)
    return Progress(load.waiting, load.running, load.pages_parked, is_done)


def _after(found: KnownNode, answer: Managed) -> KnownNode:
    """As the node says it is now; its next report says the same."""
    view = found.view
    if view is None or view.load is None:
        return found
    load = msgspec.structs.replace(view.load, role=answer.role, draining=answer.cordoned)
    return replace(found, view=replace(view, role=answer.role, is_cordoned=answer.cordoned, load=load))
