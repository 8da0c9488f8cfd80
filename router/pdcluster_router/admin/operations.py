"""What operators ask and are told, in plain values: the seam between the Admin service (`admin_api`) and whoever
answers.

That is one router (`admin`), or the supervisor of several workers on its workers' behalf (`workers.fleet`). The values
can be sent from one process to another; nothing here does that, or decides anything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from pdcluster.core.messages import Load, Role
from pdcluster_router.cluster.events import Event
from pdcluster_router.explain.records import Explanation

State = Literal["connecting", "ready", "cordoned"]


class NodeStatus(msgspec.Struct, frozen=True):
    """in_flight: requests of the router, or of all workers, on the node; load: None before its first report."""

    name: str
    incarnation: str
    role: Role
    state: State
    address: str
    model: str
    device: str
    backends: tuple[str, ...]
    max_len: int
    in_flight: int
    load: Load | None


class RequestStatus(msgspec.Struct, frozen=True):
    """One choice of a client's request that is not answered yet. mode, prefill, decode: "" until they are chosen."""

    id: str
    model: str
    state: str
    mode: str
    prefill: str
    decode: str
    prompt_tokens: int
    output_tokens: int
    attempts: int
    age_s: float


class RequestList(msgspec.Struct, frozen=True):
    """Oldest first. silent: workers that did not answer, so that what they work on is not listed."""

    requests: tuple[RequestStatus, ...]
    silent: tuple[str, ...] = ()


class PolicyStatus(msgspec.Struct, frozen=True):
    """shadow: "" for none; known: names that may be set."""

    live: str
    shadow: str
    known: tuple[str, ...]


class CachedNode(msgspec.Struct, frozen=True):
    """digest: of the blocks, equal for equal sets, "" when it was not asked for; is_exact: all that the node last said
    is known."""

    node: str
    incarnation: str
    blocks: int
    is_exact: bool
    digest: str = ""


class CacheStatus(msgspec.Struct, frozen=True):
    """entries: (block, node) pairs of one view; bytes: of all views; views: each worker's own, none for a router
    alone."""

    entries: int
    bytes: int
    nodes: tuple[CachedNode, ...]
    worker: str = ""
    views: tuple[CacheStatus, ...] = ()
    silent: tuple[str, ...] = ()


class DrainProgress(msgspec.Struct, frozen=True):
    """What is left on a node that drains."""

    waiting: int
    running: int
    pages_parked: int
    is_done: bool


class Operations(Protocol):
    """Raises UnknownName for what is not known (any more), BadRequest, NodeLost, DeadlineExceeded, and Unavailable when
    nobody can answer."""

    async def nodes(self) -> list[NodeStatus]: ...

    async def node(self, name: str) -> NodeStatus: ...

    async def cordon(self, name: str, *, cordoned: bool) -> NodeStatus: ...

    async def set_role(self, name: str, role: Role) -> NodeStatus: ...

    def drain(self, name: str, deadline_s: float) -> AsyncIterator[DrainProgress]: ...

    async def requests(self, node: str = "") -> RequestList: ...

    async def cancel(self, request: str, reason: str) -> int: ...

    async def explain(self, request: str) -> list[Explanation]: ...

    async def policy(self) -> PolicyStatus: ...

    async def set_policy(self, *, live: str | None, shadow: str | None, dry_run: bool) -> PolicyStatus: ...

    async def cache(self, *, digests: bool) -> CacheStatus: ...

    def events(self, since: int, *, follow: bool) -> AsyncIterator[Event]: ...
