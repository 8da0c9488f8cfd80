"""What a choice compared: records of candidates, kept without the view."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from pdcluster.cost.cost import CostError
from pdcluster_router.policy.predicted.records import LOCAL_LEG, TERMS, CandidateRow

LegName = Literal["prefill", "decode", "local"]
# Legs by CandidateRow.leg, and the names of their terms.
LEG_NAMES: tuple[LegName, ...] = ("prefill", "decode", "local")
TERM_NAMES = tuple(tuple(name.removesuffix("_s") for name in names) for names in TERMS)
HELD_UP = "holds up running rows"

# Candidates that are kept of those that were ruled out, and of each leg.
MOST_LISTED = 16


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node for one leg, as people read it.

    terms: add up to cost, in seconds or the policy's own points, unless the policy says otherwise.
    ttft_s: the estimate in seconds; None for a decode leg.
    rejected_by: the rule that removed it, "" when it was compared.
    ttft_error_s: error bar of ttft_s on usual work (9 of 10 are within); None: unknown.
    """

    node: str
    leg: str
    cached_tokens: int = 0
    cost: float = 0.0
    terms: dict[str, float] = {}
    ttft_s: float | None = None
    rejected_by: str = ""
    ttft_error_s: float | None = None


def error_bar_s(ttft_s: float, spread: float, doubt: float) -> float | None:
    """The error bar of an estimate; None: unknown."""
    return ttft_s * CostError(spread, doubt).share if spread > 0.0 else None


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """Few decisions are read, so candidates of `scoring` stay bytes until someone asks.

    rows: CandidateRow records.
    names: of the view's nodes.
    is_calm: False: the local ones hold up running rows for long.
    listed: the other ones: of policies that are not compiled, and nodes that were ruled out.
    num: of all, kept or not.
    """

    rows: bytes
    names: tuple[str, ...]
    is_calm: bool
    listed: tuple[Candidate, ...]
    num: int

    def read(self) -> list[Candidate]:
        rows = np.frombuffer(self.rows, CandidateRow.dtype).tolist()
        return [*(self._candidate(CandidateRow(*row)) for row in rows), *self.listed]

    def _candidate(self, row: CandidateRow) -> Candidate:
        terms = dict(zip(TERM_NAMES[row.leg], [getattr(row, name) for name in TERMS[row.leg]], strict=True))
        rejected_by = "" if row.leg != LOCAL_LEG or self.is_calm else HELD_UP
        ttft_s = None if row.estimate_s < 0.0 or rejected_by else row.estimate_s
        error_s = None if ttft_s is None else error_bar_s(ttft_s, row.spread, row.doubt)
        name, leg = self.names[row.row], LEG_NAMES[row.leg]
        return Candidate(name, leg, int(row.cached), row.cost, terms, ttft_s, rejected_by, error_s)
