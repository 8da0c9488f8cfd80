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

PREFILL_TERMS = ("wait", "compute", "price", "slowed")
DECODE_TERMS = ("room", "behind_prompts", "exposed", "decode", "others", "price")
LOCAL_TERMS = ("wait", "compute", "price", "slowed", "room", "decode", "others", "row_price")

Values = tuple[float, ...]


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


def prefill_values(station: Station, query: Query, price: float, harm: float) -> Values:
    """price: seconds that later prompts lose for each second of work that is put on the node. slowed: what running rows lose, which stand still while
    the prompt is computed."""
    pace = station.pace
    compute = compute_s(pace, query, query.cached_on(station.node))
    return pace.wait_s, compute, price * compute, harm * compute * pace.rows


def decode_values(station: Station, query: Query, exposed_s: float, price: float) -> Values:
    """exposed_s: the transfer that no computing hides. others: what the running rows lose by one more beside them. price: as above, for the row's
    share of the steps that compute prompts."""
    pace, output = station.pace, query.expected_output
    row_s = pace.row_s(query.num_tokens + output / 2)
    tpot_s = pace.tpot_s + row_s
    return room_s(station, query, tpot_s), pace.backlog_s, exposed_s, output * tpot_s, output * row_s * pace.rows, price * output * row_s


def local_values(station: Station, query: Query, price: float, harm: float) -> Values:
    room, _, _, decode, others, row_price = decode_values(station, query, 0.0, price)
    return *prefill_values(station, query, price, harm), room, decode, others, row_price


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
