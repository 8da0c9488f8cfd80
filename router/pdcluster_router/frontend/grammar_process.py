"""A process that makes grammars of what requests ask for, in a child: a library reads there what strangers sent. A
child that takes too much of a CPU, the stack or memory ends, and its shape is refused. The next one is a fork, so it is
there at once.

Shapes come on stdin and answers leave on stdout, each behind its length in 4 bytes, lowest first.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from typing import BinaryIO, NoReturn

import msgspec

from pdcluster.api.openai.answer_shape import AnswerShape, grammar_of_shape
from pdcluster.api.structured import library
from pdcluster.core.errors import BadRequest, PdclusterError

# Seconds on a CPU that a grammar may take.
CPU_S = 2
# Nodes compile with four times as much, so what is made here is no danger to them.
STACK_BYTES = 64 << 20
MEMORY_BYTES = 2 << 30
LIMITS = ((resource.RLIMIT_STACK, STACK_BYTES), (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0))
# Most grammars take a tenth of it. One that takes longer goes on at the lowest priority.
LATE_S = 0.1
LOWEST = 19


class Answer(msgspec.Struct, frozen=True):
    """source: of the grammar; None with the text and the field of a refusal.
    is_final: False where another try may do better.
    """

    source: str | None = None
    refusal: str = ""
    param: str | None = None
    is_final: bool = True


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    stream.write(len(payload).to_bytes(4, "little") + payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    payload = stream.read(size)
    return payload if len(payload) == size else None


def answer_of(payload: bytes) -> Answer:
    shape = msgspec.msgpack.decode(payload, type=AnswerShape)
    try:
        return Answer(grammar_of_shape(shape).source)
    except PdclusterError as error:
        return Answer(None, str(error), error.param if isinstance(error, BadRequest) else None)
    except (RecursionError, MemoryError):
        return Answer(None, f"{shape.param} is too large or nested too deeply; send a smaller one", shape.param)


class GrammarChild:
    """Makes one grammar after the other."""

    def __init__(self) -> None:
        (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(write_in)
            os.close(read_out)
            _serve(read_in, write_out)
        os.close(read_in)
        os.close(write_out)
        self._shapes, self._answers = os.fdopen(write_in, "wb"), os.fdopen(read_out, "rb")
        self.is_late = False

    def ask(self, payload: bytes) -> Answer | None:
        """None where it ended."""
        try:
            write_frame(self._shapes, payload)
        except BrokenPipeError:
            return None
        waiting = select.poll()
        waiting.register(self._answers, select.POLLIN)
        if not waiting.poll(LATE_S * 1e3):
            os.setpriority(os.PRIO_PROCESS, self.pid, LOWEST)
            self.is_late = True
        frame = read_frame(self._answers)
        return None if frame is None else msgspec.msgpack.decode(frame, type=Answer)

    def end(self) -> int:
        """Its status."""
        os.kill(self.pid, signal.SIGKILL)
        self._answers.close()
        with contextlib.suppress(BrokenPipeError):
            self._shapes.close()
        return os.waitpid(self.pid, 0)[1]


class GrammarChildren:
    """One at a time, the next as soon as one ended."""

    def __init__(self) -> None:
        self._child = GrammarChild()

    def answered(self, payload: bytes) -> Answer:
        answer, child = self._child.ask(payload), self._child
        if answer is None or child.is_late:
            status = child.end()
            self._child = GrammarChild()
        return _refusal(payload, status) if answer is None else answer


def _serve(read_end: int, write_end: int) -> NoReturn:
    try:
        for name, most in LIMITS:
            _limit(name, most)
        with os.fdopen(read_end, "rb") as shapes, os.fdopen(write_end, "wb") as answers:
            while (payload := read_frame(shapes)) is not None:
                _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + CPU_S)
                write_frame(answers, msgspec.msgpack.encode(answer_of(payload)))
    except Exception:  # the top of a process
        traceback.print_exc()
    finally:
        os._exit(0)


def _limit(name: int, most: int) -> None:
    hard = resource.getrlimit(name)[1]
    resource.setrlimit(name, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _refusal(payload: bytes, status: int) -> Answer:
    """Of a child that ended before it answered."""
    param = msgspec.msgpack.decode(payload, type=AnswerShape).param
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number not in (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
        return Answer(None, f"this router could not read {param}; retry", param, is_final=False)
    what = f"takes more than {CPU_S} s to read" if number == signal.SIGXCPU else "is too deep or too large to be read"
    return Answer(None, f"{param} {what}; send a simpler one", param)


def main() -> None:
    if not library.is_missing():
        library.byte_tokenizer()  # so that no child loads it
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    write_frame(answers, b"")  # ready
    children = GrammarChildren()
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        write_frame(answers, msgspec.msgpack.encode(children.answered(payload)))


if __name__ == "__main__":
    main()
