"""From which node the computing node fetches KV first: a rule over a choice that is made. Pure.

The rule counts tokens: the node that holds most of the prompt, if that is enough more than the computing node holds.
Whether a pull pays depends on link and model. A policy that predicts seconds sets `Decision.pull`; its silence
counts once the pair's bandwidth is known. Until then the rule pulls, which measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Decision, Query

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

    def apply(self, decision: Decision) -> Decision:
        """The decision with its pull, the policy's own where it made one, and how much that is."""
        query, own, always = decision.query, decision.pull, self.mode == "always"
        held = query.cached if query.held is None else query.held
        if own is None and (not always or not held):
            return decision  # the usual case: no node has anything
        holder = own or self.holder(decision.first, query, decision.view)
        if self.mode == "never" or holder is None or (own is None and _was_weighed(decision, holder)):
            return decision if own is None else decision.pulling(None)
        return decision.pulling(holder, query.held_on(holder))

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


def _was_weighed(decision: Decision, holder: NodeView) -> bool:
    """Whether the policy knew the pull's cost in seconds, and chose none."""
    return decision.record.ttft_s is not None and holder.bandwidth.get(decision.first.name, 0.0) > 0


def _can_give(holder: NodeView, node: NodeView, query: Query) -> bool:
    """Whether a node can give KV. One that takes no new work may; it declines by itself."""
    apart = holder.endpoint.incarnation != node.endpoint.incarnation
    return apart and holder.can_give(node) and holder.endpoint.incarnation not in query.excluded
