"""Records of numbers, and the record of one node.

Each class is one row of an array: its fields, in order, are the columns. Compiled code gets numpy record arrays, plain
Python gets lists of these objects. Both read `row.wait_s`, so a formula has one source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, ClassVar, Self, TypeVar

import msgspec
import numpy as np

# Bits of a node for one request: it may compute the prompt for another node, decode for another node, or do both. BUSY:
# it asked for a pause, so it is the last choice.
COMPUTES, DECODES, SERVES, BUSY = 1, 2, 4, 8

# Pages are scarce while fewer than one of so many is left.
SCARCE = 4.0

KINDS = {"float": np.float64, "int": np.int64}


class NumberRecord(msgspec.Struct, gc=False):
    """A row."""

    # Its numpy type, which follows from its fields. Numba knows an array by this very object.
    dtype: ClassVar[np.dtype[Any]]

    @classmethod
    def blank(cls) -> Self:
        return cls(*(0 for _ in cls.__struct_fields__))

    def numbers(self) -> tuple[float, ...]:
        return msgspec.structs.astuple(self)


R = TypeVar("R", bound=NumberRecord)


class Rows(list[R]):
    """Records with the assignment of an array: it copies."""

    def __setitem__(self, index: Any, row: Any) -> None:
        super().__setitem__(index, row.__copy__())


def dtype_of(kind: type[NumberRecord]) -> np.dtype[Any]:
    types = {
        name: text for each in reversed(kind.__mro__) for name, text in vars(each).get("__annotations__", {}).items()
    }
    return np.dtype([(name, KINDS[types[name]]) for name in kind.__struct_fields__])


def array_of(kind: type[NumberRecord], rows: Iterable[NumberRecord]) -> np.ndarray[Any, Any]:
    return np.array([row.numbers() for row in rows], kind.dtype)


class NodeRow(NumberRecord):
    """One node: what it is, what steps cost there, what it reported, what was sent to it since, and what follows.

    Only `cluster.view` writes it.
    """

    # What it is. is_server: 1 on nodes that compute prompts for others. decodes: 1 on nodes that decode for others.
    # pulls: 1 on nodes that fetch cached KV. leaves_first: 1 where the decode node makes the first token.
    is_server: float
    decodes: float
    # Of a request that it takes; -1 while it takes none.
    most_tokens: float
    block_tokens: float
    kv_bytes: float
    pulls: float
    leaves_first: float
    # A bit for each transfer medium.
    media: int

    # What steps cost. chunk_tokens: inf when a prompt is one step. each_row_s: what a row adds to a step, beside
    # context_s per attended token. spread, doubt: the two parts of a prompt's error bar (`CostError`).
    prompt_fixed_s: float
    token_s: float
    pair_s: float
    chunk_tokens: float
    decode_fixed_s: float
    each_row_s: float
    context_s: float
    spread: float
    doubt: float

    # What it reported. has_load: 0 before its first report. pages_left: free or only cached. batch_tokens: prompt
    # tokens of batch requests, which are not among the others; batch_rows: of the rows, theirs.
    has_load: float
    reported_prompts: float
    reported_requests: float
    reported_tokens: float
    reported_pairs: float
    reported_rows: float
    reported_context: float
    reported_itl_s: float
    slots: float
    slots_used: float
    pages_left: float
    pages_parked: float
    pages: float
    reported_batch_tokens: float
    reported_batch_rows: float

    # What this router sent since (`InFlightWork`).
    in_flight: float
    sent_requests: float
    sent_tokens: float
    sent_pairs: float
    sent_rows: float
    sent_context: float
    sent_prompts: float
    sent_batch_tokens: float
    sent_batch_rows: float

    # What follows (`derive`). wait_s: until a new prompt begins. backlog_s: prompt work, if computed alone.
    # stretch: factor by which prompts take longer beside rows. added_s: what all rows add to a step. tpot_s: between
    # tokens of a row while no prompt is computed. itl_s: lately, prompts included. prompt_step_s: a step with the rows
    # and a chunk of a prompt. missing_rows: rows that must end before one more fits, as a share of all. spare_pages:
    # for a new row. tight: 1 ÷ pages held by rows where pages are scarce, else 0. batch_s: batch prompts, if computed
    # alone. batch_rows: of the rows, those of batch requests.
    num_prompts: float = 0.0
    num_requests: float = 0.0
    rows: float = 0.0
    context_tokens: float = 0.0
    wait_s: float = 0.0
    backlog_s: float = 0.0
    stretch: float = 0.0
    added_s: float = 0.0
    tpot_s: float = 0.0
    itl_s: float = 0.0
    prompt_step_s: float = 0.0
    missing_rows: float = 0.0
    spare_pages: float = 0.0
    tight: float = 0.0
    batch_s: float = 0.0
    batch_rows: float = 0.0


NodeRow.dtype = dtype_of(NodeRow)


def derive(node: NodeRow) -> None:
    """Write the fields that follow from the report, the step costs and the work sent since."""
    tokens, pairs = node.reported_tokens + node.sent_tokens, node.reported_pairs + node.sent_pairs
    rows, context = node.reported_rows + node.sent_rows, node.reported_context + node.sent_context
    requests = node.reported_requests + node.sent_requests
    node.num_prompts = node.reported_prompts + node.sent_prompts + (1.0 if tokens > 0.0 else 0.0)
    node.num_requests = node.in_flight if node.in_flight > requests else requests
    node.rows, node.context_tokens = rows, context
    derive_room(node)
    chunk = node.chunk_tokens if node.chunk_tokens < inf else 0.0
    added_s = node.each_row_s * rows + node.context_s * context
    backlog_s = step_s = 0.0
    if chunk > 0.0:
        step_s = (
            node.prompt_fixed_s + node.token_s * chunk + node.pair_s * (chunk * depth_of(node, tokens, pairs, chunk))
        )
    if tokens > 0.0:
        steps = tokens / chunk if tokens > chunk and chunk > 0.0 else 1.0
        backlog_s = node.prompt_fixed_s * steps + node.token_s * tokens + node.pair_s * pairs
    tpot_s = node.decode_fixed_s + added_s
    node.stretch = 1.0 + added_s / step_s if step_s > 0.0 else 1.0
    node.wait_s, node.backlog_s, node.added_s, node.tpot_s = backlog_s * node.stretch, backlog_s, added_s, tpot_s
    node.itl_s = node.reported_itl_s if rows > 0.0 and node.reported_itl_s > tpot_s else tpot_s
    node.batch_s = node.token_s * (node.reported_batch_tokens + node.sent_batch_tokens)
    node.batch_rows = node.reported_batch_rows + node.sent_batch_rows
    node.prompt_step_s = (step_s if step_s > node.decode_fixed_s else node.decode_fixed_s) + added_s


def depth_of(node: NodeRow, tokens: float, pairs: float, chunk: float) -> float:
    """Tokens that a token of a chunk attends to: as the waiting prompts do, else as prompts as long as the contexts."""
    depth = 0.0
    if tokens > 0.0:
        depth = pairs / tokens
    elif node.rows > 0.0:
        depth = node.context_tokens / node.rows / 2.0
    return depth if depth > chunk / 2.0 else chunk / 2.0


def derive_room(node: NodeRow) -> None:
    """Rows that are too many for the node's slots, and pages that rows could still have."""
    node.missing_rows = node.spare_pages = node.tight = 0.0
    if node.has_load == 0.0:
        return
    missing = node.slots_used + node.sent_rows - node.slots + 1.0
    if missing > 0.0 and node.slots != 0.0:
        node.missing_rows = missing / node.slots
    node.spare_pages = node.pages_left - node.sent_context / node.block_tokens
    if node.pages_left < node.pages // SCARCE:
        held = node.pages - node.pages_left
        node.tight = 1.0 / (held if held > 1.0 else 1.0)


def note_sent(nodes: Sequence[NodeRow], in_flight: int, sent: tuple[int, int, int, int, int, int, int, int]) -> None:
    """Write what this router now has in flight on the one node: requests, and the fields of `InFlightWork`."""
    node = nodes[0]
    node.in_flight = in_flight
    node.sent_requests, node.sent_tokens, node.sent_pairs = sent[0], sent[1], sent[2]
    node.sent_rows, node.sent_context, node.sent_prompts = sent[3], sent[4], sent[5]
    node.sent_batch_tokens, node.sent_batch_rows = sent[6], sent[7]
    derive(node)


def alone_s(node: NodeRow, new: float, cached: float) -> float:
    """Seconds to compute so many tokens behind cached ones, alone; 0 for none."""
    if new <= 0.0:
        return 0.0
    steps = new / node.chunk_tokens
    if steps < 1.0:
        steps = 1.0
    return node.prompt_fixed_s * steps + node.token_s * new + node.pair_s * (new * (cached + new / 2))
