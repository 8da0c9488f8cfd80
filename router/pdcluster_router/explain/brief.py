"""A decision by which a request went at once, kept in the numbers of its choice (`policy.predicted.placing`) until
somebody reads it. What is told of it is what `explain` would have noted."""

from __future__ import annotations

import struct

import msgspec

from pdcluster_router.explain.records import Decided, Hit, Judged, Weighed, worth_keeping
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


class Brief(msgspec.Struct, frozen=True, gc=False):
    """at_s, held_s, num_tokens: see DecisionRecord; told: as doubles; names: of the nodes, by row; best: see Hindsight,
    with its estimate."""

    at_s: float
    held_s: float
    policy: str
    num_tokens: int
    told: bytes
    names: tuple[str, ...]
    predicted_ttft_s: float
    best: int
    best_s: float

    def hindsight(self, ttft_s: float, hit: Hit | None) -> Judged:
        """As `explain.hindsight`."""
        late_s = ttft_s - self.predicted_ttft_s
        if self.best < 0:
            return ttft_s, late_s, 0.0, None, None, hit
        regret_s = ttft_s - self.best_s
        return ttft_s, late_s, regret_s if regret_s > 0.0 else 0.0, self.names[self.best], self.best_s, hit

    def decided(self) -> Decided:
        numbers = struct.unpack(f"={len(self.told) // 8}d", self.told)
        weighed, at = list[Weighed](), FIRST_TOLD
        for leg in range(len(LEGS)):
            for _ in range(int(numbers[NUM_TOLD + leg])):
                weighed.append(self._weighed(leg, numbers[at : at + TOLD_ENTRY], is_calm=numbers[CALM] > 0.0))
                at += TOLD_ENTRY
        is_local = numbers[MODE] == LOCAL
        return Decided(
            self.at_s,
            self.held_s,
            self.policy,
            "local" if is_local else "remote",
            None if is_local else self.names[int(numbers[PREFILL])],
            self.names[int(numbers[DECODE])],
            self.num_tokens,
            numbers[TTFT_S],
            numbers[FOUND_TPOT_S],
            numbers[ESTIMATE_S],
            len(weighed),
            tuple(worth_keeping(weighed, len(self.names))),
            None,
            None,
            0,
            {LEGS[leg][0]: LEGS[leg][1] for leg in range(len(LEGS)) if numbers[NUM_TOLD + leg]},
        )

    def _weighed(self, leg: int, entry: tuple[float, ...], *, is_calm: bool) -> Weighed:
        name, terms, _, _ = LEGS[leg]
        node, cached, values = (
            self.names[int(entry[ENTRY_ROW])],
            int(entry[ENTRY_CACHED]),
            entry[ENTRY_VALUES : ENTRY_VALUES + len(terms)],
        )
        is_left_out = leg == LOCAL_LEG and not is_calm
        if is_left_out or leg == DECODE_LEG:
            return Weighed(node, name, cached, entry[ENTRY_COST], values, None, REJECTED if is_left_out else "")
        bars = entry[TOLD_SPREAD] or None, entry[TOLD_DOUBT]
        return Weighed(node, name, cached, entry[ENTRY_COST], values, entry[TOLD_ESTIMATE], "", *bars)
