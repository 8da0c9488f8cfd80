"""A router's link to a simulated node: what `wire.router_link` does, without sockets.

Frames keep their order and take time. A cut loses what is on its way, and a Hello follows. A frame that is lost alone
is a gap: a Hello follows as soon as the next one comes. A link hears nothing for a lease and is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from pdcluster.core.errors import NodeLost
from pdcluster.core.messages import AnyMessage, Endpoint, Hello
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.client_link import LinkState, Open
from pdcluster.wire.sockets import WireSettings

LATENCY_S = 0.001
# Frames that follow each other arrive one after the other.
TICK_S = 1e-6
RECONNECT_S = 0.02


class Process(Protocol):
    """A boot of a node."""

    def receive(self, link: FuzzLink, number: int, message: AnyMessage) -> None: ...

    def note_silence(self) -> None:
        """The router may have lost its lease."""
        ...


class Network:
    """Which boots run where, and what becomes of frames."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, note: Callable[[str], None], on_loss: Callable[[str], None]
    ) -> None:
        """on_loss: told the boot that did not get, or say, a frame."""
        self.loop = loop
        self.note, self.on_loss = note, on_loss
        self.settings = WireSettings()
        self._processes: dict[str, tuple[str, Process]] = {}
        self._muted: set[str] = set()
        self._slow: dict[str, float] = {}
        # Frames of a node, in either direction, that will be lost.
        self._to_lose: dict[str, int] = {}
        self.links: list[FuzzLink] = []

    def start(self, node: str, incarnation: str, process: Process) -> None:
        self._processes[node] = incarnation, process

    def end(self, node: str) -> None:
        """The process ends: its connections are cut."""
        del self._processes[node]
        self.cut(node)

    def boot_of(self, node: str) -> str | None:
        found = self._processes.get(node)
        return None if found is None else found[0]

    def process(self, endpoint: Endpoint) -> Process | None:
        found = self._processes.get(endpoint.node)
        return None if found is None or found[0] != endpoint.incarnation else found[1]

    def cut(self, node: str) -> None:
        for link in self._of(node):
            self.loop.call_later(LATENCY_S, link.cut)

    def is_muted(self, node: str) -> bool:
        return node in self._muted

    def mute(self, node: str) -> None:
        """Connections stand, and nothing comes through."""
        self._muted.add(node)
        for link in self._of(node):
            self.loop.call_later(self.settings.lease_s, link.end_silence)
        self.loop.call_later(self.settings.lease_s, self._note_silence, node)

    def unmute(self, node: str) -> None:
        self._muted.discard(node)
        for link in self._of(node):
            self.loop.call_later(self.settings.heartbeat_s, link.say_hello)  # a ping tells that frames are missing

    def _note_silence(self, node: str) -> None:
        found = self._processes.get(node)
        if found is not None:
            found[1].note_silence()

    def slow(self, node: str, latency_s: float) -> None:
        self._slow[node] = latency_s

    def quicken(self, node: str) -> None:
        self._slow.pop(node, None)

    def latency_s(self, node: str) -> float:
        return self._slow.get(node, LATENCY_S)

    def is_clear(self, node: str) -> bool:
        """Whether all that is said arrives, and at once."""
        is_good = node not in self._muted and node not in self._slow and not self._to_lose.get(node)
        return is_good and not any(link.has_gap for link in self._of(node))

    def lose(self, node: str, count: int) -> None:
        self._to_lose[node] = count

    def is_lost(self, node: str) -> bool:
        left = self._to_lose.get(node, 0)
        self._to_lose[node] = max(left - 1, 0)
        return left > 0

    def heal(self) -> None:
        self._slow.clear()
        self._to_lose.clear()
        for node in list(self._muted):
            self.unmute(node)

    def _of(self, node: str) -> list[FuzzLink]:
        return [link for link in self.links if link.endpoint.node == node]


