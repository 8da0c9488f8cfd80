"""A plain request (`plain_run`) becomes general: `answer`, `run` and `attempt` are put together as they would be by
now, had it gone their way from the start; everything that happens to it from now on comes there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pdcluster.core.errors import PdclusterError
from pdcluster_router.core.generation import Sink, TokenChunk
from pdcluster_router.core.stages import Stage
from pdcluster_router.frontend.choices import OutputChoice
from pdcluster_router.frontend.response import open_answer, writer_of
from pdcluster_router.request.begun import Begun
from pdcluster_router.request.open_requests import OpenRequest
from pdcluster_router.request.plain.plain_stream import prepared_of
from pdcluster_router.request.run import Run

if TYPE_CHECKING:
    from pdcluster_router.request.plain.plain_run import PlainRun

logger = logging.getLogger(__name__)


def become(plain: PlainRun) -> Run:
    """Its exchange, its nodes and its operators speak to what this gives."""
    stream, exchange = plain.stream, plain.exchange
    if stream is not None:
        choice, writer = stream.choice, stream.writer
    else:
        assert plain.asked is not None  # as long as it has no stream
        prepared = prepared_of(plain, plain.asked)
        choice, writer = prepared.choices[0], writer_of(exchange, prepared)
    answer, sink = open_answer(exchange, choice, writer, plain.metrics)
    run = Run(plain.shared, choice.generation, sink, plain.job, plain.record, plain.started)
    answer.adopt(run)
    run.enter()
    if plain.choice is not None and (plain.prefill is not None or plain.decode is not None):
        run.go_on(plain.choice, plain.placed_at, _begun(plain))
    if stream is None and plain.job.emitted:
        _tell(plain, choice, sink)
    return run


def place_after(request: str, run: Run, error: Exception) -> None:
    """A plain request found no nodes for this error. What is told of it is told here, where it is asked for once more:
    asking has no effect but the answer. A failure that is not one of ours would else only make everything slow."""
    if not isinstance(error, PdclusterError):
        logger.error(
            "request %s: to choose its nodes the short way failed; it goes the general way", request, exc_info=error
        )
    run.place()


def told(plain: PlainRun, end: Callable[[Exception], None]) -> OpenRequest:
    """For operators, as `run` tells it."""
    job, choice = plain.job, plain.choice
    asked = OpenRequest(job.request, plain.model, len(job.prompt), plain.started, end)
    if choice is None:
        return asked
    prefill = choice.prefill.name if choice.prefill is not None else None
    return replace(
        asked, attempts=1, mode=choice.mode, prefill=prefill, decode=choice.decode.name, num_output=len(job.emitted)
    )


def clocks(plain: PlainRun) -> dict[Stage, float]:
    """What an attempt would wait for now, and until when."""
    stages, running = plain.shared.settings.stages, {}
    if not (plain.is_scheduled or plain.has_token or plain.decode_spoke):
        running[Stage.QUEUE] = plain.placed_at + stages.queue_s
    if plain.prefill is not None and plain.decode is not None and plain.ticket is None:
        running[Stage.HANDSHAKE] = plain.reserved_at + stages.handshake_s
    if plain.carried_since:
        running[Stage.TRANSFER] = plain.carried_since + stages.transfer_s
    if plain.heard_at:
        heard_at = plain.decode.heard_at if plain.decode is not None else 0.0  # of rows that were not read here
        running[Stage.LIVENESS] = max(plain.heard_at, heard_at) + stages.liveness_s
    return running


def _begun(plain: PlainRun) -> Begun:
    return Begun(
        plain.prefill, plain.decode, clocks(plain), plain.has_token, plain.ticket, plain.held, plain.delivered,
        plain.decode_spoke,
        plain.first_at, plain.second_at,
    )  # fmt: skip


def _tell(plain: PlainRun, choice: OutputChoice, sink: Sink) -> None:
    """What was emitted, as one chunk: nobody has seen it yet."""
    choice.clock.first, choice.clock.second = plain.first_seen, plain.second_seen
    sink.on_chunk(TokenChunk(0, tuple(plain.job.emitted), (), (), plain.route()))
    choice.clock.last = plain.last_seen
