"""What a routing policy is asked and what it answers: frozen values and one Protocol.

A policy is a pure function of a Query and a ClusterView: no clock, no I/O, no state, no randomness but Query.counter.
So the live router, a dry run, a shadow and the replay all call the same object, and two routers with equal views choose
alike.
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

    num_tokens: the prompt and what was emitted; hashes: its block hashes. cached: tokens of the longest prefix that
    each node holds or will by the time it gets to this request, by incarnation (none: 0); held: those that it holds
    already, so that they can be copied; None: the same. excluded: incarnations that failed this request already; busy:
    those that said to come back later, which is a reason to prefer another of the same pool, but none to leave the
    pool. expected_output: tokens that are still to come, as far as one can tell. session: key of a conversation, "" for
    none; without it, policies that need one use the prompt's first blocks. force: the mode that the request must have.
    fallback: when a request may run on one node though both pools exist. counter: number of this decision on this
    router, the only source of chance. previous: the mode of the router's last choice that no request asked for, for
    hysteresis. itl_s: the longest gap between the tokens of running requests that a choice may cause; 0: judged by the
    batch's own pace. num_held: requests that wait in the router for a node. usual_tokens: of most prompts lately; 0:
    none has ended. busy_serving, busy_decoding: how many nodes the prompts kept busy that this router sent lately to
    those that compute for others, and to decode nodes. lost: of what prompts of late could have had cached, the share
    that no node had kept.
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
        """At least one token is always computed: the first output token is drawn from its logits."""
        return max(self.num_tokens - self.cached_on(node), 1)


Terms = tuple[tuple[str, float], ...]


class Candidate(msgspec.Struct, frozen=True):
    """One node for one leg. names and values of the terms that its cost is made of, in seconds, or in the policy's own
    points; they add up to cost unless the policy's docstring says otherwise. rejected_by: the rule that removed it, ""
    when it was compared."""

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


# Tells what was compared and why others were not. Asked when somebody reads it, if ever, so it holds only what never
# changes; the whole view may be behind it until then.
Record = Callable[[], tuple[Candidate, ...]]


# Whether the policy would let that node compute the prompt, too, in the mode that it chose. The gate asks when the
# chosen node is not open, and then lets go of it, since the whole view may be behind it.
Suits = Callable[[NodeView], bool]


def suits_all(node: NodeView) -> bool:
    return True


class RoutingDecision(msgspec.Struct, frozen=True, eq=False):
    """decode is the node that runs the request to its end; prefill is None in mode local. pull: the node from which the
    computing node first copies the prefix that it holds itself no longer, None for none; pull_tokens: how much that
    node holds, filled in by `pull`."""

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
        """Whatever was compared on the way."""
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
        """Another decode node for KV that `prefill` holds; None when there is none."""
        ...
