"""Which tokens a row's grammar allows next. State is a function of the grammar and of the output so far, so any node makes it anew: after a
hand-over, a preemption, a migration. It is kept between steps only because that is faster.

A grammar ends in an end-of-sequence token, allowed where it is complete. While a row is shorter than its min_tokens that token is withheld as long
as anything else may follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster.engine.grammar import Grammars
from pdcluster.grammar import Grammar
from pdcluster.sampling import Sampling
from pdcluster.step import Row, RowError

Mask = NDArray[np.int32]
"""A bit per token id, lowest first."""

MAX_IDLE_STEPS = 64
"""After so many steps without it a row's state is dropped: its row is gone, or waits."""


class Constraint:
    """One output's place in its grammar."""

    def __init__(self, compiled: Any, grammar: Grammar | None = None) -> None:
        import xgrammar

        self.grammar = grammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = -(-compiled.tokenizer_info.vocab_size // 32)
        self.num_tokens = 0

    def accept(self, token: int) -> bool:
        """False for a token that the grammar does not allow here."""
        self.num_tokens += 1
        return bool(self._matcher.accept_token(token))

    def mask(self) -> Mask:
        words = np.full((1, self._words), -1, np.int32)
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(words, 0)
        else:
            words[:] = 0
        row: Mask = words[0]
        return row


class Dead(Exception):
    """The row cannot go on; says why. is_lost: only because this node no longer has the grammar."""

    def __init__(self, reason: str, *, is_lost: bool = False) -> None:
        super().__init__(reason)
        self.is_lost = is_lost


class Constraints:
    """The state of an engine's rows; used by its worker thread alone."""

    def __init__(self, grammars: Grammars, eos_token_ids: Sequence[int]) -> None:
        self._grammars = grammars
        self._eos = tuple(eos_token_ids)
        self._rows: dict[str, tuple[Constraint, int]] = {}
        self._step = 0

    def of_step(self, rows: Sequence[Row]) -> tuple[dict[int, Mask], dict[int, RowError]]:
        """By place: what the rows that have a grammar may say next, and which of them can not go on."""
        self._step += 1
        masks: dict[int, Mask] = {}
        dead: dict[int, RowError] = {}
        for place, row in enumerate(rows):
            if row.sampling is None or row.sampling.grammar is None:
                continue
            try:
                masks[place] = self._mask(row, row.sampling, row.sampling.grammar)
            except Dead as error:
                self._rows.pop(row.request, None)
                dead[place] = RowError(str(error), retryable=error.is_lost)
        if self._rows:
            self._rows = {key: kept for key, kept in self._rows.items() if self._step - kept[1] < MAX_IDLE_STEPS}
        return masks, dead

    def __len__(self) -> int:
        return len(self._rows)

    def _mask(self, row: Row, sampling: Sampling, grammar: Grammar) -> Mask:
        constraint = self._at(row, grammar)
        self._rows[row.request] = constraint, self._step
        mask = constraint.mask()
        if row.output_index < sampling.min_tokens:
            longer = without(mask, (*self._eos, *sampling.stop_token_ids))
            mask = longer if longer.any() else mask
        if not mask.any():
            raise Dead(f"after {row.output_index} tokens the request's grammar allows none of the model's tokens; change the grammar")
        return mask

    def _at(self, row: Row, grammar: Grammar) -> Constraint:
        """The row's state after its output so far."""
        output = np.empty(0, np.int32) if row.output is None else row.output
        kept = self._rows.get(row.request)
        if kept is not None and kept[0].grammar == grammar and kept[0].num_tokens <= len(output):
            constraint = kept[0]
        else:
            compiled = self._grammars.find(grammar)
            if compiled is None:
                raise Dead("this node no longer has the request's grammar", is_lost=True)
            constraint = Constraint(compiled, grammar)
        for token in output[constraint.num_tokens :].tolist():
            if not constraint.accept(token):
                raise Dead(f"output token {token} at position {constraint.num_tokens - 1} does not fit the request's grammar")
        return constraint


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
