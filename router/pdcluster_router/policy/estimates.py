"""The terms of `seconds`: plain arithmetic over a Station, all in seconds.

Each formula is asked with one node's numbers, or with those of all nodes as arrays; so there is no `if` about a node here, only `larger` and
`smaller` of two numbers or arrays. TINY stands where zero would be divided by.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Generic

import msgspec

from pdcluster_router.policy.base import Query
from pdcluster_router.stations import Number, Station

LAST_GROUP = 0.25
"""Share of a prompt's last chunk whose KV leaves after the first token, about: layers go in groups while the later ones are computed."""

UNMEASURED_BYTES_S = 1e9
"""Bandwidth of a pair that has not moved anything yet."""

HANDOVER_S = 1e-3
"""Commit, its check and the acknowledgement."""

COMFORT = 2.0
"""Times what a row alone takes from token to token, up to which rows are well served (DESIGN §11)."""

STRAIN = 5.0
"""How much more a second weighs for each time that a pace is beyond that."""

PATIENCE = 5.0
"""Times what a prompt takes alone, short ones given the time of a usual one, within which its first token is in time (DESIGN §11)."""

CHANCE = 1.0
"""Standard deviations by which a row may be slower than the mean of all. Prompts come beside it by chance, each with a pause about as long as that
of the one that is asked about: while there are few, as a Poisson process; the less time there is without one, the less is left to chance."""

TINY = 1e-300

PREFILL_TERMS = ("wait", "compute", "fetch", "price", "slowed")
DECODE_TERMS = ("room", "exposed", "decode", "others", "row_price")
LOCAL_TERMS = (*PREFILL_TERMS, "room", "decode", "others", "row_price")

Values = tuple[float, ...]


class Market(msgspec.Struct, frozen=True, gc=False):
    """What holds for all nodes at one moment. price: seconds that later prompts lose for each second of work; harm: weight of a running row's pause;
    share: of the time in which a node that computes prompts for others will do so, local_share: in which a decode node will for its own."""

    price: float
    harm: float
    share: float
    local_share: float


class Ask(msgspec.Struct, Generic[Number], frozen=True, gc=False):
    """What is asked of each node. row_tokens: what a row will attend to, on average."""

    num_tokens: float
    output: float
    row_tokens: float
    itl_s: float
    market: Market
    larger: Callable[[Number, Number | float], Number]
    smaller: Callable[[Number, Number | float], Number]


def ask(
    query: Query, market: Market, larger: Callable[[Number, Number | float], Number], smaller: Callable[[Number, Number | float], Number]
) -> Ask[Number]:
    output = query.expected_output
    return Ask(query.num_tokens, output, query.num_tokens + output / 2, query.itl_s, market, larger, smaller)


class Prompt(msgspec.Struct, Generic[Number], frozen=True, gc=False):
    """How a node would come by a prompt's KV: seconds of fetching that its queue does not hide, seconds of computing the rest, and what each row that
    runs there loses meanwhile."""

    fetch_s: Number
    compute_s: Number
    paused_s: Number


class Row(msgspec.Struct, Generic[Number], frozen=True, gc=False):
    """What a row would be like on a node. strain: how much more a second weighs there, because rows are slower than is comfortable. others_s: what
    the running rows lose by one more beside them. price_s: the row's share of the steps that compute prompts, priced."""

    tpot_s: Number
    strain: Number
    room_s: Number
    decode_s: Number
    others_s: Number
    price_s: Number


def alone_s(node: Station[float], new: float, cached: float) -> float:
    """Computing so many tokens behind cached ones, with nothing beside them; 0 for none."""
    if new <= 0.0:
        return 0.0
    return node.prompt_fixed_s * max(new / node.chunk_tokens, 1.0) + node.token_s * new + node.pair_s * (new * (cached + new / 2))


def gap_s(node: Station[float], new: float, cached: float) -> float:
    """The longest pause between tokens of running rows while `new` tokens of a prompt are computed."""
    chunk = min(new, node.chunk_tokens)
    return alone_s(node, chunk, cached + new - chunk) + node.added_s


def paced_s(node: Station[float], new: float, cached: float, output: float) -> float:
    """Between tokens of the rows that run there, over an answer: as it was lately, but for the steps in which this prompt is computed beside them,
    and what waits before it; and slower by CHANCE, which few long pauses leave more room to than many short ones, and a node that always computes
    prompts none: no row is slower than all of its steps."""
    steps = max(new / node.chunk_tokens, 1.0)
    busy_s = max(alone_s(node, new, cached) / steps, node.decode_fixed_s) + node.added_s
    share = min((node.wait_s / max(node.prompt_step_s, busy_s, TINY) + steps) / output, 1.0)
    mean_s = (1.0 - share) * node.itl_s + share * busy_s
    most_s, slower_s = max(busy_s - node.tpot_s, 0.0), max(mean_s - node.tpot_s, 0.0)
    if slower_s >= most_s:
        return mean_s
    pause_s, free = min(steps / output, 1.0) * most_s, 1.0 - slower_s / most_s
    return min(mean_s + CHANCE * sqrt(slower_s * pause_s * free), busy_s)


