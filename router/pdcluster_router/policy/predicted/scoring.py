"""Scores the nodes for one request by `cost_model`: what holds for all, the best of each leg, and the better mode.

It is compiled where possible (`compiled`). The caller gives the pools as ascending rows. A choice is two calls:
`first_leg`, and `pair` where that found a prefill node, because paths from the computing node matter only to its
partner. Results stand in one row of numbers, so a record costs nothing until it is read.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from pdcluster_router.policy.predicted.cost_model import (
    ALPHA,
    BACKLOG_S,
    BUSY_DECODING,
    BUSY_SERVING,
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    DOUBT,
    HANDOVER_S,
    HARM,
    IS_SERVER,
    KV_BYTES,
    LAST_GROUP,
    MARGIN,
    NUM_HELD,
    NUM_PROMPTS,
    NUM_REQUESTS,
    NUM_TOKENS,
    OUTPUT,
    PATIENCE,
    PREVIOUS,
    ROWS,
    TINY,
    TPOT_S,
    UNMEASURED_BYTES_S,
    USUAL_TOKENS,
    WAIT_S,
    Market,
    Numbers,
    alone_s,
    bears,
    copy_s,
    keeps_pace,
    num_slowed,
    pause_weight,
    prompt_on,
    row_on,
    slowness,
)

Table = Sequence[Numbers]
Rows = Sequence[int]
Found = MutableSequence[float]

# Least strain of rows that a prompt slows at all.
LEAST_STRAIN = 0.05

# Upper bound of the share of time with prompts on a node that still takes rows.
MOST_SHARE = 0.9

# Upper bound of the doubt, so that a mode does not stay for ever.
MOST_DOUBT = 0.5

# Result numbers. Modes are numbered as PREVIOUS. SKIPPED: better prefill nodes without a partner. BEARABLE: rows that a
# local node may hold up for long, -1 for none. IS_CALM: 0 where every local node holds up too many. The market: price,
# share and local_share as in Market; late: 0 while a node is idle, 1 when waiting first tokens will just be in time.
(
    MODE,
    PREFILL,
    DECODE,
    TTFT_S,
    FOUND_TPOT_S,
    IS_FETCHED,
    SKIPPED,
    BEARABLE,
    IS_CALM,
    PRICE,
    SHARE,
    LOCAL_SHARE,
    LATE,
    NUM_LEG,
) = range(14)
NO_MODE, LOCAL, REMOTE = 0.0, 1.0, 2.0
PREFILL_LEG, DECODE_LEG, LOCAL_LEG = 0, 1, 2
# Candidates kept per leg, the best first.
MOST_CANDIDATES = 16
ENTRY_ROW, ENTRY_COST, ENTRY_FETCHED, ENTRY_CACHED, ENTRY_VALUES = 0, 1, 2, 3, 4
# Numbers per node of a leg. A leg with fewer terms leaves the last ones unused.
ENTRY = ENTRY_VALUES + 10
HEADER = NUM_LEG + 3
NUM_FOUND = HEADER + 3 * MOST_CANDIDATES * ENTRY


def weigh_market(
    node_rows: Table, cached: Numbers, serving: Rows, decoding: Rows, asked: Numbers, found: Found
) -> None:
    """What holds for all nodes now.

    serving: nodes that compute prompts for others.
    decoding: decode-only nodes.
    """
    of_serving, of_decoding = totals(node_rows, serving), totals(node_rows, decoding)
    num_held = asked[NUM_HELD]
    least_s, prompts, backlog_s, _, _, _ = of_serving if len(serving) else of_decoding
    num_nodes = len(serving) if len(serving) else len(decoding)
    price = late = 0.0
    if least_s > 0.0:
        prompts = max(prompts, 1.0)
        price = asked[ALPHA] * (least_s * prompts / backlog_s + num_held / num_nodes)
        first = node_rows[
            min(serving[0], decoding[0])
            if len(serving) and len(decoding)
            else serving[0]
            if len(serving)
            else decoding[0]
        ]
        wait_s = least_s + num_held / num_nodes * (backlog_s / prompts)
        late = wait_s / max(PATIENCE * alone_s(first, max(asked[NUM_TOKENS], asked[USUAL_TOKENS]), 0.0), TINY)
    share = 0.0
    if len(serving):
        # The share of now, from the number of prompts there or waiting: with Poisson arrivals ρ = N ÷ (1 + N).
        share = (of_serving[1] + num_held) / (of_serving[1] + num_held + len(serving))
        share = max(share, share_later(node_rows, cached, serving, of_serving, of_decoding, asked))
        if len(decoding):
            # Prompts computed by decode nodes count: the next one may come here, and takes all the time of a row.
            share = max(share, min((asked[BUSY_SERVING] + asked[BUSY_DECODING]) / len(serving), MOST_SHARE))
    found[PRICE], found[SHARE], found[LATE] = price, share, late
    # From work sent there lately. Present work on a decode node is soon over, which `beside_prompts_s` counts. Whether
    # more follows is this policy's own choice.
    found[LOCAL_SHARE] = min(asked[BUSY_DECODING] / len(decoding), MOST_SHARE) if len(decoding) else 0.0


def market_of(found: Numbers) -> Market:
    return found[PRICE], found[SHARE], found[LOCAL_SHARE]


def totals(node_rows: Table, rows: Rows) -> tuple[float, float, float, float, float, float]:
    """The least wait of any node, and sums of prompts, backlog, rows, context and TPOT × rows."""
    least_s, prompts, backlog_s, num_rows, context, tpot_rows = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for place in range(len(rows)):
        node = node_rows[rows[place]]
        if place == 0 or node[WAIT_S] < least_s:
            least_s = node[WAIT_S]
        prompts += node[NUM_PROMPTS]
        backlog_s += node[BACKLOG_S]
        num_rows += node[ROWS]
        context += node[CONTEXT_TOKENS]
        tpot_rows += node[TPOT_S] * node[ROWS]
    return least_s, prompts, backlog_s, num_rows, context, tpot_rows


def share_later(
    node_rows: Table, cached: Numbers, serving: Rows, of_serving: Numbers, of_decoding: Numbers, asked: Numbers
) -> float:
    """Share of time with prompts on serving nodes over the life of an answer.

    By Little's law the running rows came at rows ÷ (output × TPOT) a second. Each had a prompt about as long as what it
    attends to, cached about as far as this one at best.
    """
    num_rows = of_serving[3] + of_decoding[3]
    life_s = asked[OUTPUT] * (of_serving[5] + of_decoding[5]) / max(num_rows, 1.0)
    if life_s <= 0.0:
        return 0.0
    mean = (of_serving[4] + of_decoding[4]) / num_rows
    most = 0.0
    for row in serving:
        most = max(most, cached[row])
    known = most / asked[NUM_TOKENS]
    work_s = alone_s(node_rows[serving[0]], mean * (1 - known), mean * known)
    return min(work_s * num_rows / life_s / len(serving), MOST_SHARE)


def start_of(leg: int, rank: int) -> int:
    return HEADER + (leg * MOST_CANDIDATES + rank) * ENTRY


def enter(found: Found, leg: int, row: int, cost: float, node_rows: Table) -> int:
    """Where the terms of that node go, in ascending rows; -1 when MOST_CANDIDATES are better. Ties go to the node with
    fewer requests, then to the first.
    """
    num = int(found[NUM_LEG + leg])
    if num == MOST_CANDIDATES:
        worst = start_of(leg, num - 1)
        last = found[worst + ENTRY_COST]
        if cost > last or (cost == last and node_rows[row][NUM_REQUESTS] >= node_rows[int(found[worst])][NUM_REQUESTS]):
            return -1
        rank = num - 1
    else:
        rank = num
        found[NUM_LEG + leg] = num + 1.0
    while rank > 0:
        before, here = start_of(leg, rank - 1), start_of(leg, rank)
        other = found[before + ENTRY_COST]
        if other < cost or (
            other == cost and node_rows[int(found[before])][NUM_REQUESTS] <= node_rows[row][NUM_REQUESTS]
        ):
            break
        for place in range(ENTRY):
            found[here + place] = found[before + place]
        rank -= 1
    return start_of(leg, rank)


def note(found: Found, at: int, row: int, cost: float, is_fetched: float, cached: float) -> None:
    found[at + ENTRY_ROW], found[at + ENTRY_COST], found[at + ENTRY_FETCHED], found[at + ENTRY_CACHED] = (
        row,
        cost,
        is_fetched,
        cached,
    )


def most_kept(node_rows: Table, cached: Numbers, pool: Rows) -> float:
    """Tokens of the prompt that some serving node of the pool has or soon will have."""
    most = 0.0
    for row in pool:
        if cached[row] > most and node_rows[row][IS_SERVER] > 0.0:
            most = cached[row]
    return most


def weigh_prefill(
    node_rows: Table,
    cached: Numbers,
    held: float,
    source: int,
    paths: Numbers,
    pool: Rows,
    asked: Numbers,
    found: Found,
) -> None:
    """Score serving nodes for the prompt.

    slowed: what running rows lose by it. Work on a decode node delays no other prompt, so it has no price.
    """
    kept = most_kept(node_rows, cached, pool)
    found[NUM_LEG + PREFILL_LEG] = 0.0
    for row in pool:
        node = node_rows[row]
        fetch_s, compute_s, paused_s, is_fetched = prompt_on(
            node, cached[row], held, 0.0 if row == source else paths[row], asked
        )
        price_s, slowed_s = node[IS_SERVER] * found[PRICE] * compute_s, asked[HARM] * paused_s * node[ROWS]
        copied_s = copy_s(node, cached[row], kept, asked)
        cost = node[WAIT_S] + compute_s + fetch_s + price_s + slowed_s + copied_s
        at = enter(found, PREFILL_LEG, row, cost, node_rows)
        if at >= 0:
            note(found, at, row, cost, is_fetched, cached[row])
            at += ENTRY_VALUES
            found[at], found[at + 1], found[at + 2], found[at + 3], found[at + 4] = (
                node[WAIT_S],
                compute_s,
                fetch_s,
                price_s,
                slowed_s,
            )
            found[at + 5] = copied_s


def weigh_local(
    node_rows: Table,
    cached: Numbers,
    held: float,
    source: int,
    paths: Numbers,
    pool: Rows,
    asked: Numbers,
    found: Found,
) -> None:
    market, kept = market_of(found), most_kept(node_rows, cached, pool)
    found[NUM_LEG + LOCAL_LEG] = 0.0
    for row in pool:
        node = node_rows[row]
        fetch_s, compute_s, paused_s, is_fetched = prompt_on(
            node, cached[row], held, 0.0 if row == source else paths[row], asked
        )
        _, strain, room_s, decode_s, others_s, row_price_s = row_on(node, cached[row], asked, market)
        harm = asked[HARM] * pause_weight(node, found[LATE], asked)
        price_s, slowed_s = node[IS_SERVER] * found[PRICE] * compute_s, harm * strain * paused_s * node[ROWS]
        copied_s = copy_s(node, cached[row], kept, asked)
        cost = (
            node[WAIT_S]
            + compute_s
            + fetch_s
            + price_s
            + slowed_s
            + copied_s
            + room_s
            + decode_s
            + others_s
            + row_price_s
        )
        at = enter(found, LOCAL_LEG, row, cost, node_rows)
        if at >= 0:
            note(found, at, row, cost, is_fetched, cached[row])
            at += ENTRY_VALUES
            found[at], found[at + 1], found[at + 2], found[at + 3], found[at + 4] = (
                node[WAIT_S],
                compute_s,
                fetch_s,
                price_s,
                slowed_s,
            )
            found[at + 5], found[at + 6], found[at + 7], found[at + 8], found[at + 9] = (
                copied_s,
                room_s,
                decode_s,
                others_s,
                row_price_s,
            )


def exposed_s(
    node: Numbers, cached: float, bytes_s: float, chunk_tokens: float, compute_s: float, asked: Numbers
) -> float:
    """Seconds of the transfer that remain after the first token, with the hand-over."""
    token_s = node[KV_BYTES] / (bytes_s if bytes_s > 0.0 else UNMEASURED_BYTES_S)
    missing = asked[NUM_TOKENS] - cached
    left_s = missing * token_s - compute_s
    last_s = (missing if missing < chunk_tokens else chunk_tokens) * LAST_GROUP * token_s
    return HANDOVER_S + (left_s if left_s > last_s else last_s)


def weigh_decode(
    node_rows: Table,
    cached: Numbers,
    paths: Numbers,
    pool: Rows,
    groups: Rows,
    exchange: Table,
    first: int,
    chunk_tokens: float,
    compute_s: float,
    asked: Numbers,
    found: Found,
) -> None:
    """Score decode nodes that `first` can send KV to; -1: all.

    paths: bytes/s from the computing node, in chunks of chunk_tokens; 0 for unmeasured. The computing node keeps the
    whole prompt.
    """
    market = market_of(found)
    found[NUM_LEG + DECODE_LEG] = 0.0
    for row in pool:
        if first >= 0 and not is_partner(first, row, groups, exchange):
            continue
        node = node_rows[row]
        _, _, room_s, decode_s, others_s, price_s = row_on(node, cached[row], asked, market)
        exposed = exposed_s(node, cached[row], paths[row], chunk_tokens, compute_s, asked)
        copied_s = copy_s(node, cached[row], asked[NUM_TOKENS], asked)
        cost = room_s + exposed + decode_s + others_s + price_s + copied_s
        at = enter(found, DECODE_LEG, row, cost, node_rows)
        if at >= 0:
            note(found, at, row, cost, 0.0, cached[row])
            at += ENTRY_VALUES
            found[at], found[at + 1], found[at + 2], found[at + 3], found[at + 4] = (
                room_s,
                exposed,
                decode_s,
                others_s,
                price_s,
            )
            found[at + 5] = copied_s


# ---------------------------------------------------------------- what is asked


def is_partner(prefill: int, decode: int, groups: Rows, exchange: Table) -> bool:
    """Whether KV can move between two nodes.

    exchange: 1 where two groups share a medium.
    """
    return prefill != decode and exchange[groups[prefill]][groups[decode]] > 0.0


def first_leg(
    node_rows: Table,
    cached: Numbers,
    held: float,
    source: int,
    paths: Numbers,
    serving: Rows,
    decoding: Rows,
    prefill: Rows,
    decode: Rows,
    local: Rows,
    groups: Rows,
    exchange: Table,
    wants_local: bool,
    asked: Numbers,
    found: Found,
) -> int:
    """The best prefill node with a partner, or -1 with the best node for both legs.

    held: tokens on the node from which KV may be fetched (source, -1 for none), over paths in bytes/s.
    """
    weigh_market(node_rows, cached, serving, decoding, asked, found)
    found[NUM_LEG + PREFILL_LEG] = found[NUM_LEG + DECODE_LEG] = found[NUM_LEG + LOCAL_LEG] = 0.0
    found[SKIPPED] = 0.0
    first = -1
    if len(prefill) and len(decode) and not (len(prefill) == 1 and len(decode) == 1 and prefill[0] == decode[0]):
        weigh_prefill(node_rows, cached, held, source, paths, prefill, asked, found)
        for rank in range(int(found[NUM_LEG + PREFILL_LEG])):
            row = int(found[start_of(PREFILL_LEG, rank)])
            for other in decode:
                if is_partner(row, other, groups, exchange):
                    first = row
                    break
            if first >= 0:
                found[SKIPPED] = rank
                break
    if first < 0 or wants_local:
        weigh_local(node_rows, cached, held, source, paths, local, asked, found)
    if first < 0:
        settle_local(node_rows, cached, 0, asked, found)
    return first


def pair(
    node_rows: Table,
    cached: Numbers,
    paths: Numbers,
    decode: Rows,
    groups: Rows,
    exchange: Table,
    asked: Numbers,
    found: Found,
) -> None:
    """The best partner of the prefill node of `first_leg`, and the better mode.

    paths: from that node.
    """
    leg = start_of(PREFILL_LEG, int(found[SKIPPED]))
    first, compute_s = node_rows[int(found[leg])], found[leg + ENTRY_VALUES + 1]
    weigh_decode(
        node_rows,
        cached,
        paths,
        decode,
        groups,
        exchange,
        int(found[leg]),
        first[CHUNK_TOKENS],
        compute_s,
        asked,
        found,
    )
    rank = -1
    if found[NUM_LEG + LOCAL_LEG] > 0.0:
        row = int(found[leg])
        found[BEARABLE] = -1.0 if keeps_pace(first, cached[row], asked) else num_slowed(first)
        rank = calm_rank(node_rows, cached, asked, found)
        found[IS_CALM] = 1.0 if rank >= 0 else 0.0
    if rank >= 0 and is_local_better(node_rows, rank, cached, asked, found):
        settle_local(node_rows, cached, rank, asked, found)
        return
    row = int(found[start_of(DECODE_LEG, 0)])
    found[MODE], found[PREFILL], found[DECODE] = REMOTE, found[leg], row
    found[TTFT_S], found[IS_FETCHED] = ttft_s(found, leg), found[leg + ENTRY_FETCHED]
    found[FOUND_TPOT_S] = row_on(node_rows[row], cached[row], asked, market_of(found))[0]


def settle_local(node_rows: Table, cached: Numbers, rank: int, asked: Numbers, found: Found) -> None:
    leg = start_of(LOCAL_LEG, rank)
    row = int(found[leg])
    found[MODE], found[PREFILL], found[DECODE] = LOCAL, -1.0, row
    found[TTFT_S], found[IS_FETCHED] = ttft_s(found, leg), found[leg + ENTRY_FETCHED]
    found[FOUND_TPOT_S] = row_on(node_rows[row], cached[row], asked, market_of(found))[0]


def ttft_s(found: Numbers, leg: int) -> float:
    """wait, compute and fetch: the first terms of both legs that compute a prompt."""
    return found[leg + ENTRY_VALUES] + found[leg + ENTRY_VALUES + 1] + found[leg + ENTRY_VALUES + 2]


def calm_rank(node_rows: Table, cached: Numbers, asked: Numbers, found: Numbers) -> int:
    """Rank of the best local node that holds up no running rows for long; -1 for none.

    Where the prefill node would hold up rows, too, a local node may hold up as many.
    """
    for rank in range(int(found[NUM_LEG + LOCAL_LEG])):
        row = int(found[start_of(LOCAL_LEG, rank)])
        if bears(node_rows[row], cached[row], asked, found[BEARABLE]):
            return rank
    return -1


def is_local_better(node_rows: Table, rank: int, cached: Numbers, asked: Numbers, found: Numbers) -> bool:
    """Whether mode local is better.

    The price counts only as far as first tokens are nearer to being late than rows to being slow. Beyond that it fades
    with the third power: 1, 2 and 5 gave less goodput in replay.
    """
    prefill, decode, local = (
        start_of(PREFILL_LEG, int(found[SKIPPED])),
        start_of(DECODE_LEG, 0),
        start_of(LOCAL_LEG, rank),
    )
    row = int(found[local])
    slow = slowness(node_rows[row], row_on(node_rows[row], cached[row], asked, market_of(found))[0], asked)
    nearer = min(found[LATE] / max(slow, LEAST_STRAIN), 1.0)
    uncounted = 1.0 - nearer * nearer * nearer
    price = ENTRY_VALUES + 3
    remote_cost = found[prefill + ENTRY_COST] + found[decode + ENTRY_COST] - uncounted * found[prefill + price]
    local_cost = found[local + ENTRY_COST] - uncounted * found[local + price]
    margin = (
        asked[MARGIN] * min(ttft_s(found, prefill), ttft_s(found, local))
        + doubt_s(node_rows, found, prefill)
        + doubt_s(node_rows, found, local)
    )
    if asked[PREVIOUS] == REMOTE:
        return local_cost + margin < remote_cost
    return local_cost < remote_cost + (margin if asked[PREVIOUS] == LOCAL else 0.0)


def doubt_s(node_rows: Table, found: Numbers, leg: int) -> float:
    """Seconds by which the prompt's time may be wrong, from the model's error bars."""
    doubt = node_rows[int(found[leg])][DOUBT]
    return (doubt if doubt < MOST_DOUBT else MOST_DOUBT) * (found[leg + ENTRY_VALUES] + found[leg + ENTRY_VALUES + 1])


def parked(
    node_rows: Table,
    cached: Numbers,
    paths: Numbers,
    serving: Rows,
    decoding: Rows,
    pool: Rows,
    groups: Rows,
    exchange: Table,
    chunk_tokens: float,
    asked: Numbers,
    found: Found,
) -> int:
    """The best node of a pool for KV that is computed already."""
    weigh_market(node_rows, cached, serving, decoding, asked, found)
    weigh_decode(node_rows, cached, paths, pool, groups, exchange, -1, chunk_tokens, 0.0, asked, found)
    return int(found[start_of(DECODE_LEG, 0)])
