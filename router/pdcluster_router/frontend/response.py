"""Answers a generation over HTTP, whole or as an event stream, with route, usage and metrics.

The response starts with the first token or an error. An error before the first byte is an HTTP status; one after it is
an `error` event. Choices run concurrently. If one fails, all are cancelled and its error answers. An answer has no
task: node messages drive it. What they add waits here while its client does not read, up to MAX_UNREAD_BYTES.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Protocol

import msgspec

from pdcluster.api.openai.replies import PromptTokensDetails, RouteReport, TokenUsage, ranges_within
from pdcluster.api.text.choice_text import TextPiece
from pdcluster.core.errors import Cancelled, PdclusterError
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.core.generation import Dispatcher, Done, RequestRoute, Running, TakeTokens, Timeline, TokenChunk
from pdcluster_router.frontend.choices import OutputChoice, advance, keep, keeper, sent_to_client
from pdcluster_router.frontend.fast_tokens import fast_token_path
from pdcluster_router.frontend.prepare import Prepared
from pdcluster_router.http.errors import ClientLeft, fail
from pdcluster_router.http.exchange import JSON, NO_BUFFERING, Exchange
from pdcluster_router.request.open_requests import HANG_UP_S
from pdcluster_router.request.stream import MAX_UNREAD_BYTES, too_far_behind

NO_TIMELINE = Timeline()
# Between events that say nothing, where an API has such.
PING_S = 15.0

Event = TokenChunk | Done | Exception
# What an event adds to the answer, or the error that ends it.
Said = TextPiece | Exception


class AnswerWriter(Protocol):
    """How pieces of choices become an answer."""

    def add(self, index: int, piece: TextPiece) -> None: ...

    def fast_token_path(self, index: int) -> TakeTokens | None: ...

    @property
    def is_text_only(self) -> bool:
        """Whether tokens are kept (`choices.keep`) until their choice is done."""
        ...

    def finish(self) -> None:
        """All choices are done."""
        ...

    def close(self) -> None:
        """Nothing more is written, by it or anyone."""
        ...


def answer(exchange: Exchange, prepared: Prepared, dispatcher: Dispatcher, metrics: RouterMetrics) -> None:
    """Start the generations. From then on they drive the answer."""
    HttpAnswer(exchange, prepared.choices, writer_of(exchange, prepared), metrics).start(dispatcher)


def writer_of(exchange: Exchange, prepared: Prepared) -> AnswerWriter:
    return _Stream(exchange, prepared) if prepared.stream else _Whole(exchange, prepared)


class HttpAnswer:
    """An answer, from its start until its exchange is over. The generations are cancelled by then."""

    __slots__ = (
        "_choices",
        "_exchange",
        "_is_over",
        "_metrics",
        "_num_open",
        "_running",
        "_unread",
        "_unread_bytes",
        "_writer",
    )

    def __init__(
        self, exchange: Exchange, choices: Sequence[OutputChoice], writer: AnswerWriter, metrics: RouterMetrics
    ) -> None:
        self._exchange, self._choices, self._writer, self._metrics = exchange, choices, writer, metrics
        self._num_open = len(choices)
        self._running: list[Running] = []
        self._unread: deque[tuple[int, Said]] = deque()
        self._unread_bytes = 0
        self._is_over = False

    def start(self, dispatcher: Dispatcher) -> None:
        self._exchange.on_gone = self._over
        self._exchange.on_resume = self._read_on
        try:
            self._start_all(dispatcher)
        except Exception as error:  # the top of an answer: running generations must not write into a failed one
            self._end(error)

    def _start_all(self, dispatcher: Dispatcher) -> None:
        for index, choice in enumerate(self._choices):
            running = dispatcher.start(choice.generation, _ChoiceSink(self, choice, index))
            self._running.append(running)
            if self._is_over:
                running.cancel("another choice failed")
                return
            if choice.text.stopped:
                running.finish(choice.text.num_tokens)

    def take(self, index: int, choice: OutputChoice, event: Event) -> None:
        """Take in an event of a choice. Any failure answers the client.

        The event is read at once, so a stop string ends its generation without a reader. What it adds waits until the
        client reads.
        """
        text, is_chunk = choice.text, type(event) is TokenChunk
        if self._is_over or (text.stopped and is_chunk):
            return  # sent before its node knew that it may stop
        said: Said
        if self._writer.is_text_only and isinstance(event, TokenChunk):
            try:
                keep(choice, event)
            except Exception as error:  # the top of a choice
                self._say(index, error)
            return
        if isinstance(event, Exception):
            said = sent_to_client(choice, event)
        else:
            try:
                said = advance(choice, event)
            except Exception as error:  # the top of a choice
                said = error
        if self._unread or self._exchange.line.is_paused:
            self._keep(index, said)
        else:
            self._say(index, said)
        if text.stopped and is_chunk and index < len(self._running):
            self._running[index].finish(choice.text.num_tokens)

    @property
    def is_held_back(self) -> bool:
        """Whether nothing can be sent: the client must read first, or the answer is over."""
        return self._is_over or bool(self._unread) or self._exchange.is_paused

    def fast_token_path(self, index: int) -> TakeTokens | None:
        """The fast token path of a choice that has begun; None where there is none."""
        return self._writer.fast_token_path(index)

    def _say(self, index: int, said: Said) -> None:
        if isinstance(said, Exception):
            self._end(said)
            return
        try:
            self._writer.add(index, said)
            if said.finish is not None:
                self._num_open -= 1
                if not self._num_open:
                    self._writer.finish()
                    self._end(None)
        except Exception as error:  # the top of an answer
            self._end(error)

    def _keep(self, index: int, said: Said) -> None:
        if not isinstance(said, Exception):
            self._unread_bytes += said.num_bytes
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._end(ClientLeft(str(too_far_behind(self._unread_bytes))))
                return
        self._unread.append((index, said))
        if isinstance(said, Exception):
            self._cancel(str(said))  # the others end with it, however late it is read
        if isinstance(said, Cancelled):
            asyncio.get_running_loop().call_later(HANG_UP_S, self._hang_up_if_stuck, len(self._unread))

    def _hang_up_if_stuck(self, num_unread: int) -> None:
        """End a request whose client is too far behind."""
        if not self._is_over and len(self._unread) == num_unread:
            self._end(ClientLeft("the client did not read what it was sent"))

    def _read_on(self) -> None:
        """The client reads again."""
        while self._unread and not self._is_over and not self._exchange.is_paused:
            index, said = self._unread.popleft()
            if not isinstance(said, Exception):
                self._unread_bytes -= said.num_bytes
            self._say(index, said)

    def _over(self, error: PdclusterError) -> None:
        if not self._is_over:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._is_over = True
        self._unread.clear()
        if error is not None:
            self._cancel("client left" if isinstance(error, ClientLeft) else str(error))
        self._writer.close()
        self._running = []  # drop the reference cycle, so that no garbage collector has to find it
        self._exchange.on_gone = self._exchange.on_resume = None
        record(self._choices, self._metrics)
        if error is not None:
            fail(self._exchange, error, self._metrics)

    def _cancel(self, reason: str) -> None:
        for running in self._running:
            running.cancel(reason)


class _ChoiceSink:
    """Implements generation.Sink for one choice."""

    __slots__ = ("_answer", "_choice", "_fast_token_path", "_index", "_is_asked")

    def __init__(self, answer: HttpAnswer, choice: OutputChoice, index: int) -> None:
        self._answer, self._choice, self._index = answer, choice, index
        self._fast_token_path: TakeTokens | None = None
        # Whether the choice has a fast token path.
        self._is_asked = False

    def on_chunk(self, chunk: TokenChunk) -> None:
        self._answer.take(self._index, self._choice, chunk)

    def fast_token_path(self) -> TakeTokens | None:
        if self._answer.is_held_back:
            return None  # there may be one once the client reads
        if not self._is_asked:
            self._is_asked, self._fast_token_path = True, self._answer.fast_token_path(self._index)
        return self._fast_token_path

    def on_done(self, done: Done) -> None:
        self._answer.take(self._index, self._choice, done)

    def on_error(self, error: Exception) -> None:
        self._answer.take(self._index, self._choice, error)


# ---------------------------------------------------------------- whole


class _Whole:
    """A whole reply. Text is joined at the end, because appending copies all before it."""

    def __init__(self, exchange: Exchange, prepared: Prepared) -> None:
        self._exchange, self._prepared = exchange, prepared
        self._collected: dict[int, _Collected] = {}
        self.is_text_only = all(map(attrgetter("is_text_only"), prepared.choices))

    def close(self) -> None:
        """Nothing runs on."""

    def add(self, index: int, piece: TextPiece) -> None:
        collected = self._collected.get(index)
        if collected is None:
            self._collected[index] = _Collected(piece, [piece.text], [piece.reasoning])
        else:
            collected.add(piece)

    def fast_token_path(self, index: int) -> TakeTokens | None:
        return keeper(self._prepared.choices[index]) if self.is_text_only else None

    def finish(self) -> None:
        prepared, collected = self._prepared, self._collected
        pieces = (
            [collected[0].whole()]
            if len(prepared.choices) == 1
            else [collected[index].whole() for index in range(len(prepared.choices))]
        )
        num_each = len(pieces) // prepared.num_prompts
        if num_each > 1:
            for index, whole in enumerate(pieces):
                whole.prompt_logprobs = pieces[
                    index - index % num_each
                ].prompt_logprobs  # told once for all choices of a prompt
        body = prepared.format.whole(pieces, usage_of(prepared))
        self._exchange.reply(200, body, _headers(JSON, prepared.choices[0].route))


class _Collected(msgspec.Struct):
    """A choice's first piece and all that came after it, but for text."""

    piece: TextPiece
    texts: list[str]
    thoughts: list[str]

    def add(self, piece: TextPiece) -> None:
        """Add a later piece. Fields of the first piece are not read again."""
        whole = self.piece
        self.texts.append(piece.text)
        if piece.reasoning:
            self.thoughts.append(piece.reasoning)
        if piece.calls or whole.parts:
            if not whole.parts:
                whole.parts.append("".join(self.texts[:-1]))
            whole.parts += piece.parts or [piece.text]
            whole.calls += piece.calls
        if piece.tokens:
            whole.tokens += piece.tokens
            whole.num_reasoning += piece.num_reasoning
        if piece.scored_text:
            whole.scored_text += piece.scored_text
        if piece.listed:
            whole.listed = [] if whole.listed is None else whole.listed
            whole.listed += piece.listed
        whole.finish, whole.stop_string = piece.finish, piece.stop_string

    def whole(self) -> TextPiece:
        self.piece.text, self.piece.reasoning = "".join(self.texts), "".join(self.thoughts)
        return self.piece


