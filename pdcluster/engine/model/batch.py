"""Turns a StepPlan into the flat arrays a forward works on: tokens of all rows after each other, nothing padded. It
computes no model.

Everything per token is made by numpy; Python loops run over rows only, never over a row's context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster.core.errors import IntegrityError
from pdcluster.core.step import Row, StepPlan

Ids = NDArray[np.int64]

NOTHING_FED: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row's tokens [begin, end) in the flat batch; start of them had KV before this step. pages: exactly those that
    hold its context."""

    begin: int
    end: int
    start: int
    pages: Ids

    @property
    def length(self) -> int:
        """Tokens of context after this step."""
        return self.start + self.end - self.begin


@dataclass(frozen=True)
class Batch:
    """Tokens of all rows after each other. Row r's are [begins[r], begins[r + 1]), the last of its lengths[r] tokens of
    context. Its pages stand in `pages` from first_page[r] on. The first num_decodes rows are one token each.

    Derived arrays are made when they are asked for. A step that is one kernel call does without.
    """

    tokens: Ids
    begins: Ids
    lengths: Ids
    first_page: Ids
    pages: Ids
    num_decodes: int
    page_tokens: int
    device: str

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @cached_property
    def spans(self) -> tuple[RowSpan, ...]:
        pages = np.split(self.pages, self.first_page[1:])
        begins, lengths = self.begins.tolist(), self.lengths.tolist()
        return tuple(
            RowSpan(begin, end, length + begin - end, own)
            for begin, end, length, own in zip(begins, begins[1:], lengths, pages, strict=False)
        )

    @property
    def decode_pages(self) -> Ids:
        """Of the rows that decode, after each other."""
        return self.pages if self.num_decodes == self.num_rows else self.pages[: self.first_page[self.num_decodes]]

    @property
    def decode_first(self) -> Ids:
        """Where each one's begin there."""
        return self.first_page[: self.num_decodes]

    @property
    def decode_lengths(self) -> Ids:
        return self.lengths[: self.num_decodes]

    @cached_property
    def token_ids(self) -> Tensor:
        return _tensor(self.tokens, self.device)

    @cached_property
    def positions(self) -> Tensor:
        return _tensor(self._places, self.device)

    @cached_property
    def slot_pages(self) -> Tensor:
        """int64 [num_tokens]: token i's KV goes to slot_offsets[i] of this page."""
        rows = np.repeat(np.arange(self.num_rows), np.diff(self.begins))
        return _tensor(self.pages[self.first_page[rows] + self._places // self.page_tokens], self.device)

    @cached_property
    def slot_offsets(self) -> Tensor:
        return _tensor(self._places % self.page_tokens, self.device)

    @cached_property
    def _places(self) -> Ids:
        places: Ids = np.arange(len(self.tokens)) + np.repeat(self.lengths - self.begins[1:], np.diff(self.begins))
        return places


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan may name."""

    vocab_size: int
    num_pages: int
    page_tokens: int
    max_len: int


def build_batch(plan: StepPlan, limits: PlanLimits, device: str, fed: Mapping[int, int] = NOTHING_FED) -> Batch:
    """fed: tokens of rows that follow the step before, by index. Raises IntegrityError when the plan names what is not
    there: a plan is made by our own scheduler."""
    if not plan.rows:
        raise IntegrityError("a step plan without rows has nothing to compute")
    pages = [_pages(row, limits) for row in plan.rows]
    counts = [len(row.tokens) for row in plan.rows]
    lengths = [row.start + count for row, count in zip(plan.rows, counts, strict=True)]
    first_page = accumulate(map(len, pages), initial=0)
    table = np.array(
        (list(accumulate(counts, initial=0)), list(first_page), [*lengths, 0]), np.int64
    )  # one call: each costs more than what it does
    tokens = np.concatenate([row.tokens for row in plan.rows], dtype=np.int64)
    if fed:
        tokens[table[0, list(fed)]] = list(fed.values())
    batch = Batch(
        tokens=tokens,
        begins=table[0],
        lengths=table[2, :-1],
        first_page=table[1, :-1],
        pages=np.concatenate(pages, dtype=np.int64),
        num_decodes=len(counts)
        if len(tokens) == len(counts)
        else next(index for index, count in enumerate(counts) if count > 1),
        page_tokens=limits.page_tokens,
        device=device,
    )
    _check_range("token id", batch.tokens, limits.vocab_size)
    _check_range("page", batch.pages, limits.num_pages)
    return batch


def _pages(row: Row, limits: PlanLimits) -> NDArray[np.int32]:
    """Those that hold the row's context."""
    length = row.start + len(row.tokens)
    if not len(row.tokens) or row.start < 0 or length > limits.max_len:
        raise IntegrityError(f"request {row.request}: tokens [{row.start}, {length}) do not fit 1…{limits.max_len}")
    needed = -(-length // limits.page_tokens)
    if len(row.pages) < needed:
        raise IntegrityError(
            f"request {row.request}: {length} tokens need {needed} pages, the plan gives {len(row.pages)}"
        )
    return row.pages[:needed]


def _check_range(what: str, values: Ids, limit: int) -> None:
    large = values.view(np.uint64)  # negative ones are large, so that one look does
    if large.item(large.argmax()) >= limit:
        wrong = values[(values < 0) | (values >= limit)][0]
        raise IntegrityError(f"{what} {wrong} is not in 0…{limit - 1}")


def _tensor(values: NDArray[Any], device: str) -> Tensor:
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made if device == "cpu" else made.to(device)
