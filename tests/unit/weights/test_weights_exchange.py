"""Weights between the memory of two nodes, and from a trainer into one, with real media and a network of the test."""

from __future__ import annotations

import ctypes
import re
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdcluster.checkpoint.weight_image import WeightImage, new_image
from pdcluster.core.errors import ModelError
from pdcluster.core.messages import (
    AnyMessage,
    CommitWeights,
    DropWeights,
    Endpoint,
    PrepareWeights,
    ReceiveWeights,
    WeightsManaged,
)
from pdcluster.core.weights import WeightsVersion, WeightTensor
from pdcluster.node import weights_exchange
from pdcluster.node.outbox import Outbox
from pdcluster.node.weights_exchange import ImageIntake
from pdcluster.node.weights_loader import WeightsLoader
from pdcluster.transfer.backends.base import Backend, Peer
from pdcluster.transfer.paths.choose import create_backends
from pdcluster.weights.sender import SourceTensor, WeightsSender

ROUTER, TRAINER = Peer("r", "r1"), Peer("trainer", "t-1")
STARTED, TUNED = WeightsVersion(), WeightsVersion("tuned", 1)
TENSORS = (WeightTensor("a", "F32", (1000,)), WeightTensor("b", "BF16", (7,)))
VALUES = [np.arange(tensor.nbytes, dtype=np.uint8) for tensor in TENSORS]


@dataclass
class Boot:
    version: WeightsVersion
    image: WeightImage | None
    ended: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        if self.image is not None:
            self.image.close()
        self.ended.set()


class Node:
    """A node's loader. answers: what routers were told."""

    def __init__(self, network: Network, me: Peer, serving: tuple[WeightsVersion, WeightImage | None]) -> None:
        self.me, self.outbox, self._network, name = me, Outbox(), network, me.node
        intake = ImageIntake(f"{name}:1", check, media, network.find)
        self.loader = WeightsLoader(self.me, self.outbox, prepare, intake, serving)
        self.answers: list[WeightsManaged] = []

    def turn(self) -> None:
        self.loader.turn()
        self.outbox.flush(self)

    def send(self, to: Peer | Endpoint, message: AnyMessage) -> bool:
        if isinstance(message, WeightsManaged):
            self.answers.append(message)
            return True
        return self._network.send(self.me, to, message)


