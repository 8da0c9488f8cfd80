"""The terms of `seconds`, one function a leg: plain arithmetic over a node's Pace. All in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_router.pace import Pace
from pdcluster_router.policy.base import Query, Terms
from pdcluster_router.view import NodeView

LAST_GROUP = 0.25
"""Share of a prompt's last chunk whose KV leaves after the first token, about: layers go in groups while the later ones are computed."""

UNMEASURED_BYTES_S = 1e9
"""Bandwidth of a pair that has not moved anything yet."""

HANDOVER_S = 1e-3
"""Commit, its check and the acknowledgement."""

EASY = 0.05
"""Weight of a second that a client waits for its answer's later tokens while their pace is easy to follow; a second beyond that counts whole."""

PREFILL_TERMS = ("wait", "compute", "price", "slowed")
DECODE_TERMS = ("room", "exposed", "decode", "others", "row_price")
LOCAL_TERMS = ("wait", "compute", "price", "slowed", "room", "decode", "others", "row_price")

Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Market:
    """What holds for all nodes at one moment. price: seconds that later prompts lose for each second of work; share: of the nodes that compute
    prompts those that do so now, and so of the time that one of them does; ease: times the pace of a row alone that is easy enough."""

    price: float
    share: float
    ease: float
    harm: float


@dataclass(frozen=True, slots=True)
class Station:
    """A node and its pace, side by side."""

    node: NodeView
    pace: Pace


def named(names: tuple[str, ...], values: Values) -> Terms:
    return tuple(zip(names, values, strict=True))


def compute_s(pace: Pace, query: Query, cached: int) -> float:
    """The prompt's own work, from its first step to its first token."""
    return pace.prefill.seconds(max(query.num_tokens - cached, 1), cached) * pace.stretch


def easy_s(pace: Pace, query: Query, market: Market) -> float:
    """Between tokens; slower than that costs."""
    return query.itl_s or market.ease * pace.decode.seconds(1, query.num_tokens)


def pause_s(pace: Pace, compute: float) -> float:
    """What a running row loses while a prompt takes `compute`: it goes on at the chunks' pace."""
    chunk_s = pace.gap_s(pace.prefill.chunk_tokens, 0.0) if pace.prefill.chunk_tokens else compute
    return compute * max(1.0 - pace.tpot_s / chunk_s, 0.0) if chunk_s > 0 else 0.0


def pace_cost(tokens: float, before_s: float, after_s: float, easy: float) -> float:
    """Of `tokens` whose gaps grow from before_s to after_s."""
    return tokens * (EASY * (after_s - before_s) + max(after_s - easy, 0.0) - max(before_s - easy, 0.0))


def prefill_values(station: Station, query: Query, market: Market) -> Values:
    """slowed: what rows lose that run on the node."""
    pace = station.pace
    compute = compute_s(pace, query, query.cached_on(station.node))
    price = price_on(station, market) * compute
    if not pace.rows:
        return pace.wait_s, compute, price, 0.0
    later = pace.itl_s + pause_s(pace, compute) / query.expected_output
    slowed = market.harm * pace_cost(pace.rows * query.expected_output, pace.itl_s, later, easy_s(pace, query, market))
    return pace.wait_s, compute, price, slowed


def decode_values(station: Station, query: Query, exposed_s: float, market: Market) -> Values:
    """exposed_s: the transfer that no computing hides. others: what the running rows lose by one more beside them. row_price: the row's share of the
    steps that compute prompts, priced."""
    pace, output = station.pace, query.expected_output
    row_s = pace.row_s(query.num_tokens + output / 2)
    before = pace.itl_s if station.node.role == "decode" else max(pace.itl_s, pace.mixed_tpot_s(market.share))
    easy = easy_s(pace, query, market)
    own = pace_cost(output, 0.0, before + row_s, easy)
    others = pace_cost(output * pace.rows, before, before + row_s, easy)
    return room_s(station, query, pace.tpot_s + row_s), exposed_s, own, others, price_on(station, market) * output * row_s


def local_values(station: Station, query: Query, market: Market) -> Values:
    room, _, decode, others, row_price = decode_values(station, query, 0.0, market)
    return *prefill_values(station, query, market), room, decode, others, row_price


def price_on(station: Station, market: Market) -> float:
    """Work that is done on a decode node delays no prompt of the others."""
    return 0.0 if station.node.role == "decode" else market.price


def exposed_s(prefill: Station, decode: NodeView, query: Query, compute: float) -> float:
    """What of a transfer to `decode` is left when the first token is there, and the handing over."""
    token_s = decode.kv_bytes_per_token / (prefill.node.bandwidth.get(decode.name, 0.0) or UNMEASURED_BYTES_S)
    missing = query.num_tokens - query.cached_on(decode)
    last = min(prefill.pace.prefill.chunk_tokens or missing, missing) * LAST_GROUP
    return HANDOVER_S + max(missing * token_s - compute, last * token_s)


def room_s(station: Station, query: Query, tpot_s: float) -> float:
    """Until there is a row and pages, when those that run give them back at an even rate."""
    load, pending = station.node.load, station.node.pending
    if load is None:
        return 0.0
    life_s = query.expected_output * tpot_s
    rows = load.slots_used + pending.rows - load.slots + 1
    wait = life_s * rows / load.slots if rows > 0 and load.slots else 0.0
    if load.pages_total and load.pages_free + load.pages_cached < load.pages_total // 4:
        wait += life_s * _missing_share(station.node, query)
    return wait


def _missing_share(node: NodeView, query: Query) -> float:
    """Pages that are missing, as a share of those that rows hold; block_tokens is close enough to a page."""
    load = node.load
    assert load is not None
    used = load.pages_total - load.pages_free - load.pages_cached
    needed = (query.num_tokens - query.cached_on(node) + query.expected_output + node.pending.context_tokens) / node.block_tokens
    return max(needed - load.pages_free - load.pages_cached, 0.0) / max(used, 1)
