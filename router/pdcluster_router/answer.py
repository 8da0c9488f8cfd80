"""Answers one generation request over HTTP, whole or as an event stream, with its route, usage and metrics.

The response starts when the first token, or an error, is there: an error before the first byte is a proper HTTP status, one after it an
`error` event. Choices run concurrently; if one fails all are cancelled and the one error answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pdcluster.api import sse
from pdcluster.api.choice import Piece
from pdcluster.api.replies import PromptTokensDetails, RouteReport, TimelineReport, Usage
from pdcluster.metrics import RouterMetrics
from pdcluster_router.asgi import JSON, NO_BUFFERING, Exchange, Header
from pdcluster_router.choices import Choice, merge, pieces_of
from pdcluster_router.generation import Dispatcher, Route
from pdcluster_router.prepare import Prepared


async def answer(exchange: Exchange, prepared: Prepared, dispatcher: Dispatcher, metrics: RouterMetrics) -> None:
    """Raises ClientLeft when the client left, and whatever a choice raised, maybe after the first byte; generations are closed by then."""
    pieces = merge([pieces_of(choice, dispatcher) for choice in prepared.choices])
    try:
        async with exchange.watching(), aclosing(pieces):
            if prepared.stream:
                await _stream(exchange, prepared, pieces)
            else:
                await _whole(exchange, prepared, pieces)
    finally:
        record(prepared.choices, metrics)


# ---------------------------------------------------------------- whole


async def _whole(exchange: Exchange, prepared: Prepared, pieces: AsyncGenerator[tuple[int, Piece], None]) -> None:
    collected = [Piece() for _ in prepared.choices]
    async for index, piece in pieces:
        _append(collected[index], piece)
    body = prepared.format.whole(collected, usage_of(prepared))
    await exchange.reply(200, body, (JSON, *_route_headers(prepared.choices[0].route)))


def _append(whole: Piece, piece: Piece) -> None:
    whole.text += piece.text
    whole.tokens += piece.tokens
    whole.echo += piece.echo
    whole.finish = piece.finish
    if piece.prompt_token_ids is not None:
        whole.prompt_token_ids = piece.prompt_token_ids


# ---------------------------------------------------------------- stream


async def _stream(exchange: Exchange, prepared: Prepared, pieces: AsyncGenerator[tuple[int, Piece], None]) -> None:
    opened: set[int] = set()
    async for index, piece in pieces:
        if not exchange.started:
            await exchange.start(200, (*NO_BUFFERING, *_route_headers(prepared.choices[index].route)))
        data = b""
        if index not in opened:
            opened.add(index)
            data = prepared.format.opening(index)
        if piece.text or piece.tokens or piece.finish or piece.prompt_token_ids is not None:
            data += prepared.format.chunk(index, piece)
        if data:
            await exchange.write(data)
    ending = prepared.format.usage_chunk(usage_of(prepared)) if prepared.include_usage else b""
    await exchange.write(ending + sse.DONE, last=True)


# ---------------------------------------------------------------- route and usage


def _route_headers(route: Route | None) -> tuple[Header, ...]:
    """What was known at the first byte; a part that has no name yet or does not exist is left out."""
    if route is None:
        return ()
    named = (("mode", route.mode), ("prefill", route.prefill), ("decode", route.decode), ("transfer", route.backend))
    return tuple((b"x-pdcluster-" + name.encode(), value.encode("latin-1", "replace")) for name, value in named if value)


def usage_of(prepared: Prepared) -> Usage:
    """Every prompt counts once, however many choices it has; cached tokens likewise, when the nodes reported them."""
    choices = prepared.choices
    firsts = choices[:: len(choices) // prepared.num_prompts]
    num_prompt = sum(len(choice.generation.token_ids) for choice in firsts)
    num_output = sum(choice.text.num_tokens for choice in choices)
    cached = [choice.cached_tokens for choice in firsts if choice.cached_tokens is not None]
    details = PromptTokensDetails(sum(cached)) if len(cached) == len(firsts) else None
    return Usage(num_prompt, num_output, num_prompt + num_output, details, _report(choices))


def _report(choices: Sequence[Choice]) -> RouteReport:
    """The first choice's route; with several, all of them under `choices`."""
    reports = [route_report(choice) for choice in choices]
    report = reports[0]
    if len(reports) > 1:
        report = route_report(choices[0])
        report.choices = reports
    return report


def route_report(choice: Choice) -> RouteReport:
    route, timeline = choice.route, choice.timeline
    assert route is not None and timeline is not None  # set before a choice's last piece
    report = TimelineReport(
        timeline.queue_s,
        timeline.prefill_s,
        timeline.transfer_s,
        timeline.exposed_s,
        timeline.ttft_s,
        timeline.ttst_s,
        timeline.decode_s,
        timeline.decode_tokens,
        timeline.transfer_bytes,
        timeline.pulled_tokens,
    )
    return RouteReport(route.mode, route.prefill, route.decode, route.backend, choice.attempts, report)


# ---------------------------------------------------------------- metrics


def record(choices: Sequence[Choice], metrics: RouterMetrics) -> None:
    for choice in choices:
        metrics.output_tokens.inc(choice.text.num_tokens)
        if choice.route is None:
            continue
        metrics.prompt_tokens.inc(len(choice.generation.token_ids))
        metrics.prompt_length.observe(len(choice.generation.token_ids))
        _record_times(choice, choice.route.mode, metrics)
        if choice.finish is not None:
            _record_end(choice, choice.route, choice.finish, metrics)


def _record_times(choice: Choice, mode: str, metrics: RouterMetrics) -> None:
    """As the client saw them, so measured here."""
    clock = choice.clock
    if clock.first is not None:
        metrics.ttft.labels(mode).observe(clock.first - clock.started)
    if clock.second is not None:
        metrics.ttst.labels(mode).observe(clock.second - clock.started)
    if clock.first is not None and clock.last is not None and choice.text.num_tokens > 1:
        metrics.tpot.labels(mode).observe((clock.last - clock.first) / (choice.text.num_tokens - 1))


def _record_end(choice: Choice, route: Route, finish: str, metrics: RouterMetrics) -> None:
    metrics.choices.labels(route.mode, finish).inc()
    metrics.output_length.observe(choice.text.num_tokens)
    metrics.cached_tokens.inc(choice.cached_tokens or 0)
    if choice.attempts is None or choice.timeline is None:
        return
    metrics.attempts.inc(choice.attempts)
    metrics.queue_seconds.observe(choice.timeline.queue_s)
    if route.mode == "remote":
        metrics.transfer_seconds.labels(route.backend).observe(choice.timeline.transfer_s)
        metrics.transfer_bytes.labels(route.backend).inc(choice.timeline.transfer_bytes)
