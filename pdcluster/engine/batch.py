"""Turns a StepPlan into the flat arrays a forward works on: tokens of all rows after each other, nothing padded. It computes no model.

Everything per token is made by numpy; Python loops run over rows only, never over a row's context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster.errors import IntegrityError
from pdcluster.step import Row, StepPlan

Ids = NDArray[np.int64]

NOTHING_FED: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Span:
    """One row's tokens [begin, end) in the flat batch; start of them had KV before this step. pages: exactly those that hold its context."""

    begin: int
    end: int
    start: int
    pages: Ids

    @property
    def length(self) -> int:
        """Tokens of context after this step."""
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids, positions, slot_pages and slot_offsets are int64 [num_tokens]: token i's KV goes to slot_offsets[i] of page slot_pages[i].

    The first num_decodes spans are one token each; decode_pages holds their pages after each other, decode_first where each row's begin.
    """

    token_ids: Tensor
    positions: Tensor
    slot_pages: Tensor
    slot_offsets: Tensor
    spans: tuple[Span, ...]
    num_decodes: int
    decode_pages: Ids
    decode_first: Ids
    decode_lengths: Ids


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may name."""

    vocab_size: int
    num_pages: int
    page_tokens: int
    max_len: int


def build_batch(plan: StepPlan, limits: Limits, device: str, fed: Mapping[int, int] = NOTHING_FED) -> Batch:
    """fed: tokens of rows that follow the step before, by index. Raises IntegrityError when the plan names what is not there: a plan is made by our
    own scheduler."""
    if not plan.rows:
        raise IntegrityError("a step plan without rows has nothing to compute")
    spans = _spans(plan.rows, limits)
    token_ids = np.concatenate([row.tokens for row in plan.rows]).astype(np.int64)
    if fed:
        token_ids[[spans[index].begin for index in fed]] = list(fed.values())
    _check_range("token id", token_ids, limits.vocab_size)
    positions, pages = _slots(spans, limits.page_tokens)
    num_decodes = next((index for index, row in enumerate(plan.rows) if len(row.tokens) > 1), len(plan.rows))
    decodes = spans[:num_decodes]
    sizes = np.array([len(span.pages) for span in decodes], np.int64)
    return Batch(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        slot_pages=_tensor(pages, device),
        slot_offsets=_tensor(positions % limits.page_tokens, device),
        spans=spans,
        num_decodes=num_decodes,
        decode_pages=np.concatenate([span.pages for span in decodes]) if decodes else np.zeros(0, np.int64),
        decode_first=np.cumsum(sizes) - sizes,
        decode_lengths=np.array([span.length for span in decodes], np.int64),
    )


def _slots(spans: tuple[Span, ...], page_tokens: int) -> tuple[Ids, Ids]:
    """Of every token: its position, and the page of its KV."""
    if len(spans) == spans[-1].end:  # each has one token, which stands in its last page
        return np.array([span.start for span in spans], np.int64), np.array([span.pages[-1] for span in spans], np.int64)
    places = [np.arange(span.start, span.length) for span in spans]
    return np.concatenate(places), np.concatenate([span.pages[place // page_tokens] for span, place in zip(spans, places, strict=True)])


def _spans(rows: tuple[Row, ...], limits: Limits) -> tuple[Span, ...]:
    spans = []
    begin = 0
    for row in rows:
        length = row.start + len(row.tokens)
        if not len(row.tokens) or row.start < 0 or length > limits.max_len:
            raise IntegrityError(f"request {row.request}: tokens [{row.start}, {length}) do not fit 1…{limits.max_len}")
        needed = -(-length // limits.page_tokens)
        if len(row.pages) < needed:
            raise IntegrityError(f"request {row.request}: {length} tokens need {needed} pages, the plan gives {len(row.pages)}")
        pages = row.pages[:needed].astype(np.int64)
        _check_range(f"request {row.request}: page", pages, limits.num_pages)
        spans.append(Span(begin, begin + len(row.tokens), row.start, pages))
        begin += len(row.tokens)
    return tuple(spans)


def _check_range(what: str, values: Ids, limit: int) -> None:
    if values.min() < 0 or values.max() >= limit:
        wrong = values[(values < 0) | (values >= limit)][0]
        raise IntegrityError(f"{what} {wrong} is not in 0…{limit - 1}")


def _tensor(values: NDArray[Any], device: str) -> Tensor:
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made if device == "cpu" else made.to(device)