class Network:
    """Nodes by name, and their loops. lost: nodes whose messages nobody gets."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.lost: set[str] = set()
        self.num_lost = 0

    def add(
        self, name: str, version: WeightsVersion = STARTED, image: WeightImage | None = None, boot: int = 1
    ) -> Node:
        self.nodes[name] = Node(self, Peer(name, f"{name}-{boot}"), (version, image))
        return self.nodes[name]

    def find(self, name: str) -> Endpoint | None:
        node = self.nodes.get(name)
        return None if node is None else Endpoint(name, node.me.incarnation, f"{name}:1")

    def send(self, sender: Peer, to: Peer | Endpoint, message: AnyMessage) -> bool:
        if to.node in self.lost:
            self.num_lost += 1
        else:
            assert self.nodes[to.node].loader.exchange.on_message(sender, message)
        return True

    def until(self, is_so: Callable[[], object]) -> None:
        deadline, poller = time.monotonic() + 10, select.poll()
        for node in self.nodes.values():
            poller.register(node.loader.wakeup_fd, select.POLLIN)
        while not is_so():
            assert time.monotonic() < deadline
            poller.poll(100)
            for node in self.nodes.values():
                node.turn()

    def answer_of(self, node: Node) -> WeightsManaged:
        self.until(lambda: node.answers)
        return node.answers.pop(0)


def check(tensors: Sequence[WeightTensor]) -> None:
    if tuple(tensors) != TENSORS:
        raise ModelError("tensors of another model")


def media(me: Peer) -> dict[str, Backend]:
    return create_backends("auto", me, host="127.0.0.1", staging_bytes=1 << 20)


def prepare(message: PrepareWeights, image: WeightImage | None) -> Boot:
    return Boot(WeightsVersion(message.version.label, message.version.epoch, "whole"), image)


def filled() -> WeightImage:
    image = new_image(TENSORS)
    for place, values in zip(image.tensors, VALUES, strict=True):
        ctypes.memmove(place.address, values.ctypes.data, len(values))
    return image


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    for node in made.nodes.values():
        node.loader.close()
        image = node.loader.exchange.serving[1]
        if image is not None:
            image.close()


def receive(node: Node, number: int = 1, version: WeightsVersion = TUNED) -> None:
    node.loader.receive(ROUTER, ReceiveWeights(number, version, Endpoint(*TRAINER, ""), TENSORS))


def written(node: Node, answer: WeightsManaged) -> tuple[tuple[str, bytes], ...]:
    assert answer.target is not None and not answer.error
    sources = [SourceTensor(tensor, values.ctypes.data) for tensor, values in zip(TENSORS, VALUES, strict=True)]
    return WeightsSender(TRAINER, sources, answer.target, media).send()


def bytes_of(image: WeightImage | None) -> bytes:
    assert image is not None
    return b"".join(
        bytes(image.memory(each.file)[each.offset : each.offset + each.tensor.nbytes]) for each in image.tensors
    )


def test_a_node_takes_what_another_one_serves(network: Network) -> None:
    network.add("p0", WeightsVersion("tuned", 1, "whole"), filled())
    taker = network.add("d0")
    taker.loader.load(ROUTER, PrepareWeights(3, TUNED, "node:p0"))
    assert network.answer_of(taker) == WeightsManaged(3, "", WeightsVersion("tuned", 1, "whole"))
    assert bytes_of(taker.loader.exchange.image_of(TUNED)) == b"".join(values.tobytes() for values in VALUES)
    # Which node gave it does not matter.
    taker.loader.load(ROUTER, PrepareWeights(4, TUNED, "node:d0"))
    assert network.answer_of(taker).error == ""


def test_a_node_has_the_weights_that_it_serves_under_another_label(network: Network) -> None:
    """A rollout finds them by their digest, and names the node itself as the one to take them from."""
    node = network.add("d0", WeightsVersion("base-again", 7, "whole"), filled())
    wanted = WeightsVersion("tuned", 9, "whole")
    node.loader.load(ROUTER, PrepareWeights(3, wanted, "node:d0"))
    assert network.answer_of(node) == WeightsManaged(3, "", wanted)
    own = node.loader.exchange.prepared
    assert own is not None and own[1] is not node.loader.exchange.serving[1]
    assert bytes_of(own[1]) == b"".join(values.tobytes() for values in VALUES)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("node:d1", "node d1 has no weights tuned .* but base"),
        ("node:x", "node x is not known"),
        ("node:d0", "node d0 is not known"),
    ],
)
def test_weights_that_a_node_has_not_are_refused_by_name(
    network: Network, source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_exchange, "FIND_S", 0.1)
    taker = network.add("d0")
    network.add("d1")
    taker.loader.load(ROUTER, PrepareWeights(3, TUNED, source))
    assert re.search(reason, network.answer_of(taker).error)


def test_a_holder_that_does_not_answer_or_is_gone_ends_it(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_exchange, "OFFER_S", 0.3)
    holder, taker = network.add("p0"), network.add("d0")
    network.lost.add("p0")
    taker.loader.load(ROUTER, PrepareWeights(3, TUNED, "node:p0"))
    assert network.answer_of(taker).error == "node p0 did not say within 0.3 s which weights it has"
    monkeypatch.setattr(weights_exchange, "OFFER_S", 10.0)
    monkeypatch.setattr(weights_exchange, "FIND_S", 0.0)
    network.num_lost = 0
    taker.loader.load(ROUTER, PrepareWeights(4, TUNED, "node:p0"))
    network.until(lambda: network.num_lost)
    taker.loader.exchange.node_gone(holder.me)
    assert network.answer_of(taker).error == "node p0, which gave the weights, is gone"


@pytest.mark.parametrize("is_known", [False, True])
def test_a_holder_that_just_went_over_is_looked_for_until_its_new_boot_is_known(
    network: Network, is_known: bool
) -> None:
    """Each node hears on its own that another one has a new boot. is_known: the boot before still is."""
    taker = network.add("d0")
    if is_known:
        former = network.add("p0")
        network.lost.add("p0")
    taker.loader.load(ROUTER, PrepareWeights(3, TUNED, "node:p0"))
    if is_known:
        network.until(lambda: network.num_lost)
        network.lost.clear()
        former.loader.close()
        taker.loader.exchange.node_gone(former.me)
    network.add("p0", WeightsVersion("tuned", 1, "whole"), filled(), boot=2)
    assert network.answer_of(taker).error == ""


def test_a_trainer_pushes_and_pushes_again(network: Network) -> None:
    node = network.add("p0")
    receive(node)
    digests = written(node, network.answer_of(node))
    node.loader.commit(ROUTER, CommitWeights(2, TUNED, digests))
    ready = WeightsManaged(2, "", WeightsVersion("tuned", 1, "whole"))
    assert network.answer_of(node) == ready
    receive(node, 3)
    assert network.answer_of(node) == WeightsManaged(3, "", ready.prepared)  # without a target: it is there
    node.loader.commit(ROUTER, CommitWeights(4, TUNED, digests))
    assert network.answer_of(node) == WeightsManaged(4, "", ready.prepared)
    node.loader.commit(ROUTER, CommitWeights(5, TUNED, ((TENSORS[0].name, bytes(16)),)))
    assert "has other weights as tuned (epoch 1)" in network.answer_of(node).error


def test_a_later_push_takes_the_place_of_one_that_was_left(network: Network) -> None:
    node = network.add("p0")
    receive(node)
    left = network.answer_of(node)
    receive(node, 2)
    answer = network.answer_of(node)
    assert answer.number == 2 and answer.target is not None and answer.target != left.target
    node.loader.commit(ROUTER, CommitWeights(3, TUNED, written(node, answer)))
    assert network.answer_of(node).error == ""


def test_a_load_takes_the_place_of_a_push_that_was_left(network: Network) -> None:
    """Its trainer died, or somebody wants other weights."""
    node, other = network.add("p0"), WeightsVersion("other", 1)
    receive(node)
    network.answer_of(node)
    node.loader.load(ROUTER, PrepareWeights(2, other, "/other"))
    assert network.answer_of(node) == WeightsManaged(2, "", WeightsVersion("other", 1, "whole"))


def test_a_push_is_dropped_and_a_commit_without_one_is_refused(network: Network) -> None:
    node = network.add("p0")
    receive(node)
    network.answer_of(node)
    node.loader.drop(ROUTER, DropWeights(2))
    assert network.answer_of(node).number == 2
    network.until(lambda: not node.loader.is_preparing)
    node.loader.commit(ROUTER, CommitWeights(3, TUNED, ()))
    assert "receives no weights tuned (epoch 1); push them again" in network.answer_of(node).error


def test_other_tensors_are_refused_before_memory_is_taken(network: Network) -> None:
    node = network.add("p0")
    node.loader.receive(ROUTER, ReceiveWeights(1, TUNED, Endpoint(*TRAINER, ""), TENSORS[:1]))
    assert network.answer_of(node) == WeightsManaged(1, "tensors of another model")
