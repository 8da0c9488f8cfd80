"""Grammars of requests, made in processes of their own: each once, and kept while there is room.

A tenant has one process fewer than there are at a time, so none keeps the others waiting.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import BinaryIO, cast

import msgspec

from pdcluster.api.openai.answer_shape import AnswerShape, encoded
from pdcluster.core.errors import BadRequest, Overloaded, PdclusterError, Unavailable
from pdcluster.core.grammar import Grammar
from pdcluster_router.frontend.grammar_process import CPU_S, Answer, read_frame, write_frame

log = logging.getLogger(__name__)

NUM_PROCESSES = 2
MAX_KEPT = 1024
KEPT_BYTES = 64 << 20
# Of one tenant, and of all.
MAX_WAITING, MAX_WAITING_OF_ALL = 64, 512
# A grammar that got a tenth of a CPU has had what it may use by then.
WAIT_S = CPU_S * 10.0
START_S = 60.0
ARGV = (sys.executable, "-m", "pdcluster_router.frontend.grammar_process")


class _Job:
    """A shape that is wanted, once for all that ask for it."""

    def __init__(self, payload: bytes, shape: AnswerShape, tenant: str) -> None:
        self.payload, self.shape, self.tenant = payload, shape, tenant
        self.waiting: list[Future[Grammar]] = []


def _resolve(waiting: Sequence[Future[Grammar]], answer: Answer) -> None:
    """Each gets an error of its own: one that is raised again grows."""
    for future in waiting:
        if not future.set_running_or_notify_cancel():
            continue
        found = _result(answer)
        if isinstance(found, Grammar):
            future.set_result(found)
        else:
            future.set_exception(found)


class GrammarPool:
    """Any thread may use it. close waits for the processes."""

    def __init__(self, num_processes: int = NUM_PROCESSES, argv: Sequence[str] = ARGV) -> None:
        self._num_processes, self._argv = num_processes, argv
        self._lock = threading.Condition()
        self._kept: OrderedDict[bytes, Answer] = OrderedDict()
        self._bytes = 0
        # By tenant and shape, so that none waits in another's queue.
        self._jobs: dict[tuple[str, bytes], _Job] = {}
        # By tenant, the one whose turn it is first.
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._running: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self._makers: list[_Maker] = []
        self._is_closed = False

    def start(self) -> None:
        """Have the processes ready for the first request. Idempotent."""
        with self._lock:
            if self._threads or self._is_closed:
                return
            self._threads = [
                threading.Thread(target=self._work, name=f"grammars {number}", daemon=True)
                for number in range(self._num_processes)
            ]
            for thread in self._threads:
                thread.start()

    def known(self, shape: AnswerShape) -> Grammar | None:
        """The shape's grammar when it was made before. Raises BadRequest when it was refused."""
        with self._lock:
            found = self._kept.get(key := encoded(shape))
            if found is None:
                return None
            self._kept.move_to_end(key)
        made = _result(found)
        if isinstance(made, Grammar):
            return made
        raise made

    async def make(self, shape: AnswerShape, tenant: str) -> Grammar:
        """Raises BadRequest for what cannot be kept or takes too long, Overloaded where too many wait."""
        known = self.known(shape)
        return await asyncio.wrap_future(self._ask(shape, tenant)) if known is None else known

    def num_waiting(self, tenant: str) -> int:
        """Shapes of a tenant that no process has."""
        with self._lock:
            return len(self._queues.get(tenant, ()))

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._is_closed = True
            waiting = [future for job in self._jobs.values() for future in job.waiting]
            self._jobs.clear()
            self._lock.notify_all()
        _resolve(waiting, Answer(refusal="this router stops; ask another one", is_final=False))
        for maker in self._makers:
            maker.kill()
        for thread in self._threads:
            thread.join()

    def _ask(self, shape: AnswerShape, tenant: str) -> Future[Grammar]:
        self.start()
        payload, future = encoded(shape), Future[Grammar]()
        with self._lock:
            if self._is_closed:
                raise Unavailable("this router stops; ask another one")
            job = self._jobs.get((tenant, payload))
            if job is None:
                job = self._jobs[tenant, payload] = self._enqueued(payload, shape, tenant)
            job.waiting.append(future)
        return future

    def _enqueued(self, payload: bytes, shape: AnswerShape, tenant: str) -> _Job:
        queue = self._queues.get(tenant, ())
        if len(queue) >= MAX_WAITING or len(self._jobs) >= MAX_WAITING_OF_ALL:
            raise Overloaded(f"{len(queue)} schemas or grammars wait to be read here; retry later", 1.0, "grammars")
        job = _Job(payload, shape, tenant)
        self._queues.setdefault(tenant, deque()).append(job)
        self._lock.notify()
        return job

    # ------------------------------------------------------------ threads, each with its process

    def _work(self) -> None:
        maker = _Maker(self._argv)
        self._makers.append(maker)
        maker.start()
        try:
            while (job := self._next()) is not None:
                found = self._found(job) or maker.ask(job.payload, job.shape.param)
                with self._lock:
                    waiting = self._done(job, found)
                _resolve(waiting, found)
        finally:
            maker.end()

    def _found(self, job: _Job) -> Answer | None:
        """What another tenant's job found meanwhile, or that nobody waits any more."""
        with self._lock:
            if all(future.cancelled() for future in job.waiting):
                return Answer(refusal="nobody waits for it", is_final=False)
            return self._kept.get(job.payload)

    def _next(self) -> _Job | None:
        """The next tenant's job, in turns. None at the end."""
        with self._lock:
            while not self._is_closed:
                for tenant, queue in self._queues.items():
                    if self._running.get(tenant, 0) < max(self._num_processes - 1, 1):
                        self._running[tenant] = self._running.get(tenant, 0) + 1
                        self._queues.move_to_end(tenant)
                        job = queue.popleft()
                        if not queue:
                            del self._queues[tenant]
                        return job
                self._lock.wait()
            return None

    def _done(self, job: _Job, found: Answer) -> Sequence[Future[Grammar]]:
        """Who waits for it."""
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        waiting = job.waiting if self._jobs.pop((job.tenant, job.payload), None) is not None else []
        if found.is_final and job.payload not in self._kept:
            self._kept[job.payload] = found
            self._bytes += _size(job.payload, found)
        while len(self._kept) > MAX_KEPT or self._bytes > KEPT_BYTES:
            self._bytes -= _size(*self._kept.popitem(last=False))
        self._lock.notify_all()
        return waiting


