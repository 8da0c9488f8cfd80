"""A router's link to one node, driven by its asyncio loop (uvloop too). The rules of a link are in `wire.client_link`;
this file only wakes it.

ZMQ's descriptors are edge-triggered: they become readable once per change, and sending may swallow that edge. So every
wake-up drains to the end, and every send looks again.

What is sent in turns of the loop that follow each other leaves as one frame: at the end of the first turn that sent
nothing, or with the first message that comes HELD_S after the one that waits longest. A frame costs a busy router what
half a request does. Where one message was sent when last something was, the next goes at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter

import zmq

from pdcluster.core.awake_clock import AwakeClock
from pdcluster.core.errors import NodeLost
from pdcluster.core.messages import AnyMessage, Endpoint
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.client_link import ClientLink, LinkState, Open
from pdcluster.wire.sockets import WireSettings

__all__ = ["LinkState", "NodeLink"]

# Who handles many requests does not keep the first one's messages until the last one is done.
HELD_S = 0.001


class NodeLink:
    """One caller of one boot of one node; belongs to the running loop.

    Two plain callbacks instead of a queue: a token frame reaches its request without a task switch. on_message gets
    every message but Ping and Hello, on_state every change of state; neither may block. Sending is allowed while
    CONNECTING: frames follow the Hello.
    """

    def __init__(
        self,
        me: Peer,
        endpoint: Endpoint,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: Callable[[AnyMessage], None],
        on_state: Callable[[LinkState], None],
        open_attempts: Callable[[], Open],
        settings: WireSettings,
    ) -> None:
        self.endpoint = endpoint
        self._on_message, self._on_state = on_message, on_state
        self._tick_s = settings.heartbeat_s / 4
        self._loop = asyncio.get_running_loop()
        self._clock = AwakeClock(2 * self._tick_s, self._loop.time)
        self._client_link = ClientLink(
            me, endpoint, kind="router", context=context, settings=settings, open_attempts=open_attempts,
            now=self._clock()
        )  # fmt: skip
        self._told = LinkState.CONNECTING
        # What waits for a flush.
        self._unsent = self._client_link.unsent
        self._watched: Sequence[zmq.Socket[bytes]] = ()
        self._closed = False
        self._is_end_due = False
        # Something may have become of the connection since it was looked at.
        self._is_connection_due = True
        # One message was sent when last something was, and that turn is over.
        self._is_calm = True
        # Messages since the end of a turn was looked at.
        self._num_sent = 0
        # Something was held since the end of the turn before this one.
        self._is_more = False
        # A frame left since the last look at what came, whose edge may have gone with it.
        self._has_flushed = False
        # More came than was taken in one go.
        self._is_behind = False
        # When the first message that waits came; 0: none came since the last flush.
        self._held_since = 0.0
        self._watch()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    @property
    def state(self) -> LinkState:
        return self._client_link.state

    @property
    def lost_because(self) -> str:
        """Why the link is LOST, "" while it is not."""
        return self._client_link.lost_because

    @property
    def dropped(self) -> Counter[str]:
        """Frames that were not accepted, by reason."""
        return self._client_link.dropped

    @property
    def gaps(self) -> int:
        return self._client_link.gaps

    def send(self, message: AnyMessage) -> int:
        """Put one message into this turn's frame, and return that frame's number; raises NodeLost when the link is
        lost, broken just now, or too much waits."""
        number = self._client_link.put(message) or self._make_room(message)
        self._num_sent += 1
        if self._is_calm:
            self._is_calm = False
            self._flush()
            self._end_turn_soon()
            return number
        self._is_more = True
        if not self._held_since:
            self._held_since = perf_counter()
            self._end_turn_soon()
        elif perf_counter() - self._held_since >= HELD_S:
            self._flush()
        return number

    def _make_room(self, message: AnyMessage) -> int:
        """For a message that does not go with what waits."""
        self._held_since, self._has_flushed = 0.0, True
        number = self._client_link.send(message, self._clock())
        if number:
            return number
        node, state = self.endpoint.node, self.state
        why = self.lost_because or (f"its link is {state.name.lower()} and takes no more frames")
        raise NodeLost(f"cannot send {type(message).__name__} to {node} at {self.endpoint.address}: {why}")

    def _flush(self) -> None:
        self._held_since = 0.0
        if self._unsent:
            self._has_flushed = True
            self._client_link.flush(self._clock())

    def close(self) -> None:
        """Let go of the sockets; on_state is not called. Idempotent."""
        self._closed = True
        self._timer.cancel()
        self._client_link.close()
        self._watch()

    def _end_turn_soon(self) -> None:
        if not self._is_end_due:
            self._is_end_due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        if self._is_more and self._held_since:
            self._is_more = False
            self._loop.call_soon(self._end_turn)
            if self._has_flushed or self._is_behind:
                self._has_flushed = self._is_behind = False
                self._drain()
            return
        self._is_end_due = False
        if self._num_sent:
            self._is_calm = self._num_sent == 1
            self._num_sent = 0
        self._held_since = 0.0
        if self._unsent:
            self._flush()
        self._has_flushed = self._is_behind = False
        self._drain()
        if self._unsent:
            self._flush()
        if self._unsent:
            self._retry_later()
        elif self._has_flushed:
            self._end_turn_soon()

    def _retry_later(self) -> None:
        """Too much waits already, and nothing says when it no longer does."""
        if not self._is_end_due:
            self._is_end_due = True
            self._loop.call_later(HELD_S, self._end_turn)

    def _on_readable(self) -> None:
        self._drain()
        if self._unsent:
            self._end_turn_soon()

    def _on_connection(self) -> None:
        self._is_connection_due = True
        self._on_readable()

    def _drain(self) -> None:
        looks_at_connection, self._is_connection_due = self._is_connection_due, False
        messages, more = self._client_link.receive(self._clock(), looks_at_connection=looks_at_connection)
        if more:
            self._is_behind = True
            self._end_turn_soon()
        link = self._client_link
        if link.sockets is not self._watched or link.retired:
            self._watch()
        if link.state is LinkState.UP and self._told is not LinkState.UP:
            self._tell()
        if messages:
            self._deliver(messages)
        if link.state is not self._told:
            self._tell()

    def _deliver(self, messages: list[AnyMessage]) -> None:
        # One message that its receiver cannot stand must not cost the others of the same batch.
        on_message, is_calm = self._on_message, self._is_calm
        if len(messages) > 1:
            self._is_calm = False  # what is said in answer goes together
        for message in messages:
            if self._closed:
                return
            try:
                on_message(message)
            except Exception as error:
                what = f"{type(message).__name__} from {self.endpoint.node} was not handled"
                self._loop.call_exception_handler({"message": what, "exception": error})
        if not self._num_sent:
            self._is_calm = is_calm

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._is_connection_due = True
        self._drain()
        self._client_link.tick(self._clock())
        self._watch()
        self._tell()
        self._has_flushed = True
        self._end_turn_soon()

    def _tell(self) -> None:
        if self._closed or self.state is self._told:
            return
        self._told = self.state
        if self.state is LinkState.LOST:
            self._timer.cancel()
        self._on_state(self.state)

    def _watch(self) -> None:
        """Follow the link's sockets, which change with every connection."""
        sockets = self._client_link.sockets
        if sockets is not self._watched:
            for socket in self._watched:
                self._loop.remove_reader(socket.fileno())
            for socket, on_readable in zip(sockets, (self._on_readable, self._on_connection), strict=False):
                self._loop.add_reader(socket.fileno(), on_readable)
            self._watched = sockets
            self._is_connection_due = True
            self._end_turn_soon()
        self._client_link.release()
