"""The socket that vLLM's KV events come over. vLLM has no other way for them out of its engine process.

vLLM publishes a numbered batch per step. Its publisher drops what a slow subscriber does not take. So a gap is asked
for again, while what came behind it waits. What vLLM no longer has is lost, and the batch behind it says so.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from pdcluster.core.errors import ProtocolError
from pdcluster.node.vllm.events import CacheEvents, decode_events

log = logging.getLogger(__name__)

# Batches that vLLM keeps for a second asking, and that wait unread in a socket.
REPLAY_STEPS = 10_000
HIGH_WATER = 100_000
# Longest wait for a replay, and how often it is looked for. vLLM's publisher looks for requests ten times a second.
REPLAY_S, LOOK_S = 2.0, 0.02
# Batches of one `take`, so that a node that fell behind does other work too.
MAX_TAKEN = 256

_END = (-1).to_bytes(8, "big", signed=True)


class EventStream:
    """Owned by the thread that calls `take`: when fd is readable, and at `next_deadline`.

    directory: of the node alone; the sockets are files in it.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint, self._replay_endpoint = f"ipc://{directory / 'kv'}", f"ipc://{directory / 'kv-replay'}"
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(HIGH_WATER)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self._endpoint)
        # Number of the next batch in order.
        self._next = 0
        # Batches behind a gap, while it is asked for.
        self._held: deque[tuple[int, bytes]] = deque()
        self._replay: zmq.Socket[bytes] | None = None
        self._give_up_at = 0.0
        self._has_more = False

    @property
    def fd(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def config(self) -> dict[str, object]:
        """Values of vLLM's KVEventsConfig."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._endpoint,
            "replay_endpoint": self._replay_endpoint,
            "buffer_steps": REPLAY_STEPS,
            "hwm": HIGH_WATER,
        }

    def next_deadline(self) -> float | None:
        """When `take` has something to do though fd is silent."""
        if self._has_more:
            return self._clock()
        return None if self._replay is None else self._clock() + LOOK_S

    def take(self) -> list[CacheEvents]:
        """Batches since the last call, in order. Raises ProtocolError for what the pinned version does not send."""
        taken: list[CacheEvents] = []
        for number, payload in self._received():
            if self._replay is None and number > self._next:
                self._ask(number)
            if self._replay is not None:
                self._held.append((number, payload))
            else:
                self._append(taken, number, payload)
        if self._replay is not None and self._fill(taken):
            for number, payload in self._held:
                self._append(taken, number, payload)
            self._held.clear()
        return taken

    def close(self) -> None:
        self._end_replay()
        self._socket.close(linger=0)

    def _received(self) -> Iterator[tuple[int, bytes]]:
        self._has_more = False
        for _ in range(MAX_TAKEN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3:
                raise ProtocolError(f"vLLM's KV events came in {len(frames)} frames, not in 3")
            yield int.from_bytes(frames[1], "big"), frames[2]
        self._has_more = True

    def _append(self, taken: list[CacheEvents], number: int, payload: bytes) -> None:
        if number < self._next:
            return  # it came in a replay before
        taken.append(CacheEvents(decode_events(payload), is_gap=number > self._next))
        self._next = number + 1

    # ------------------------------------------------------------ gaps

    def _ask(self, number: int) -> None:
        log.info("vLLM's KV events %d to %d did not come; they are asked for again", self._next, number - 1)
        self._give_up_at = self._clock() + REPLAY_S
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.set_hwm(HIGH_WATER)
        self._replay.connect(self._replay_endpoint)
        self._replay.send_multipart((b"", self._next.to_bytes(8, "big")))

    def _fill(self, taken: list[CacheEvents]) -> bool:
        """Take replayed batches. Whether the wait for them is over."""
        assert self._replay is not None
        while True:
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 4:
                raise ProtocolError(f"vLLM replays KV events in {len(frames)} frames, not in 4")
            if frames[2] == _END:
                self._end_replay()
                return True
            self._append(taken, int.from_bytes(frames[2], "big"), frames[3])
        if self._clock() < self._give_up_at and len(self._held) < REPLAY_STEPS:
            return False
        log.warning("vLLM does not repeat its KV events from %d on", self._next)
        self._end_replay()
        return True

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None
