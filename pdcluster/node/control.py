"""What any node does, whatever its engine: messages, leases of routers, drains, reports and health.

`NodeControl` runs one loop over an `EngineSide`, which owns requests, KV and steps. One thread runs both and owns all
that they touch. The loop blocks only in `_wait`. That ends when a socket, the side or the stop signal has something, or
the next timer fires.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Protocol

import zmq
from msgspec import structs

from pdcluster.bootstrap.card import Adapter
from pdcluster.core.errors import NodeDrains
from pdcluster.core.messages import (
    AnyMessage,
    AskCache,
    Cancel,
    CommitWeights,
    Deliver,
    DropWeights,
    FetchFile,
    Hello,
    Load,
    Manage,
    ManageAdapter,
    Prefill,
    PrepareWeights,
    ReceiveWeights,
    Release,
    Reserve,
    Role,
    ShareWeights,
    SleepNode,
    SwitchWeights,
    WeightsManaged,
    Welcome,
)
from pdcluster.node.acceptance import Acceptance
from pdcluster.node.availability import NodeAvailability
from pdcluster.node.legs import AnyLeg, EmittedTokens, EndedLegs
from pdcluster.node.outbox import Outbox
from pdcluster.node.reports.health import NodeHealth, NodeSnapshot
from pdcluster.node.reports.load_report import CacheSource, ModelFiles, Reporter
from pdcluster.node.weights_loader import PreparedBoot, WeightsLoader
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.hub import Hub, LeaseEnded, LinkLost, Received

logger = logging.getLogger(__name__)

# Time for a drained node's last frames to leave.
LINGER_S = 0.5

# Idle time before the books are recounted, once.
IDLE_CHECK_S = 1.0

# The hub's heartbeats and leases need a look this often.
LONGEST_WAIT_S = 0.1

# Time for a draining node's last transfers, once its requests moved.
MOVE_S = 5.0


class NodeLeg(AnyLeg, Protocol):
    """A leg that runs here."""

    @property
    def output(self) -> EmittedTokens: ...


class EngineSide(Protocol):
    """An engine with its requests and KV, as the control drives it. Called by the control's thread only."""

    @property
    def cache(self) -> CacheSource:
        """The block hashes that are cached here."""
        ...

    @property
    def num_open(self) -> int:
        """Requests and transfers that are not done."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, and no KV is held for anybody."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether nothing runs, and no write of this node still reads its KV. Others may write to it."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether the engine makes no progress with the work that it has."""
        ...

    def wakeups(self) -> Iterable[int]:
        """File descriptors that are readable when `turn` has something to do."""
        ...

    def next_deadline(self) -> float | None:
        """When `turn` has something to do at the latest."""
        ...

    def turn(self) -> None:
        """Take in what the engine did, act on clocks, give the engine work. Never blocks. Raises what breaks the
        node.
        """
        ...

    def prefill(self, router: Peer, message: Prefill) -> None: ...

    def reserve(self, router: Peer, message: Reserve) -> None: ...

    def deliver(self, router: Peer, message: Deliver) -> None: ...

    def cancel(self, request: str, attempt: int, reason: str) -> None:
        """End legs of this attempt and of earlier ones. Idempotent."""
        ...

    def release(self, request: str) -> None:
        """Nobody wants the KV that is kept for the request."""
        ...

    def manage_adapter(self, router: Peer, message: ManageAdapter) -> None:
        """Load or unload a LoRA adapter, and answer the router, perhaps later."""
        ...

    def node_message(self, peer: Peer, message: AnyMessage) -> bool:
        """Take a message of another node. False when nodes send no such message."""
        ...

    def node_gone(self, peer: Peer) -> None: ...

    def find(self, request: str, attempt: int) -> NodeLeg | None:
        """The attempt's leg that runs here."""
        ...

    def awaits(self, request: str, attempt: int) -> bool:
        """Whether the attempt is known here, although it has no leg."""
        ...

    def cancel_router(self, router: Peer) -> None:
        """The router's lease ended: nobody waits for its requests."""
        ...

    def keep_only(self, router: Peer, awaited: Set[tuple[str, int]]) -> None:
        """The router (re)connected. End its attempts that it does not name."""
        ...

    def end_all(self, code: str, reason: str) -> int:
        """End every leg, so that its router goes on elsewhere. Returns how many. Cached KV stays."""
        ...

    def load(self) -> Load: ...

    def snapshot(self) -> NodeSnapshot: ...

    def check_integrity(self) -> None:
        """The node is idle. Raises IntegrityError when something leaked."""
        ...


