"""A node's links: one bound ROUTER socket for all callers, one ClientLink for each node it calls. Synchronous, owned by
the node's loop thread.

The hub knows who is there (leases), what arrived in order, and which boot is gone. The node's loop answers every Hello
with Welcome, and says again what a router misses.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

import zmq

from pdcluster.core import messages as m
from pdcluster.core.errors import OtherProtocol, ProtocolError
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire import codec
from pdcluster.wire.batch import MessageBatch
from pdcluster.wire.client_link import ClientLink, LinkState
from pdcluster.wire.curve import Gatekeeper
from pdcluster.wire.sockets import WireSettings, derive_keys, link_key_of, open_router

Kind = Literal["router", "node"]
MAX_RETIRED = 1024
MAX_FORMER = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    peer: Peer
    kind: Kind
    message: m.AnyMessage


@dataclass(frozen=True, slots=True)
class LinkLost:
    """That boot of a node cannot be reached any more, or was replaced by a newer one."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class LinkGap:
    """Frames between us and that peer were lost: say again what it may have missed, and expect it to do the same."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """That router is silent for lease_s: what it asked for is nobody's now. It may come back with a Hello."""

    peer: Peer


Event = LinkLost | LinkGap | LeaseEnded


@dataclass(slots=True)
class _Route:
    """One caller at the ROUTER socket. Kept after its lease ended, so that its numbers go on when it returns."""

    kind: Kind
    identity: bytes
    received: int
    heard_at: float
    sent_at: float
    batch: MessageBatch
    sent: int = 0
    alive: bool = True
    # Its connections before this one. The socket reads what those still held in any order, so a Hello among it is no
    # news.
    former: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_FORMER))


