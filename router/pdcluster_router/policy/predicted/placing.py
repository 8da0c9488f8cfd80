"""A choice by `weighing` and all that is asked of it when its request goes at once: whether it goes (`passing`), what
it makes its node busy with, and what is noted of it. Compiled where that can be (`compiled`), else the Python that it
is.

Nearly every request goes at once, and to look at all this in one or two calls costs a router a fraction of asking for
one after the other. What stands in `told` is all that anybody wants of such a choice later, in bare numbers, so that
nothing is made of them for what nobody reads. That both ways find the same is in test_placing.
"""

from __future__ import annotations

from collections.abc import MutableSequence

from pdcluster_router.policy.predicted.cost_model import BACKLOG_S as BACKLOG_ON
from pdcluster_router.policy.predicted.cost_model import DOUBT, ITL_ASKED_S, NUM_TOKENS, OUTPUT, Numbers, alone_s
from pdcluster_router.policy.predicted.node_state import IS_OWN, SPREAD
from pdcluster_router.policy.predicted.passing import goes
from pdcluster_router.policy.predicted.scoring import (
    DECODE,
    DECODE_LEG,
    ENTRY,
    IS_CALM,
    LOCAL,
    LOCAL_LEG,
    MODE,
    MOST_CANDIDATES,
    NUM_LEG,
    PREFILL,
    PREFILL_LEG,
    SKIPPED,
    TTFT_S,
    Found,
    Rows,
    Table,
    first_leg,
    pair,
    start_of,
)

Told = MutableSequence[float]

# What is told, from MODE to IS_FETCHED as `weighing` finds it. GOES: 1 where the request goes at once; 0: it has to be
# looked at in full, or a node's own steps do not say yet what they cost. SENT_S: seconds of work for the computing
# node, which computes at least one token; ESTIMATE_S: until the first token there, by what waits and its own prompt.
# BEST, BEST_S: who else would have been soonest by that measure, -1 for nobody. Then of each leg the number of nodes
# that were compared, whether the local ones are CALM (0: they were left out for their rows), and these nodes, leg by
# leg.
(GOES, SENT_S, ESTIMATE_S, BEST, BEST_S, CALM, NUM_TOLD) = range(SKIPPED, SKIPPED + 7)
FIRST_TOLD = NUM_TOLD + 3
TOLD_ESTIMATE, TOLD_SPREAD, TOLD_DOUBT = ENTRY, ENTRY + 1, ENTRY + 2
# Behind the numbers of an entry: its own ESTIMATE_S, -1 where it has none, and what that may be wrong by.
TOLD_ENTRY = ENTRY + 3
MOST_TOLD = FIRST_TOLD + 3 * MOST_CANDIDATES * TOLD_ENTRY


def place(
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
    usual_tokens: int,
    backlog_s: float,
    found: Found,
    told: Told,
) -> int:
    """As `first_leg`: a prefill node, for `place_pair`; else minus how many numbers are told of a choice of mode
    local."""
    first = first_leg(
        node_rows,
        cached,
        held,
        source,
        paths,
        serving,
        decoding,
        prefill,
        decode,
        local,
        groups,
        exchange,
        wants_local,
        asked,
        found,
    )
    if first >= 0:
        return first
    return -tell(node_rows, cached, False, True, asked, usual_tokens, backlog_s, found, told)


def place_pair(
    node_rows: Table,
    cached: Numbers,
    paths: Numbers,
    decode: Rows,
    groups: Rows,
    exchange: Table,
    wants_local: bool,
    asked: Numbers,
    usual_tokens: int,
    backlog_s: float,
    found: Found,
    told: Told,
) -> int:
    """As `pair`, after `place`: how many numbers are told."""
    pair(node_rows, cached, paths, decode, groups, exchange, asked, found)
    return tell(node_rows, cached, True, wants_local, asked, usual_tokens, backlog_s, found, told)


def tell(
    node_rows: Table,
    cached: Numbers,
    is_apart: bool,
    is_alone: bool,
    asked: Numbers,
    usual_tokens: int,
    backlog_s: float,
    found: Found,
    told: Told,
) -> int:
    """is_apart, is_alone: whether prefill and decode nodes were compared, and nodes for both legs."""
    is_local = found[MODE] == LOCAL
    decode = int(found[DECODE])
    first = decode if is_local else int(found[PREFILL])
    for place in range(SKIPPED):
        told[place] = found[place]
    node, tokens = node_rows[first], asked[NUM_TOKENS]
    known = min(cached[first], tokens - 1.0)
    told[SENT_S], told[ESTIMATE_S] = alone_s(node, tokens - known, known), estimate_s(node, cached[first], tokens)
    told[BEST], told[BEST_S] = -1.0, 0.0
    is_calm = not is_apart or found[IS_CALM] > 0.0
    told[CALM] = 1.0 if is_calm else 0.0
    is_own, at = node[IS_OWN] > 0.0, FIRST_TOLD
    for leg in range(3):
        told[NUM_TOLD + leg] = 0.0
        if not (is_alone if leg == LOCAL_LEG else is_apart):
            continue
        skipped = int(found[SKIPPED]) if leg == PREFILL_LEG else 0
        has_estimate = leg != DECODE_LEG and (leg != LOCAL_LEG or is_calm)
        for rank in range(skipped, int(found[NUM_LEG + leg])):
            tell_node(node_rows, cached, start_of(leg, rank), at, has_estimate, asked, found, told)
            row = int(told[at])
            is_own = is_own and (not has_estimate or node_rows[row][IS_OWN] > 0.0)
            if has_estimate and row != first and is_sooner(told, at):
                told[BEST], told[BEST_S] = told[at], told[at + TOLD_ESTIMATE]
            told[NUM_TOLD + leg] += 1.0
            at += TOLD_ENTRY
    told[GOES] = 0.0
    if is_own and goes(
        node_rows,
        first,
        decode,
        is_local,
        False,
        int(tokens),
        int(asked[OUTPUT]),
        usual_tokens,
        asked[ITL_ASKED_S],
        found[TTFT_S],
        0.0,
        backlog_s,
    ):
        told[GOES] = 1.0
    return at


def tell_node(
    node_rows: Table, cached: Numbers, entry: int, at: int, has_estimate: bool, asked: Numbers, found: Found, told: Told
) -> None:
    for place in range(ENTRY):
        told[at + place] = found[entry + place]
    row = int(found[entry])
    node = node_rows[row]
    told[at + TOLD_ESTIMATE] = estimate_s(node, cached[row], asked[NUM_TOKENS]) if has_estimate else -1.0
    told[at + TOLD_SPREAD], told[at + TOLD_DOUBT] = (node[SPREAD], node[DOUBT]) if has_estimate else (0.0, 0.0)


def is_sooner(told: Told, at: int) -> bool:
    """Than the best of the others so far; the first one of those that are alike."""
    if told[BEST] < 0.0 or told[at + TOLD_ESTIMATE] < told[BEST_S]:
        return True
    return told[at + TOLD_ESTIMATE] == told[BEST_S] and told[at] < told[BEST]


def estimate_s(node: Numbers, cached: float, num_tokens: float) -> float:
    """As `headroom.ttft_s`: what waits there, and the prompt as far as it is not cached."""
    return node[BACKLOG_ON] + alone_s(node, max(num_tokens - cached, 1.0), cached)
