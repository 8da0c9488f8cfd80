"""Limits of gRPC calls that hold before a message is read.

gRPC reads the message of a unary call before its handler runs. So every method is served here as one of streams: the
handler decides first, and reads then. Clients see no difference.

1. Methods of one group share places, and groups do not take each other's. By Shares, no machine gets all of a group.
2. Few messages are read at a time, since each may be as large as messages may be. Where that many are read, the call
   waits. A message that had its grace makes room for one that waits: of those who read most, or of the waiter where
   nobody reads more. Callers take turns, and each has at most MOST_WAITING that wait.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from time import monotonic
from typing import Any

import grpc

from pdcluster.core.errors import Cancelled, Overloaded, PdclusterError
from pdcluster.rpc.status import retry_metadata, status_of
from pdcluster_router.core.shares import GREED, Shares
from pdcluster_router.http.errors import SlowRequest

log = logging.getLogger(__name__)

GRACE_S, OPEN_GRACE_S = 1.0, 0.25
READ_S = 30.0
# For a client that reads nothing, to take a message, and then its error.
STALL_S, LAST_WORD_S = 30.0, 1.0
# Of methods that anybody may call.
OPEN_READS = 2
MOST_WAITING = 64


class MessageReads:
    """Messages that are being read. Owned by the server's loop.

    read_s: for one message, with the wait for its turn.
    grace_s: that it has while others wait.
    """

    def __init__(self, num_at_a_time: int, read_s: float = READ_S, grace_s: float = GRACE_S) -> None:
        self._shares = Shares(num_at_a_time, GREED)
        self._read_s, self._grace_s = read_s, grace_s
        # Whose each is and when it began, the oldest first.
        self._readers: dict[asyncio.Timeout, tuple[str, float]] = {}
        # By owner, whose turn is next first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def read(self, context: grpc.aio.ServicerContext, owner: str) -> Any:
        """The call's next message; grpc.aio.EOF behind the last. Raises SlowRequest and Overloaded."""
        until = monotonic() + self._read_s
        if any(map(self._shares.has_room, self._waiting)) or not self._shares.take_if_room(owner):
            await self._turn(owner, until)
            while not self._shares.take_if_room(owner):
                await self._turn(owner, until)
            self._wake()
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - monotonic()) as limit:
                self._readers[limit] = owner, monotonic()
                try:
                    return await context.read()
                finally:
                    self._readers.pop(limit, None)
        except TimeoutError:
            raise SlowRequest("the call's message did not arrive in time; send it faster") from None
        finally:
            self._shares.give_back(owner)
            self._wake()

    async def _turn(self, owner: str, until: float) -> None:
        """Wait for a turn. Raises Overloaded."""
        if len(self._waiting.get(owner, ())) >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} calls wait for their message to be read; retry later", reason="arriving")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            while not turn.done():
                left_s = until - monotonic()
                if left_s <= 0:
                    raise Overloaded("too many messages are being read; retry later", reason="arriving")
                await asyncio.wait((turn,), timeout=min(self._make_room(owner), left_s))
        except asyncio.CancelledError:
            if turn.done():
                self._wake()
            raise
        finally:
            if not turn.done():
                self._waiting[owner].remove(turn)
                if not self._waiting[owner]:
                    del self._waiting[owner]

    def _make_room(self, waiter: str) -> float:
        """End the oldest read of whoever reads most, the waiter before others, if it had its grace. Returns the seconds
        until that may be so again.
        """
        taken = {
            owner: self._shares.taken_by(owner) for owner in (waiter, *(each for each, _ in self._readers.values()))
        }
        most = max(taken.values())
        ends = {waiter} if taken[waiter] == most else {owner for owner, count in taken.items() if count == most}
        oldest = next((limit for limit, (owner, _) in self._readers.items() if owner in ends), None)
        if oldest is None:
            return self._grace_s
        left_s = self._readers[oldest][1] + self._grace_s - monotonic()
        if left_s > 0:
            return left_s
        del self._readers[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())
        return self._grace_s

    def _wake(self) -> None:
        """One who waits and has room, of one owner after the other."""
        owner = next(filter(self._shares.has_room, self._waiting), None)
        if owner is None:
            return
        turns = self._waiting.pop(owner)
        turns.popleft().set_result(None)
        if turns:
            self._waiting[owner] = turns


def open_reads() -> MessageReads:
    """For methods that anybody may call. Their messages are small."""
    return MessageReads(OPEN_READS, grace_s=OPEN_GRACE_S)


class CallGroup:
    """Methods that share places.

    name: in errors.
    is_fair: no machine gets all places.
    """

    def __init__(self, name: str, num_calls: int, reads: MessageReads, *, is_fair: bool = True) -> None:
        self.name, self.reads = name, reads
        self._shares = Shares(num_calls, GREED if is_fair else None)

    def bounded(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        async def call(requests: object, context: grpc.aio.ServicerContext) -> None:
            machine = machine_of(context)
            if not self._shares.take_if_room(machine):
                used = self._shares.used
                await _fail(context, Overloaded(f"{used} calls of {self.name} are open; close some, or retry later"))
                return
            try:
                await self._run(handler, context, machine)
            except PdclusterError as error:
                await _fail(context, error)
            finally:
                self._shares.give_back(machine)

        return grpc.stream_stream_rpc_method_handler(
            call, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    async def _run(self, handler: grpc.RpcMethodHandler, context: grpc.aio.ServicerContext, machine: str) -> None:
        if handler.request_streaming:
            work, request = handler.stream_stream, self._messages(context, machine)
        else:
            work, request = handler.unary_stream or handler.unary_unary, await self.reads.read(context, machine)
            if request is grpc.aio.EOF:
                return
        if inspect.isasyncgenfunction(work):
            async with aclosing(work(request, context)) as replies:
                async for reply in replies:
                    await _write(context, reply)
        elif handler.response_streaming:
            await work(request, context)
        else:
            await _write(context, await work(request, context))

    async def _messages(self, context: grpc.aio.ServicerContext, machine: str) -> AsyncIterator[Any]:
        while (message := await self.reads.read(context, machine)) is not grpc.aio.EOF:
            yield message


class CallLimits(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Bounds the calls of one server.

    groups: by method (/SERVICE/METHOD).
    others: of methods that are in none.
    """

    def __init__(self, groups: Mapping[str, CallGroup], others: CallGroup) -> None:
        self._groups, self._others = groups, others

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        return self._groups.get(details.method, self._others).bounded(handler)


async def _write(context: grpc.aio.ServicerContext, reply: object) -> None:
    try:
        async with asyncio.timeout(STALL_S):
            await context.write(reply)
    except TimeoutError:
        raise Cancelled("the client did not read what it was sent") from None


async def _fail(context: grpc.aio.ServicerContext, error: PdclusterError) -> None:
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await context.abort(status_of(error), str(error), retry_metadata(error))
    except TimeoutError:
        log.info("a client does not read why its call ended: %s", error)


def machine_of(context: grpc.aio.ServicerContext) -> str:
    """Who calls, without the port."""
    return str(context.peer()).rpartition(":")[0]
