"""Records of numbers: a node, a request, a choice and its candidates. Values only.

Each class is one row of an array: its fields, in order, are the columns. Compiled code gets numpy record arrays, plain
Python gets lists of these objects. Both read `row.wait_s`, so a formula has one source.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

# The best candidates of a leg that are kept.
MOST_CANDIDATES = 16

# ChoiceRow.mode and RequestRow.previous.
NO_MODE, LOCAL, REMOTE = 0, 1, 2
MODES = {None: NO_MODE, "local": LOCAL, "remote": REMOTE}

# CandidateRow.leg.
PREFILL_LEG, DECODE_LEG, LOCAL_LEG = 0, 1, 2

# Bits of a node for one request: it may compute the prompt for another node, decode for another node, or do both. BUSY:
# it asked for a pause, so it is the last choice.
COMPUTES, DECODES, SERVES, BUSY = 1, 2, 4, 8

NOWHERE = -1

KINDS = {"float": np.float64, "int": np.int64}


class NumberRecord(msgspec.Struct, gc=False):
    """A row. Its numpy type follows from its fields."""

    @classmethod
    def dtype(cls) -> np.dtype[Any]:
        return DTYPES[cls]

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


class NodeRow(NumberRecord):
    """One node: what it is, what steps cost there, what it reported, what was sent to it since, and what follows.

    Only `cluster.view` writes it.
    """

    # What it is. is_server: 1 on nodes that compute prompts for others. decodes: 1 on nodes that decode for others.
    is_server: float
    decodes: float
    # Of a request that it takes; -1 while it takes none.
    most_tokens: float
    block_tokens: float
    kv_bytes: float
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

    # What it reported. has_load: 0 before its first report. pages_left: free or only cached.
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

    # What this router sent since (`InFlightWork`).
    in_flight: float
    sent_requests: float
    sent_tokens: float
    sent_pairs: float
    sent_rows: float
    sent_context: float
    sent_prompts: float

    # What follows (`node_state.derive`). wait_s: until a new prompt begins. backlog_s: prompt work, if computed alone.
    # stretch: factor by which prompts take longer beside rows. added_s: what all rows add to a step. tpot_s: between
    # tokens of a row while no prompt is computed. itl_s: lately, prompts included. prompt_step_s: a step with the rows
    # and a chunk of a prompt. missing_rows: rows that must end before one more fits, as a share of all. spare_pages:
    # for a new row. tight: 1 ÷ pages held by rows where pages are scarce, else 0.
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


class RequestRow(NumberRecord):
    """What a choice depends on besides the nodes: see `Query`, and `Seconds` for the last four."""

    num_tokens: float
    output: float
    itl_s: float
    num_held: float
    usual_tokens: float
    busy_serving: float
    busy_decoding: float
    previous: int
    lost: float
    # The node from which KV may be fetched (NOWHERE: none), and the tokens that it holds.
    source: int
    held: float
    # Mode local is compared though a pair is possible.
    wants_local: int
    # Of KV that is computed already: tokens of a chunk that it leaves in.
    parked_chunk: float
    alpha: float
    harm: float
    margin: float
    gap: float


class ChoiceRow(NumberRecord):
    """A choice.

    prefill: NOWHERE in mode local. skipped: better prefill nodes without a partner. bearable: rows that a local node
    may hold up for long, -1 for none. is_calm: 0 where every local node holds up too many.

    price: seconds that later prompts lose per second of work. share, local_share: of the time, with prompts on a
    serving node and on a decode node. late: 0 while a node is idle, 1 when waiting first tokens will just be in time.

    work_s: of the computing node. estimate_s: until the first token there, by what waits and its own prompt. best,
    best_s: who else is estimated to be soonest, NOWHERE for nobody.
    """

    mode: int
    prefill: int
    decode: int
    ttft_s: float
    tpot_s: float
    is_fetched: int
    skipped: int
    bearable: float
    is_calm: int
    price: float
    share: float
    local_share: float
    late: float
    num_prefill: int
    num_decode: int
    num_local: int
    work_s: float
    estimate_s: float
    best: int
    best_s: float


class CandidateRow(NumberRecord):
    """A node for one leg. estimate_s: see ChoiceRow; -1 for none. The fields of its leg in TERMS add up to its cost."""

    leg: int
    row: int
    cached: float
    cost: float
    is_fetched: int
    estimate_s: float
    spread: float
    doubt: float
    wait_s: float = 0.0
    compute_s: float = 0.0
    fetch_s: float = 0.0
    price_s: float = 0.0
    slowed_s: float = 0.0
    copy_s: float = 0.0
    room_s: float = 0.0
    exposed_s: float = 0.0
    decode_s: float = 0.0
    others_s: float = 0.0
    row_price_s: float = 0.0


# The terms of a cost, by leg. Explanations name them so, without the unit.
PREFILL_TERMS = "wait_s", "compute_s", "fetch_s", "price_s", "slowed_s", "copy_s"
TERMS = (
    PREFILL_TERMS,
    ("room_s", "exposed_s", "decode_s", "others_s", "row_price_s", "copy_s"),
    (*PREFILL_TERMS, "room_s", "decode_s", "others_s", "row_price_s"),
)


def _dtype(kind: type[NumberRecord]) -> np.dtype[Any]:
    """The numpy type of a record. Numba knows an array by this very object."""
    types = {
        name: text for each in reversed(kind.__mro__) for name, text in vars(each).get("__annotations__", {}).items()
    }
    return np.dtype([(name, KINDS[types[name]]) for name in kind.__struct_fields__])


DTYPES: dict[type[NumberRecord], np.dtype[Any]] = {
    kind: _dtype(kind) for kind in (NodeRow, RequestRow, ChoiceRow, CandidateRow)
}


def array_of(kind: type[NumberRecord], rows: Iterable[NumberRecord]) -> np.ndarray[Any, Any]:
    return np.array([row.numbers() for row in rows], DTYPES[kind])
