"""A plain request (`plain_run`) becomes general: what `prepare` makes of a request, `answer`, `run` and `attempt` are put together as they would be
by now, had it gone their way from the start; everything that happens to it from now on comes there."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pdcluster.api.choice import ChoiceText
from pdcluster.api.replies import CompletionFormat, Head
from pdcluster.api.stop import StopMatcher
from pdcluster_router.answer import open_answer
from pdcluster_router.choices import Choice, Clock
from pdcluster_router.generation import Chunk, Generation, Sink
from pdcluster_router.prepare import Prepared
from pdcluster_router.run import Run

if TYPE_CHECKING:
    from pdcluster_router.plain_run import PlainRun


def become(plain: PlainRun) -> Run:
    """Its exchange, its nodes and its operators speak to what this gives."""
    exchange, job = plain.exchange, plain.job
    prepared = _prepared(plain)
    choice = prepared.choices[0]
    answer, sink = open_answer(exchange, prepared, plain.metrics)
    run = Run(plain.shared, choice.generation, sink, job, plain.record, plain.started)
    answer.adopt(run)
    run.enter()
    if plain.choice is None:
        return run
    if plain.prefill is not None or plain.decode is not None:
        run.go_on(plain.choice, plain.placed_at, plain.begun())
    if job.emitted:
        _tell(plain, choice, sink)
    return run


def _prepared(plain: PlainRun) -> Prepared:
    """As `prepare.prepare_completion` does."""
    kind, job, exchange, standing = plain.kind, plain.job, plain.exchange, plain.standing
    info, text = kind.info, kind.text
    token_ids = job.prompt if isinstance(job.prompt, array) else array("i", job.prompt)
    left_s, salt = max(job.deadline - plain.started, 0.0), plain.salt
    session, client_id = job.session, exchange.client_id
    generation = Generation(job.request, info.id, token_ids, job.sampling, left_s, salt, standing, None, session, client_id)
    detokenizer = text.detokenizer(skip_special_tokens=kind.skips, at_start=False)
    choice = Choice(generation, ChoiceText(detokenizer, StopMatcher(()), kind.silent), Clock(exchange.arrived), info.vocab_size)
    head = Head("cmpl-" + exchange.id, plain.created, info.id, text.pieces, False, False, False)
    return Prepared([choice], 1, CompletionFormat(head), False, False)


def _tell(plain: PlainRun, choice: Choice, sink: Sink) -> None:
    """What was emitted, as one chunk: nobody has seen it yet."""
    clock = choice.clock
    clock.first, clock.second = plain.first_seen, plain.second_seen
    sink.on_chunk(Chunk(0, tuple(plain.job.emitted), (), (), plain.route()))
    clock.last = plain.last_seen
