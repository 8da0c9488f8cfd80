"""What crosses the seam between scheduler and engine: one StepPlan in, one StepResult out.

Plain values, and numpy arrays so that page tables and prompts are never copied into Python objects. There is no prefill
phase and no decode phase. A row computes `tokens` at positions `start…`. It samples after its last one when `sampling`
is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.history import History
from pdcluster.core.sampling import Sampling, TokenLogprobs

# In the place of a token that the step before draws.
NOT_DRAWN_YET: NDArray[np.int32] = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step.

    tokens: int32 [n], n ≥ 1, the ids computed this step.
    start: how many tokens of the row already have KV in `pages`.
    pages: int32 [≥ ceil((start + n) / page_tokens)], page ids in token order. Extra entries are ignored.
    sampling: given when the row's last position yields a token. The random generator takes position start + n.
    output_index: output tokens of the request before this one (for min_tokens).
    prompt_logprobs: number of alternatives for every prompt position of this step, None for none. A result carries
    those of positions start+1 … start+n.
    next_token: the id at position start + n if it is still prompt, else None.
    history: what penalties and bad words look at. The step that draws the row's token enters it there, once.
    output: the output tokens so far, of a row that samples by a grammar.
    follows: its one token is the one that the step launched just before draws for the same request. `tokens` is
    NOT_DRAWN_YET then, and `output` lacks it.
    """

    request: str
    tokens: NDArray[np.int32]
    start: int
    pages: NDArray[np.int32]
    sampling: Sampling | None = None
    output_index: int = 0
    prompt_logprobs: int | None = None
    next_token: int | None = None
    history: History | None = None
    output: NDArray[np.int32] | None = None
    follows: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows of one forward. Decode rows (n == 1) come first.

    copies: (source, target) pages, which the engine copies first.
    milestones: numbers of layers after which the engine tells, so that their KV can leave early.
    """

    rows: tuple[Row, ...]
    milestones: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row can not go on here while the others do.

    param: what of its work is at fault, "" for nothing in particular.
    spoils_kv: its KV may be the cause, and must not become a prefix of others.
    """

    reason: str
    retryable: bool
    param: str = ""
    spoils_kv: bool = False


@dataclass(frozen=True, slots=True)
class RowResult:
    """token is None for a row that did not sample: its chunk is not the prompt's last, or `error` says why."""

    request: str
    token: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's rows. forward_s: wall time of the forward in seconds."""

    rows: tuple[RowResult, ...]
    forward_s: float
