"""The router's side of every node: links that follow the bootstrap's snapshots, what nodes report, and the view that policies see.

Owned by the router's event loop. Which node gets a request is not decided here (`policy`), nor what an answer means (`attempt`); answers are put into
the request's inbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import zmq

from pdcluster.bootstrap.card import ClusterSnapshot, NodeCard
from pdcluster.cost import NodeCost
from pdcluster.errors import NodeLost
from pdcluster.messages import (
    HASH_BYTES,
    AnyMessage,
    CacheDelta,
    Delivered,
    Endpoint,
    Failed,
    FetchFile,
    FileChunk,
    Finished,
    Load,
    Manage,
    Managed,
    Refused,
    Reserved,
    Role,
    Scheduled,
    Tokens,
    Welcome,
)
from pdcluster.transfer.base import Peer
from pdcluster.wire.links import LinkState, NodeLink
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.legs import Body, Ledger, Lost
from pdcluster_router.view import ClusterView, NodeView

logger = logging.getLogger(__name__)

REDIAL_S = 0.5
"""Pause before a link is opened again to a boot that the bootstrap still lists."""


@dataclass(slots=True)
class NodeState:
    """What the router knows of one boot of one node."""

    card: NodeCard
    endpoint: Endpoint
    link: NodeLink | None = None
    load: Load | None = None
    cached: set[bytes] = field(default_factory=set)
    cache_sequence: int | None = None
    redial_at: float = 0.0

    @property
    def is_up(self) -> bool:
        return self.link is not None and self.link.state is LinkState.UP


class Cluster:
    def __init__(self, me: Peer, *, context: zmq.Context[zmq.Socket[bytes]], settings: WireSettings) -> None:
        self.ledger = Ledger()
        self.version = 0
        self.unmatched: Counter[str] = Counter()
        self._me = me
        self._context = context
        self._settings = settings
        self._nodes: dict[str, NodeState] = {}
        self._files: dict[tuple[str, str], asyncio.Future[FileChunk]] = {}
        self._managing: dict[int, asyncio.Future[Managed]] = {}
        self._num_managed = 0
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ following the bootstrap

    async def follow(self, snapshots: AsyncIterator[ClusterSnapshot]) -> None:
        """Apply snapshots until cancelled; between them, dial again what was lost."""
        redial = asyncio.create_task(self._redial_forever())
        try:
            async for snapshot in snapshots:
                self.apply(snapshot)
        finally:
            redial.cancel()
            await asyncio.gather(redial, return_exceptions=True)

    def apply(self, snapshot: ClusterSnapshot) -> None:
        """Open links to new boots and drop those that left. A boot that only lost its bootstrap lease but still answers is kept until its link
        breaks: absence from a list is no proof."""
        listed = {card.incarnation: card for card in snapshot.nodes}
        replaced = {card.node: card.incarnation for card in snapshot.nodes}
        for incarnation, card in listed.items():
            state = self._nodes.get(incarnation)
            if state is None:
                self._nodes[incarnation] = NodeState(card, card.endpoint)
            else:
                state.card = card
        for incarnation, state in list(self._nodes.items()):
            if incarnation not in listed and (not state.is_up or state.card.node in replaced):
                self._drop(incarnation, "it left the cluster")
        self._dial()
        self._notify()

    def close(self) -> None:
        for incarnation in list(self._nodes):
            self._drop(incarnation, "the router stops")

    async def wait_for_change(self, seen: int) -> None:
        """Until a node came, went or reported after `version` was `seen`."""
        while self.version == seen:
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        self.version += 1
        self._changed.set()

    async def _redial_forever(self) -> None:
        while True:
            await asyncio.sleep(REDIAL_S / 2)
            self._dial()

    def _dial(self) -> None:
        now = asyncio.get_running_loop().time()
        for incarnation, state in self._nodes.items():
            if state.link is None and now >= state.redial_at:
                state.link = self._open_link(incarnation, state)

    def _open_link(self, incarnation: str, state: NodeState) -> NodeLink:
        return NodeLink(
            self._me,
            state.endpoint,
            context=self._context,
            on_message=lambda message: self._on_message(incarnation, message),
            on_state=lambda link_state: self._on_state(incarnation, link_state),
            open_attempts=lambda: self.ledger.open_attempts(incarnation),
            settings=self._settings,
        )

    def _on_state(self, incarnation: str, link_state: LinkState) -> None:
        state = self._nodes.get(incarnation)
        if state is None or state.link is None:
            return
        if link_state is LinkState.LOST:
            reason, link, state.link = state.link.lost_because, state.link, None
            link.close()
            logger.warning("node %s is lost: %s", state.card.node, reason)
            state.load, state.cache_sequence = None, None
            state.redial_at = asyncio.get_running_loop().time() + REDIAL_S
            self.ledger.lose_node(incarnation, reason)
        self._notify()

    def _drop(self, incarnation: str, reason: str) -> None:
        state = self._nodes.pop(incarnation)
        if state.link is not None:
            state.link.close()
        self.ledger.lose_node(incarnation, reason)

    # ------------------------------------------------------------ what nodes say

    def _on_message(self, incarnation: str, message: AnyMessage) -> None:
        state = self._nodes.get(incarnation)
        if state is None:
            return
        if isinstance(message, Tokens):
            for row in message.rows:
                self._deliver(row.request, incarnation, row)
        elif isinstance(message, Scheduled | Refused | Delivered | Finished | Failed):
            self._deliver(message.request, incarnation, message)
        elif isinstance(message, Reserved):
            self._deliver(message.ticket.request, incarnation, message)
        elif isinstance(message, Welcome):
            for request, attempt in message.lost:
                self._deliver(request, incarnation, Lost("it does not know the request (any more)", attempt))
            self.ledger.rewelcome(incarnation)
            self._notify()
        elif isinstance(message, Load):
            state.load = message
            self._notify()
        elif isinstance(message, CacheDelta):
            self._on_cache(state, message)
        elif isinstance(message, Managed):
            asked = self._managing.get(message.number)
            if asked is not None and not asked.done():
                asked.set_result(message)
        elif isinstance(message, FileChunk):
            waiting = self._files.get((incarnation, message.name))
            if waiting is not None and not waiting.done():
                waiting.set_result(message)

    def _deliver(self, request: str, incarnation: str, body: Body) -> None:
        if not self.ledger.deliver(request, incarnation, body):
            self.unmatched[type(body).__name__] += 1

    def _on_cache(self, state: NodeState, delta: CacheDelta) -> None:
        """A delta that does not follow the last one is dropped with all that was known: the link says Hello again and a snapshot comes."""
        if delta.snapshot:
            state.cached = set(split_hashes(delta.added))
        elif state.cache_sequence is None or delta.sequence != state.cache_sequence + 1:
            state.cached, state.cache_sequence = set(), None
            return
        else:
            state.cached.difference_update(split_hashes(delta.removed))
            state.cached.update(split_hashes(delta.added))
        state.cache_sequence = delta.sequence

    # ------------------------------------------------------------ what the rest of the router asks

    def view(self) -> ClusterView:
        return ClusterView(tuple(self._view_of(state) for state in self._nodes.values() if state.is_up and state.load is not None))

    def _view_of(self, state: NodeState) -> NodeView:
        card, load = state.card, state.load
        assert load is not None  # else it is not in the view
        return NodeView(
            endpoint=state.endpoint,
            role=load.role or card.role,
            in_flight=self.ledger.in_flight(card.incarnation),
            load=load,
            cached=state.cached,
            block_tokens=card.hash_block_tokens,
            max_len=card.max_len,
            backends=card.backends,
            is_cordoned=load.draining,
            cost=NodeCost.of(load.cost) if load.cost is not None else None,
            kv_bytes_per_token=card.fingerprint.layout.token_bytes,
        )

    def cards(self) -> list[NodeCard]:
        """Cards of the nodes that can be reached, in the order they came."""
        return [state.card for state in self._nodes.values() if state.is_up]

    def send(self, to: Endpoint, message: AnyMessage) -> None:
        state = self._nodes.get(to.incarnation)
        if state is None or state.link is None:
            raise NodeLost(f"node {to.node} is not connected (any more)")
        state.link.send(message)

    async def manage(self, incarnation: str, *, role: Role | None = None, cordoned: bool | None = None, timeout_s: float) -> Managed:
        """Change what a node is for, or whether it takes new work; raises NodeLost or TimeoutError."""
        state = self._nodes.get(incarnation)
        if state is None:
            raise NodeLost("the node left the cluster; list the nodes again")
        self._num_managed += 1
        number = self._num_managed
        answer = self._managing[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(state.endpoint, Manage(number, role, cordoned))
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._managing[number]

    async def fetch_file(self, incarnation: str, name: str, offset: int, timeout_s: float) -> FileChunk:
        """One piece of a model card's file; raises NodeLost or TimeoutError."""
        waiting: asyncio.Future[FileChunk] = asyncio.get_running_loop().create_future()
        self._files[incarnation, name] = waiting
        try:
            state = self._nodes.get(incarnation)
            if state is None:
                raise NodeLost(f"the node that was asked for {name} left the cluster")
            self.send(state.endpoint, FetchFile(name, offset))
            async with asyncio.timeout(timeout_s):
                return await waiting
        finally:
            del self._files[incarnation, name]


def split_hashes(packed: bytes) -> Iterator[bytes]:
    return (packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES))
