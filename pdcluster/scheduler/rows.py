"""Rows of a step: what a sequence puts in, how a step is built, what comes out, and when a sequence ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdcluster.core.messages import FinishReason, TokenLogprobs
from pdcluster.core.step import NOT_DRAWN_YET, Row, RowError, StepPlan
from pdcluster.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Update:
    """What one step, or a commit, did to one sequence.

    token: the new output token, at output index `position` of the request; None for a chunk before the prompt's last.
    prompt_logprobs: all, with the first token.
    finished: why it ended with this token; its pages are then gone.
    parked: a remote prefill got its first token and keeps its pages until `release`.
    error: it got no token and cannot go on here; the caller must cancel it.
    """

    key: str
    request: str
    attempt: int
    position: int
    sequence: Sequence
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finished: FinishReason | None = None
    stop_token: int | None = None
    parked: bool = False
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The scheduler's part of messages.Load.

    waiting_tokens, waiting_pairs: of prompts to compute.
    rows: rows that decode here or will, with slots.
    context_tokens: KV that they attend to.
    batch_tokens, batch_rows: of batch sequences; only the rows are among the others, too.
    """

    waiting: int
    running: int
    waiting_tokens: int
    waiting_pairs: int
    rows: int
    context_tokens: int
    slots_used: int
    reserved: int
    parked: int
    batch_tokens: int = 0
    batch_rows: int = 0


def make_row(sequence: Sequence, count: int) -> Row:
    """The row for the next `count` tokens. It samples when these are the last. For a sequence in flight it is the row
    behind.
    """
    if sequence.num_in_flight:
        return _next_row(sequence)
    start = sequence.num_computed
    end = start + count
    tokens = sequence.tokens
    wants = sequence.wants_prompt_logprobs
    samples = end == sequence.num_tokens
    return Row(
        request=sequence.key,
        tokens=tokens[start:end],
        start=start,
        pages=sequence.pages,
        sampling=sequence.sampling if samples else None,
        output_index=sequence.num_output,
        prompt_logprobs=sequence.sampling.prompt_logprobs if wants else None,
        next_token=int(tokens[end]) if wants and end < sequence.num_prompt else None,
        history=sequence.history if samples else None,
        output=tokens[sequence.num_prompt :] if samples and sequence.sampling.grammar is not None else None,
    )


def _next_row(sequence: Sequence) -> Row:
    """The row behind the one in flight, whose token is unknown."""
    return Row(
        request=sequence.key,
        tokens=NOT_DRAWN_YET,
        start=sequence.num_tokens,
        pages=sequence.pages,
        sampling=sequence.sampling,
        output_index=sequence.num_output + 1,
        history=sequence.history,
        output=sequence.tokens[sequence.num_prompt :] if sequence.sampling.grammar is not None else None,
        follows=True,
    )


def can_be_followed(plan: StepPlan, sequences: Iterable[Sequence]) -> bool:
    """Whether a step may follow before this one's tokens are known: each row has at most one next token.

    So no chunks; no forks, whose pages a failed step would not have copied; and no remote prefills, which leave the
    batch and whose layers are watched.
    """
    return not plan.copies and len(plan.rows[-1].tokens) == 1 and not any(sequence.remote for sequence in sequences)


def finish(sequence: Sequence, token: int, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
    """Why the sequence ends with `token`, just appended, and the token that ended it; (None, None) while it goes on.

    Output tokens before index min_tokens end nothing. The sampler draws no ending token there, unless a grammar leaves
    nothing else.
    """
    sampling = sequence.sampling
    if sequence.num_output > sampling.min_tokens or sampling.grammar is not None:
        if not sampling.ignore_eos and token in eos_token_ids:
            return "eos", token
        if token in sequence.stop_token_ids:
            return "stop", token
    if sequence.num_tokens >= sequence.max_total:
        return "length", None
    return None, None


class Draft:
    """A plan in the making. Rows of one token come first.

    logprobs_left: positions whose logprobs are still wanted.
    """

    def __init__(self, left: int, logprobs_left: int = 0) -> None:
        self.left = left
        self._logprobs_left = logprobs_left
        self.copies: tuple[tuple[int, int], ...] = ()
        self._singles: list[Sequence] = []
        self._chunks: list[Sequence] = []
        self._single_rows: list[Row] = []
        self._chunk_rows: list[Row] = []

    def room(self, sequence: Sequence) -> int:
        """How many of its tokens this step may compute."""
        return min(
            sequence.num_pending, self.left, self._logprobs_left if sequence.wants_prompt_logprobs else self.left
        )

    def take(self, sequence: Sequence, count: int) -> None:
        self.left -= count
        self._logprobs_left -= count if sequence.wants_prompt_logprobs else 0
        (self._singles if count == 1 else self._chunks).append(sequence)
        (self._single_rows if count == 1 else self._chunk_rows).append(make_row(sequence, count))

    @property
    def has_chunk(self) -> bool:
        return bool(self._chunks)

    @property
    def sequences(self) -> list[Sequence]:
        return self._singles + self._chunks

    @property
    def plan(self) -> StepPlan:
        return StepPlan((*self._single_rows, *self._chunk_rows), copies=self.copies)
