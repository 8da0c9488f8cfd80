"""Whether nodes have room for a request. One source for compiled code and plain Python; `queueing.headroom` asks."""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_router.core.node_row import BUSY, COMPUTES, SERVES, NodeRow, alone_s

Nodes = Sequence[NodeRow]
# The bits of each node for a request.
Legs = Sequence[int]

# Rows are well served up to this multiple of a lone row's time per token.
COMFORT = 2.0

# A first token is in time within this multiple of its prompt's lone time. HALF of that is for the prompts before it on
# the node, and for what was predicted wrongly.
PATIENCE, HALF = 5.0, 0.5

# Beside other rows, batch rows fill a decode node up to this part of the way from a lone row's time per token to the
# limit. The rest is for rows that clients wait for.
BATCH_SHARE = 0.5

# Prompts are computed ahead of full decode nodes until finished KV fills one part in so many of a prefill node's pool.
AHEAD = 4


def has_open(nodes: Nodes, legs: Legs, first: int, decode: int, backlog_s: float) -> bool:
    """Whether some node is open that could compute the prompt in the chosen mode."""
    is_local = first == decode
    leg, has_row = SERVES if is_local else COMPUTES, not is_local and takes_row(nodes[decode])
    if is_free(legs, first, leg) and is_open(nodes[first], is_local, has_row, backlog_s):
        return True
    return any_open(nodes, legs, leg, has_row or any_row(nodes), backlog_s)


def is_free(legs: Legs, row: int, leg: int) -> bool:
    return legs[row] & leg != 0 and legs[row] & BUSY == 0


def any_open(nodes: Nodes, legs: Legs, leg: int, has_row: bool, backlog_s: float) -> bool:
    """Whether some node that may take the leg is open. has_row: some decode node has a row."""
    for row in range(len(nodes)):
        if is_free(legs, row, leg) and is_open(nodes[row], leg == SERVES, has_row, backlog_s):
            return True
    return False


def is_open(node: NodeRow, is_local: bool, has_row: bool, backlog_s: float) -> bool:
    """Whether the node is open for the leg that computes the prompt: little work waits, and its KV will find a row.

    has_row: on a decode node. If there is none, prompts are computed ahead while finished KV is few. Mode local needs a
    row of the node's own. An idle node is open whatever else is believed, so a wrong belief holds no request for ever.
    """
    if is_idle(node):
        return True
    if not node.backlog_s < backlog_s:
        return False
    if is_local:
        return takes_row(node)
    return has_row or node.has_load == 0.0 or node.pages_parked * AHEAD < node.pages


def is_idle(node: NodeRow) -> bool:
    return node.has_load > 0.0 and node.reported_requests == node.pages_parked == node.in_flight == 0.0


def takes_row(node: NodeRow) -> bool:
    """Whether the node has a row for a request that is not batch. Batch rows give way."""
    return node.has_load == 0.0 or node.sent_rows + node.slots_used - node.batch_rows < node.slots


def any_row(nodes: Nodes) -> bool:
    """Whether a decode node that takes work has a row."""
    for row in range(len(nodes)):
        node = nodes[row]
        if node.most_tokens >= 0.0 and node.decodes > 0.0 and takes_row(node):
            return True
    return False


def keeps_rows_fast(
    nodes: Nodes, first: int, decode: int, num_tokens: float, output: float, itl_s: float, late_s: float
) -> bool:
    """Whether one more row on `decode` leaves its rows within their limit (itl_s; 0: by their own pace).

    Also where its first token, due after late_s, has no time to wait. Batch rows do not count: they give way.
    """
    node = nodes[decode]
    if node.rows <= node.batch_rows:
        return True
    tpot_s = node.decode_fixed_s + node.added_s * (1.0 - node.batch_rows / node.rows)
    row_s = node.each_row_s + node.context_s * (num_tokens + output / 2)
    limit_s = itl_s if itl_s != 0.0 else COMFORT * (node.decode_fixed_s + row_s)
    return tpot_s + row_s <= limit_s or late_s >= HALF * PATIENCE * alone_s(nodes[first], num_tokens, 0.0)


def has_batch_room(
    nodes: Nodes, first: int, decode: int, num_tokens: float, output: float, itl_s: float, backlog_s: float
) -> bool:
    """Whether a batch request is in nobody's way.

    1. No other prompt waits on `first`, and less than backlog_s of batch prompts.
    2. `decode` has a row that nobody has. Beside rows that are not batch, one more leaves all within BATCH_SHARE of
       their headroom (itl_s; 0: by their own pace).
    3. Its prompt is no step beside such rows that exceeds their limit.
    """
    server, node = nodes[first], nodes[decode]
    if server.reported_tokens + server.sent_tokens > 0.0 or not server.batch_s < backlog_s:
        return False
    if node.has_load > 0.0 and node.rows > 0.0 and node.sent_rows + node.slots_used >= node.slots:
        return False
    if node.rows <= node.batch_rows:
        return True
    row_s = node.each_row_s + node.context_s * (num_tokens + output / 2)
    lone_s = node.decode_fixed_s + row_s
    limit_s = itl_s if itl_s != 0.0 else COMFORT * lone_s
    if node.tpot_s + row_s > lone_s + BATCH_SHARE * (limit_s - lone_s):
        return False
    return first != decode or node.prompt_step_s <= limit_s


def least_excess_s(nodes: Nodes, backlog_s: float) -> float:
    """The least time in which a node beyond the backlog has worked off the rest; 0: there is none."""
    least = 0.0
    for row in range(len(nodes)):
        excess = nodes[row].backlog_s - backlog_s
        if excess > 0.0 and (least == 0.0 or excess < least):
            least = excess
    return least
