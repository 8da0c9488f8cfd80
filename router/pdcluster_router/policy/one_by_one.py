"""The formulas of `estimates` for a handful of nodes, one after the other, written out: calls and `larger` of two numbers are most of what they cost
in plain Python, and a decision among eight nodes asks each of them a dozen times. Same terms, same order of sums, same floats.

A change of a formula is made in both; test_seconds_oracle holds both ways against a third.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdcluster_router.policy.estimates import COMFORT, HANDOVER_S, LAST_GROUP, STRAIN, TINY, UNMEASURED_BYTES_S, Ask, Values
from pdcluster_router.stations import Station

Stations = Sequence[Station[float]]
Cached = Sequence[float]
Rows = Iterable[int]
"""Numbers of nodes."""

Prompt = tuple[float, float, float]
"""The fields of estimates.Prompt: fetch_s, compute_s, paused_s. Bare, since it is made for every node of every decision."""

Row = tuple[float, float, float, float, float, float]
"""Those of estimates.Row: tpot_s, strain, room_s, decode_s, others_s, price_s."""


def own_prompts(ask: Ask[float], stations: Stations, cached: Cached, rows: Rows) -> dict[int, Prompt]:
    found = {}
    num_tokens = ask.num_tokens
    for row in rows:
        node, held = stations[row], cached[row]
        new = num_tokens - held
        if new < 1.0:
            new = 1.0
        steps = new / node.chunk_tokens
        if steps < 1.0:
            steps = 1.0
        alone_s = node.prompt_fixed_s * steps + node.token_s * new + node.pair_s * (new * (held + new / 2))
        paused_s = alone_s - steps * node.decode_fixed_s
        found[row] = 0.0, alone_s * node.stretch, paused_s if paused_s > 0.0 else 0.0
    return found


def fetched(
    ask: Ask[float], stations: Stations, prompts: Mapping[int, Prompt], cached: Cached, held: float, bytes_s: Mapping[int, float]
) -> dict[int, Prompt]:
    """By a copy of the `held` tokens that another node has, over a path of so many bytes a second: of the nodes where that is sooner."""
    found = {}
    new = ask.num_tokens - held
    if new < 1.0:
        new = 1.0
    for row, path_bytes_s in bytes_s.items():
        node, own_s = stations[row], prompts[row][1]
        fetch_s = HANDOVER_S + (held - cached[row]) * node.kv_bytes / path_bytes_s - node.wait_s
        if fetch_s < 0.0:
            fetch_s = 0.0
        if fetch_s >= own_s:
            continue
        steps = new / node.chunk_tokens
        if steps < 1.0:
            steps = 1.0
        alone_s = node.prompt_fixed_s * steps + node.token_s * new + node.pair_s * (new * (held + new / 2))
        if fetch_s + alone_s * node.stretch < own_s:
            paused_s = alone_s - steps * node.decode_fixed_s
            found[row] = fetch_s, alone_s * node.stretch, paused_s if paused_s > 0.0 else 0.0
    return found


def rows_on(ask: Ask[float], stations: Stations, cached: Cached, rows: Rows) -> dict[int, Row]:
    found = {}
    num_tokens, output, row_tokens, itl_s, market = ask.num_tokens, ask.output, ask.row_tokens, ask.itl_s, ask.market
    price, serving_share, other_share = market.price, market.share, market.local_share
    for row in rows:
        node = stations[row]
        is_server = node.is_server
        row_s = node.each_row_s + node.context_s * row_tokens
        quiet_s, busy_s = node.tpot_s + row_s, node.prompt_step_s + row_s
        at_times = share = is_server * serving_share + (1.0 - is_server) * other_share
        if node.wait_s > 0.0:
            life_s = output * quiet_s
            waits = node.wait_s / (life_s if life_s > 1e-9 else 1e-9)
            if waits > 1.0:
                waits = 1.0
            if waits > share:
                at_times = waits
        mean_s = (1.0 - at_times) * busy_s + at_times * quiet_s
        tpot_s = quiet_s * busy_s / (mean_s if mean_s > TINY else TINY)
        comfort_s = itl_s or COMFORT * (node.decode_fixed_s + row_s) or TINY
        beyond = tpot_s / comfort_s - 1.0
        strain = 1.0 + STRAIN * beyond if beyond > 0.0 else 1.0
        missing_pages = (num_tokens - cached[row] + output) / node.block_tokens - node.spare_pages
        if missing_pages < 0.0:
            missing_pages = 0.0
        strained = strain * output
        found[row] = (
            tpot_s,
            strain,
            output * tpot_s * (node.missing_rows + missing_pages * node.tight),
            strained * tpot_s,
            strained * row_s * node.rows,
            is_server * price * share * output * row_s,
        )
    return found


def prefill(ask: Ask[float], stations: Stations, prompts: Mapping[int, Prompt], rows: Rows) -> dict[int, Values]:
    found: dict[int, Values] = {}
    price, harm = ask.market.price, ask.market.harm
    for row in rows:
        node = stations[row]
        fetch_s, compute_s, paused_s = prompts[row]
        found[row] = node.wait_s, compute_s, fetch_s, node.is_server * price * compute_s, harm * paused_s * node.rows
    return found


def decode(
    ask: Ask[float],
    stations: Stations,
    on: Mapping[int, Row],
    cached: Cached,
    bytes_s: Mapping[int, float],
    chunk_tokens: float,
    compute_s: float,
) -> dict[int, Values]:
    """bytes_s: by node, of the path from where the prompt is computed, in chunks of chunk_tokens; 0 for one that was not measured."""
    found: dict[int, Values] = {}
    num_tokens = ask.num_tokens
    for row, path_bytes_s in bytes_s.items():
        node = stations[row]
        _, _, room_s, decode_s, others_s, price_s = on[row]
        token_s = node.kv_bytes / (path_bytes_s or UNMEASURED_BYTES_S)
        missing = num_tokens - cached[row]
        exposed_s = missing * token_s - compute_s
        last_s = (missing if missing < chunk_tokens else chunk_tokens) * LAST_GROUP * token_s
        exposed_s = HANDOVER_S + (exposed_s if exposed_s > last_s else last_s)
        found[row] = room_s, exposed_s, decode_s, others_s, price_s
    return found


def local(
    ask: Ask[float], stations: Stations, prompts: Mapping[int, Prompt], on: Mapping[int, Row], rows: Rows
) -> dict[int, Values]:
    found: dict[int, Values] = {}
    price, harm = ask.market.price, ask.market.harm
    for row in rows:
        node = stations[row]
        fetch_s, compute_s, paused_s = prompts[row]
        _, strain, room_s, decode_s, others_s, price_s = on[row]
        found[row] = (
            node.wait_s,
            compute_s,
            fetch_s,
            node.is_server * price * compute_s,
            harm * strain * paused_s * node.rows,
            room_s,
            decode_s,
            others_s,
            price_s,
        )
    return found
