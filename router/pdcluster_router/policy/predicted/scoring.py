"""Scores the nodes for one request by `cost_model`: what holds for all, the best of each leg, and the better mode.

A choice is two calls: `first_leg`, and `pair` where that found a prefill node, because paths from the computing node
matter only to its partner. `legs` has the bits of each node (`records`), as `eligibility` found them. Results go into
`choice` and `seen`: MOST_CANDIDATES records for each leg, the best first.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from pdcluster_router.core.node_row import BUSY, COMPUTES, DECODES, SERVES, NodeRow, alone_s
from pdcluster_router.core.room import Legs, Nodes
from pdcluster_router.policy.predicted.cost_model import (
    HANDOVER_S,
    LAST_GROUP,
    UNMEASURED_BYTES_S,
    bears,
    copy_s,
    keeps_pace,
    num_slowed,
    prompt_on,
    row_on,
)
from pdcluster_router.policy.predicted.records import (
    DECODE_LEG,
    LOCAL,
    LOCAL_LEG,
    MOST_CANDIDATES,
    NOWHERE,
    PREFILL_LEG,
    REMOTE,
    CandidateRow,
    ChoiceRow,
    RequestRow,
)

Numbers = Sequence[float]
Seen = MutableSequence[CandidateRow]

# Upper bound of the share of time with prompts on a node that still takes rows.
MOST_SHARE = 0.9

# Upper bound of the doubt, so that a mode does not stay for ever.
MOST_DOUBT = 0.5

# ---------------------------------------------------------------- what holds for all nodes


def weigh_market(nodes: Nodes, cached: Numbers, asked: RequestRow, choice: ChoiceRow) -> None:
    """Write what holds for all nodes now: the price, and the shares of time with prompts."""
    serving, decoding = totals(nodes, 1.0), totals(nodes, 0.0)
    num_nodes, least_s, prompts, backlog_s, _, _, _ = serving if serving[0] > 0.0 else decoding
    choice.price = choice.share = choice.local_share = 0.0
    if least_s > 0.0:
        choice.price = asked.alpha * (least_s * max(prompts, 1.0) / backlog_s + asked.num_held / num_nodes)
    if serving[0] > 0.0:
        # The share of now, from the number of prompts there or waiting: with Poisson arrivals ρ = N ÷ (1 + N).
        coming = serving[2] + asked.num_held
        choice.share = max(coming / (coming + serving[0]), share_later(nodes, cached, serving, decoding, asked))
        if decoding[0] > 0.0:
            # Prompts computed by decode nodes count: the next one may come here, and takes all the time of a row.
            choice.share = max(choice.share, min((asked.busy_serving + asked.busy_decoding) / serving[0], MOST_SHARE))
    if decoding[0] > 0.0:
        # From work sent there lately. Present work on a decode node is soon over, which `beside_prompts_s` counts.
        # Whether more follows is this policy's own choice.
        choice.local_share = min(asked.busy_decoding / decoding[0], MOST_SHARE)


def totals(nodes: Nodes, is_server: float) -> tuple[float, float, float, float, float, float, float]:
    """Of the serving nodes, or the others, that take work: how many there are, the least wait of any, and sums of
    prompts, backlog, rows, context and TPOT × rows.
    """
    num, least_s, prompts, backlog_s, rows, context, tpot_rows = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for row in range(len(nodes)):
        node = nodes[row]
        if node.most_tokens < 0.0 or node.is_server != is_server:
            continue
        if num == 0.0 or node.wait_s < least_s:
            least_s = node.wait_s
        num += 1.0
        prompts += node.num_prompts
        backlog_s += node.backlog_s
        rows += node.rows
        context += node.context_tokens
        tpot_rows += node.tpot_s * node.rows
    return num, least_s, prompts, backlog_s, rows, context, tpot_rows


def share_later(nodes: Nodes, cached: Numbers, serving: Numbers, decoding: Numbers, asked: RequestRow) -> float:
    """Share of time with prompts on serving nodes over the life of an answer.

    By Little's law the running rows came at rows ÷ (output × TPOT) a second. Each had a prompt about as long as what it
    attends to, cached about as far as this one at best.
    """
    num_rows = serving[4] + decoding[4]
    life_s = asked.output * (serving[6] + decoding[6]) / max(num_rows, 1.0)
    if life_s <= 0.0:
        return 0.0
    mean, most, first = (serving[5] + decoding[5]) / num_rows, 0.0, NOWHERE
    for row in range(len(nodes)):
        if nodes[row].most_tokens >= 0.0 and nodes[row].is_server > 0.0:
            most = max(most, cached[row])
            if first == NOWHERE:
                first = row
    known = most / asked.num_tokens
    work_s = alone_s(nodes[first], mean * (1 - known), mean * known)
    return min(work_s * num_rows / life_s / serving[0], MOST_SHARE)


# ---------------------------------------------------------------- candidates


def start_of(leg: int) -> int:
    return leg * MOST_CANDIDATES


def enter(nodes: Nodes, seen: Seen, leg: int, num: int, row: int, cost: float) -> int:
    """Make room for a candidate in its leg of `num`. Returns its place, -1 when MOST_CANDIDATES are better.

    Nodes come in ascending rows. Ties go to the node with fewer requests, then to the first.
    """
    place = start_of(leg) + num
    if num == MOST_CANDIDATES:
        place -= 1
        if not comes_before(nodes, row, cost, seen[place]):
            return -1
    while place > start_of(leg) and comes_before(nodes, row, cost, seen[place - 1]):
        seen[place] = seen[place - 1]
        place -= 1
    candidate, node = seen[place], nodes[row]
    candidate.leg, candidate.row, candidate.cost, candidate.is_fetched = leg, row, cost, 0
    candidate.estimate_s, candidate.spread, candidate.doubt = -1.0, node.spread, node.doubt
    return place


def comes_before(nodes: Nodes, row: int, cost: float, other: CandidateRow) -> bool:
    if cost != other.cost:
        return cost < other.cost
    return nodes[row].num_requests < nodes[other.row].num_requests


def estimate_s(node: NodeRow, cached: float, num_tokens: float) -> float:
    """Seconds to the first token by what waits on the node and the uncached prompt, at least one token."""
    return node.backlog_s + alone_s(node, max(num_tokens - cached, 1.0), cached)


def takes(legs: Legs, row: int, leg: int, passed_over: int) -> bool:
    return legs[row] & leg != 0 and legs[row] & passed_over == 0


def busy_bit(legs: Legs, leg: int) -> int:
    """BUSY where some other node may take the leg: then busy ones are passed over."""
    for row in range(len(legs)):
        if legs[row] & leg != 0 and legs[row] & BUSY == 0:
            return BUSY
    return 0


def most_kept(nodes: Nodes, legs: Legs, cached: Numbers, leg: int, passed_over: int) -> float:
    """Tokens of the prompt that some serving node of the leg has or soon will have."""
    most = 0.0
    for row in range(len(nodes)):
        if cached[row] > most and nodes[row].is_server > 0.0 and takes(legs, row, leg, passed_over):
            most = cached[row]
    return most


def weigh_first(
    nodes: Nodes,
    legs: Legs,
    cached: Numbers,
    paths: Numbers,
    asked: RequestRow,
    choice: ChoiceRow,
    seen: Seen,
    leg: int,
) -> int:
    """Score nodes for the prompt of a pair (PREFILL_LEG), or for both legs (LOCAL_LEG). Returns how many are kept.

    slowed: what running rows lose by it. Work on a decode node delays no other prompt, so it has no price.
    """
    bit, num = COMPUTES if leg == PREFILL_LEG else SERVES, 0
    passed_over = busy_bit(legs, bit)
    kept = most_kept(nodes, legs, cached, bit, passed_over)
    for row in range(len(nodes)):
        if not takes(legs, row, bit, passed_over):
            continue
        node, bytes_s = nodes[row], paths[row]
        if row == asked.source or node.pulls == 0.0:
            bytes_s = 0.0
        fetch_s, compute_s, paused_s, is_fetched = prompt_on(node, cached[row], asked.held, bytes_s, asked)
        price_s, slowed_s = node.is_server * choice.price * compute_s, asked.harm * paused_s * node.rows
        copied_s, room_s, decode_s, others_s = copy_s(node, cached[row], kept, asked), 0.0, 0.0, 0.0
        if leg == LOCAL_LEG:
            _, room_s, decode_s, others_s = row_on(node, cached[row], asked, choice)
        cost = node.wait_s + compute_s + fetch_s + price_s + slowed_s + copied_s + (room_s + decode_s + others_s)
        place = enter(nodes, seen, leg, num, row, cost)
        if place < 0:
            continue
        num = min(num + 1, MOST_CANDIDATES)
        candidate = seen[place]
        candidate.cached, candidate.is_fetched = cached[row], is_fetched
        candidate.estimate_s = estimate_s(node, cached[row], asked.num_tokens)
        candidate.wait_s, candidate.compute_s, candidate.fetch_s = node.wait_s, compute_s, fetch_s
        candidate.price_s, candidate.slowed_s, candidate.copy_s = price_s, slowed_s, copied_s
        candidate.room_s, candidate.decode_s, candidate.others_s = room_s, decode_s, others_s
    return num


def exposed_s(
    node: NodeRow, cached: float, bytes_s: float, chunk_tokens: float, compute_s: float, asked: RequestRow
) -> float:
    """Seconds of the transfer that remain after the first token, with the hand-over."""
    token_s = node.kv_bytes / (bytes_s if bytes_s > 0.0 else UNMEASURED_BYTES_S)
    missing = asked.num_tokens - cached
    left_s = missing * token_s - compute_s
    last_s = (missing if missing < chunk_tokens else chunk_tokens) * LAST_GROUP * token_s
    return HANDOVER_S + (left_s if left_s > last_s else last_s)


def is_partner(nodes: Nodes, first: int, row: int) -> bool:
    """Whether KV can move between two nodes."""
    return first != row and nodes[first].media & nodes[row].media != 0


def weigh_decode(
    nodes: Nodes,
    legs: Legs,
    cached: Numbers,
    paths: Numbers,
    asked: RequestRow,
    choice: ChoiceRow,
    seen: Seen,
    is_parked: bool,
) -> None:
    """Score decode nodes for KV that `choice.prefill` computes, or holds already (is_parked).

    paths: bytes/s from that node; 0 for unmeasured. The computing node keeps the whole prompt.
    """
    chunk_tokens, compute_s = asked.parked_chunk, 0.0
    if not is_parked:
        chunk_tokens = nodes[choice.prefill].chunk_tokens
        # A node that leaves the first token to another sends nothing before the prompt is done.
        if nodes[choice.prefill].leaves_first == 0.0:
            compute_s = seen[start_of(PREFILL_LEG) + choice.skipped].compute_s
    passed_over = 0
    for row in range(len(nodes)):
        if takes(legs, row, DECODES, BUSY) and (is_parked or is_partner(nodes, choice.prefill, row)):
            passed_over = BUSY
            break
    for row in range(len(nodes)):
        if not takes(legs, row, DECODES, passed_over):
            continue
        if not (is_parked or is_partner(nodes, choice.prefill, row)):
            continue
        node = nodes[row]
        _, room_s, decode_s, others_s = row_on(node, cached[row], asked, choice)
        exposed = exposed_s(node, cached[row], paths[row], chunk_tokens, compute_s, asked)
        copied_s = copy_s(node, cached[row], asked.num_tokens, asked)
        cost = room_s + exposed + decode_s + others_s + copied_s
        place = enter(nodes, seen, DECODE_LEG, choice.num_decode, row, cost)
        if place < 0:
            continue
        choice.num_decode = min(choice.num_decode + 1, MOST_CANDIDATES)
        candidate = seen[place]
        candidate.cached, candidate.exposed_s = cached[row], exposed
        candidate.room_s, candidate.decode_s = room_s, decode_s
        candidate.others_s, candidate.copy_s = others_s, copied_s


# ---------------------------------------------------------------- choices


def first_leg(
    nodes: Nodes,
    legs: Legs,
    cached: Numbers,
    paths: Numbers,
    asked_rows: Sequence[RequestRow],
    choice_rows: Sequence[ChoiceRow],
    seen: Seen,
) -> int:
    """The best prefill node with a partner, for `pair`. NOWHERE: the choice is the best node for both legs.

    cached: tokens of the prompt on each node. paths: bytes/s from asked.source to each node. asked_rows and
    choice_rows have one row.
    """
    asked, choice = asked_rows[0], choice_rows[0]
    weigh_market(nodes, cached, asked, choice)
    choice.num_prefill = choice.num_decode = choice.num_local = 0
    choice.skipped, choice.prefill, choice.is_calm, choice.bearable = 0, NOWHERE, 1, 0.0
    choice.num_prefill = weigh_first(nodes, legs, cached, paths, asked, choice, seen, PREFILL_LEG)
    find_partner(nodes, legs, choice, seen)
    if choice.prefill == NOWHERE:
        choice.num_prefill = 0
    if choice.prefill == NOWHERE or asked.wants_local != 0:
        choice.num_local = weigh_first(nodes, legs, cached, paths, asked, choice, seen, LOCAL_LEG)
    if choice.prefill == NOWHERE and choice.num_local > 0:
        choose_local(nodes, 0, asked, choice, seen)
    return choice.prefill


def find_partner(nodes: Nodes, legs: Legs, choice: ChoiceRow, seen: Seen) -> None:
    """The best prefill node that can send KV to some decode node."""
    for rank in range(choice.num_prefill):
        first = seen[start_of(PREFILL_LEG) + rank].row
        for row in range(len(nodes)):
            if legs[row] & DECODES != 0 and is_partner(nodes, first, row):
                choice.prefill, choice.skipped = first, rank
                return


def pair(
    nodes: Nodes,
    legs: MutableSequence[int],
    cached: Numbers,
    paths: Numbers,
    asked_rows: Sequence[RequestRow],
    choice_rows: Sequence[ChoiceRow],
    seen: Seen,
) -> None:
    """The best partner of the prefill node of `first_leg`, and the better mode.

    paths: from that node. In mode local, nodes where too many rows would be held up lose SERVES.
    """
    asked, choice = asked_rows[0], choice_rows[0]
    weigh_decode(nodes, legs, cached, paths, asked, choice, seen, False)
    rank = -1
    if choice.num_local > 0:
        node = nodes[choice.prefill]
        choice.bearable = -1.0 if keeps_pace(node, cached[choice.prefill], asked) else num_slowed(node)
        rank = calm_rank(nodes, cached, asked, choice, seen)
        choice.is_calm = 1 if rank >= 0 else 0
    if rank >= 0 and is_local_better(nodes, rank, asked, choice, seen):
        choose_local(nodes, rank, asked, choice, seen)
        for row in range(len(nodes)):
            if legs[row] & SERVES != 0 and not bears(nodes[row], cached[row], asked, choice.bearable):
                legs[row] = legs[row] & ~SERVES
        return
    choice.mode, choice.decode = REMOTE, seen[start_of(DECODE_LEG)].row
    predict(nodes, start_of(PREFILL_LEG) + choice.skipped, asked, choice, seen)


def choose_local(nodes: Nodes, rank: int, asked: RequestRow, choice: ChoiceRow, seen: Seen) -> None:
    place = start_of(LOCAL_LEG) + rank
    choice.mode, choice.prefill, choice.decode = LOCAL, NOWHERE, seen[place].row
    predict(nodes, place, asked, choice, seen)


def predict(nodes: Nodes, place: int, asked: RequestRow, choice: ChoiceRow, seen: Seen) -> None:
    """Write what is expected of a choice. place: of the candidate that computes the prompt."""
    first = seen[place]
    node, known = nodes[first.row], min(first.cached, asked.num_tokens - 1.0)
    choice.ttft_s, choice.is_fetched = ttft_s(first), first.is_fetched
    if choice.mode == REMOTE:
        choice.ttft_s += handover_s(nodes, choice, seen)
    choice.tpot_s = row_on(nodes[choice.decode], cached_of(choice, seen, first), asked, choice)[0]
    choice.work_s, choice.estimate_s = alone_s(node, asked.num_tokens - known, known), first.estimate_s
    choice.best, choice.best_s = NOWHERE, 0.0
    find_other(first.row, PREFILL_LEG, choice.skipped, choice.num_prefill, choice, seen)
    if choice.is_calm != 0:
        find_other(first.row, LOCAL_LEG, 0, choice.num_local, choice, seen)


def cached_of(choice: ChoiceRow, seen: Seen, first: CandidateRow) -> float:
    return first.cached if choice.mode == LOCAL else seen[start_of(DECODE_LEG)].cached


def find_other(chosen: int, leg: int, skipped: int, num: int, choice: ChoiceRow, seen: Seen) -> None:
    """Of the other candidates, the one with the least estimate; the first node of equal ones."""
    for rank in range(skipped, num):
        candidate = seen[start_of(leg) + rank]
        if candidate.row == chosen:
            continue
        is_equal = candidate.estimate_s == choice.best_s and candidate.row < choice.best
        if choice.best == NOWHERE or candidate.estimate_s < choice.best_s or is_equal:
            choice.best, choice.best_s = candidate.row, candidate.estimate_s


def ttft_s(candidate: CandidateRow) -> float:
    return candidate.wait_s + candidate.compute_s + candidate.fetch_s


def handover_s(nodes: Nodes, choice: ChoiceRow, seen: Seen) -> float:
    """What of the transfer the first token waits for."""
    return seen[start_of(DECODE_LEG)].exposed_s if nodes[choice.prefill].leaves_first > 0.0 else 0.0


def calm_rank(nodes: Nodes, cached: Numbers, asked: RequestRow, choice: ChoiceRow, seen: Seen) -> int:
    """Rank of the best local node that holds up no running rows for long; -1 for none.

    Where the prefill node would hold up rows, too, a local node may hold up as many.
    """
    for rank in range(choice.num_local):
        row = seen[start_of(LOCAL_LEG) + rank].row
        if bears(nodes[row], cached[row], asked, choice.bearable):
            return rank
    return -1


def is_local_better(nodes: Nodes, rank: int, asked: RequestRow, choice: ChoiceRow, seen: Seen) -> bool:
    """Whether mode local is better. The last mode keeps a margin."""
    prefill, decode = seen[start_of(PREFILL_LEG) + choice.skipped], seen[start_of(DECODE_LEG)]
    local, remote_cost = seen[start_of(LOCAL_LEG) + rank], prefill.cost + decode.cost
    remote_s = ttft_s(prefill) + handover_s(nodes, choice, seen)
    margin = asked.margin * min(remote_s, ttft_s(local)) + doubt_s(prefill) + doubt_s(local)
    if asked.previous == REMOTE:
        return local.cost + margin < remote_cost
    return local.cost < remote_cost + (margin if asked.previous == LOCAL else 0.0)


def doubt_s(candidate: CandidateRow) -> float:
    """Seconds by which the prompt's time may be wrong, from the model's error bars."""
    return min(candidate.doubt, MOST_DOUBT) * (candidate.wait_s + candidate.compute_s)


def parked(
    nodes: Nodes,
    legs: Legs,
    cached: Numbers,
    paths: Numbers,
    asked_rows: Sequence[RequestRow],
    choice_rows: Sequence[ChoiceRow],
    seen: Seen,
) -> int:
    """The best node with DECODES for KV that is computed already. paths: from the node that holds it."""
    asked, choice = asked_rows[0], choice_rows[0]
    weigh_market(nodes, cached, asked, choice)
    choice.num_decode = 0
    weigh_decode(nodes, legs, cached, paths, asked, choice, seen, True)
    return seen[start_of(DECODE_LEG)].row