class _Maker:
    """A thread's process, made anew where it ended."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, payload: bytes, param: str) -> Answer:
        """The answer, also a refusal. One that is not final says nothing of the shape."""
        try:
            process = self._started()
            write_frame(cast(BinaryIO, process.stdin), payload)
            frame = self._read(WAIT_S)
            answer = None if frame is None else msgspec.msgpack.decode(frame, type=Answer)
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("a process that makes grammars gave no answer: %s", error)
            answer = None
        if answer is not None:
            return answer
        self.end()
        return Answer(refusal=f"this router could not read {param} in time; retry", is_final=False)

    def kill(self) -> None:
        """From any thread: who waits for an answer gets none."""
        if (process := self._process) is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("a process that makes grammars had ended")

    def end(self) -> None:
        """Idempotent."""
        self.kill()
        process, self._process = self._process, None
        if process is None:
            return
        cast(BinaryIO, process.stdout).close()
        try:
            cast(BinaryIO, process.stdin).close()
        except BrokenPipeError:
            log.debug("what was written to a process that makes grammars is lost")
        process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            if self._read(START_S) is None:
                raise OSError("it ended before it was ready")
        return self._process

    def start(self) -> None:
        """Idempotent. Where it does not start, the first shape tries again."""
        try:
            self._started()
        except (OSError, TimeoutError) as error:
            log.warning("a process that makes grammars did not start: %s", error)
            self.end()

    def _read(self, timeout_s: float) -> bytes | None:
        """None where the process ended."""
        assert self._process is not None
        stdout = cast(BinaryIO, self._process.stdout)
        if not _is_readable(stdout, timeout_s):
            raise TimeoutError(f"nothing came for {timeout_s:g} s")
        return read_frame(stdout)


def _is_readable(stream: BinaryIO, timeout_s: float) -> bool:
    waiting = select.poll()
    waiting.register(stream, select.POLLIN)
    return bool(waiting.poll(timeout_s * 1e3))


def _size(payload: bytes, answer: Answer) -> int:
    return len(payload) + len(answer.source or answer.refusal)


def _result(answer: Answer) -> Grammar | PdclusterError:
    if answer.source is not None:
        return Grammar(answer.source)
    if not answer.is_final:
        return Unavailable(answer.refusal)
    return BadRequest(answer.refusal, answer.param)


@cache
def shared_pool() -> GrammarPool:
    """The pool of this process."""
    pool = GrammarPool()
    atexit.register(pool.close)
    return pool
