"""Frames between supervisor and workers over a unix socket: length-prefixed msgpack, checked on reading.

Both may ask; an answer carries the question's number. A worker first sends Joined, and sends events unasked.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from pdcluster.core import errors
from pdcluster.core.errors import BadRequest, DeadlineExceeded, Overloaded, PdclusterError, ProtocolError
from pdcluster.core.messages import Role, WeightsOrder
from pdcluster_router.cluster.events import Event
from pdcluster_router.queueing.pauses import PauseMode

MAX_FRAME_BYTES = 32 * 2**20
_LENGTH = struct.Struct("<I")

# ---------------------------------------------------------------- questions


class Question(msgspec.Struct, frozen=True, tag=True):
    pass


class AskNodes(Question, frozen=True):
    pass


class AskCordon(Question, frozen=True):
    node: str
    cordoned: bool


class AskMove(Question, frozen=True):
    """Have a node give its work to others."""

    node: str


class AskAdapter(Question, frozen=True):
    """Load an adapter, or unload it (path None)."""

    name: str
    path: str | None
    nodes: tuple[str, ...]


class AskWeights(Question, frozen=True):
    """Ask something of a node's weights."""

    node: str
    order: WeightsOrder


class AskPause(Question, frozen=True):
    mode: PauseMode
    max_pause_s: float


class AskResume(Question, frozen=True):
    pass


class AskPaused(Question, frozen=True):
    pass


class AskRole(Question, frozen=True):
    node: str
    role: Role


class AskRequests(Question, frozen=True):
    node: str


class AskCancel(Question, frozen=True):
    request: str
    reason: str


class AskExplain(Question, frozen=True):
    request: str


class AskPolicy(Question, frozen=True):
    pass


class SetPolicy(Question, frozen=True):
    live: str | None
    shadow: str | None
    dry_run: bool


class AskCacheState(Question, frozen=True):
    digests: bool


class AskMetrics(Question, frozen=True):
    """To a worker: its own metric families."""


class AskReadiness(Question, frozen=True):
    """To a worker: what it answers to /readyz."""


class AskExposition(Question, frozen=True):
    """To the supervisor: the scrape text of all workers."""


AnyQuestion = (
    AskNodes | AskCordon | AskMove | AskAdapter | AskWeights | AskRole | AskRequests | AskCancel | AskExplain
    | AskPause | AskResume | AskPaused | AskPolicy | SetPolicy | AskCacheState | AskMetrics | AskReadiness
    | AskExposition
)  # fmt: skip

# ---------------------------------------------------------------- frames


class Problem(msgspec.Struct, frozen=True):
    """An error of ours: the name of its class, and what it carries."""

    kind: str
    message: str
    detail: str = ""
    retry_after_s: float = 1.0


class Joined(msgspec.Struct, frozen=True, tag=True):
    worker: int
    incarnation: str
    pid: int


class WorkerQuestion(msgspec.Struct, frozen=True, tag=True):
    number: int
    question: AnyQuestion


class WorkerAnswer(msgspec.Struct, frozen=True, tag=True):
    """An answer.

    value: msgpack of what the question asks for, when there is no problem.
    """

    number: int
    value: bytes = b""
    problem: Problem | None = None


class WorkerEvent(msgspec.Struct, frozen=True, tag=True):
    event: Event


Frame = Joined | WorkerQuestion | WorkerAnswer | WorkerEvent

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a frame of {len(body)} bytes is too large for the control socket, at most {MAX_FRAME_BYTES} fit"
        )
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame of {len(body)} bytes on the control socket is not understood: {error}") from error


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None at the end of the connection, also in the middle of a frame."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"a frame of {length} bytes was announced on the control socket, at most {MAX_FRAME_BYTES} are taken"
            )
        return decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# ---------------------------------------------------------------- errors

_KINDS: dict[str, type[PdclusterError]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PdclusterError)
}


def problem_of(error: PdclusterError) -> Problem:
    detail = (
        (error.param or "")
        if isinstance(error, BadRequest)
        else error.stage
        if isinstance(error, DeadlineExceeded)
        else ""
    )
    return Problem(
        type(error).__name__, str(error), detail, error.retry_after_s if isinstance(error, Overloaded) else 1.0
    )


def error_of(problem: Problem) -> PdclusterError:
    kind = _KINDS.get(problem.kind, PdclusterError)
    if issubclass(kind, BadRequest):
        return kind(problem.message, problem.detail or None)
    if issubclass(kind, DeadlineExceeded):
        return kind(problem.message, problem.detail or "request")
    return kind(problem.message, problem.retry_after_s) if issubclass(kind, Overloaded) else kind(problem.message)
