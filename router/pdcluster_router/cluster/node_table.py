"""The router's table of nodes: links, load reports and the view of policies.

Links follow the snapshots of the bootstrap. Policies decide which node gets a request (`policy`). Requests read the
answers (`request.node_events`). Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq
from msgspec.structs import replace

from pdcluster.bootstrap.card import ClusterSnapshot, NodeCard
from pdcluster.core.errors import NodeLost
from pdcluster.core.messages import (
    HASH_BYTES,
    HASHES_PARAM,
    PROTOCOL_VERSION,
    AdapterManaged,
    AnyMessage,
    AskCache,
    CacheDelta,
    Cancel,
    Computed,
    Delivered,
    Embedded,
    Endpoint,
    Failed,
    FileChunk,
    Finished,
    Load,
    Managed,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    Role,
    Scheduled,
    Tokens,
    WeightsManaged,
    Welcome,
)
from pdcluster.cost.cost import NodeCost
from pdcluster.processes.tasks import running
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.router_link import LinkState, NodeLink
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.cluster.events import EventLog
from pdcluster_router.cluster.in_flight import SentWork, work_of
from pdcluster_router.cluster.legs import Body, Ledger, LegLost
from pdcluster_router.cluster.node_calls import NodeCalls
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.prefix_index.index import MAX_BLOCKS, PrefixIndex
from pdcluster_router.prefix_index.updates import CacheUpdates

logger = logging.getLogger(__name__)

# Pause before the router reopens a link to a boot that the bootstrap still lists.
REDIAL_S = 0.5

# How long the router expects the blocks of a new request, beyond the time that the node needs for it.
EXPECTED_S = 5.0

WORK = (Prefill, Reserve)
# Messages that only the request itself reads.
ANSWERS = frozenset((Scheduled, Computed, Reserved, Delivered, Finished, Embedded))


# How long typical step costs stay valid.
TYPICAL_S = 1.0

# A slower path counts as unmeasured.
LEAST_BYTES_S = 1.0


@dataclass(slots=True)
class NodeState:
    """What the router knows of one boot of one node."""

    card: NodeCard
    endpoint: Endpoint
    link: NodeLink | None = None
    load: Load | None = None
    # Of `card`. Reading it there hashes.
    models: frozenset[str] = frozenset()
    # From the last report or answer. `load` stays as reported: a drain must see a report made after the cordon.
    is_cordoned: bool = False
    # From the last report.
    cost: NodeCost | None = None
    # The role that it takes work in; None while it takes none.
    taking: Role | None = None
    redial_at: float = 0.0
    # False: the bootstrap no longer lists it, but its link still stands.
    is_listed: bool = True

    @property
    def is_up(self) -> bool:
        return self.link is not None and self.link.state is LinkState.UP

    def role_taking(self) -> Role | None:
        """The role that it takes work in, as `NodeView.accepts_work` has it."""
        load = self.load
        if load is None or self.is_cordoned or load.draining or load.stuck:
            return None
        return load.role or self.card.role


class ViewUpkeep:
    """Owned by the router's event loop.

    nodes: by incarnation, kept by the node table.
    """

    def __init__(self, nodes: Mapping[str, NodeState], ledger: Ledger) -> None:
        self._nodes, self._ledger = nodes, ledger
        self._view = ClusterView(())
        # Whether a caller may still have the current view.
        self._is_lent = False
        # Nodes that reported since the view was made.
        self._reported: set[str] = set()
        # False: nodes came or left since the view was made.
        self._is_whole = True
        # When typical costs expire; 0: compute them with the next view.
        self._typical_until = 0.0

    def note_change(self) -> None:
        """Nodes came or left."""
        self._is_whole = False

    def note_report(self, incarnation: str, *, is_first: bool, has_cost: bool) -> None:
        """A node reported. has_cost: its step costs may be others."""
        self._is_whole = self._is_whole and not is_first
        self._reported.add(incarnation)
        if has_cost and self._view.typical is None:
            self._typical_until = 0.0  # compute typical costs at once when the first node reports some

    def view(self) -> ClusterView:
        """The view as of now.

        A call updates only what changed since the last one. It rebuilds the view only after nodes came or left.
        """
        self._bring_up()
        self._is_lent = True
        return self._view

    def glance(self) -> ClusterView:
        """As `view`, for a caller that keeps nothing.

        Work sent since is written into the last view in place, unless a caller of `view` may still have it.
        """
        self._bring_up()
        return self._view

    def _bring_up(self) -> None:
        changed, before = self._ledger.take_changed(), self._view
        if not self._is_whole:
            self._view = ClusterView(
                [self._view_of(state) for state in self._nodes.values() if state.is_up and state.load is not None]
            )
            self._is_whole, self._typical_until = True, 0.0
        else:
            if self._reported:
                self._view = before.replaced(self._replacements())
                changed -= self._reported
            if changed and self._is_lent and self._view is before:
                self._view = self._view.sent(changed, self._ledger.counts)
            elif changed:
                self._view.note_sent(changed, self._ledger.counts)
        self._reported.clear()
        if time.monotonic() >= self._typical_until:
            self._look_at_costs()
        if self._view is not before:
            self._is_lent = False

    def _look_at_costs(self) -> None:
        """Compute typical step costs, and a new view where they changed.

        They stand in where a node has too few steps of its own. TYPICAL_S bounds how often nodes are recomputed.
        """
        self._typical_until = time.monotonic() + TYPICAL_S
        found = self._view.typical_now()
        if found != self._view.typical:
            self._view = self._view.priced(found)

    def _replacements(self) -> dict[str, NodeView]:
        """New values of the nodes that reported and are in the view."""
        row_of = self._view.roster.row_of
        return {
            incarnation: self._view_of(self._nodes[incarnation])
            for incarnation in self._reported
            if incarnation in row_of
        }

    def _view_of(self, state: NodeState) -> NodeView:
        card, load = state.card, state.load
        assert load is not None  # without a load it is not in the view
        return NodeView(
            endpoint=state.endpoint,
            role=load.role or card.role,
            in_flight=self._ledger.in_flight(card.incarnation),
            pending=self._ledger.pending.of(card.incarnation),
            load=load,
            block_tokens=card.hash_block_tokens,
            max_len=card.max_len,
            backends=card.backends,
            is_cordoned=state.is_cordoned,
            is_sleeping=state.card.sleeping,
            cost=state.cost,
            bandwidth={
                path.peer: path.bytes_s for path in load.paths if path.is_chosen and path.bytes_s >= LEAST_BYTES_S
            },
            kv_bytes_per_token=card.fingerprint.layout.token_bytes,
            models=state.models,
            capabilities=card.capabilities,
        )


class NodeTable:
    def __init__(
        self,
        me: Peer,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: WireSettings,
        events: EventLog | None = None,
        index_blocks: int = MAX_BLOCKS,
    ) -> None:
        self._clock: Callable[[], float] | None = None
        self.ledger = Ledger()
        self.caches = CacheUpdates(PrefixIndex(max_blocks=index_blocks))
        self.version = 0
        # Counts changes of cards and links, which are few among those of `version`.
        self.cards_version = 0
        # Counts those, and changes of the roles that nodes take work in.
        self.roles_version = 0
        self.events = events or EventLog()
        self.unmatched: Counter[str] = Counter()
        # Works whose block hashes a node did not believe.
        self.num_refused_hashes = 0
        self._me = me
        self._context = context
        self._settings = settings
        self._nodes: dict[str, NodeState] = {}
        # Boots of another protocol version, and what was said of them.
        self._refused: dict[str, str] = {}
        self._calls = NodeCalls(self._send_to)
        self.manage, self.fetch_file = self._calls.manage, self._calls.fetch_file
        self.manage_adapter, self.manage_weights = self._calls.manage_adapter, self._calls.manage_weights
        self._changed = asyncio.Event()
        self._upkeep = ViewUpkeep(self._nodes, self.ledger)
        self.view, self.glance = self._upkeep.view, self._upkeep.glance
        # Whether a call of `_take_piece` is scheduled.
        self._is_taking = False
        # Handlers by type. A chain of type tests costs more than most messages.
        self._handlers: dict[type[AnyMessage], Callable[[NodeState, Any], None]] = {
            Tokens: self._on_tokens,
            Refused: self._on_refusal,
            Failed: self._on_refusal,
            Welcome: self._on_welcome,
            Load: self._on_load,
            CacheDelta: self._on_delta,
            Managed: self._on_managed,
            AdapterManaged: self._on_answer,
            WeightsManaged: self._on_answer,
            FileChunk: self._on_answer,
        }

    # ------------------------------------------------------------ following the bootstrap

    async def follow(self, snapshots: AsyncIterator[ClusterSnapshot]) -> None:
        """Apply snapshots until cancelled. Between them, reopen lost links."""
        async with running(self._redial_forever, "redialling"):
            async for snapshot in snapshots:
                self.apply(snapshot)

    def apply(self, snapshot: ClusterSnapshot) -> None:
        """Open links to new boots and drop boots that left.

        A boot that lost only its lease at the bootstrap, but still answers, stays until its link breaks. Absence from
        the list does not prove that it left.
        """
        self._upkeep.note_change()
        nodes = self._compatible(snapshot.nodes)
        listed = {card.incarnation: card for card in nodes}
        replaced = {card.node: card.incarnation for card in nodes}
        for incarnation, card in listed.items():
            state = self._nodes.get(incarnation)
            if state is None:
                state = self._nodes[incarnation] = NodeState(card, card.endpoint)
            state.card, state.models = card, card.model_digests
        for incarnation, state in list(self._nodes.items()):
            state.is_listed = incarnation in listed
            if not state.is_listed and (not state.is_up or state.card.node in replaced):
                self._drop(incarnation, "it left the cluster")
        self._dial()
        self._note_cards()
        self._notify()

    def _compatible(self, cards: Sequence[NodeCard]) -> list[NodeCard]:
        """Nodes that speak this router's protocol. Others are refused by name, once."""
        before, self._refused = self._refused, {}
        for card in cards:
            if card.fingerprint.protocol != PROTOCOL_VERSION:
                why = (
                    f"node {card.node} speaks protocol {card.fingerprint.protocol}, this router speaks "
                    f"{PROTOCOL_VERSION}; run the same pdcluster version on both, or each with bootstraps of its own"
                )
                self._refused[card.incarnation] = why
                if card.incarnation not in before:
                    self.events.add("node-refused", card.node, why)
                    logger.warning("%s", why)
        return [card for card in cards if card.incarnation not in self._refused]

    def refusal(self) -> str | None:
        """Why there is no node, where only nodes of another version are registered."""
        return next(iter(self._refused.values()), None) if not self._nodes else None

    def close(self) -> None:
        for incarnation in list(self._nodes):
            self._drop(incarnation, "the router stops")

    async def wait_for_change(self, seen: int) -> None:
        """Wait until a node came, left or reported after version `seen`."""
        while self.version == seen:
            self._changed.clear()
            await self._changed.wait()

    def _note_cards(self) -> None:
        self.cards_version += 1
        self.roles_version += 1

    def _notify(self) -> None:
        self.version += 1
        self._changed.set()

    async def _redial_forever(self) -> None:
        while True:
            await asyncio.sleep(REDIAL_S / 2)
            self._dial()

    def _dial(self) -> None:
        now = self._now()
        for incarnation, state in self._nodes.items():
            if state.link is None and now >= state.redial_at:
                state.link = self._open_link(incarnation, state)

    def _open_link(self, incarnation: str, state: NodeState) -> NodeLink:
        return NodeLink(
            self._me,
            state.endpoint,
            context=self._context,
            on_message=partial(self._on_message, state),
            on_state=lambda link_state: self._on_state(incarnation, link_state),
            open_attempts=lambda: self.ledger.open_attempts(incarnation),
            settings=self._settings,
        )

    def _on_state(self, incarnation: str, link_state: LinkState) -> None:
        self._upkeep.note_change()
        self._note_cards()
        state = self._nodes.get(incarnation)
        if state is None or state.link is None:
            return
        if link_state is LinkState.LOST:
            reason, link, state.link = state.link.lost_because, state.link, None
            link.close()
            level = logging.INFO if state.is_cordoned else logging.WARNING  # one that took no more work may go
            logger.log(level, "node %s is lost: %s", state.card.node, reason)
            state.load = state.cost = state.taking = None
            self.roles_version += 1
            state.redial_at = self._now() + REDIAL_S
            self._lose(incarnation, reason)
            self.events.add("node-lost", state.card.node, reason)
            if not state.is_listed:
                del self._nodes[incarnation]  # the bootstrap does not list it, so its link is not reopened
        elif link_state is LinkState.UP:
            self.events.add(
                "node-up", state.card.node, f"{state.card.role} at {state.card.address}, boot {incarnation}"
            )
        self._notify()

    def _drop(self, incarnation: str, reason: str) -> None:
        self._upkeep.note_change()
        state = self._nodes.pop(incarnation)
        self.events.add("node-left", state.card.node, reason)
        if state.link is not None:
            state.link.close()
        self._lose(incarnation, reason)

    def _lose(self, incarnation: str, reason: str) -> None:
        self.caches.lose(incarnation)
        self.ledger.lose_node(incarnation, reason)
        self._calls.lose_node(incarnation, reason)

    # ------------------------------------------------------------ what nodes say

    def _on_message(self, state: NodeState, message: AnyMessage) -> None:
        """Handle one message. A closed link delivers none, so the node is still in the table."""
        kind = type(message)
        if kind in ANSWERS:
            read = self.ledger.reader_of(message.request)  # type: ignore[union-attr]
            if read is not None:
                read(state.endpoint.incarnation, message)  # type: ignore[arg-type]
            else:
                self.unmatched[kind.__name__] += 1
            return
        handle = self._handlers.get(kind)
        if handle is not None:
            handle(state, message)

    def _on_tokens(self, state: NodeState, message: Tokens) -> None:
        num_unread = self.ledger.deliver_rows(state.card.incarnation, message.rows, time.monotonic())
        if num_unread:
            self.unmatched["TokenRow"] += num_unread

    def _on_refusal(self, state: NodeState, message: Refused | Failed) -> None:
        if isinstance(message, Refused) and message.param == HASHES_PARAM:
            self.num_refused_hashes += 1
        self._expect_no_more(state.card.incarnation, message)
        self._deliver(message.request, state.card.incarnation, message)

    def _on_welcome(self, state: NodeState, message: Welcome) -> None:
        for request, attempt in message.lost:
            self._deliver(request, state.card.incarnation, LegLost("it does not know the request (any more)", attempt))
        self.ledger.rewelcome(state.card.incarnation)
        self._notify()

    def _on_load(self, state: NodeState, message: Load) -> None:
        state.is_cordoned = message.draining
        if message.stuck != (state.load is not None and state.load.stuck):
            self._note_stuck(state, is_stuck=message.stuck)
        self._take_load(state, message)

    def _note_stuck(self, state: NodeState, *, is_stuck: bool) -> None:
        if is_stuck:
            self.events.add("node-stuck", state.card.node, "its engine makes no progress; its requests go on elsewhere")
        else:
            self.events.add("node-answers", state.card.node, "its engine makes progress again")

    def _take_load(self, state: NodeState, message: Load) -> None:
        former, incarnation = state.load, state.card.incarnation
        has_cost = former is None or former.cost != message.cost
        if has_cost:
            state.cost = NodeCost.of(message.cost) if message.cost is not None else None
        self._upkeep.note_report(incarnation, is_first=former is None, has_cost=has_cost)
        state.load = message
        role = state.role_taking()
        if role != state.taking:
            state.taking = role
            self.roles_version += 1
        self.ledger.pending.reported(incarnation, message.seen)
        if self.caches.is_overdue(incarnation, self._now()):
            self._ask_cache(state)
        self._notify()

    def _on_delta(self, state: NodeState, message: CacheDelta) -> None:
        if self.caches.apply(state.card.incarnation, message, self._now()):
            self._ask_cache(state)
        if self.caches.has_pieces and not self._is_taking:
            self._is_taking = True
            asyncio.get_running_loop().call_soon(self._take_piece)

    def _on_managed(self, state: NodeState, message: Managed) -> None:
        """Apply a role or cordon before the node's next report, so that it gets no unwanted work.

        A cordon may end before the node reported it. Then only the answer shows its end.
        """
        load = state.load
        if load is not None:
            state.is_cordoned = message.cordoned
            self._take_load(state, replace(load, role=message.role))
        self._on_answer(state, message)

    def _on_answer(self, state: NodeState, message: Managed | AdapterManaged | WeightsManaged | FileChunk) -> None:
        self._calls.on_answer(state.card.incarnation, message)

    def _take_piece(self) -> None:
        """Take in one slice of a cache report per turn of the loop, so that requests go on between them."""
        self._is_taking = self.caches.has_pieces
        if self._is_taking:
            asyncio.get_running_loop().call_soon(self._take_piece)
            self.caches.take_piece()

    def _ask_cache(self, state: NodeState) -> None:
        if state.link is None:
            return
        try:
            state.link.send(AskCache())
        except NodeLost:
            logger.debug(
                "node %s cannot be asked for its cache now", state.card.node
            )  # a new link begins with a snapshot

    def _now(self) -> float:
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time  # looked up once: finding the loop is a system call
        return self._clock()

    def _deliver(self, request: str, incarnation: str, body: Body) -> None:
        if not self.ledger.deliver(request, incarnation, body):
            self.unmatched[type(body).__name__] += 1

    # ------------------------------------------------------------ what the rest of the router asks

    def cached(self, hashes: bytes) -> dict[str, int]:
        """Leading blocks of a prompt that each node holds or will soon hold, by incarnation. Others are left out."""
        return self.caches.index.depths(hashes, self._now())

    def held(self, hashes: bytes) -> dict[str, int]:
        """Leading blocks that each node reported as cached, so that they can be fetched."""
        return self.caches.index.depths(hashes)

    def expected(self, hashes: bytes) -> dict[str, int]:
        """Leading blocks that each node will soon hold."""
        return self.caches.index.expected.depths(hashes, self._now())

    def listed(self) -> list[NodeCard]:
        """Cards of all nodes, also of those without a link."""
        return [state.card for state in self._nodes.values()]

    def known_cards(self) -> list[tuple[NodeCard, bool]]:
        """The same, and whether the node is there to stay: the bootstrap lists it, and it does not drain."""
        return [(state.card, state.is_listed and not state.card.draining) for state in self._nodes.values()]

    def roles_taking(self) -> dict[str, set[Role]]:
        """Roles of the reachable nodes that take work, by the digests of their models. Safe in any thread."""
        found: dict[str, set[Role]] = {}
        for state in list(self._nodes.values()):
            if state.taking is not None and state.is_up:
                for digest in state.models:
                    found.setdefault(digest, set()).add(state.taking)
        return found

    def cards(self) -> Iterator[NodeCard]:
        """Cards of the reachable nodes, in the order they came.

        Nodes must not come or leave during the iteration: a caller that awaits makes a list first.
        """
        return (
            state.card for state in self._nodes.values() if state.link is not None and state.link.state is LinkState.UP
        )

    def send(self, to: Endpoint, message: AnyMessage) -> None:
        state = self._nodes.get(to.incarnation)
        if state is None or state.link is None:
            raise NodeLost(f"node {to.node} is not connected (any more)")
        sequence = state.link.send(message)
        if isinstance(message, WORK):
            self._note_work(state, message, sequence)
        elif type(message) is Cancel:
            self._expect_no_more(to.incarnation, message)

    def _send_to(self, incarnation: str, message: AnyMessage) -> None:
        state = self._nodes.get(incarnation)
        if state is None:
            raise NodeLost("the node left the cluster; list the nodes again")
        self.send(state.endpoint, message)

    def _note_work(self, state: NodeState, message: Prefill | Reserve, sequence: int) -> None:
        """Count the sent work, and expect its blocks, until the node reports them."""
        work, incarnation, now = message.work, state.card.incarnation, self._now()
        depth = self.caches.index.depth(incarnation, work.hashes)
        pending = work_of(message, depth * state.card.fingerprint.hash_block_tokens)
        sent = SentWork(work.attempt, sequence, pending, work.hashes if depth * HASH_BYTES < len(work.hashes) else b"")
        self.ledger.pending.enter(incarnation, work.request, sent)
        if sent.hashes:
            total = self.ledger.pending.of(incarnation)
            wait_s = (
                state.cost.prefill.work_s(total.prefill_tokens, total.prefill_pairs) if state.cost is not None else 0.0
            )
            self.caches.index.expect(incarnation, sent.hashes, now + EXPECTED_S + wait_s)

    def _expect_no_more(self, incarnation: str, message: Refused | Failed | Cancel) -> None:
        """Withdraw the expected blocks of a leg that ended.

        A cancelled slot gets no more KV. What a node computed of a cancelled prompt stays in its cache.
        """
        sent = self.ledger.pending.find(incarnation, message.request, message.attempt)
        if sent is None or not sent.hashes or (type(message) is Cancel and sent.work.prompts):
            return
        if not self.ledger.pending.has_alike(incarnation, sent):
            self.caches.index.expected.withdraw(incarnation, sent.hashes)
