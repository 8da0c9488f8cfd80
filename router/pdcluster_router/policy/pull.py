"""From which node the one that computes a prompt fetches KV first: a rule over a choice that is made already. Pure;
policies may say it themselves.

The rule is about tokens, not seconds: the node that holds most of the prompt, if that is enough more than the computing
node holds. Whether such a pull pays is a matter of link and model; a policy that predicts seconds sets Choice.pull, and
its silence counts once the pair's bandwidth is known. Until then the rule pulls, which is how that bandwidth is
measured.
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
    """mode: always when at least min_tokens (and a hash block) need not be computed; chosen: only what the policy
    itself chose; never."""

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
                return choice  # as mostly: nobody has anything, or the computing node alone
        holder = own or (self.holder(choice.first, query, view) if always else None)
        if self.mode == "never" or holder is None or (own is None and _was_weighed(choice, holder)):
            return choice if own is None else replace(choice, pull=None)
        return replace(choice, pull=holder, pull_tokens=query.held_on(holder))

    def leaves(self, most_held: int, own: int, node: NodeView) -> bool:
        """Whether it is plain that `apply` leaves a choice as it is that pulls nothing: nobody has enough beyond the
        `own` tokens of the node that computes the prompt. most_held: tokens of it that any node holds."""
        return self.mode != "always" or not most_held or most_held - own < max(self.min_tokens, node.block_tokens)

    def holder(self, node: NodeView, query: Query, view: ClusterView) -> NodeView | None:
        """Who has most beyond what `node` holds; None when nobody has enough."""
        held = query.cached if query.held is None else query.held
        if not held:
            return None
        worth, own = max(self.min_tokens, node.block_tokens), query.cached_on(node)
        if max(held.values()) - own < worth:
            return None  # whoever has most
        able = [each for each in map(view.find, held) if each is not None and _can_give(each, node, query)]
        best = min(able, key=lambda each: (-query.held_on(each), each.num_requests, each.name), default=None)
        if best is None:
            return None
        saved = min(query.held_on(best), query.num_tokens - 1) - own
        return best if saved >= worth else None


# Pulls whenever a hash block is saved.
BY_TOKENS = PullRule()


def _was_weighed(choice: RoutingDecision, holder: NodeView) -> bool:
    """The policy knew what the pull would cost in seconds, and chose none."""
    return choice.predicted.ttft_s is not None and holder.bandwidth.get(choice.first.name, 0.0) > 0


def _can_give(holder: NodeView, node: NodeView, query: Query) -> bool:
    """One that takes no new work may still give; it says so itself when it will not."""
    apart = holder.endpoint.incarnation != node.endpoint.incarnation
    return apart and holder.can_exchange(node) and holder.endpoint.incarnation not in query.excluded
