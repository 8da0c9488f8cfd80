"""A plain request's answer in the general way's own parts: what `prepare` makes of such a request, and its events, one
choice's text as it comes.

Of a stream and of a chat from its start, since its text has to go on as it began; of a whole completion only when it
becomes general (`general`).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from pdcluster.api.openai.replies import CompletionFormat, Head
from pdcluster.api.text.choice_text import ChoiceText
from pdcluster.api.text.stop_strings import StopMatcher
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.core.generation import Done, Generation, Take, TokenChunk
from pdcluster_router.frontend.choices import Clock, OutputChoice, advance
from pdcluster_router.frontend.prepare import Prepared
from pdcluster_router.frontend.response import AnswerWriter, record, writer_of
from pdcluster_router.request.plain.plain_kind import Asked

if TYPE_CHECKING:
    from pdcluster_router.request.plain.plain_run import PlainRun


class PlainStream(msgspec.Struct, eq=False):
    """Nobody else writes to its exchange, whose client reads."""

    choice: OutputChoice
    writer: AnswerWriter

    def say(self, chunk: TokenChunk) -> None:
        self.writer.add(0, advance(self.choice, chunk))

    def way(self) -> Take | None:
        """For what comes after two tokens."""
        return self.writer.through(0)

    def finish(self, done: Done, metrics: RouterMetrics) -> None:
        self.writer.add(0, advance(self.choice, done))
        self.writer.finish()
        record((self.choice,), metrics)


def stream_of(plain: PlainRun, asked: Asked, wants_usage: bool) -> PlainStream:
    prepared = prepared_of(plain, asked, is_stream=True, wants_usage=wants_usage)
    return PlainStream(prepared.choices[0], writer_of(plain.exchange, prepared))


def prepared_of(plain: PlainRun, asked: Asked, *, is_stream: bool = False, wants_usage: bool = False) -> Prepared:
    """As `prepare.prepare_completion` makes it."""
    kind, job, exchange = asked.kind, plain.job, plain.exchange
    info, text = kind.info, kind.text
    token_ids = job.prompt if isinstance(job.prompt, array) else array("i", job.prompt)
    left_s = max(job.deadline - plain.started, 0.0)
    generation = Generation(
        job.request, info.id, token_ids, job.sampling, left_s, asked.salt, plain.standing, None, job.session,
        exchange.client_id
    )  # fmt: skip
    detokenizer = text.detokenizer(skip_special_tokens=kind.skips, at_start=False)
    choice = OutputChoice(
        generation, ChoiceText(detokenizer, StopMatcher(()), kind.silent), Clock(exchange.arrived), info.vocab_size
    )
    head = Head("cmpl-" + exchange.id, asked.created, info.id, text.pieces, False, False, wants_usage)
    return Prepared([choice], 1, CompletionFormat(head), is_stream, wants_usage)
