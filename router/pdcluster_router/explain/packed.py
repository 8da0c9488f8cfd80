"""Unpacks a decision that is kept in the numbers of its choice (`policy.predicted.placing`) until somebody reads it.
The result is what `explain` would have noted."""

from __future__ import annotations

import struct

from pdcluster_router.explain.records import Decided, Weighed, worth_keeping
from pdcluster_router.policy.decisions import PackedComparison
from pdcluster_router.policy.predicted.placing import (
    CALM,
    ESTIMATE_S,
    FIRST_TOLD,
    NUM_TOLD,
    TOLD_DOUBT,
    TOLD_ENTRY,
    TOLD_ESTIMATE,
    TOLD_SPREAD,
)
from pdcluster_router.policy.predicted.scoring import (
    DECODE,
    DECODE_LEG,
    ENTRY_CACHED,
    ENTRY_COST,
    ENTRY_ROW,
    ENTRY_VALUES,
    FOUND_TPOT_S,
    LOCAL,
    LOCAL_LEG,
    MODE,
    PREFILL,
    TTFT_S,
)
from pdcluster_router.policy.scales import LEGS, REJECTED


def unpack(packed: PackedComparison, at_s: float, held_s: float) -> Decided:
    """at_s, held_s: see DecisionRecord."""
    numbers = struct.unpack(f"={len(packed.told) // 8}d", packed.told)
    weighed, at = list[Weighed](), FIRST_TOLD
    for leg in range(len(LEGS)):
        for _ in range(int(numbers[NUM_TOLD + leg])):
            weighed.append(_weighed(packed.names, leg, numbers[at : at + TOLD_ENTRY], is_calm=numbers[CALM] > 0.0))
            at += TOLD_ENTRY
    is_local = numbers[MODE] == LOCAL
    return Decided(
        at_s,
        held_s,
        packed.policy,
        "local" if is_local else "remote",
        None if is_local else packed.names[int(numbers[PREFILL])],
        packed.names[int(numbers[DECODE])],
        packed.num_tokens,
        numbers[TTFT_S],
        numbers[FOUND_TPOT_S],
        numbers[ESTIMATE_S],
        len(weighed),
        tuple(worth_keeping(weighed, len(packed.names))),
        None,
        None,
        0,
        {LEGS[leg][0]: LEGS[leg][1] for leg in range(len(LEGS)) if numbers[NUM_TOLD + leg]},
    )


def _weighed(names: tuple[str, ...], leg: int, entry: tuple[float, ...], *, is_calm: bool) -> Weighed:
    name, terms, _, _ = LEGS[leg]
    node, cached, values = (
        names[int(entry[ENTRY_ROW])],
        int(entry[ENTRY_CACHED]),
        entry[ENTRY_VALUES : ENTRY_VALUES + len(terms)],
    )
    is_left_out = leg == LOCAL_LEG and not is_calm
    if is_left_out or leg == DECODE_LEG:
        return Weighed(node, name, cached, entry[ENTRY_COST], values, None, REJECTED if is_left_out else "")
    bars = entry[TOLD_SPREAD] or None, entry[TOLD_DOUBT]
    return Weighed(node, name, cached, entry[ENTRY_COST], values, entry[TOLD_ESTIMATE], "", *bars)
