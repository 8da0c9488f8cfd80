"""Whether a request just goes to the nodes that were chosen for it, as nearly all do: what `headroom` asks of them,
over rows of numbers. Compiled where that can be (`compiled`), else the Python that it is.

No is no answer: then `headroom` looks at all nodes. That both agree is in test_headroom_numbers.
"""

from __future__ import annotations

from pdcluster_router.policy.predicted.cost_model import (
    BACKLOG_S,
    COMFORT,
    CONTEXT_S,
    DECODE_FIXED_S,
    EACH_ROW_S,
    PATIENCE,
    ROWS,
    TPOT_S,
    Numbers,
    alone_s,
)
from pdcluster_router.policy.predicted.node_state import (
    HAS_LOAD,
    IN_FLIGHT,
    IS_OWN,
    MOST_TOKENS,
    PAGES,
    PARKED,
    SENT_ROWS,
    SLOTS,
    SLOTS_USED,
    TOLD_PROMPTS,
    TOLD_REQUESTS,
)
from pdcluster_router.policy.predicted.scoring import Rows, Table

# Prompts are computed ahead of full decode nodes until finished KV fills one part in so many of a prefill node's pool.
AHEAD = 4

# Of the time that a first token has, for the prompts before it on the node, and for what was predicted wrongly.
HALF = 0.5


def goes(
    table: Table,
    first: int,
    decode: int,
    is_local: bool,
    may_slow: bool,
    num_tokens: int,
    output: int,
    usual_tokens: int,
    itl_s: float,
    ttft_s: float,
    waited_s: float,
    backlog_s: float,
) -> bool:
    """first computes the prompt, decode runs the rows. may_slow: whatever becomes of rows."""
    node = table[first]
    if node[MOST_TOKENS] < num_tokens or not is_open(node, table[decode], is_local, backlog_s):
        return False
    return may_slow or is_bearable(node, table[decode], num_tokens, output, usual_tokens, itl_s, ttft_s + waited_s)


def is_open(node: Numbers, other: Numbers, is_local: bool, backlog_s: float) -> bool:
    """Where all is local, its own rows are looked at."""
    has_load = node[HAS_LOAD] > 0.0
    if has_load and node[TOLD_PROMPTS] == node[TOLD_REQUESTS] == node[PARKED] == node[IN_FLIGHT] == 0.0:
        return True
    if node[IS_OWN] == 0.0:
        return False
    has_row = takes_row(node if is_local else other)
    return has_room(node[BACKLOG_S], backlog_s, is_local, has_row, has_load, node[PARKED], node[PAGES])


def has_room(
    waiting_s: float,
    backlog_s: float,
    is_local: bool,
    has_row: bool,
    has_load: bool,
    num_parked: float,
    num_pages: float,
) -> bool:
    """Whether a busy node is open: little prompt work waits there, and its KV will find a row.

    has_row: on the node where the request would decode. If there is none, prompts are computed ahead while finished KV
    is few. num_parked, num_pages: pages of finished KV, and all.
    """
    if not waiting_s < backlog_s:
        return False
    return has_row or (not is_local and (not has_load or num_parked * AHEAD < num_pages))


def any_open(table: Table, rows: Rows, is_local: bool, has_row: bool, backlog_s: float) -> int:
    """1: one of these nodes is open, 0: none is, -1: their numbers do not say. has_row: some decode node has one."""
    found = 0
    for row in rows:
        node = table[row]
        has_load = node[HAS_LOAD] > 0.0
        if has_load and node[TOLD_PROMPTS] == node[TOLD_REQUESTS] == node[PARKED] == node[IN_FLIGHT] == 0.0:
            return 1
        if node[IS_OWN] == 0.0:
            found = -1
        elif has_room(
            node[BACKLOG_S],
            backlog_s,
            is_local,
            takes_row(node) if is_local else has_row,
            has_load,
            node[PARKED],
            node[PAGES],
        ):
            return 1
    return found


def any_row(table: Table, rows: Rows) -> bool:
    """Whether one of these nodes takes a row."""
    for row in rows:  # noqa: SIM110 (compiled)
        if takes_row(table[row]):
            return True
    return False


def least_excess_s(table: Table, backlog_s: float) -> float:
    """The least time in which one of the nodes beyond the backlog has worked off the rest; 0: there is none, -1: the
    nodes' own numbers do not say."""
    least = 0.0
    for row in range(len(table)):
        node = table[row]
        if node[IS_OWN] == 0.0:
            return -1.0
        excess = node[BACKLOG_S] - backlog_s
        if excess > 0.0 and (least == 0.0 or excess < least):
            least = excess
    return least


def takes_row(node: Numbers) -> bool:
    return node[HAS_LOAD] == 0.0 or node[SENT_ROWS] + node[SLOTS_USED] < node[SLOTS]


def is_bearable(
    node: Numbers, other: Numbers, num_tokens: int, output: int, usual_tokens: int, itl_s: float, late_s: float
) -> bool:
    """Whether one more row leaves the others as fast as they may be, or its first token has no time left (it comes
    after late_s)."""
    if other[IS_OWN] == 0.0 or other[ROWS] == 0.0:
        return True
    context = num_tokens + output / 2
    if keeps_pace(other[TPOT_S], other[EACH_ROW_S], other[CONTEXT_S], other[DECODE_FIXED_S], context, itl_s):
        return True
    return node[IS_OWN] > 0.0 and has_no_time(late_s, alone_s(node, float(max(num_tokens, usual_tokens)), 0.0))


def keeps_pace(
    tpot_s: float, each_row_s: float, context_s: float, decode_fixed_s: float, context: float, itl_s: float
) -> bool:
    """Whether a node's rows stay within their limit with one more, of so many tokens. itl_s: 0: by their own pace."""
    row_s = each_row_s + context_s * context
    return tpot_s + row_s <= (itl_s if itl_s != 0.0 else COMFORT * (decode_fixed_s + row_s))


def has_no_time(late_s: float, alone_s: float) -> bool:
    """Whether a first token that comes after late_s has no time to wait. alone_s: of its prompt on an idle node."""
    return late_s >= HALF * PATIENCE * alone_s