# ---------------------------------------------------------------- stream


class _Stream:
    is_text_only = False

    def __init__(self, exchange: Exchange, prepared: Prepared) -> None:
        self._exchange, self._prepared, self._format = exchange, prepared, prepared.format
        self._opened: set[int] = set()
        self._pinging: asyncio.TimerHandle | None = None

    def add(self, index: int, piece: TextPiece) -> None:
        data = b"" if index in self._opened else self._open(index)
        if self._carries_something(index, piece):
            data += self._format.chunk(index, piece)
        if data:  # nothing, as a chunk of HTTP, would end the answer
            self._exchange.write(data)

    def _carries_something(self, index: int, piece: TextPiece) -> bool:
        """Tokens without text carry nothing while marks of calls, or what may be a stop string, are held back."""
        if piece.text or piece.reasoning or piece.calls or piece.finish or piece.prompt_token_ids is not None:
            return True
        return bool(piece.tokens) and (self._prepared.choices[index].text.is_plain or not self._format.is_plain)

    def _open(self, index: int) -> bytes:
        route = self._prepared.choices[index].route
        if not self._opened:
            self._exchange.start(200, _headers(NO_BUFFERING, route))
            self._exchange.failure = self._format.failure
            if self._format.ping:
                self._ping_later()
        self._opened.add(index)
        return self._format.opening(index, None if route is None else route.cached_tokens)

    def fast_token_path(self, index: int) -> TakeTokens | None:
        choice, around = self._prepared.choices[index], self._format.around(index)
        if around is None or index not in self._opened or not choice.text.is_plain:
            return None
        return fast_token_path(choice, self._exchange.line, *self._exchange.framing(*around))

    def finish(self) -> None:
        prepared = self._prepared
        usage = usage_of(prepared) if prepared.include_usage else None
        self._exchange.write(prepared.format.ending(usage), last=True)

    def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()

    def _ping_later(self) -> None:
        self._pinging = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def _ping(self) -> None:
        if not self._exchange.is_paused:
            self._exchange.write(self._format.ping)
        self._ping_later()