class Neighbours(Protocol):
    """Nodes that left the cluster, from the bootstrap.

    wakeup_fd: readable when there is news.
    """

    wakeup_fd: int

    def gone(self) -> Iterable[Peer]: ...

    def set_draining(self, is_draining: bool) -> None: ...

    def set_role(self, role: Role) -> None: ...

    def set_adapters(self, adapters: tuple[Adapter, ...]) -> None: ...

    def set_weights_share(self, share: float) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """How a node talks and what it says about itself, whatever its engine."""

    me: Peer
    standing: NodeAvailability
    acceptance: Acceptance
    hub: Hub
    outbox: Outbox
    ended: EndedLegs
    files: ModelFiles
    neighbours: Neighbours


class NodeControl:
    def __init__(
        self,
        links: NodeLinks,
        side: EngineSide,
        *,
        report_s: float,
        drain_s: float,
        clock: Callable[[], float],
        health: NodeHealth | None = None,
        loader: WeightsLoader | None = None,
    ) -> None:
        """health: told of every turn; None: nobody looks.
        loader: by default one that refuses to load.
        """
        self._links, self._side = links, side
        self._loader = loader or WeightsLoader(links.me, links.outbox, None)
        self._health = health
        self._drain_s = drain_s
        self._clock = clock
        self._reporter = Reporter(side.cache, side.load, interval_s=report_s, clock=clock, seen=links.hub.last_received)
        # When running work moves to other nodes, and then when the node ends whatever is left, or serves on where it
        # only goes over to other weights.
        self._leave_by: float | None = None
        self._has_moved = False
        self._idle_since = clock()
        self._is_checked = True
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._poller = zmq.Poller()
        self._polled: list[object] = []

    @property
    def is_stopping(self) -> bool:
        """Whether a signal ends the node."""
        return self._links.standing.is_draining

    def stop(self) -> None:
        """Ask the loop to drain and return. Safe from signal handlers and other threads."""
        if not self._is_closed:
            os.eventfd_write(self._stop_fd, 1)

    def run(self) -> PreparedBoot | None:
        """Serve until `stop`, then until running work is done; None. What still runs at the drain deadline moves to
        other nodes. Where other weights are to be served, return them when running work is done.

        Raises what the side raises: the node is broken then.
        """
        try:
            while not self.is_over():
                self._wait()
                self.turn()
            self._links.outbox.flush(self._links.hub)
            self._links.hub.close(LINGER_S)
            return self._loader.take() if self._loader.is_switching else None
        finally:
            self.close()

    def close(self) -> None:
        self._is_closed = True
        os.close(self._stop_fd)
        self._loader.close()

    def turn(self) -> None:
        """One pass over everything that may have news."""
        self._handle_messages()
        self._loader.turn()
        self._move_at_deadline()
        self._side.turn()
        self._reporter.report(self._tell)
        self._links.outbox.flush(self._links.hub)
        self._links.hub.tick()
        self._check_idle()
        if self._health is not None:
            self._health.turn(self._side.snapshot)

    # ------------------------------------------------------------ waiting

    def _wait(self) -> None:
        links = self._links
        watched = [
            *links.hub.sockets(), links.neighbours.wakeup_fd, self._stop_fd, self._loader.wakeup_fd,
            *self._side.wakeups(),
        ]  # fmt: skip
        if watched != self._polled:
            self._poller = zmq.Poller()
            for item in watched:
                self._poller.register(item, zmq.POLLIN)
            self._polled = watched
        ready = dict(self._poller.poll(round(self.wait_s() * 1000)))
        if self._stop_fd in ready:
            os.eventfd_read(self._stop_fd)
            self._start_draining()

    def wait_s(self) -> float:
        """How long nothing is due, in whole milliseconds."""
        clocks = (self._side.next_deadline(), self._reporter.next_deadline())
        now = self._clock()
        wait_s = min([LONGEST_WAIT_S, *(moment - now for moment in clocks if moment is not None)])
        return max(0, int(wait_s * 1000 + 0.999)) / 1000

    def _start_draining(self) -> None:
        if self._links.standing.is_draining:
            return
        if self._loader.is_switching:
            self._stay("the node stops")
        logger.info("draining: %d requests or transfers are still here", self._side.num_open)
        self._leave_by, self._has_moved = self._clock() + self._drain_s, False
        self._links.standing.drain()

    def is_over(self) -> bool:
        """Whether `run` returns."""
        if self._leave_by is None:
            return False
        is_late = self._has_moved and self._clock() >= self._leave_by
        if self._loader.is_switching:
            if is_late and not self._side.is_quiet:
                self._stay(f"{self._side.num_open} requests or transfers did not end within {MOVE_S:g} s")
            return self._leave_by is not None and self._side.is_quiet and self._is_replaced()
        if is_late:
            logger.warning("the node ends although %d requests or transfers are not done", self._side.num_open)
            return True
        return self._side.is_idle or (self._side.is_stuck and not self._side.num_open)

    def _is_replaced(self) -> bool:
        """Whether the engine has what the next boot needs, and nothing runs. Where it cannot, this boot serves on."""
        error = self._loader.replace()
        if error:
            self._stay(error)
        return error == ""

    def _move_at_deadline(self) -> None:
        """Give what still runs at the deadline to other nodes, once, and leave transfers a little more time."""
        if self._leave_by is None or self._has_moved or (now := self._clock()) < self._leave_by:
            return
        self._has_moved, self._leave_by = True, now + MOVE_S
        if num_moved := self._move_work():
            logger.warning("the time to end is over: %d requests move to other nodes", num_moved)

    def _end_boot(self, router: Peer, message: SwitchWeights | SleepNode) -> None:
        """Take no new work, and end what runs, for other weights or for sleep."""
        loader = self._loader
        if self._links.standing.is_draining:
            reason = f"node {self._links.me.node} stops"
            self._links.outbox.message(router, WeightsManaged(message.number, reason, loader.prepared))
        elif loader.sleep(router, message) if isinstance(message, SleepNode) else loader.switch(router, message):
            self._leave_by, self._has_moved = self._clock() + message.finish_s, False
            self._links.standing.set_switching(True)

    def catch_up(self, order: PrepareWeights, share: float) -> bool:
        """Load other weights before the node has registered, and have `run` go over to them at once. False where that
        failed, or the node stops.
        """
        standing = self._links.standing
        self._loader.catch_up(self._links.me, order)
        while self._loader.is_preparing and not standing.is_draining:
            self._wait()
            self.turn()
        if standing.is_draining or self._loader.prepared is None:
            return False
        self._end_boot(self._links.me, SwitchWeights(0, order.version.epoch, 0.0, share))
        while self._loader.is_switching and not self.is_over():  # an engine that is changed may fail
            self._wait()
            self.turn()
        return self._loader.is_switching

    def _stay(self, reason: str) -> None:
        """The switch is off; the node takes work again."""
        self._loader.stay(reason)
        self._leave_by, self._has_moved = None, False
        self._links.standing.set_switching(False)

    def _move_work(self) -> int:
        """End what runs or waits here, so that routers go on with it elsewhere. Returns how many requests."""
        return self._side.end_all(NodeDrains.code, f"node {self._links.me.node} gives its work to other nodes")

    # ------------------------------------------------------------ messages

    def _handle_messages(self) -> None:
        links = self._links
        for received in links.hub.receive():
            self.handle(received)
        for event in links.hub.events():
            if isinstance(event, LeaseEnded):
                self._lose_router(event.peer)
            if isinstance(event, LinkLost):
                self._lose_node(event.peer)
        for peer in links.neighbours.gone():
            self._lose_node(peer)

    def handle(self, received: Received) -> None:
        """Act on one message."""
        peer, message = received.peer, received.message
        if received.kind == "router":
            self._on_router_message(peer, message)
        elif isinstance(message, Hello):
            self._links.hub.send(peer, Welcome(self._links.standing.role))
        elif received.kind == "node" and (
            self._loader.exchange.on_message(peer, message) or self._side.node_message(peer, message)
        ):
            return
        elif not isinstance(message, Welcome):
            logger.warning("node %s sent a %s, which only routers send: dropped", peer.node, type(message).__name__)

    def _on_router_message(self, router: Peer, message: AnyMessage) -> None:
        side, links = self._side, self._links
        if isinstance(message, Prefill):
            side.prefill(router, message)
        elif isinstance(message, Reserve):
            side.reserve(router, message)
        elif isinstance(message, Deliver):
            side.deliver(router, message)
        elif isinstance(message, Cancel):
            side.cancel(message.request, message.attempt, message.reason)
        elif isinstance(message, Release):
            side.release(message.request)
        elif isinstance(message, Hello):
            self._on_hello(router, message)
        elif isinstance(message, Manage):
            answer = links.standing.apply(message)
            if message.moves:
                answer = structs.replace(answer, num_moved=self._move_work())
            links.outbox.message(router, answer)
        elif isinstance(message, ManageAdapter):
            side.manage_adapter(router, message)
        elif isinstance(message, PrepareWeights):
            self._loader.load(router, message)
        elif isinstance(message, ReceiveWeights):
            self._loader.receive(router, message)
        elif isinstance(message, CommitWeights):
            self._loader.commit(router, message)
        elif isinstance(message, SwitchWeights | SleepNode):
            self._end_boot(router, message)
        elif isinstance(message, DropWeights):
            self._loader.drop(router, message)
        elif isinstance(message, ShareWeights):
            self._loader.change_share(message.share)
            links.neighbours.set_weights_share(message.share)
            links.outbox.message(router, WeightsManaged(message.number, "", self._loader.prepared))
        elif isinstance(message, AskCache):
            self._reporter.add(router, self._tell)
        elif isinstance(message, FetchFile):
            self._tell(router, links.files.chunk(message))

    def _on_hello(self, router: Peer, message: Hello) -> None:
        """(Re)welcome a router: send again what it lost, report what we do not know, end what it no longer awaits."""
        self._side.keep_only(router, {(request, attempt) for request, attempt, _ in message.open})
        lost = tuple(self._lost(router, message))
        self._links.outbox.message(router, Welcome(self._links.standing.role, lost))
        self._reporter.add(router, self._tell)

    def _lost(self, router: Peer, message: Hello) -> Iterator[tuple[str, int]]:
        """Attempts that this boot does not know. What the router missed of the others is sent."""
        outbox = self._links.outbox
        for request, attempt, position in message.open:
            leg, ended = self._side.find(request, attempt), self._links.ended.get(request, attempt)
            if leg is not None and leg.router == router:
                if leg.output.num_output > position:
                    outbox.row(router, leg.output.since(position))
            elif ended is not None and ended.router == router:
                outbox.row(router, ended.output.since(position))
                outbox.message(router, ended.word)
            elif not self._side.awaits(request, attempt):
                yield request, attempt

    def _lose_node(self, peer: Peer) -> None:
        self._loader.exchange.node_gone(peer)
        self._side.node_gone(peer)

    def _lose_router(self, router: Peer) -> None:
        logger.warning("router %s is gone: its requests are cancelled", router.node)
        self._reporter.remove(router)
        self._links.ended.forget_router(router)
        self._side.cancel_router(router)

    def _tell(self, router: Peer, message: AnyMessage) -> None:
        self._links.hub.send(router, message)

    # ------------------------------------------------------------ idleness

    def _check_idle(self) -> None:
        """After an idle while, check that the allocators add up, so that a leak is found early. Not at every pause: a
        recount may visit all pages.
        """
        now = self._clock()
        if not self._side.is_idle:
            self._idle_since = now
            self._is_checked = False
        elif not self._is_checked and now - self._idle_since >= IDLE_CHECK_S:
            self._is_checked = True
            self._side.check_integrity()
