"""An Admin service whose answers a test sets, and which keeps what was changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pdcluster.core.errors import UnknownName
from pdcluster.core.messages import Load, Role
from pdcluster.telemetry.health import Verdict
from pdcluster_router.admin.grpc import listening
from pdcluster_router.admin.operations import (
    CacheStatus,
    DrainProgress,
    NodeAdapter,
    NodeStatus,
    PolicyStatus,
    RequestList,
    RequestStatus,
    State,
)
from pdcluster_router.cluster.events import Event, EventLog
from pdcluster_router.explain.records import Explanation


def admin_node(name: str, role: Role, *, state: State = "ready", load: Load | None = None) -> NodeStatus:
    return NodeStatus(name, f"{name}-boot", role, state, "127.0.0.1:1", "bundled", "cpu", ("shm", "tcp"), 4096, 0, load)


class ScriptedAdmin:
    """Implements Operations."""

    def __init__(self, nodes: list[NodeStatus] | None = None, requests: list[RequestStatus] | None = None) -> None:
        self.node_list, self.request_list = nodes or [], requests or []
        self.explained: dict[str, list[Explanation]] = {}
        self.changes: list[tuple[Any, ...]] = []
        self.log = EventLog()

    async def nodes(self) -> list[NodeStatus]:
        return self.node_list

    async def node(self, name: str) -> NodeStatus:
        for found in self.node_list:
            if found.name == name:
                return found
        raise UnknownName(f"no node is called {name}", "node")

    async def cordon(self, name: str, *, cordoned: bool) -> NodeStatus:
        self.changes.append(("cordon", name, cordoned))
        return await self.node(name)

    async def set_role(self, name: str, role: Role) -> NodeStatus:
        self.changes.append(("role", name, role))
        return await self.node(name)

    async def change_adapter(self, name: str, path: str | None, nodes: tuple[str, ...]) -> list[NodeAdapter]:
        self.changes.append(("adapter", name, (path, nodes)))
        why = "it is bad" if path == "/bad" else ""
        return [NodeAdapter(each.name, why, "" if why or path is None else "d1") for each in self.node_list]

    async def move(self, name: str) -> int:
        raise AssertionError("a client does not ask for it")

    async def drain(self, name: str, deadline_s: float) -> AsyncIterator[DrainProgress]:
        self.changes.append(("drain", name, deadline_s))
        yield DrainProgress(0, 0, 0, True)

    async def requests(self, node: str = "") -> RequestList:
        return RequestList(tuple(self.request_list))

    async def cancel(self, request: str, reason: str) -> int:
        self.changes.append(("cancel", request, reason))
        return 1

    async def explain(self, request: str) -> list[Explanation]:
        if request not in self.explained:
            raise UnknownName(f"nothing is known of request {request}", "id")
        return self.explained[request]

    async def policy(self) -> PolicyStatus:
        return PolicyStatus("seconds", "", ("seconds", "kv-cost"))

    async def set_policy(self, *, live: str | None, shadow: str | None, dry_run: bool) -> PolicyStatus:
        if not dry_run:
            self.changes.append(("policy", live, shadow))
        return await self.policy()

    async def cache(self, *, digests: bool) -> CacheStatus:
        return CacheStatus(0, 0, ())

    def events(self, since: int, *, follow: bool) -> AsyncIterator[Event]:
        return self.log.follow(since) if follow else self.log.kept(since)


class AlwaysReady:
    """Implements RouterHealth."""

    def __init__(self, warnings: tuple[str, ...] = ()) -> None:
        self.warnings = warnings

    async def readiness(self) -> Verdict:
        return Verdict(True, "ready", [], {"can_serve": True})

    async def exposition(self) -> bytes:
        return b""


def administered(
    admin: ScriptedAdmin, address: str = "127.0.0.1:0", token: str | None = None, warnings: tuple[str, ...] = ()
):
    """Serves it while the block runs; yields HOST:PORT."""
    return listening(admin, address, token, "r0", AlwaysReady(warnings))
