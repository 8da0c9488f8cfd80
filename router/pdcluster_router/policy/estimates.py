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

COMFORT = 2.0
"""Times what a row alone takes from token to token, up to which rows are well served (DESIGN §11)."""

STRAIN = 5.0
"""How much more a second weighs for each time that a pace is beyond that."""

PREFILL_TERMS = ("wait", "compute", "fetch", "price", "slowed")
DECODE_TERMS = ("room", "exposed", "decode", "others", "row_price")
LOCAL_TERMS = (*PREFILL_TERMS, "room", "decode", "others", "row_price")

Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Market:
    """What holds for all nodes at one moment. price: seconds that later prompts lose for each second of work; harm: weight of a running row's pause;
    share: of the time in which a node that computes prompts for others will do so, local_share: in which a decode node will for its own; source: the
    node that holds most of the prompt, from which it can be fetched."""

    price: float
    harm: float
    share: float
    local_share: float
    source: NodeView | None


@dataclass(frozen=True, slots=True)
class Station:
    """A node and its pace, side by side."""

    node: NodeView
    pace: Pace


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a node would come by a prompt's KV: seconds of fetching that its queue does not hide, tokens known then, seconds of computing the rest."""

    fetch_s: float
    cached: int
    compute_s: float
    is_fetched: bool = False


def named(names: tuple[str, ...], values: Values) -> Terms:
    return tuple(zip(names, values, strict=True))


def prompt_on(station: Station, query: Query, source: NodeView | None) -> Prompt:
    """By its own cache, or by a copy of what `source` holds, if that is sooner."""
    node, pace = station.node, station.pace
    own = query.cached_on(node)
    alone = Prompt(0.0, own, _compute_s(pace, query, own))
    if source is None or source is node or query.held_on(source) <= own or not (bytes_s := source.bandwidth.get(node.name, 0.0)):
        return alone
    held = query.held_on(source)
    copy_s = HANDOVER_S + (held - own) * node.kv_bytes_per_token / bytes_s
    fetched = Prompt(max(copy_s - pace.wait_s, 0.0), held, _compute_s(pace, query, held), is_fetched=True)
    return fetched if fetched.fetch_s + fetched.compute_s < alone.compute_s else alone


def _compute_s(pace: Pace, query: Query, cached: int) -> float:
    """The prompt's own work, from its first step to its first token."""
    return pace.prefill.seconds(max(query.num_tokens - cached, 1), cached) * pace.stretch


def prefill_values(station: Station, query: Query, market: Market, strain: float = 1.0) -> Values:
    """slowed: what running rows lose by the prompt; strain: how much more that weighs."""
    pace, prompt = station.pace, prompt_on(station, query, market.source)
    paused = pace.paused_s(max(query.num_tokens - prompt.cached, 1), prompt.cached)
    price = price_on(station, market) * prompt.compute_s
    return pace.wait_s, prompt.compute_s, prompt.fetch_s, price, market.harm * strain * paused * pace.rows


def decode_values(station: Station, query: Query, exposed_s: float, market: Market) -> Values:
    """exposed_s: the transfer that no computing hides. others: what the running rows lose by one more beside them. row_price: the row's share of the
    steps that compute prompts, priced."""
    pace, output = station.pace, query.expected_output
    row_s = pace.row_s(query.num_tokens + output / 2)
    share = share_on(station, market)
    tpot_s, strain = strained(station, query, share)
    price = price_on(station, market) * share * output * row_s
    return room_s(station, query, tpot_s), exposed_s, strain * output * tpot_s, strain * output * row_s * pace.rows, price


def local_values(station: Station, query: Query, market: Market) -> Values:
    room, _, decode, others, row_price = decode_values(station, query, 0.0, market)
    _, strain = strained(station, query, share_on(station, market))
    return *prefill_values(station, query, market, strain), room, decode, others, row_price


def strained(station: Station, query: Query, share: float) -> tuple[float, float]:
    """Between tokens of this row, with prompts beside it for that share of the time and while what waits now is computed; and how much more a second
    weighs there, because rows are slower than is comfortable."""
    pace = station.pace
    row_s = pace.row_s(query.num_tokens + query.expected_output / 2)
    now = min(pace.wait_s / max(query.expected_output * (pace.tpot_s + row_s), 1e-9), 1.0)
    tpot_s = pace.busy_tpot_s(max(share, now), row_s)
    limit_s = query.itl_s or COMFORT * (pace.decode.fixed_s + row_s)
    return tpot_s, 1.0 + STRAIN * max(tpot_s / limit_s - 1.0, 0.0) if limit_s > 0 else 1.0


def price_on(station: Station, market: Market) -> float:
    """Work that is done on a decode node delays no prompt of the others."""
    return 0.0 if station.node.role == "decode" else market.price


def share_on(station: Station, market: Market) -> float:
    return market.local_share if station.node.role == "decode" else market.share


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
