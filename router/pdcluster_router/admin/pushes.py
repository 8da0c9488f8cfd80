"""Weights that a trainer writes into the memory of one node. From there a rollout passes them on (`rollouts`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdcluster.core.errors import BadRequest, PdclusterError, Unavailable, UnknownName
from pdcluster.core.messages import CommitWeights, Endpoint, ReceiveWeights, TensorDigests, WeightsTarget
from pdcluster.core.weights import WeightsVersion, WeightTensors, check_label, holder_of
from pdcluster_router.admin.operations import NodeStatus, Operations


class OpenedPush(msgspec.Struct, frozen=True):
    """The node that takes the weights. target: where to write them; None: it has that version already."""

    node: str
    version: WeightsVersion
    target: WeightsTarget | None


async def open_push(cluster: Operations, label: str, writer: tuple[str, str], tensors: Sequence[object]) -> OpenedPush:
    """Have one node take the weights. writer: name and incarnation. tensors: as WeightTensor has its fields, unchecked.

    Raises BadRequest, UnknownName without nodes, and Unavailable with the node's reason.
    """
    check_label(label)
    if not (nodes := await cluster.nodes()):
        raise UnknownName("no node is known that could take weights", "nodes")
    checked = _checked(tensors, WeightTensors)
    node, version = receiver_of(nodes, label)
    order = ReceiveWeights(0, version, _checked((*writer, ""), Endpoint), checked)
    answer = await cluster.change_weights(node.name, order)
    if answer.error:
        raise Unavailable(f"node {node.name} does not take the weights {version}: {answer.error}")
    return OpenedPush(node.name, version, answer.target)


async def commit_push(
    cluster: Operations, node: str, version: WeightsVersion, digests: Mapping[str, bytes]
) -> WeightsVersion:
    """Have the node check and load what was written. digests: by the tensor's name."""
    check_label(version.label)
    order = CommitWeights(0, version, _checked(list(digests.items()), TensorDigests))
    answer = await cluster.change_weights(node, order)
    if answer.error or answer.prepared is None:
        raise PdclusterError(f"node {node}: {answer.error or 'it has nothing ready'}")
    return answer.prepared


def receiver_of(nodes: list[NodeStatus], label: str) -> tuple[NodeStatus, WeightsVersion]:
    """The node that takes weights of that label, and their version: one that serves them, else always the same one, so
    that a push that is tried again finds what it left. Raises BadRequest for a label of other weights.
    """
    newest = max(node.weights.epoch for node in nodes)
    alike = [node for node in nodes if node.weights.label == label]
    if any(node.weights.epoch != newest or holder_of(node.weights_source) is None for node in alike):
        raise BadRequest(f"the label {label!r} is that of other weights in the cluster; choose another one", "label")
    if alike:
        return alike[0], msgspec.structs.replace(alike[0].weights, digest="")
    ready = [node for node in nodes if node.state == "ready"] or nodes
    return min(ready, key=lambda node: node.name), WeightsVersion(label, newest + 1)


def _checked(value: object, kind: object) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the push is malformed: {error}", "tensors") from error
