"""The seam between the Admin service and whoever answers it: plain values and one protocol.

One router answers (`admin.service`), or the supervisor for its workers (`workers.fleet`). Values can go from process to
process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal, Protocol

import msgspec

from pdcluster.bootstrap.card import NATIVE, Adapter, Capabilities
from pdcluster.core.messages import Load, Role, WeightsOrder, WeightsTarget
from pdcluster.core.weights import FormerWeights, WeightsVersion
from pdcluster.kv.layout import NATIVE_ENGINE
from pdcluster_router.cluster.events import Event
from pdcluster_router.explain.records import Explanation
from pdcluster_router.queueing.pauses import PauseMode

State = Literal["connecting", "ready", "cordoned", "stuck", "sleeping"]


class NodeStatus(msgspec.Struct, frozen=True):
    """One node.

    in_flight: requests of the router, or of all workers.
    load: None before its first report.
    """

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
    version: str = ""
    # Every name that requests may use.
    models: tuple[str, ...] = ()
    engine: str = NATIVE_ENGINE
    capabilities: Capabilities = NATIVE
    adapters: tuple[Adapter, ...] = ()
    # Those that it serves, their share of the requests that name none, where they come from, and what was before.
    weights: WeightsVersion = WeightsVersion()
    weights_share: float = 100.0
    weights_source: str = ""
    weights_former: FormerWeights | None = None


class NodeWeights(msgspec.Struct, frozen=True):
    """A node's answer to what it was asked of its weights.

    error: why it was not done, "" where it was.
    prepared: the version that is ready to be switched to; None: none is.
    target: where weights may be written, if that was asked for.
    """

    node: str
    error: str = ""
    prepared: WeightsVersion | None = None
    target: WeightsTarget | None = None


class WeightsRollout(msgspec.Struct, frozen=True):
    """Weights that nodes shall serve.

    source: a directory or file on the nodes' machines, or a hub's ORG/NAME.
    max_unavailable: how many nodes may change at the same time; 0: all.
    canary_percent: load as few nodes as serve, which get this share of the requests that name no weights; None: all.
    finish_s: how long a node may end what runs; what is left moves to other nodes then.
    releases_first: nodes sleep before they load, so that one set of weights is in memory at a time.
    """

    source: str
    label: str
    max_unavailable: int = 1
    canary_percent: float | None = None
    finish_s: float = 600.0
    releases_first: bool = False


class RolloutProgress(msgspec.Struct, frozen=True):
    """Where a rollout is.

    stage: loading, ending (what runs there), sleeping or serving.
    node: "" once all are done.
    num_done: nodes that serve the version, of num_nodes.
    running, context_tokens: what the node still has to end.
    """

    node: str
    stage: str
    version: WeightsVersion
    num_done: int
    num_nodes: int
    running: int = 0
    context_tokens: int = 0
    seconds: float = 0.0


class NodeAdapter(msgspec.Struct, frozen=True):
    """How a change of an adapter ended at one node.

    error: why it was not done, "" where it was.
    digest: of the files that are loaded.
    """

    node: str
    error: str = ""
    digest: str = ""


class RequestStatus(msgspec.Struct, frozen=True):
    """One choice of a request without its final answer.

    mode, prefill, decode: "" until chosen.
    placed_s, ttft_s: after it came, when its nodes were chosen last, and its first token; None until then.
    """

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
    placed_s: float | None = None
    ttft_s: float | None = None


class RequestList(msgspec.Struct, frozen=True):
    """Requests, oldest first.

    silent: workers that did not answer, whose requests are missing.
    """

    requests: tuple[RequestStatus, ...]
    silent: tuple[str, ...] = ()


class PolicyStatus(msgspec.Struct, frozen=True):
    """Policies.

    shadow: "" for none.
    known: names that may be set.
    shadow_agreed, shadow_watched: decisions of the present shadow, equal to the live policy's and all.
    """

    live: str
    shadow: str
    known: tuple[str, ...]
    shadow_agreed: int = 0
    shadow_watched: int = 0


class CachedNode(msgspec.Struct, frozen=True):
    """One node's cache as the index has it.

    digest: equal for equal sets of blocks, "" when not requested.
    is_exact: the index has all that the node last reported.
    """

    node: str
    incarnation: str
    blocks: int
    is_exact: bool
    digest: str = ""


class CacheStatus(msgspec.Struct, frozen=True):
    """The prefix index.

    entries: (block, node) pairs of one view.
    bytes: of all views.
    views: one per worker, none for a router alone.
    """

    entries: int
    bytes: int
    nodes: tuple[CachedNode, ...]
    worker: str = ""
    views: tuple[CacheStatus, ...] = ()
    silent: tuple[str, ...] = ()


class DrainProgress(msgspec.Struct, frozen=True):
    """What is left on a draining node.

    num_moved: requests that went to other nodes, once the deadline passed.
    """

    waiting: int
    running: int
    pages_parked: int
    is_done: bool
    num_moved: int = 0


class Operations(Protocol):
    """What operators may do. Raises UnknownName, BadRequest, NodeLost, DeadlineExceeded, or Unavailable when no worker
    answers.
    """

    async def nodes(self) -> list[NodeStatus]: ...

    async def node(self, name: str) -> NodeStatus: ...

    async def cordon(self, name: str, *, cordoned: bool) -> NodeStatus: ...

    async def set_role(self, name: str, role: Role) -> NodeStatus: ...

    async def move(self, name: str) -> int: ...

    async def change_adapter(self, name: str, path: str | None, nodes: tuple[str, ...]) -> list[NodeAdapter]:
        """Load an adapter on these nodes, or on all; path None unloads it."""
        ...

    async def change_weights(self, name: str, order: WeightsOrder) -> NodeWeights:
        """Ask something of one node's weights. A node that goes over to others answers without an error."""
        ...

    async def pause(self, mode: PauseMode, max_pause_s: float) -> int:
        """Hold new requests, and end, await or hold those that run. Returns once none runs: how many there were."""
        ...

    async def resume(self) -> bool:
        """End the pause; False where there was none."""
        ...

    async def is_paused(self) -> bool: ...

    async def sleep(self, finish_s: float) -> list[str]:
        """Have all nodes give the memory of weights and KV back. What runs may end within finish_s. Returns the nodes
        that fell asleep."""
        ...

    async def wake(self) -> list[str]:
        """Have all nodes that sleep serve the weights that they had. Returns which nodes."""
        ...

    def load_weights(self, wanted: WeightsRollout) -> AsyncGenerator[RolloutProgress, None]: ...

    def undo_weights(self, finish_s: float) -> AsyncGenerator[RolloutProgress, None]: ...

    def drain(self, name: str, deadline_s: float) -> AsyncIterator[DrainProgress]: ...

    async def requests(self, node: str = "") -> RequestList: ...

    async def cancel(self, request: str, reason: str) -> int: ...

    async def explain(self, request: str) -> list[Explanation]: ...

    async def policy(self) -> PolicyStatus: ...

    async def set_policy(self, *, live: str | None, shadow: str | None, dry_run: bool) -> PolicyStatus: ...

    async def cache(self, *, digests: bool) -> CacheStatus: ...

    def events(self, since: int, *, follow: bool) -> AsyncIterator[Event]: ...
