"""Which tokens a row's grammar allows next. State is a function of the grammar and of the output so far, so any node
makes it anew. Between steps it is kept only for speed.

How long a mask takes depends on the grammar. An ambiguous one takes longer with every token, without end. So masks are
made in a `DeadlinePool`. A row whose mask takes too long, or so long that the next one may, ends. So do all others of
its grammar, which is refused from then on. Rows of other grammars go on.

A grammar ends in an end-of-sequence token, allowed where it is complete. While a row is shorter than its min_tokens
that token is withheld as long as anything else may follow.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from pdcluster.core.grammar import PARAM, Grammar
from pdcluster.core.sampling import Sampling
from pdcluster.core.step import Row, RowError
from pdcluster.engine.sampling.deadline_pool import DeadlinePool, MissedDeadline, PoolFull
from pdcluster.engine.sampling.grammar import Compiled, Constraint, Grammars, Mask

# After so many steps without it a row's state is dropped: its row is gone, or waits.
MAX_IDLE_STEPS = 64


# Longest time for a row's mask, which all rows of the step wait for. Most take less than a thousandth of it.
MASK_S = 1.0

# Share of that time on a CPU from which a mask counts as too slow though it came. The next one would keep a thread that
# nobody can end.
SLOW = 0.5


# Nothing is known against the grammar then.
STARVED = RowError(
    "this node gets too little time on its CPUs to say what the request's grammar allows next; retry later",
    retryable=True,
)


WORN = "other rows used up what the request's grammar may take on this node; retry"


@dataclass(frozen=True, slots=True)
class DeadRow:
    """The row cannot go on; says why. is_lost: only because this node no longer has the grammar."""

    reason: str
    is_lost: bool = False
    # Whether the grammar must be compiled anew.
    is_worn: bool = False


class GrammarPosition(NamedTuple):
    """Where a row stands in its grammar, what it may say next, and how long a CPU took to find that."""

    constraint: Constraint
    mask: Mask
    cpu_s: float


class Constraints:
    """The state of an engine's rows; used by its worker thread alone."""

    def __init__(self, grammars: Grammars, eos_token_ids: Sequence[int], mask_s: float = MASK_S) -> None:
        self._grammars = grammars
        self._eos = tuple(eos_token_ids)
        self._rows: dict[str, tuple[Constraint, int]] = {}
        self._step = 0
        self._slow_s = mask_s * SLOW
        self._aside = DeadlinePool[GrammarPosition | DeadRow]("masks", mask_s)

    def of_step(self, rows: Sequence[Row]) -> tuple[dict[int, Mask], dict[int, RowError]]:
        """By place: what the rows that have a grammar may say next, and which of them can not go on."""
        self._step += 1
        masks: dict[int, Mask] = {}
        dead: dict[int, RowError] = {}
        asked = [
            (place, row, row.sampling.grammar)
            for place, row in enumerate(rows)
            if row.sampling is not None and row.sampling.grammar is not None
        ]
        for (place, row, grammar), answer in zip(
            asked, self._answers([(row, grammar) for _, row, grammar in asked]), strict=True
        ):
            if isinstance(answer, GrammarPosition) and answer.cpu_s < self._slow_s:
                masks[place] = answer.mask
                self._rows[row.request] = answer.constraint, self._step
                continue
            self._rows.pop(row.request, None)
            dead[place] = self._error(answer, row, grammar)
        if self._rows:
            self._rows = {key: kept for key, kept in self._rows.items() if self._step - kept[1] < MAX_IDLE_STEPS}
        return masks, dead

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_late(self) -> int:
        """Masks that nobody waits for and that are still made."""
        return self._aside.num_left

    def close(self) -> None:
        self._aside.close()

    def _job(self, row: Row, grammar: Grammar) -> partial[GrammarPosition | DeadRow]:
        kept = self._rows.get(row.request)
        return partial(_advanced, row, None if kept is None else kept[0], self._grammars.find(grammar), self._eos)

    def _answers(
        self, asked: Sequence[tuple[Row, Grammar]]
    ) -> list[GrammarPosition | DeadRow | MissedDeadline | PoolFull]:
        """Nothing is begun for a grammar that was refused while its rows ran."""
        refused = {grammar: reason for _, grammar in asked if (reason := self._grammars.refusal(grammar)) is not None}
        begun = [(row, grammar) for row, grammar in asked if grammar not in refused]
        found = iter(
            self._aside.run([self._job(row, grammar) for row, grammar in begun], [grammar for _, grammar in begun])
            if begun
            else ()
        )
        return [DeadRow(refused[grammar]) if grammar in refused else next(found) for _, grammar in asked]

    def _error(
        self, answer: GrammarPosition | DeadRow | MissedDeadline | PoolFull, row: Row, grammar: Grammar
    ) -> RowError:
        if isinstance(answer, MissedDeadline) and answer.is_starved:
            return STARVED
        if isinstance(answer, MissedDeadline | GrammarPosition):
            return self._too_slow(row, grammar)
        if isinstance(answer, PoolFull):
            return RowError(
                f"{self._aside.num_left} other grammars take too long on this node; retry later", retryable=True
            )
        if answer.is_worn:
            self._grammars.forget(grammar)
        return RowError(answer.reason, retryable=answer.is_lost, param=PARAM)

    def _too_slow(self, row: Row, grammar: Grammar) -> RowError:
        reason = (
            f"after {row.output_index} tokens it takes too long to find what the grammar allows next; send a less "
            "ambiguous one"
        )
        self._grammars.refuse(grammar, reason)
        return RowError(reason, retryable=False, param=PARAM)