def comfort_s(node: Station[float], itl_s: float) -> float:
    """What rows that run there, or will, may take from token to token: as asked, or COMFORT times what one of them takes alone."""
    return itl_s or COMFORT * (node.decode_fixed_s + (node.added_s / node.rows if node.rows else node.each_row_s))


def own_prompt(ask: Ask[Number], node: Station[Number], cached: Number) -> Prompt[Number]:
    """By the node's own cache. At least one token is always computed: the first output token is drawn from its logits."""
    larger = ask.larger
    new = larger(ask.num_tokens - cached, 1.0)
    steps = larger(new / node.chunk_tokens, 1.0)
    alone_s = node.prompt_fixed_s * steps + node.token_s * new + node.pair_s * (new * (cached + new / 2))
    return Prompt(0.0 * new, alone_s * node.stretch, larger(alone_s - steps * node.decode_fixed_s, 0.0))


def fetched_prompt(ask: Ask[Number], node: Station[Number], cached: Number, held: Number, bytes_s: Number) -> Prompt[Number]:
    """By a copy of what another node holds, which comes while this one's queue is worked off."""
    copy_s = HANDOVER_S + (held - cached) * node.kv_bytes / bytes_s
    rest = own_prompt(ask, node, held)
    return Prompt(ask.larger(copy_s - node.wait_s, 0.0), rest.compute_s, rest.paused_s)


def prefill_values(ask: Ask[Number], node: Station[Number], prompt: Prompt[Number], strain: Number | float = 1.0) -> tuple[Number, ...]:
    """Of PREFILL_TERMS. slowed: what running rows lose by the prompt; strain: how much more that weighs. Work that is done on a decode node delays no
    prompt of the others, so it has no price."""
    market = ask.market
    price_s = node.is_server * market.price * prompt.compute_s
    return node.wait_s, prompt.compute_s, prompt.fetch_s, price_s, market.harm * strain * prompt.paused_s * node.rows


def row_on(ask: Ask[Number], node: Station[Number], cached: Number) -> Row[Number]:
    """A row beside those that run, with prompts beside it for the market's share of the time, and while what waits now is computed."""
    larger, market, output = ask.larger, ask.market, ask.output
    row_s = node.each_row_s + node.context_s * ask.row_tokens
    quiet_s, busy_s = node.tpot_s + row_s, node.prompt_step_s + row_s
    share = node.is_server * market.share + (1.0 - node.is_server) * market.local_share
    at_times = larger(share, ask.smaller(node.wait_s / larger(output * quiet_s, 1e-9), 1.0))
    tpot_s = quiet_s * busy_s / larger((1.0 - at_times) * busy_s + at_times * quiet_s, TINY)
    comfort_s = ask.itl_s or larger(COMFORT * (node.decode_fixed_s + row_s), TINY)
    strain = 1.0 + STRAIN * larger(tpot_s / comfort_s - 1.0, 0.0)
    missing_pages = larger((ask.num_tokens - cached + output) / node.block_tokens - node.spare_pages, 0.0)
    return Row(
        tpot_s,
        strain,
        output * tpot_s * (node.missing_rows + missing_pages * node.tight),
        strain * output * tpot_s,
        strain * output * row_s * node.rows,
        node.is_server * market.price * share * output * row_s,
    )


def decode_values(row: Row[Number], exposed_s: Number) -> tuple[Number, ...]:
    """Of DECODE_TERMS."""
    return row.room_s, exposed_s, row.decode_s, row.others_s, row.price_s


def local_values(ask: Ask[Number], node: Station[Number], prompt: Prompt[Number], row: Row[Number]) -> tuple[Number, ...]:
    """Of LOCAL_TERMS."""
    wait_s, compute_s, fetch_s, price_s, slowed_s = prefill_values(ask, node, prompt, row.strain)
    return wait_s, compute_s, fetch_s, price_s, slowed_s, row.room_s, row.decode_s, row.others_s, row.price_s


def exposed_s(ask: Ask[Number], cached: Number, token_s: Number, chunk_tokens: float, compute_s: float) -> Number:
    """What of a transfer to a node with so much cached is left when the first token is there, and the handing over. token_s: to move a token's KV."""
    missing = ask.num_tokens - cached
    last = ask.smaller(missing, chunk_tokens) * LAST_GROUP
    return HANDOVER_S + ask.larger(missing * token_s - compute_s, last * token_s)