# ---------------------------------------------------------------- route and usage


def _headers(kind: bytes, route: RequestRoute | None) -> bytes:
    """Reply headers as known at the first byte. Unknown or missing parts are left out."""
    return kind if route is None else named_headers(kind, route.mode, route.prefill, route.decode, route.backend)


@lru_cache(maxsize=1024)
def named_headers(kind: bytes, mode: str, prefill: str | None, decode: str | None, backend: str) -> bytes:
    """Cached by route: every request asks, and pairs of nodes are few."""
    named = (("mode", mode), ("prefill", prefill), ("decode", decode), ("transfer", backend))
    return kind + b"".join(
        b"x-pdcluster-%b: %b\r\n" % (name.encode(), _header_value(value)) for name, value in named if value
    )


def _header_value(text: str) -> bytes:
    """A value that a node chose, made safe: it must not begin header lines."""
    return "".join([each if each.isprintable() else "?" for each in text]).encode("latin-1", "replace")


def usage_of(prepared: Prepared) -> TokenUsage:
    """The usage. Each prompt counts once, however many choices it has. Cached tokens likewise."""
    choices = prepared.choices
    if len(choices) == 1:
        choice, num_cached = choices[0], choices[0].cached_tokens
        num_prompt, num_output = len(choice.generation.token_ids), choice.text.num_tokens
        details = None if num_cached is None else PromptTokensDetails(num_cached)
        return TokenUsage(num_prompt, num_output, num_prompt + num_output, details, route_report(choice))
    num_prompt = num_output = num_cached = 0
    is_known = True
    for choice in choices[:: len(choices) // prepared.num_prompts]:
        num_prompt += len(choice.generation.token_ids)
        num_cached += choice.cached_tokens or 0
        is_known = is_known and choice.cached_tokens is not None
    for choice in choices:
        num_output += choice.text.num_tokens
    details = PromptTokensDetails(num_cached) if is_known else None
    return TokenUsage(num_prompt, num_output, num_prompt + num_output, details, _report(choices))


def _report(choices: Sequence[OutputChoice]) -> RouteReport:
    """The first choice's route; with several, all of them under `choices`."""
    reports = [route_report(choice) for choice in choices]
    report = reports[0]
    if len(reports) > 1:
        report = route_report(choices[0])
        report.choices = reports
    return report


def route_report(choice: OutputChoice) -> RouteReport:
    route = choice.route
    assert route is not None  # set before a choice's last piece
    weights = ranges_within(choice.weights, choice.text.num_tokens)
    return RouteReport(
        route.mode, route.prefill, route.decode, route.backend, choice.attempts, choice.timeline, weights
    )


# ---------------------------------------------------------------- metrics


def record(choices: Sequence[OutputChoice], metrics: RouterMetrics) -> None:
    """Record times to tokens as the client saw them, and what the tenant used: a prompt counts once, as in an answer's
    usage, and a request without an answer's first token not at all.
    """
    begun = [choice for choice in choices if choice.route is not None]
    if begun:
        firsts = [choice for choice in choices if choice.generation.sampling.choice == 0]
        metrics.tenants.used(
            begun[0].generation.standing.tenant,
            sum(len(choice.generation.token_ids) for choice in firsts),
            sum(choice.cached_tokens or 0 for choice in firsts),
            sum(choice.text.num_tokens for choice in choices),
        )
    for choice in choices:
        route, timeline, clock, num_output = (
            choice.route,
            choice.timeline or NO_TIMELINE,
            choice.clock,
            choice.text.num_tokens,
        )
        started, first, second, last = clock.started, clock.first, clock.second, clock.last
        if choice.generation.standing.is_batch:
            first = second = None  # nobody waits for it
        noted = (
            len(choice.generation.token_ids),
            num_output,
            choice.cached_tokens or 0,
            choice.attempts or 0,
            None if first is None else first - started,
            None if second is None else second - started,
            None if first is None or last is None or num_output <= 1 else (last - first) / (num_output - 1),
            timeline.queue_s,
            # A transfer that was cut, or was not reported, has no time.
            timeline.transfer_s if timeline.transfer_s or timeline.transfer_bytes else None,
            timeline.transfer_bytes,
        )
        metrics.note((None, None, "") if route is None else (route.mode, choice.finish, route.backend), noted)