def _advanced(
    row: Row, kept: Constraint | None, compiled: Compiled | None, eos_token_ids: Sequence[int]
) -> GrammarPosition | DeadRow:
    """kept: the row's state at an earlier step; compiled: its grammar, None when this node has it no longer."""
    assert row.sampling is not None and row.sampling.grammar is not None
    output = np.empty(0, np.int32) if row.output is None else row.output
    if kept is not None and kept.grammar == row.sampling.grammar and kept.num_tokens <= len(output):
        constraint = kept
    elif compiled is None:
        return DeadRow("this node no longer has the request's grammar", is_lost=True)
    else:
        constraint = Constraint(compiled, row.sampling.grammar)
    for token in output[constraint.num_tokens :].tolist():
        if not constraint.accept(token):
            if constraint.is_worn:
                return DeadRow(WORN, is_lost=True, is_worn=True)
            return DeadRow(
                f"output token {token} at position {constraint.num_tokens - 1} does not fit the request's grammar"
            )
    began_s = time.thread_time()
    mask = constraint.mask()
    cpu_s = time.thread_time() - began_s
    mask = _long_enough(mask, row, row.sampling, eos_token_ids)
    if not mask.any():
        if constraint.is_worn:
            return DeadRow(WORN, is_lost=True, is_worn=True)
        why = f": {constraint.fault}" if constraint.fault else ""
        return DeadRow(
            f"after {row.output_index} tokens the request's grammar allows none of the model's tokens{why}; change it"
        )
    return GrammarPosition(constraint, mask, cpu_s)


def _long_enough(mask: Mask, row: Row, sampling: Sampling, eos_token_ids: Sequence[int]) -> Mask:
    """Without the ends of a row that is shorter than its min_tokens, where anything else may follow."""
    if row.output_index >= sampling.min_tokens:
        return mask
    longer = without(mask, (*eos_token_ids, *sampling.stop_token_ids))
    return longer if longer.any() else mask


def without(mask: Mask, token_ids: Sequence[int]) -> Mask:
    """A copy that does not allow these."""
    fewer = mask.copy()
    bits = fewer.view(np.uint32)
    for token in token_ids:
        if token >> 5 < len(bits):
            bits[token >> 5] &= ~np.uint32(1 << (token & 31))
    return fewer


def unbound(sampling: Sampling) -> Sampling:
    """Without min_tokens, which masks heed already."""
    return msgspec.structs.replace(sampling, min_tokens=0) if sampling.min_tokens else sampling


def masked(logits: Tensor, masks: Mapping[int, Mask]) -> Tensor:
    """The same tensor when there are no masks, else a copy in which what they do not allow is impossible."""
    if not masks:
        return logits
    places = list(masks)
    bits = np.stack([masks[place] for place in places]).view(np.uint8)
    allowed = np.unpackbits(bits, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    logits = logits.clone()
    rows = logits[places]
    logits[places] = rows.masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))
    return logits
