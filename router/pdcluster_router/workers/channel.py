"""One connection between supervisor and worker: questions with deadlines both ways, and events one way.

A question gets an answer, an error of the other side, or WorkerSilent: the other end is gone or too slow. Both ends are
the same. Every wait has a bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from pdcluster.core.errors import Overloaded, PdclusterError, ProtocolError, Unavailable
from pdcluster.processes.tasks import watched
from pdcluster_router.cluster.events import Event
from pdcluster_router.workers import frames

logger = logging.getLogger(__name__)

T = TypeVar("T")
Reply = Callable[[frames.AnyQuestion], Awaitable[object]]
Hear = Callable[[Event], None]

# Questions being answered at a time.
MAX_QUESTIONS = 256

# More unsent bytes mean that the other end does not read.
MAX_UNSENT_BYTES = 2 * frames.MAX_FRAME_BYTES


class WorkerSilent(Unavailable):
    """No answer came: the other end is gone, or too busy."""


class Channel:
    """Owned by one event loop.

    name: of the other end, in messages.
    reply: answers its questions.
    hear: receives its events.
    """

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply, hear: Hear
    ) -> None:
        self.name = name
        self._reader, self._writer = reader, writer
        self._reply, self._hear = reply, hear
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._num_asked = 0
        self.is_open = True

    async def run(self) -> None:
        """Run until the connection ends. Then no question waits any more."""
        try:
            while (frame := await frames.read(self._reader)) is not None:
                self._take(frame)
        except ProtocolError as error:
            logger.warning("the control connection to %s is closed: %s", self.name, error)
        finally:
            self.close()

    def close(self) -> None:
        self.is_open = False
        for task in self._answering:
            task.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkerSilent(f"{self.name} is gone; if it died, it is being started again"))
        self._writer.close()

    async def ask(self, question: frames.AnyQuestion, kind: type[T], timeout_s: float) -> T:
        """Ask a question. Raises WorkerSilent, or what the other end raised."""
        self._num_asked += 1
        number, answer = self._num_asked, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(frames.WorkerQuestion(number, question))
            async with asyncio.timeout(timeout_s):
                return msgspec.msgpack.decode(await answer, type=kind)
        except TimeoutError:
            raise WorkerSilent(f"{self.name} did not answer within {timeout_s:g} s; it may be stuck") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"{self.name} answered {type(question).__name__} with something else: {error}"
            ) from error
        finally:
            del self._waiting[number]

    def introduce(self, frame: frames.Joined) -> None:
        self._send(frame)

    def tell(self, event: Event) -> None:
        self._send(frames.WorkerEvent(event))

    def _send(self, frame: frames.Frame) -> None:
        if not self.is_open:
            raise WorkerSilent(f"{self.name} is gone; if it died, it is being started again")
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close()
            self._writer.transport.abort()  # no one will read what waits
            raise WorkerSilent(f"{self.name} reads nothing; its control connection is closed")
        self._writer.write(frames.encode(frame))

    def _take(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.WorkerEvent):
            self._hear(frame.event)
        elif isinstance(frame, frames.WorkerAnswer):
            self._resolve(frame)
        elif isinstance(frame, frames.WorkerQuestion):
            self._take_question(frame)
        else:
            raise ProtocolError(f"{type(frame).__name__} came in the middle of a connection")

    def _resolve(self, frame: frames.WorkerAnswer) -> None:
        waiting = self._waiting.get(frame.number)
        if waiting is None or waiting.done():
            return  # its deadline passed
        if frame.problem is not None:
            waiting.set_exception(frames.error_of(frame.problem))
        else:
            waiting.set_result(frame.value)

    def _take_question(self, asked: frames.WorkerQuestion) -> None:
        if len(self._answering) >= MAX_QUESTIONS:
            refusal = Overloaded(f"{MAX_QUESTIONS} questions are being answered already")
            self._send(frames.WorkerAnswer(asked.number, problem=frames.problem_of(refusal)))
            return
        task = watched(self._answer(asked), f"an answer to {self.name}")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, asked: frames.WorkerQuestion) -> None:
        try:
            value = msgspec.msgpack.encode(await self._reply(asked.question))
            answered = frames.WorkerAnswer(asked.number, value)
            frames.encode(answered)  # an answer that is too large raises
        except PdclusterError as error:
            answered = frames.WorkerAnswer(asked.number, problem=frames.problem_of(error))
        except Exception as error:  # the top of this task: the asker must get a bug of ours as an error
            logger.exception("a question of %s failed", self.name)
            answered = frames.WorkerAnswer(
                asked.number, problem=frames.Problem("PdclusterError", f"internal error: {error}; see the log")
            )
        if self.is_open:
            self._send(answered)
