"""A generation as a stream of events, for callers that wait: gRPC and tests. HTTP uses `generation.Sink` directly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, Protocol, TypeVar

from pdcluster.core.errors import Cancelled
from pdcluster_router.core.generation import Dispatcher, Done, Generation, HangUp, Running, TokenChunk
from pdcluster_router.request.open_requests import HANG_UP_S

# Bytes of events that wait for a reader. A reader further behind is given up.
MAX_UNREAD_BYTES = 16 << 20


class Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


def too_far_behind(num_bytes: int) -> Cancelled:
    return Cancelled(f"the client did not read {num_bytes / 2**20:.1f} MiB that it was sent")


class Unread(Generic[T]):
    """What waits for one reader.

    hang_up: see Generation; called when the request was cancelled and no one reads.
    """

    def __init__(self, hang_up: HangUp | None = None) -> None:
        self._hang_up = hang_up
        self._waiting: deque[T | Exception] = deque()
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, said: T) -> bool:
        """Add an event. False when the reader is too far behind, which is what it gets in the end."""
        num_bytes = said.num_bytes
        has_room = self._num_bytes + num_bytes <= MAX_UNREAD_BYTES or not self._waiting
        self._num_bytes += num_bytes
        self._put(said if has_room else too_far_behind(self._num_bytes))
        return has_room

    def fail(self, error: Exception) -> None:
        """The last event that the reader gets."""
        self._put(error)
        if isinstance(error, Cancelled) and self._hang_up is not None:
            asyncio.get_running_loop().call_later(HANG_UP_S, self._hang_up_if_stuck, self._hang_up, len(self._waiting))

    def _hang_up_if_stuck(self, hang_up: HangUp, num_unread: int) -> None:
        if len(self._waiting) == num_unread:
            hang_up()

    async def next(self) -> T:
        """The next event. Raises the error that ended the generation. Its deadline is the generation's."""
        while not self._waiting:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        said = self._waiting.popleft()
        if isinstance(said, Exception):
            raise said
        self._num_bytes -= said.num_bytes
        return said

    def _put(self, said: T | Exception) -> None:
        self._waiting.append(said)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Events:
    """Implements generation.Sink as a queue for one reader."""

    def __init__(self, hang_up: HangUp | None = None) -> None:
        self.running: Running | None = None
        self._unread = Unread[TokenChunk | Done](hang_up)

    def on_chunk(self, chunk: TokenChunk) -> None:
        if not self._unread.put(chunk) and self.running is not None:
            self.running.cancel("the client does not read")

    def fast_token_path(self) -> None:
        return None

    def on_done(self, done: Done) -> None:
        self._unread.put(done)

    def on_error(self, error: Exception) -> None:
        self._unread.fail(error)

    async def next(self) -> TokenChunk | Done:
        """The next event. Raises the error that ended the generation."""
        return await self._unread.next()


async def events_of(dispatcher: Dispatcher, generation: Generation) -> AsyncGenerator[TokenChunk | Done, None]:
    """Chunks, then one Done or the error. Closing it early, or cancelling its task, cancels the request on the
    nodes.
    """
    events = Events(generation.hang_up)
    running = events.running = dispatcher.start(generation, events)
    try:
        while True:
            event = await events.next()
            yield event
            if isinstance(event, Done):
                return
    finally:
        running.cancel("client left")
