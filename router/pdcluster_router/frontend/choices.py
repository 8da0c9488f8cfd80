"""From a dispatcher's events to pieces of a reply: one stream per choice, merged for several.

A stop string ends its generation here, and the dispatcher ends it on the nodes. This module knows neither HTTP nor
OpenAI's JSON.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic

import msgspec

from pdcluster.api.text.choice_text import ChoiceText, TextPiece, Token
from pdcluster.api.text.detokenizer import ChainDetokenizer, Detokenizer
from pdcluster.core.errors import BadRequest, IntegrityError, ProtocolError
from pdcluster.core.grammar import PARAM
from pdcluster.core.messages import TokenLogprobs
from pdcluster_router.core.generation import (
    Dispatcher,
    Done,
    Generation,
    OutputWeights,
    RequestRoute,
    Running,
    TakeTokens,
    Timeline,
    TokenChunk,
)
from pdcluster_router.request.stream import Unread

FINISH_REASONS = {"stop": "stop", "eos": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt to repeat before the output.

    logprobs: alternatives per prompt token; None when not reported.
    """

    text: str
    token_ids: array[int]
    detokenizer: Detokenizer | ChainDetokenizer
    logprobs: int | None


class Clock(msgspec.Struct):
    """When tokens came to the router, monotonic seconds."""

    started: float
    first: float | None = None
    second: float | None = None
    last: float | None = None

    def tick(self, num_tokens: int) -> None:
        self.last = monotonic()
        if self.first is None and num_tokens >= 1:
            self.first = self.last
        if self.second is None and num_tokens >= 2:
            self.second = self.last

    def since_start(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.started


class OutputChoice(msgspec.Struct):
    """One choice of a reply.

    prompt_logprobs: alternatives per prompt token; None when not requested.
    """

    generation: Generation
    text: ChoiceText
    clock: Clock
    vocab_size: int
    echo: Echo | None = None
    wants_prompt_ids: bool = False
    prompt_logprobs: int | None = None
    route: RequestRoute | None = None
    cached_tokens: int | None = None
    attempts: int | None = None
    timeline: Timeline | None = None
    # Which weights made its tokens. Known at the end.
    weights: Sequence[OutputWeights] = ()
    finish: str | None = None
    # False: only the prompt is reported. The token that a node makes is dropped.
    generates: bool = True
    # The request field that the grammar was made from.
    grammar_param: str | None = None
    # Tokens whose text is made at the end (`keep`).
    kept: list[int] = []

    @property
    def is_text_only(self) -> bool:
        """Whether a whole reply has nothing of it but its text."""
        return (
            self.text.is_plain
            and self.generates
            and self.echo is None
            and not self.wants_prompt_ids
            and self.generation.sampling.logprobs is None
            and self.prompt_logprobs is None
        )


def sent_to_client(choice: OutputChoice, error: Exception) -> Exception:
    """The error as the client sees it. An error about the grammar names the client's field."""
    if isinstance(error, BadRequest) and error.param == PARAM and choice.grammar_param is not None:
        return BadRequest(str(error), choice.grammar_param)
    return error


class _Pieces:
    """Implements generation.Sink for one choice. Events become pieces as they come, so a stop string works without a
    reader.
    """

    def __init__(self, choice: OutputChoice) -> None:
        self.unread = Unread[TextPiece](choice.generation.hang_up)
        self._choice = choice
        self._running: Running | None = None

    def start(self, dispatcher: Dispatcher) -> Running:
        self._running = dispatcher.start(self._choice.generation, self)
        self._finish_if_stopped()  # stop strings may have matched before
        return self._running

    def on_chunk(self, chunk: TokenChunk) -> None:
        self._take(chunk)

    def fast_token_path(self) -> None:
        return None

    def on_done(self, done: Done) -> None:
        self._take(done)

    def on_error(self, error: Exception) -> None:
        self.unread.fail(sent_to_client(self._choice, error))

    def _take(self, event: TokenChunk | Done) -> None:
        if self._choice.text.stopped and not isinstance(event, Done):
            return  # sent before its node knew that it may stop
        try:
            is_read = self.unread.put(advance(self._choice, event))
        except Exception as error:  # the top of a choice: its reader gets the error
            self.unread.fail(error)
            is_read = False
        if not is_read and self._running is not None:
            self._running.cancel("nobody takes its tokens")
        if not isinstance(event, Done):
            self._finish_if_stopped()

    def _finish_if_stopped(self) -> None:
        if self._choice.text.stopped and self._running is not None:
            self._running.finish(self._choice.text.num_tokens)


async def pieces_of(choice: OutputChoice, dispatcher: Dispatcher) -> AsyncGenerator[TextPiece, None]:
    """Pieces up to the one with `finish`. Closing it early, or a stop string, closes the generation."""
    pieces = _Pieces(choice)
    running = pieces.start(dispatcher)
    try:
        while True:
            piece = await pieces.unread.next()
            yield piece
            if piece.finish is not None:
                return
    finally:
        running.cancel("client left")


def advance(choice: OutputChoice, event: TokenChunk | Done) -> TextPiece:
    """The piece that an event adds. `choice.finish` is set with the last one, behind a stop string, too."""
    if choice.finish is not None:
        raise IntegrityError(f"the generation of {choice.generation.request} went on after its end")
    if isinstance(event, Done):
        return _finished(choice, event)
    piece, text = _advance(choice, event), choice.text
    if choice.clock.second is None:
        choice.clock.tick(text.num_tokens)
    else:
        choice.clock.last = monotonic()
    return piece


def keep(choice: OutputChoice, chunk: TokenChunk) -> None:
    """As `advance`, for a choice of which only the text is told, and that at the end."""
    token_ids, text, clock = chunk.token_ids, choice.text, choice.clock
    if token_ids and max(token_ids) >= choice.vocab_size:
        _check_ids(choice, token_ids)
    _check_position(choice, chunk)
    choice.route = chunk.route
    choice.kept += token_ids
    text.num_tokens += len(token_ids)
    if clock.second is None:
        clock.tick(text.num_tokens)
    else:
        clock.last = monotonic()


def keeper(choice: OutputChoice) -> TakeTokens:
    """The fast token path of such a choice, after two tokens."""
    text, clock, kept, vocab_size = choice.text, choice.clock, choice.kept, choice.vocab_size

    def take(position: int, token_ids: tuple[int, ...]) -> bool:
        if len(token_ids) != 1 or not 0 <= token_ids[0] < vocab_size or text.num_tokens != position:
            return False
        text.num_tokens = position + 1
        kept.append(token_ids[0])
        clock.last = monotonic()
        return True

    return take


def _check_position(choice: OutputChoice, chunk: TokenChunk) -> None:
    if choice.text.num_tokens != chunk.position:
        raise IntegrityError(
            f"{choice.generation.request}: tokens at position {chunk.position} came after "
            f"{choice.text.num_tokens} tokens"
        )


def _advance(choice: OutputChoice, chunk: TokenChunk) -> TextPiece:
    token_ids = chunk.token_ids
    if token_ids and max(token_ids) >= choice.vocab_size:
        _check_ids(choice, token_ids)
    if chunk.logprobs or chunk.prompt_logprobs:
        for entry in (*chunk.logprobs, *chunk.prompt_logprobs):
            _check_ids(choice, entry.top_ids)
    piece = TextPiece()
    if choice.route is None:
        _open(choice, chunk, piece)
    choice.route = chunk.route
    if not choice.generates:
        return piece
    text = choice.text
    _check_position(choice, chunk)
    if choice.generation.sampling.logprobs is None:
        for token_id in token_ids:
            text.push(token_id, None, piece)
            if text.stopped:
                break
        return piece
    logprobs: Sequence[TokenLogprobs] = chunk.logprobs
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        text.push(token_id, logprob, piece)
        if text.stopped:
            break
    return piece


def _check_ids(choice: OutputChoice, token_ids: Sequence[int]) -> None:
    """Refuse ids outside the model's vocabulary. Nodes are asked for the ids of one model."""
    if token_ids and (highest := max(token_ids)) >= choice.vocab_size:
        raise ProtocolError(
            f"{choice.generation.request}: a node said token {highest}, this model has ids below "
            f"{choice.vocab_size}; see its log"
        )


def _open(choice: OutputChoice, chunk: TokenChunk, piece: TextPiece) -> None:
    """What comes with the first chunk only."""
    if choice.wants_prompt_ids:
        piece.prompt_token_ids = choice.generation.token_ids.tolist()
    if choice.echo is not None:
        piece.text = choice.echo.text
        if choice.echo.logprobs is not None:
            piece.echo = _echoed_tokens(choice.echo, choice.echo.logprobs, chunk.prompt_logprobs)
    if choice.prompt_logprobs is not None:
        entries = _of_prompt(choice.generation.token_ids, choice.prompt_logprobs, chunk.prompt_logprobs)
        piece.prompt_logprobs = [
            Token(token_id, 0, entry) for token_id, entry in zip(choice.generation.token_ids, entries, strict=True)
        ]


def _echoed_tokens(echo: Echo, most: int, logprobs: Sequence[TokenLogprobs]) -> list[Token]:
    tokens, offset = [], 0
    for token_id, logprob in zip(echo.token_ids, _of_prompt(echo.token_ids, most, logprobs), strict=True):
        tokens.append(Token(token_id, offset, logprob))
        offset += len(echo.detokenizer.feed(token_id))
    return tokens


def _of_prompt(token_ids: Sequence[int], most: int, logprobs: Sequence[TokenLogprobs]) -> list[TokenLogprobs | None]:
    """Logprobs of prompt tokens, with at most `most` alternatives each. The first token has none."""
    if len(logprobs) != len(token_ids) - 1:
        raise IntegrityError(f"a prompt of {len(token_ids)} tokens came back with {len(logprobs)} prompt logprobs")
    return [
        None,
        *(
            TokenLogprobs(entry.logprob, entry.top_ids[:most], entry.top_logprobs[:most], entry.rank)
            for entry in logprobs
        ),
    ]


def _finished(choice: OutputChoice, done: Done) -> TextPiece:
    piece = TextPiece()
    if choice.route is None and done.reason != "abort":
        raise IntegrityError(f"the generation of {choice.generation.request} ended without a first token")
    choice.route = done.route
    choice.cached_tokens = done.cached_tokens
    choice.attempts = done.attempts
    choice.timeline = _with_clock(done.timeline, choice.clock)
    choice.weights = done.weights
    if choice.kept:
        piece.text = choice.text.whole(choice.kept)
    is_told = choice.generates or done.reason == "abort"
    _finish(choice, piece, FINISH_REASONS[done.reason] if is_told else "length")
    return piece


def _with_clock(timeline: Timeline, clock: Clock) -> Timeline:
    """The dispatcher's times where it has them, the router's where it has none."""
    if timeline.ttft_s is not None and (timeline.ttst_s is not None or clock.second is None):
        return timeline
    first = clock.since_start(clock.first) if timeline.ttft_s is None else timeline.ttft_s
    second = clock.since_start(clock.second) if timeline.ttst_s is None else timeline.ttst_s
    return msgspec.structs.replace(timeline, ttft_s=first, ttst_s=second)


def _finish(choice: OutputChoice, piece: TextPiece, reason: str) -> None:
    choice.text.finish(piece, is_cut=reason in ("length", "abort"))
    choice.finish = "stop" if choice.text.stopped else reason
    if choice.finish == "stop" and choice.text.num_calls:
        choice.finish = "tool_calls"
    piece.finish = choice.finish


async def merge(streams: Sequence[AsyncGenerator[TextPiece, None]]) -> AsyncGenerator[tuple[int, TextPiece], None]:
    """Pieces with their choice's index, as they come. If one stream fails, or the caller stops, all are closed."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for piece in stream:
                yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, TextPiece | Exception | None]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(index, stream, arrived)) for index, stream in enumerate(streams)]
    try:
        async for index, piece in _until_all_ended(arrived, len(streams)):
            yield index, piece
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncGenerator[TextPiece, None],
    arrived: asyncio.Queue[tuple[int, TextPiece | Exception | None]],
) -> None:
    try:
        async with aclosing(stream):
            async for piece in stream:
                await arrived.put((index, piece))
    except Exception as error:  # the top of this task: the merging caller raises it
        await arrived.put((index, error))
    else:
        await arrived.put((index, None))


async def _until_all_ended(
    arrived: asyncio.Queue[tuple[int, TextPiece | Exception | None]], num_open: int
) -> AsyncIterator[tuple[int, TextPiece]]:
    while num_open:
        index, item = await arrived.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            num_open -= 1
        else:
            yield index, item
