"""A cluster without sockets: nodes that answer by script, a clock that only moves when told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster.bootstrap.card import NodeCard
from pdcluster.core import messages as m
from pdcluster.core.errors import NodeLost
from pdcluster_router.cluster.legs import Ledger
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Force
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.policy.selector import PolicyHolder, PolicySelector

EMPTY_LOAD = m.Load(0, 0, 0, 0, 100, 100, 0, 0, 0, 8, 0)


def make_node(name: str, role: m.Role, load: m.Load | None = EMPTY_LOAD, in_flight: int = 0) -> NodeView:
    return NodeView(
        m.Endpoint(name, f"{name}-boot", f"{name}:1"),
        role,
        in_flight,
        load,
        block_tokens=4,
        max_len=4096,
        backends=("shm",),
    )


def make_ticket(work: m.Work, reader: NodeView, writer: m.Endpoint) -> m.Ticket:
    endpoint = m.Endpoint(reader.name, reader.endpoint.incarnation, reader.endpoint.address, (("shm", b""),))
    return m.Ticket(
        work.attempt + 1,
        work.request,
        work.attempt,
        endpoint,
        writer,
        0,
        b"",
        32,
        4096,
        len(work.token_ids) // 4,
        0,
        60.0,
    )


@dataclass
class FakeCluster:
    """Implements legs.ClusterLinks. handlers: what a node does with a message, given a function that answers to the
    request's inbox; deaf: nodes that are up, but to which nothing can be sent."""

    nodes: list[NodeView]
    handlers: dict[str, Callable[[m.NodeMessage, Callable[[object], None]], None]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    sent: list[tuple[str, m.NodeMessage]] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    num_refused_hashes: int = 0
    known: list[NodeCard] = field(default_factory=list)

    def listed(self) -> list[NodeCard]:
        return self.known

    def view(self) -> ClusterView:
        return ClusterView(tuple(node for node in self.nodes if node.name not in self.dead))

    def send(self, to: m.Endpoint, message: m.NodeMessage) -> None:
        if to.node in self.dead:
            raise NodeLost(f"{to.node} is dead")
        if to.node in self.deaf:
            raise NodeLost(f"{to.node} takes no more frames")
        self.sent.append((to.node, message))
        handler = self.handlers.get(to.node)
        if handler is not None:
            handler(message, lambda body: self.answer(to, message, body))

    def answer(self, to: m.Endpoint, message: m.NodeMessage, body: object) -> None:
        request = (
            message.work.request
            if isinstance(message, m.Prefill | m.Reserve)
            else getattr(message, "request", None) or message.ticket.request
        )
        self.ledger.deliver(request, to.incarnation, body)

    def sent_to(self, node: str, kind: type) -> list[m.NodeMessage]:
        return [message for name, message in self.sent if name == node and isinstance(message, kind)]

    def kill(self, node: NodeView, reason: str = "link lost") -> None:
        self.dead.add(node.name)
        self.ledger.lose_node(node.endpoint.incarnation, reason)


def make_chooser(cluster: FakeCluster, policy: str = "product", force: Force = "auto") -> PolicySelector:
    return PolicySelector(PolicyHolder(make_policy(policy)), cluster.view, lambda hashes: {}, force=force)


def row(work_or: m.Work, position: int, tokens: tuple[int, ...]) -> m.TokenRow:
    return m.TokenRow(work_or.request, work_or.attempt, position, tokens)


@dataclass
class ScriptedPair:
    """A prefill and a decode node that serve any request with tokens 100, 101, …; knobs say where they misbehave.

    A node that is told to die does so at the named moment: before_token, before_commit, after_commit, mid_decode."""

    cluster: FakeCluster
    prefill: NodeView
    decode: NodeView
    num_tokens: int = 4
    refusals: int = 0
    die_at: dict[str, str] = field(default_factory=dict)
    works: dict[str, m.Work] = field(default_factory=dict)
    token: Callable[[int], int] = lambda position: 100 + position

    def install(self) -> None:
        self.cluster.handlers[self.prefill.name] = self.on_prefill
        self.cluster.handlers[self.decode.name] = self.on_decode

    def _dies(self, node: NodeView, moment: str) -> bool:
        if self.die_at.get(node.name) != moment:
            return False
        self.cluster.kill(node)
        return True

    def on_prefill(self, message: m.NodeMessage, answer: Callable[[object], None]) -> None:
        if isinstance(message, m.Prefill):
            work = message.work
            self.works[self.prefill.name] = work
            answer(m.Scheduled(work.request, work.attempt))
            if self._dies(self.prefill, "before_token"):
                return
            if not message.remote:
                self.run(self.prefill, work, answer, from_position=self.emitted(work))
                return
            position = self.emitted(work)
            answer(row(work, position, (self.token(position),)))
        elif isinstance(message, m.Deliver):
            if self._dies(self.prefill, "before_commit"):
                return
            work = self.works[self.prefill.name]
            answer(m.Delivered(work.request, work.attempt, m.LegTimings(prefill_s=0.1, backend="shm")))
            if not self._dies(self.decode, "after_commit"):
                reserved = self.works[self.decode.name]
                self.run(
                    self.decode,
                    reserved,
                    lambda body: self.cluster.answer(self.decode.endpoint, m.Cancel(work.request, 0, ""), body),
                    self.emitted(work),
                )

    def on_decode(self, message: m.NodeMessage, answer: Callable[[object], None]) -> None:
        if isinstance(message, m.Reserve):
            self.works[self.decode.name] = message.work
            if self.refusals:
                self.refusals -= 1
                answer(m.Refused(message.work.request, message.work.attempt, "reserve", "full", 0.01))
                return
            answer(m.Reserved(make_ticket(message.work, self.decode, message.writer)))
        elif isinstance(message, m.Prefill):
            self.run(self.decode, message.work, answer, from_position=self.emitted(message.work))

    @staticmethod
    def emitted(work: m.Work) -> int:
        return len(work.token_ids) // 4 - work.num_prompt

    def run(self, node: NodeView, work: m.Work, answer: Callable[[object], None], from_position: int) -> None:
        for position in range(from_position, self.num_tokens):
            answer(row(work, position, (self.token(position),)))
            if position == self.num_tokens // 2 and self._dies(node, "mid_decode"):
                return
        answer(
            m.Finished(
                work.request, work.attempt, "length", self.num_tokens, m.LegTimings(decode_tokens=self.num_tokens - 1)
            )
        )


async def settle() -> None:
    """Let callbacks that are due run."""
    for _ in range(5):
        await asyncio.sleep(0)
