"""A node that starts where the cluster serves newer weights than its files hold: it takes those before it registers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from pdcluster.bootstrap.agent import NodeAgent
from pdcluster.bootstrap.card import NodeCard
from pdcluster.core.messages import PrepareWeights
from pdcluster.core.weights import NODE_SOURCE
from pdcluster.node.control import NodeControl

logger = logging.getLogger(__name__)

# For the first word of a bootstrap. One that is away does not know newer weights, either.
CLUSTER_S = 3.0


@dataclass(frozen=True, slots=True)
class NewerWeights:
    """What a node of the cluster serves. source: where it has them from, as the others say it."""

    order: PrepareWeights
    share: float
    source: str


def newer_weights(cards: Iterable[NodeCard], own: NodeCard, *, from_files: bool = False) -> list[NewerWeights]:
    """The newest version of the whole cluster, from each node that has it. One that gets a share of requests alone is
    tried out: the node stays with the others.

    from_files: the node reads the files that the other has them from, not its memory.
    """
    others = [card for card in cards if card.node != own.node and card.weights_share >= 100.0]
    newest = max((card.weights_epoch for card in others), default=0)
    found = [
        NewerWeights(
            PrepareWeights(0, card.weights_version, card.weights_source if from_files else NODE_SOURCE + card.node),
            card.weights_share,
            card.weights_source,
        )
        for card in others
        if card.weights_epoch == newest > own.weights_epoch
    ]
    return list(dict.fromkeys(found))


def catch_up(agent: NodeAgent, control: NodeControl, own: NodeCard, *, from_files: bool = False) -> NewerWeights | None:
    """Load what the cluster serves, and go over to it at once. None where the node's own weights serve."""
    newer = newer_weights(agent.cards(CLUSTER_S), own, from_files=from_files)
    for found in newer:
        if control.is_stopping:
            return None
        logger.info("the cluster serves the weights %s: taking them from %s", found.order.version, found.order.source)
        if control.catch_up(found.order, found.share):
            return found
    if newer and not control.is_stopping:
        logger.warning(
            "none of %s gave node %s the cluster's weights %s: it goes on with those that it was started with",
            ", ".join(found.order.source for found in newer), own.node, newer[0].order.version,
        )  # fmt: skip
    return None
