"""From which node the computing node fetches KV first: a rule over a choice that is made. Pure.

The rule counts tokens: the node that holds most of the prompt, if that is enough more than the computing node holds.
Whether a pull pays depends on link and model. A policy that predicts seconds sets `RoutingDecision.pull`; its silence
counts once the pair's bandwidth is known. Until then the rule pulls, which measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Query, RoutingDecision

PullMode = Literal["always", "chosen", "never"]


@dataclass(frozen=True, slots=True)
class PullRule:
    """When to pull.

    always: when at least min_tokens, and a hash block, need not be computed.
    chosen: only what the policy chose.
    never: no pulls.
    """

    mode: PullMode = "always"
    min_tokens: int = 1

    def apply(self, choice: RoutingDecision, query: Query, view: ClusterView) -> RoutingDecision:
        """The choice with its pull, the policy's own where it made one, and how much that is."""
        own, always = choice.pull, self.mode == "always"
        if own is None:
            held = query.cached if query.held is None else query.held
            if (
                not always
                or not held
                or (len(held) == 1 and (choice.prefill or choice.decode).endpoint.incarnation in held)
            ):
                return choice  # the usual case: no other node has anything
        holder = own or (self.holder(choice.first, query, view) if always else None)
        if self.mode == "never" or holder is None or (own is None and _was_weighed(choice, holder)):
            return choice if own is None else replace(choice, pull=None)
        return replace(choice, pull=holder, pull_tokens=query.held_on(holder))

    def leaves(self, most_held: int, own: int, node: NodeView) -> bool:
        """Whether `apply` clearly leaves a choice without a pull as it is: no node has enough beyond `own` tokens.

        most_held: tokens that any node holds.
        """
        return self.mode != "always" or not most_held or most_held - own < max(self.min_tokens, node.block_tokens)

    def holder(self, node: NodeView, query: Query, view: ClusterView) -> NodeView | None:
        """The node with most beyond what `node` holds; None when none has enough."""
        held = query.cached if query.held is None else query.held
        if not held:
            return None
        worth, own = max(self.min_tokens, node.block_tokens), query.cached_on(node)
        if max(held.values()) - own < worth:
            return None  # the node itself has most
        able = [each for each in map(view.find, held) if each is not None and _can_give(each, node, query)]
        best = min(able, key=lambda each: (-query.held_on(each), each.num_requests, each.name), default=None)
        if best is None:
            return None
        saved = min(query.held_on(best), query.num_tokens - 1) - own
        return best if saved >= worth else None


# Pulls whenever a hash block is saved.
BY_TOKENS = PullRule()


def _was_weighed(choice: RoutingDecision, holder: NodeView) -> bool:
    """Whether the policy knew the pull's cost in seconds, and chose none."""
    return choice.predicted.ttft_s is not None and holder.bandwidth.get(choice.first.name, 0.0) > 0


def _can_give(holder: NodeView, node: NodeView, query: Query) -> bool:
    """Whether a node can give KV. One that takes no new work may; it declines by itself."""
    apart = holder.endpoint.incarnation != node.endpoint.incarnation
    return apart and holder.can_exchange(node) and holder.endpoint.incarnation not in query.excluded
