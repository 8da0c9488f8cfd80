"""What a node's last report and what was sent to it since come to: the numbers that `estimates` takes, in the columns
before those that they are made of. Compiled where that can be (`compiled`), else the Python that it is; the same
floats.

`view` writes what a report says into a row, once for each report. What is sent and what ends changes the last columns
only, for every leg of every request; then the row is settled anew.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from math import inf

from pdcluster_router.policy.predicted.cost_model import (
    ADDED_S,
    BACKLOG_S,
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    CONTEXT_S,
    CONTEXT_TOKENS,
    DECODE_FIXED_S,
    EACH_ROW_S,
    ITL_S,
    MISSING_ROWS,
    NUM_PROMPTS,
    NUM_REQUESTS,
    NUM_STATION,
    PAIR_S,
    PROMPT_FIXED_S,
    PROMPT_STEP_S,
    ROWS,
    SPARE_PAGES,
    STRETCH,
    TOKEN_S,
    TPOT_S,
    WAIT_S,
)

Row = MutableSequence[float]
Rows = Sequence[Row]

# What is known of a node, behind what follows from it. HAS_LOAD: 0 before its first report. TOLD: by the report.
# PAGES_LEFT: free or only cached. PARKED, PAGES: pages of finished KV, and all. IS_OWN: 1 where its own steps say what
# they cost, 0 where that is typical; SPREAD: of a prompt's predicted seconds, as a share (DOUBT is the other part of
# that error bar). MOST_TOKENS: of a request that it takes; -1 while it takes none. From IN_FLIGHT on: what this router
# sent (`view.Pending`).
(
    HAS_LOAD,
    TOLD_PROMPTS,
    TOLD_REQUESTS,
    TOLD_TOKENS,
    TOLD_PAIRS,
    TOLD_ROWS,
    TOLD_CONTEXT,
    TOLD_ITL_S,
    SLOTS,
    SLOTS_USED,
    PAGES_LEFT,
    PARKED,
    PAGES,
    IS_OWN,
    SPREAD,
    MOST_TOKENS,
    IN_FLIGHT,
    SENT_REQUESTS,
    SENT_TOKENS,
    SENT_PAIRS,
    SENT_ROWS,
    SENT_CONTEXT,
    SENT_PROMPTS,
) = range(NUM_STATION, NUM_STATION + 23)
NUM_COLUMNS = NUM_STATION + 23


def settle(node: Row) -> None:
    """What follows from the report, from what steps cost there, and from what was sent."""
    tokens, pairs = node[TOLD_TOKENS] + node[SENT_TOKENS], node[TOLD_PAIRS] + node[SENT_PAIRS]
    rows, context = node[TOLD_ROWS] + node[SENT_ROWS], node[TOLD_CONTEXT] + node[SENT_CONTEXT]
    requests = node[TOLD_REQUESTS] + node[SENT_REQUESTS]
    node[NUM_PROMPTS] = node[TOLD_PROMPTS] + node[SENT_PROMPTS] + (1.0 if tokens > 0.0 else 0.0)
    node[NUM_REQUESTS] = node[IN_FLIGHT] if node[IN_FLIGHT] > requests else requests
    node[ROWS], node[CONTEXT_TOKENS] = rows, context
    settle_room(node)
    chunk = node[CHUNK_TOKENS] if node[CHUNK_TOKENS] < inf else 0.0
    depth = 0.0
    if tokens > 0.0:
        depth = pairs / tokens
    elif rows > 0.0:
        depth = context / rows / 2.0
    if depth < chunk / 2.0:
        depth = chunk / 2.0
    fixed_s, token_s, pair_s, decode_fixed_s = node[PROMPT_FIXED_S], node[TOKEN_S], node[PAIR_S], node[DECODE_FIXED_S]
    added_s = node[EACH_ROW_S] * rows + node[CONTEXT_S] * context
    backlog_s = step_s = 0.0
    if chunk > 0.0:
        step_s = fixed_s + token_s * chunk + pair_s * (chunk * depth)
    if tokens > 0.0:
        backlog_s = (
            fixed_s * (tokens / chunk if tokens > chunk and chunk > 0.0 else 1.0) + token_s * tokens + pair_s * pairs
        )
    stretch = 1.0 + added_s / step_s if step_s > 0.0 else 1.0
    tpot_s = decode_fixed_s + added_s
    node[WAIT_S], node[BACKLOG_S], node[STRETCH], node[ADDED_S], node[TPOT_S] = (
        backlog_s * stretch,
        backlog_s,
        stretch,
        added_s,
        tpot_s,
    )
    node[ITL_S] = node[TOLD_ITL_S] if rows > 0.0 and node[TOLD_ITL_S] > tpot_s else tpot_s
    node[PROMPT_STEP_S] = (step_s if step_s > decode_fixed_s else decode_fixed_s) + added_s


def settle_room(node: Row) -> None:
    """Rows that are too many for the node's slots, and pages that rows could still have."""
    node[MISSING_ROWS] = node[SPARE_PAGES] = 0.0
    if node[HAS_LOAD] > 0.0:
        missing = node[SLOTS_USED] + node[SENT_ROWS] - node[SLOTS] + 1.0
        if missing > 0.0 and node[SLOTS] != 0.0:
            node[MISSING_ROWS] = missing / node[SLOTS]
        node[SPARE_PAGES] = node[PAGES_LEFT] - node[SENT_CONTEXT] / node[BLOCK_TOKENS]


def note_sent(
    table: Rows, row: int, in_flight: int, requests: int, tokens: int, pairs: int, rows: int, context: int, prompts: int
) -> None:
    """This router sent the node of that row something, or heard of the end of it: now there is so much."""
    node = table[row]
    node[IN_FLIGHT], node[SENT_REQUESTS], node[SENT_TOKENS], node[SENT_PAIRS] = in_flight, requests, tokens, pairs
    node[SENT_ROWS], node[SENT_CONTEXT], node[SENT_PROMPTS] = rows, context, prompts
    settle(node)
