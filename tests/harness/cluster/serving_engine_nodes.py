"""Nodes p and d with a serving engine each, stepped by a test: letters instead of links, the test's own clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_serving_engine import FACTS, FakeServingEngine, ParkedStore
from msgspec import structs
from stepped_nodes import Letter, LetterBox

from pdcluster.bootstrap.card import Adapter, NodeCard
from pdcluster.checkpoint.weight_image import WeightImage
from pdcluster.core.errors import BadRequest, ModelError
from pdcluster.core.messages import (
    Deliver,
    Endpoint,
    Prefill,
    PrepareWeights,
    Reserve,
    Reserved,
    Role,
    Sampling,
    TokenRow,
    Tokens,
    Work,
    pack_tokens,
)
from pdcluster.cost.fit import Step
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster.node.acceptance import Acceptance
from pdcluster.node.availability import NodeAvailability
from pdcluster.node.control import NodeControl, NodeLinks
from pdcluster.node.legs import EndedLegs
from pdcluster.node.outbox import Outbox
from pdcluster.node.parking import ParkedKV
from pdcluster.node.reports.leg_records import LegRecorder
from pdcluster.node.server import NextBoot
from pdcluster.node.vllm.adapters import AdapterBook
from pdcluster.node.vllm.decode_rows import DecodeRows
from pdcluster.node.vllm.engine_side import VllmParts, VllmSide
from pdcluster.node.vllm.parked_prompts import MEDIUM, ParkedPrompts
from pdcluster.node.vllm.requests import EngineQueue
from pdcluster.node.vllm.weights_change import CheckedWeights, WeightsReplacement
from pdcluster.node.weights_loader import WeightsLoader
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.hub import Received

ROUTER = Peer("router", "router-1")
PARKS_S = 25.0
LAYOUT = KVLayout(1, 1, 2, 32, "float32")


def work_of(name: str, tokens: list[int], max_tokens: int = 4, attempt: int = 0, num_prompt: int = 0) -> Work:
    sampling = Sampling(max_tokens=max_tokens, seed=1, temperature=0.0)
    return Work(name, attempt, pack_tokens(tokens), num_prompt or len(tokens), b"", sampling, 60.0)


def refuse_hot_sampling(sampling: Sampling, num_emitted: int) -> None:
    if sampling.temperature > 2.0:
        raise BadRequest("vLLM takes temperatures up to 2", "temperature")


class NoNeighbours:
    def __init__(self, wakeup_fd: int) -> None:
        self.wakeup_fd = wakeup_fd
        self.adapters: tuple[Adapter, ...] = ()

    def gone(self) -> list[Peer]:
        return []

    def set_draining(self, is_draining: bool) -> None:
        """Nobody looks."""

    def set_role(self, role: Role) -> None:
        """Nobody looks."""

    def set_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        self.adapters = adapters

    def set_weights_share(self, share: float) -> None:
        self.share = share


class VllmNode:
    """One boot. engine: of the boot before."""

    def __init__(
        self, name: str, cluster: VllmNodes, engine: FakeServingEngine | None = None, boot: int = 1, **facts: int
    ) -> None:
        self.me, self.boot = Peer(name, f"{name}-{boot}"), boot
        self.engine = engine or FakeServingEngine(name, cluster.store, replace(FACTS, **facts))
        self.box = LetterBox(self.me, "127.0.0.1:7", cluster.letters.append)
        clock = lambda: cluster.now  # noqa: E731
        outbox, ended, neighbours = Outbox(), EndedLegs(), NoNeighbours(self.engine.news_fd)
        standing = NodeAvailability("mixed", neighbours)
        box: Any = self.box
        files: Any = None
        self.links = NodeLinks(
            self.me, standing, Acceptance(name, standing, outbox), box, outbox, ended, files, neighbours
        )
        self.parking = ParkedKV(self.engine.facts.num_blocks // 2, clock, PARKS_S)
        self.adapters = AdapterBook(self.engine, self.links)
        queue, records = EngineQueue(self.engine, 8, clock, self.adapters.number_of), LegRecorder(name)
        self.prompts = ParkedPrompts(queue, outbox, ended, records, self.parking, clock)
        self.rows = DecodeRows(self.endpoint, self.engine.facts, queue, outbox, ended, records, clock)
        parts = VllmParts(
            self.links, self.engine, queue, self.prompts, self.rows, self.parking, None, refuse_hot_sampling,
            self.adapters, WeightsReplacement(self.engine, Path(self.engine.weights or "start"), 60.0),
        )  # fmt: skip
        self.timed: list[Step] = []
        self.side = VllmSide(parts, clock=clock, on_step=self.timed.append)
        self.parts = parts
        self.loader = WeightsLoader(self.me, outbox, self.prepare)
        self.control = NodeControl(self.links, self.side, report_s=1e9, drain_s=5.0, clock=clock, loader=self.loader)

    def prepare(self, message: PrepareWeights, image: WeightImage | None) -> NextBoot:
        """The source is a digest, or begins with "bad"."""
        if why := self.adapters.refusal_of_weights():
            raise ModelError(why)
        version = replace_version(message, message.source)
        weights = CheckedWeights(version, Path(message.source))
        return NextBoot(
            version, Peer(self.me.node, f"{self.me.node}-{self.boot + 1}"), lambda process: never(), lambda: None,
            broken=self.adapters.refusal_of_weights, replace=lambda: self.parts.weights.advance(weights),
        )  # fmt: skip

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.me.node, self.me.incarnation, "127.0.0.1:7", ((MEDIUM, b""),))


def card_of(node: VllmNode, *adapters: Adapter) -> NodeCard:
    fingerprint = Fingerprint("base", "w", 1, 32, LAYOUT, engine="vllm")
    return NodeCard(
        node.me.node, node.me.incarnation, "mixed", "127.0.0.1:7", "base", fingerprint, 1024, 1000, 64,
        adapters=adapters,
    )  # fmt: skip


def replace_version(message: PrepareWeights, digest: str) -> Any:
    return structs.replace(message.version, digest=digest)


def never() -> Any:
    raise AssertionError("the test makes the next boot")


class VllmNodes:
    """Nodes p and d. heard: what the router got."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = ParkedStore()
        self.letters: list[Letter] = []
        self.nodes = {name: VllmNode(name, self) for name in ("p", "d")}
        self.heard: list[tuple[str, Any]] = []
        self.delivers = True

    def __getitem__(self, name: str) -> VllmNode:
        return self.nodes[name]

    def say(self, to: str, message: Any, sender: Peer = ROUTER) -> None:
        kind: Any = "router" if sender == ROUTER else "node"
        self[to].box.inbox.append(Received(sender, kind, message))

    def turn(self, times: int = 1, *, steps: bool = True) -> None:
        """Every node turns and its engine steps; letters go where they are addressed."""
        for _ in range(times):
            for node in self.nodes.values():
                node.control.turn()
                if steps:
                    node.engine.step()
            self._carry()

    def _carry(self) -> None:
        letters, self.letters[:] = list(self.letters), []
        for letter in letters:
            if letter.to == ROUTER:
                self._hear(letter)
            else:
                self.say(letter.to.node, letter.message, letter.sender)

    def _hear(self, letter: Letter) -> None:
        rows = letter.message.rows if isinstance(letter.message, Tokens) else (letter.message,)
        self.heard += [(letter.sender.node, row) for row in rows]
        if isinstance(letter.message, Reserved) and self.delivers:
            self.say("p", Deliver(letter.message.ticket))

    def next_boot(self, name: str) -> None:
        """The node's boot is over, and its engine serves in the next one."""
        node = self.nodes[name]
        assert node.control.is_over() and node.parts.weights.is_done
        node.loader.take()
        node.control.close()
        self.nodes[name] = VllmNode(name, self, node.engine, node.boot + 1)

    def add_pooling(self, **facts: int) -> VllmNode:
        """Node e, with a pooling model."""
        self.nodes["e"] = node = VllmNode("e", self, embedding_size=4, **facts)
        node.links.acceptance.embeds = True
        return node

    def all_of(self, kind: type, node: str | None = None) -> list[Any]:
        return [message for name, message in self.heard if isinstance(message, kind) and node in (None, name)]

    def tokens(self, request: str) -> list[int]:
        return [token for row in self.all_of(TokenRow) if row.request == request for token in row.tokens]

    def hand_over(self, name: str, tokens: list[int], max_tokens: int = 4) -> None:
        self.say("p", Prefill(work_of(name, tokens, max_tokens), remote=True))
        self.say("d", Reserve(work_of(name, tokens, max_tokens, attempt=1), self["p"].endpoint))
