"""Which node takes pushed weights, and what it and the caller are told."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pdcluster.core.errors import BadRequest, PdclusterError, Unavailable, UnknownName
from pdcluster.core.messages import CommitWeights, Endpoint, ReceiveWeights, WeightsOrder, WeightsTarget
from pdcluster.core.weights import NODE_SOURCE, WeightsVersion
from pdcluster_router.admin.operations import NodeStatus, NodeWeights
from pdcluster_router.admin.pushes import commit_push, open_push, receiver_of

TENSORS = [("a", "BF16", (2, 3))]
TARGET = WeightsTarget(5, Endpoint("d0", "d0-0", "d0:1"), 0, (4096,))


def node(name: str, **fields: Any) -> NodeStatus:
    made = NodeStatus(name, f"{name}-0", "mixed", "ready", f"{name}:1", "m", "cpu", (), 100, 0, None)
    return replace(made, **fields)


class Cluster:
    """The part of Operations that a push needs."""

    def __init__(self, *nodes: NodeStatus, answer: NodeWeights) -> None:
        self.known, self.answer, self.orders = list(nodes), answer, list[tuple[str, WeightsOrder]]()

    async def nodes(self) -> list[NodeStatus]:
        return self.known

    async def change_weights(self, name: str, order: WeightsOrder) -> NodeWeights:
        self.orders.append((name, order))
        return self.answer


async def opened(cluster: Cluster, tensors: object = TENSORS) -> Any:
    return await open_push(cluster, "tuned", ("trainer", "t-1"), tensors)  # type: ignore[arg-type]


async def test_one_node_is_asked_for_the_next_epoch() -> None:
    cluster = Cluster(node("p0"), node("d0", weights=WeightsVersion("x", 4)), answer=NodeWeights("d0", target=TARGET))
    found = await opened(cluster)
    assert (found.node, found.version, found.target) == ("d0", WeightsVersion("tuned", 5), TARGET)
    [(name, order)] = cluster.orders
    assert name == "d0" and isinstance(order, ReceiveWeights) and order.writer == Endpoint("trainer", "t-1", "")


def test_weights_that_nodes_serve_are_asked_of_one_of_them() -> None:
    served = WeightsVersion("tuned", 1, "d")
    nodes = [node("d0"), node("p0", weights=served, weights_source=NODE_SOURCE)]
    assert receiver_of(nodes, "tuned") == (nodes[1], WeightsVersion("tuned", 1))
    with pytest.raises(BadRequest, match="choose another one"):
        receiver_of([node("d0"), node("p0", weights=served, weights_source="/files")], "tuned")
    assert receiver_of([node("a", state="stuck"), node("b")], "tuned")[0].name == "b"


async def test_reasons_and_malformed_tensors_are_said() -> None:
    with pytest.raises(Unavailable, match=r"node d0 does not take the weights tuned \(epoch 1\): no memory"):
        await opened(Cluster(node("d0"), answer=NodeWeights("d0", "no memory")))
    with pytest.raises(UnknownName):
        await opened(Cluster(answer=NodeWeights("d0")))
    with pytest.raises(BadRequest, match="malformed: Invalid enum value 'I8'"):
        await opened(Cluster(node("d0"), answer=NodeWeights("d0")), [("a", "I8", (1,))])


async def test_a_commit_answers_with_the_digest_of_all() -> None:
    ready = WeightsVersion("tuned", 1, "whole")
    cluster = Cluster(node("d0"), answer=NodeWeights("d0", prepared=ready))
    assert await commit_push(cluster, "d0", WeightsVersion("tuned", 1), {"a": bytes(16)}) == ready  # type: ignore[arg-type]
    assert cluster.orders == [("d0", CommitWeights(0, WeightsVersion("tuned", 1), (("a", bytes(16)),)))]
    cluster.answer = NodeWeights("d0", "tensor a did not arrive")
    with pytest.raises(PdclusterError, match="node d0: tensor a did not arrive"):
        await commit_push(cluster, "d0", WeightsVersion("tuned", 1), {})  # type: ignore[arg-type]
