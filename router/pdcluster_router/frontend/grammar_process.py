"""A process that makes grammars of what requests ask for. It may be ended at any time, and ends where one takes too
much: a library reads in it what strangers sent.

Shapes come on stdin and answers leave on stdout, each behind its length in 4 bytes, lowest first.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import BinaryIO

import msgspec

from pdcluster.api.openai.answer_shape import AnswerShape, grammar_of_shape
from pdcluster.core.errors import BadRequest, PdclusterError

# Seconds on a CPU that a grammar may take.
CPU_S = 2
# Nodes compile with four times as much, so what is made here is no danger to them.
STACK_BYTES = 64 << 20
MEMORY_BYTES = 2 << 30


class Answer(msgspec.Struct, frozen=True):
    """source: of the grammar; None with the text and the field of a refusal."""

    source: str | None = None
    refusal: str = ""
    param: str | None = None


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


def main() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        until = math.ceil(time.process_time()) + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(answer_of(payload)))


if __name__ == "__main__":
    main()