class FuzzLink:
    """Has the interface of NodeLink. context: the network."""

    def __init__(
        self,
        me: Peer,
        endpoint: Endpoint,
        *,
        context: Network,
        on_message: Callable[[AnyMessage], None],
        on_state: Callable[[LinkState], None],
        open_attempts: Callable[[], Open],
        settings: WireSettings,
    ) -> None:
        self.me, self.endpoint = me, endpoint
        self.state = LinkState.CONNECTING
        self.lost_because = ""
        self.is_closed = False
        self._network, self._loop, self._settings = context, context.loop, settings
        self._on_message, self._on_state, self._open_attempts = on_message, on_state, open_attempts
        self._was_up = False
        # Counts connections: what was sent on an earlier one never arrives.
        self._connection = 0
        self._sent = 0
        self._has_gap_there = self._has_gap_here = False
        self._out_at = self._in_at = 0.0
        self._hello_at = -1.0
        context.links.append(self)
        self._must_be_up_in(settings.lease_s)
        self._connect(self._connection)

    @property
    def has_gap(self) -> bool:
        """Frames were lost, and no Hello has told yet."""
        return self._has_gap_there or self._has_gap_here

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._network.links.remove(self)
            process = self._network.process(self.endpoint)
            if process is not None:
                self._loop.call_later(self._settings.lease_s, process.note_silence)

    # ------------------------------------------------------------ the connection

    def _connect(self, connection: int) -> None:
        """Call the address. Who answers there may be another boot, or nobody."""
        if self.is_closed or connection != self._connection:
            return
        node, boot = self.endpoint.node, self._network.boot_of(self.endpoint.node)
        if boot is None and self._was_up:
            self._lose(f"{self.endpoint.address} refuses connections")
        elif boot is None or self._network.is_muted(node):
            self._loop.call_later(self._settings.hello_interval_s, self._connect, connection)
        elif boot != self.endpoint.incarnation:
            self._loop.call_later(LATENCY_S, self._lose, f"{node} is now another boot ({boot})")
        else:
            self._has_gap_there = self._has_gap_here = False
            self._hello_at = -1.0
            self.say_hello()

    def say_hello(self) -> None:
        now, next_at = self._loop.time(), self._hello_at + self._settings.hello_interval_s
        if self.is_closed or self.state is LinkState.LOST:
            return
        if now < next_at:
            self._loop.call_at(next_at, self.say_hello)
            return
        self._hello_at = now
        self.send(Hello("router", self._open_attempts()))

    def cut(self) -> None:
        if self.is_closed or self.state is LinkState.LOST:
            return
        self._connection += 1
        self._loop.call_later(RECONNECT_S, self._connect, self._connection)
        if self.state is LinkState.UP:
            self.state = LinkState.CONNECTING
            self._must_be_up_in(self._settings.rewelcome_s)
            self._on_state(self.state)

    def _must_be_up_in(self, seconds: float) -> None:
        self._up_by = self._loop.time() + seconds
        self._loop.call_at(self._up_by, self._give_up, self._up_by)

    def _give_up(self, up_by: float) -> None:
        if self.state is LinkState.CONNECTING and up_by == self._up_by:
            self._lose(f"{self.endpoint.node} did not answer at {self.endpoint.address}")

    def end_silence(self) -> None:
        if self.state is LinkState.UP and self._network.is_muted(self.endpoint.node):
            self._lose(f"nothing heard from {self.endpoint.node} for {self._settings.lease_s} s")

    def _lose(self, reason: str) -> None:
        if not self.is_closed and self.state is not LinkState.LOST:
            self.state, self.lost_because = LinkState.LOST, reason
            self._network.note(f"the link to {self.endpoint.incarnation} is lost: {reason}")
            self._on_state(self.state)

    # ------------------------------------------------------------ frames

    def send(self, message: AnyMessage) -> int:
        """Raises NodeLost when the link is lost."""
        if self.state is LinkState.LOST or self.is_closed:
            raise NodeLost(f"cannot send {type(message).__name__} to {self.endpoint.node}: {self.lost_because}")
        self._sent += 1
        self._out_at = max(self._loop.time() + self._network.latency_s(self.endpoint.node), self._out_at + TICK_S)
        self._loop.call_at(self._out_at, self._arrive, self._connection, self._sent, message)
        return self._sent

    def _arrive(self, connection: int, number: int, message: AnyMessage) -> None:
        node, process = self.endpoint.node, self._network.process(self.endpoint)
        if connection != self._connection or process is None:
            return
        if self._network.is_muted(node) or self._network.is_lost(node):
            self._network.note(f"lost on its way to {node}: {message}")
            self._network.on_loss(self.endpoint.incarnation)
            self._has_gap_there = True
            self._loop.call_later(self._settings.heartbeat_s, self._find_gap)  # a ping follows
            return
        self._find_gap()
        process.receive(self, number, message)

    def _find_gap(self) -> None:
        """The node has seen that frames are missing, and asks for a Hello."""
        if self._has_gap_there and not self._network.is_muted(self.endpoint.node):
            self._has_gap_there = False
            self._loop.call_later(LATENCY_S, self.say_hello)

    def reply(self, message: AnyMessage, delay_s: float = 0.0, *, in_order: bool = True) -> None:
        """The node says something."""
        at = self._loop.time() + self._network.latency_s(self.endpoint.node) + delay_s
        if in_order:
            at = self._in_at = max(at, self._in_at + TICK_S)
        self._loop.call_at(at, self._take, self._connection, message)

    def _take(self, connection: int, message: AnyMessage) -> None:
        if self.is_closed or self.state is LinkState.LOST or connection != self._connection:
            return
        node = self.endpoint.node
        if self._network.is_muted(node) or self._network.is_lost(node):
            self._network.note(f"lost on its way from {node}: {message}")
            self._network.on_loss(self.endpoint.incarnation)
            self._has_gap_here = True
            self._loop.call_later(self._settings.heartbeat_s, self._find_own_gap)
            return
        self._find_own_gap()
        if self.state is LinkState.CONNECTING:
            self.state, self._was_up = LinkState.UP, True
            self._on_state(self.state)
        try:
            self._on_message(message)
        except Exception as error:
            what = f"{type(message).__name__} from {node} was not handled"
            self._loop.call_exception_handler({"message": what, "exception": error})

    def _find_own_gap(self) -> None:
        if self._has_gap_here and not self._network.is_muted(self.endpoint.node):
            self._has_gap_here = False
            self.say_hello()
