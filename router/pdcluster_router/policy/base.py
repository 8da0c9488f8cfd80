"""What a routing policy is given and what it returns: frozen values and one Protocol.

A policy is a pure function of a Query and a ClusterView. It has no clock, no I/O, no state, and no randomness but
Query.counter. So the live router, a dry run, a shadow and the replay call the same object. Two routers with equal views
choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Literal, Protocol

import msgspec

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import Mode

Force = Literal["auto", "remote", "local"]
Fallback = Literal["deny", "on-failure", "conditional"]
LegName = Literal["prefill", "decode", "local"]


class Query(msgspec.Struct, frozen=True):
    """What a choice depends on besides the view.

    num_tokens: the prompt and what was emitted.
    hashes: its block hashes.
    cached: tokens of the longest prefix that each node holds or will hold in time, by incarnation.
    held: those that it holds already and can be copied; None: the same.
    excluded: incarnations that failed the request.
    busy: those that said to come back later. Another node of the pool is preferred, but the pool is not left.
    expected_output: tokens still to come, as a guess.
    session: key of a conversation, "" for none. Policies that need one then use the prompt's first blocks.
    force: the required mode.
    fallback: when one node may serve alone though both pools exist.
    counter: number of this decision on this router, the only source of chance.
    previous: the mode of the last choice that no request asked for, for hysteresis.
    itl_s: the longest gap between tokens of running requests; 0: judged by the batch's own pace.
    num_held: requests that wait in the router.
    usual_tokens: of most prompts lately; 0: none has ended.
    busy_serving, busy_decoding: nodes kept busy by the prompts that this router sent lately, to nodes that compute for
    others and to decode nodes.
    lost: share of the cacheable tokens of recent prompts that no node had kept.
    model: digest of the model that it was prepared for; "" for any.
    most_tokens: the prompt and the output that was asked for; 0: not stated, so it goes wherever the prompt fits.
    """

    num_tokens: int
    hashes: bytes = b""
    cached: Mapping[str, int] = {}
    excluded: Set[str] = frozenset()
    busy: Set[str] = frozenset()
    expected_output: int = 256
    session: str = ""
    force: Force = "auto"
    fallback: Fallback = "conditional"
    held: Mapping[str, int] | None = None
    counter: int = 0
    previous: Mode | None = None
    itl_s: float = 0.0
    num_held: int = 0
    usual_tokens: float = 0.0
    busy_serving: float = 0.0
    busy_decoding: float = 0.0
    lost: float = 0.0
    model: str = ""
    most_tokens: int = 0

    @property
    def row_tokens(self) -> int:
        """Tokens that a node must take to decode it. At least one is for the output."""
        least = self.num_tokens + 1
        return self.most_tokens if self.most_tokens > least else least

    def cached_on(self, node: NodeView) -> int:
        cached = self.cached.get(node.endpoint.incarnation, 0) if self.cached else 0
        return cached if cached < self.num_tokens else self.num_tokens

    def held_on(self, node: NodeView) -> int:
        return (
            self.cached_on(node)
            if self.held is None
            else min(self.held.get(node.endpoint.incarnation, 0), self.num_tokens)
        )

    def uncached_on(self, node: NodeView) -> int:
        """Tokens to compute on the node. At least one: its logits give the first output token."""
        return max(self.num_tokens - self.cached_on(node), 1)


Terms = tuple[tuple[str, float], ...]


class Candidate(msgspec.Struct, frozen=True):
    """One node for one leg.

    names, values: terms of its cost, in seconds or the policy's own points. They add up to cost unless the policy says
    otherwise.
    rejected_by: the rule that removed it, "" when it was compared.
    """

    node: NodeView
    leg: LegName
    cached_tokens: int
    names: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    cost: float = 0.0
    rejected_by: str = ""

    @property
    def terms(self) -> Terms:
        return tuple(zip(self.names, self.values, strict=True))


class Predicted(msgspec.Struct, frozen=True, gc=False):
    """What the policy expects of its choice; None where it has no model in seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None


# Returns what was compared and why others were not. It is called when someone reads it, and holds only immutable
# values.
Record = Callable[[], tuple[Candidate, ...]]


# Whether the policy would also let that node compute the prompt in the chosen mode. The gate asks when the chosen node
# is not open, and then drops it.
Suits = Callable[[NodeView], bool]


def suits_all(node: NodeView) -> bool:
    return True


class RoutingDecision(msgspec.Struct, frozen=True, eq=False):
    """A policy's answer.

    decode: the node that runs the request to its end.
    prefill: None in mode local.
    pull: the node from which the computing node first copies its missing prefix; None for none.
    pull_tokens: how much that node holds, set by `pull`.
    """

    mode: Mode
    prefill: NodeView | None
    decode: NodeView
    record: Record = tuple
    predicted: Predicted = Predicted()
    policy: str = ""
    pull: NodeView | None = None
    pull_tokens: int = 0
    suits: Suits = suits_all

    def __eq__(self, other: object) -> bool:
        """Equal choices, whatever was compared for them."""
        return isinstance(other, RoutingDecision) and all(
            getattr(self, name) == getattr(other, name) for name in DECIDED
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.record()

    @property
    def first(self) -> NodeView:
        """The node that computes the prompt."""
        return self.prefill or self.decode


DECIDED = tuple(name for name in RoutingDecision.__struct_fields__ if name not in ("record", "suits"))


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, query: Query, view: ClusterView) -> RoutingDecision:
        """Raises Unavailable when no node may take the request."""
        ...

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        """Another decode node for KV that `prefill` holds; None for none."""
        ...
