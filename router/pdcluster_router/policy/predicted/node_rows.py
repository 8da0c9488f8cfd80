"""Nodes as numbers, and which may take a leg. Values only.

All nodes of a view are one table, a row per node, as compiled code takes it. `node_state` derives columns from a
report; `cost_model` says what they mean for a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
Table = NDArray[np.float64]


class NodeRow(msgspec.Struct, frozen=True, gc=False):
    """One node. Its fields, in this order, are the first columns of a table (`cost_model` names them).

    is_server: 1 on nodes that compute prompts for others, 0 on decode nodes.
    chunk_tokens: inf when a prompt is one step.
    each_row_s: what a row adds to a step, beside context_s per attended token.
    added_s: what all running rows add.
    itl_s, prompt_step_s, stretch: see NodePacing.
    missing_rows: rows that must end before one more fits, as a share of all.
    tight: 1 ÷ pages held by rows where pages are scarce, else 0.
    spare_pages: pages for a new row.
    doubt: share of a prompt's predicted seconds by which the model may be wrong.
    """

    is_server: float
    num_prompts: float
    num_requests: float
    wait_s: float
    backlog_s: float
    stretch: float
    prompt_fixed_s: float
    token_s: float
    pair_s: float
    chunk_tokens: float
    decode_fixed_s: float
    each_row_s: float
    context_s: float
    rows: float
    context_tokens: float
    added_s: float
    tpot_s: float
    itl_s: float
    prompt_step_s: float
    missing_rows: float
    tight: float
    spare_pages: float
    block_tokens: float
    kv_bytes: float
    doubt: float


class Pool:
    """Rows of nodes that may take a leg, ascending. Immutable."""

    def __init__(self, rows: Iterable[int], size: int) -> None:
        self.rows = tuple(rows)
        self._size = size
        self._parts: dict[object, Pool] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def index(self) -> NDArray[np.int64]:
        return np.array(self.rows, np.int64)

    @cached_property
    def members(self) -> frozenset[int | None]:
        return frozenset(self.rows)

    def __and__(self, other: Pool) -> Pool:
        return other if self.rows == other.rows else self.only(other.members.__contains__)

    def only(self, is_in: Callable[[int], bool]) -> Pool:
        rows = tuple(row for row in self.rows if is_in(row))
        return self if len(rows) == len(self.rows) else Pool(rows, self._size)

    def part(self, name: object, is_in: Callable[[int], bool]) -> Pool:
        """The rows for which `is_in` holds, cached by name."""
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = self.only(is_in)
        return part