class Hub:
    """`dropped` counts what was not accepted or could not be sent, by reason: malformed, other_incarnation,
    old_incarnation, old_connection, unknown_peer, duplicate, misdirected, too_many_peers, unreachable, high_water,
    bad_address. `gaps` counts the times when frames were missing."""

    def __init__(
        self,
        me: Peer,
        *,
        listen: str,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: WireSettings,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._me, self._context, self._settings, self._clock = me, context, settings, clock
        self.dropped: Counter[str] = Counter()
        self._gaps = 0
        self._gatekeeper = (
            Gatekeeper(context, map(derive_keys, settings.cluster_keys)) if settings.cluster_keys else None
        )
        try:
            self._router, self.address = open_router(context, listen, settings)
            self.link_key = link_key_of(settings)
        except BaseException:
            self._close_gatekeeper()
            raise
        self._routes: OrderedDict[Peer, _Route] = OrderedDict()
        self._retired: OrderedDict[Peer, None] = OrderedDict()
        self._dialers: dict[Peer, ClientLink] = {}
        self._unsent: dict[Peer, _Route] = {}
        self._events: list[Event] = []
        self._now = self._drained_at = clock()

    # ------------------------------------------------------------ what the loop calls

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for reading, with zmq.Poller (their descriptors are edge-triggered). Ask again after every
        receive, send and tick."""
        return [self._router, *(socket for client_link in self._dialers.values() for socket in client_link.sockets)]

    def receive(self) -> list[Received]:
        """Whatever came, about max_drain messages per socket at most (frames are taken whole); never blocks."""
        self._now = self._clock()
        received = self._receive_calls()
        for peer, client_link in list(self._dialers.items()):
            gaps = client_link.gaps
            messages, _ = client_link.receive(self._now)
            client_link.release()
            received += (Received(peer, "node", message) for message in messages)
            if client_link.gaps > gaps:
                self._note_gap(peer)
            self._forget_if_lost(peer, client_link)
        self.flush()
        return received

    def send(self, to: m.Endpoint | Peer, message: m.AnyMessage) -> bool:
        """Put one message into the peer's next frame, which leaves by `flush`. False (counted) when the peer cannot be
        reached or too much waits. Never blocks.

        A node is called at its endpoint when no link with that boot is up. A caller that is only known by name is
        answered on its link.
        """
        self._now = self._clock()
        if isinstance(to, Peer):
            return self._send_to_known(to, message)
        peer = Peer(to.node, to.incarnation)
        if peer in self._retired:
            return self._counted(False, "old_incarnation")
        client_link = self._dialers.get(peer) or self._dial(peer, to)
        return client_link is not None and self._counted(client_link.send(message, self._now) > 0, "high_water")

    def flush(self) -> None:
        """Let everything that was sent leave, one frame per peer."""
        for peer, route in self._unsent.items():
            self._flush_route(peer, route)
        self._unsent.clear()
        for client_link in self._dialers.values():
            client_link.flush(self._now)

    def events(self) -> list[Event]:
        """What happened to links since the last call."""
        events, self._events = self._events, []
        return events

    def tick(self) -> None:
        """Pings and leases, then `flush`. Call it at the end of every turn, several of which a heartbeat has."""
        self._now = self._clock()
        for peer, route in self._routes.items():
            if route.alive:
                self._keep(peer, route)
        for peer, client_link in list(self._dialers.items()):
            client_link.tick(self._now)
            self._forget_if_lost(peer, client_link)
        self.flush()

    def peers(self, kind: Kind) -> list[Peer]:
        """Everyone of that kind who called us and whose lease runs."""
        return [peer for peer, route in self._routes.items() if route.alive and route.kind == kind]

    def forget(self, peer: Peer) -> None:
        """The bootstrap says that this boot of a node is gone. Drop its links, without an event. It may come back with
        a Hello.
        """
        client_link = self._dialers.pop(peer, None)
        if client_link is not None:
            client_link.close()
            client_link.release()
        self._routes.pop(peer, None)
        self._unsent.pop(peer, None)

    def last_received(self, peer: Peer) -> int:
        """Number of the last frame that came from a caller; 0 for strangers."""
        route = self._routes.get(peer)
        return route.received if route is not None else 0

    @property
    def gaps(self) -> int:
        return self._gaps

    def close(self, linger_s: float = 0.0) -> None:
        """Close every socket of the hub. The context stays its owner's. Idempotent. linger_s: how long waiting frames
        may still go out.
        """
        if linger_s:
            self.flush()
        for client_link in self._dialers.values():
            client_link.close()
            client_link.release()
        self._dialers.clear()
        self._router.close(int(linger_s * 1000))
        self._close_gatekeeper()

    # ------------------------------------------------------------ sending

    def _send_to_known(self, peer: Peer, message: m.AnyMessage) -> bool:
        route = self._routes.get(peer)
        if route is not None and route.alive:
            return self._send_on(peer, route, message)
        client_link = self._dialers.get(peer)
        return self._counted(client_link is not None and client_link.send(message, self._now) > 0, "unreachable")

    def _send_on(self, peer: Peer, route: _Route, message: m.AnyMessage) -> bool:
        if not route.batch.put(message):
            self._flush_route(peer, route)
            route.batch.put(message)
        self._unsent[peer] = route
        return True

    def _flush_route(self, peer: Peer, route: _Route) -> None:
        # The number is used up even when the frame is dropped: the peer then sees the gap and asks.
        if route.batch.parts:
            route.sent += 1
            if self._send_frame(route.identity, route.batch.frame(route.sent)):
                route.sent_at = self._now
            route.batch.clear()

    def _ping(self, peer: Peer, route: _Route) -> None:
        # At once, and a lost one is no loss.
        self._flush_route(peer, route)
        if self._send_frame(route.identity, self._frame_of(peer.incarnation, route.sent + 1, m.Ping())):
            route.sent += 1
            route.sent_at = self._now

    def _frame_of(self, to_incarnation: str, sequence: int, message: m.AnyMessage) -> bytes:
        envelope = m.Envelope(
            m.PROTOCOL_VERSION, self._me.node, self._me.incarnation, to_incarnation, sequence, (message,)
        )
        return codec.encode(envelope, max_bytes=self._settings.max_frame_bytes)

    def _send_frame(self, identity: bytes, frame: bytes) -> bool:
        try:
            self._router.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            return self._counted(False, "high_water")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return self._counted(False, "unreachable")
        return True

    def _counted(self, sent: bool, reason: str) -> bool:
        if not sent:
            self.dropped[reason] += 1
        return sent

    def _dial(self, peer: Peer, endpoint: m.Endpoint) -> ClientLink | None:
        if len(self._dialers) >= self._settings.max_peers:
            self.dropped["too_many_peers"] += 1
            return None
        try:
            client_link = ClientLink(
                self._me, endpoint, kind="node", context=self._context,
                settings=self._settings, open_attempts=tuple, now=self._now, dropped=self.dropped,
            )  # fmt: skip
        except ProtocolError:
            self.dropped["bad_address"] += 1
            return None
        self._dialers[peer] = client_link
        return client_link

    # ------------------------------------------------------------ receiving

    def _receive_calls(self) -> list[Received]:
        received: list[Received] = []
        for _ in range(self._settings.max_drain):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._drained_at = self._now
                break
            received += self._accept(parts)
            if len(received) >= self._settings.max_drain:
                break
        return received

    def _accept(self, parts: list[bytes]) -> Iterable[Received]:
        try:
            if len(parts) != 2:
                raise ProtocolError(f"a frame of {len(parts)} parts")
            envelope = codec.decode(parts[1], max_bytes=self._settings.max_frame_bytes)
        except OtherProtocol as error:
            self.dropped["other_protocol"] += 1
            log.warning("refused who called at %s: %s", self.address, error)
            return ()
        except ProtocolError:
            self.dropped["malformed"] += 1
            return ()
        peer, first = Peer(envelope.sender, envelope.incarnation), envelope.messages[0]
        if envelope.to_incarnation not in ("", self._me.incarnation):
            self._answer_stranger(parts[0], peer, "other_incarnation")
            return ()
        if peer in self._retired:
            self.dropped["old_incarnation"] += 1
            return ()
        if isinstance(first, m.Hello):
            return self._accept_hello(parts[0], peer, first, envelope.sequence)
        route = self._routes.get(peer)
        if route is None or not route.alive or route.identity != parts[0]:
            self._answer_stranger(parts[0], peer, "unknown_peer")
            return ()
        return self._in_order(peer, route, envelope)

    def _answer_stranger(self, identity: bytes, peer: Peer, reason: str) -> None:
        """A Hello of ours says who lives here, and asks the other to say who it is."""
        self.dropped[reason] += 1
        current = self._routes.get(peer)
        if current is None or current.identity != identity:
            self._send_frame(identity, self._frame_of(peer.incarnation, 1, m.Hello("node")))
        else:
            self._send_on(peer, current, m.Hello("node"))

    def _accept_hello(self, identity: bytes, peer: Peer, hello: m.Hello, sequence: int) -> Iterable[Received]:
        route = self._routes.get(peer)
        if route is None:
            route = self._new_route(identity, peer, hello.kind)
            if route is None:
                return ()
        if identity in route.former:
            self.dropped["old_connection"] += 1
            return ()
        if identity != route.identity:
            route.former.append(route.identity)
        self._flush_route(peer, route)  # what was said to the connection before this one goes there
        route.identity, route.kind, route.received, route.heard_at, route.alive = (
            identity,
            hello.kind,
            sequence,
            self._now,
            True,
        )
        # Proves at once that this boot lives, also when the loop computes for a while before its Welcome.
        self._ping(peer, route)
        return (Received(peer, hello.kind, hello),)

    def _new_route(self, identity: bytes, peer: Peer, kind: Kind) -> _Route | None:
        if kind == "node":
            self._replace_older_boots(peer)
        if len(self._routes) >= self._settings.max_peers and not self._make_room():
            self.dropped["too_many_peers"] += 1
            return None
        batch = MessageBatch(self._me, peer.incarnation, max_frame_bytes=self._settings.max_frame_bytes)
        route = _Route(kind, identity, 0, self._now, self._now, batch)
        self._routes[peer] = route
        return route

    def _make_room(self) -> bool:
        over = next((peer for peer, route in self._routes.items() if not route.alive), None)
        if over is not None:
            del self._routes[over]
        return over is not None

    def _replace_older_boots(self, peer: Peer) -> None:
        # Names of nodes are unique, so a new boot proves the old one dead. Routers may share a name. Their leases
        # decide.
        known = [*(p for p, route in self._routes.items() if route.kind == "node"), *self._dialers]
        for old in dict.fromkeys(known):
            if old.node == peer.node and old != peer:
                self.forget(old)
                self._retire(old)
                self._events.append(LinkLost(old, f"{peer.node} started again as {peer.incarnation}"))

    def _in_order(self, peer: Peer, route: _Route, envelope: m.Envelope) -> Iterable[Received]:
        route.heard_at = self._now
        if envelope.sequence <= route.received:
            self.dropped["duplicate"] += 1
            return ()
        if envelope.sequence != route.received + 1:
            self._note_gap(peer)
            self._send_on(peer, route, m.Hello("node"))
        route.received = envelope.sequence
        messages = envelope.messages
        return [
            Received(peer, route.kind, message)
            for message in (messages[1:] if isinstance(messages[0], m.Ping) else messages)
        ]

    # ------------------------------------------------------------ who is there

    def _keep(self, peer: Peer, route: _Route) -> None:
        # Judged by the last complete drain: during computing, pings may be waiting unread.
        if self._drained_at - route.heard_at >= self._settings.lease_s:
            route.alive = False
            dialled = peer in self._dialers
            if route.kind == "router":
                self._events.append(LeaseEnded(peer))
            elif not dialled:
                self._events.append(LinkLost(peer, f"nothing heard from {peer.node} for {self._settings.lease_s} s"))
        elif self._now - route.sent_at >= self._settings.heartbeat_s:
            self._ping(peer, route)

    def _forget_if_lost(self, peer: Peer, client_link: ClientLink) -> None:
        if client_link.state is LinkState.LOST:
            del self._dialers[peer]
            client_link.release()
            if client_link.replaced:
                self._retire(peer)
            self._events.append(LinkLost(peer, client_link.lost_because))

    def _note_gap(self, peer: Peer) -> None:
        self._gaps += 1
        self._events.append(LinkGap(peer))

    def _retire(self, peer: Peer) -> None:
        self._retired[peer] = None
        self._retired.move_to_end(peer)
        while len(self._retired) > MAX_RETIRED:
            self._retired.popitem(last=False)

    def _close_gatekeeper(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
