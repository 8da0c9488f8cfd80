"""Half a cost model made of what a node measured itself and what is typical of its cluster, each by how sure it is. Arithmetic only.

Nodes are taken to be within DIFFER of each other, nine times of ten, in each coefficient; what a node knows of its own is in its error bars
(`cost.CostError`). The best guess by both is the usual one for two normal estimates. So a node that ran three short prompts believes its own
measurement for short prompts, and the cluster's for long ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.bounds import MAX_SECONDS
from pdcluster.cost.cost import CostError, DecodeCost, PrefillCost

Vector = NDArray[np.float64]

DIFFER = 0.5
KEPT = 1024
"""Blends that are kept: they change with a node's report or with what is typical, and are asked for with every request."""
TINY = 1e-6


@lru_cache(maxsize=KEPT)
def blended_prefill(own: PrefillCost, typical: PrefillCost) -> PrefillCost:
    if own == typical:
        return own
    fixed_s, token_s, pair_s = _blended(
        (own.fixed_s, own.token_s, own.pair_s), own.error, (typical.fixed_s, typical.token_s, typical.pair_s), typical.error
    )
    return replace(own, fixed_s=fixed_s, token_s=token_s, pair_s=pair_s)


@lru_cache(maxsize=KEPT)
def blended_decode(own: DecodeCost, typical: DecodeCost) -> DecodeCost:
    if own == typical:
        return own
    fixed_s, row_s, context_s = _blended(
        (own.fixed_s, own.row_s, own.context_s), own.error, (typical.fixed_s, typical.row_s, typical.context_s), typical.error
    )
    return replace(own, fixed_s=fixed_s, row_s=row_s, context_s=context_s)


def _blended(
    own: tuple[float, float, float], own_error: CostError, typical: tuple[float, float, float], typical_error: CostError
) -> tuple[float, float, float]:
    """`typical` where a node's report has numbers that cannot be weighed: each is allowed, but not beside the others."""
    mine, theirs = np.array(own), np.array(typical)
    try:
        with np.errstate(all="ignore"):
            found = _weighed(mine, _root(own_error), theirs, _root(typical_error))
    except np.linalg.LinAlgError:
        return typical
    if not (found <= MAX_SECONDS).all():
        return typical
    first, second, third = found.tolist()
    return first, second, third


def _weighed(mine: Vector, own_root: Vector, theirs: Vector, typical_root: Vector) -> Vector:
    largest = np.maximum(mine, theirs)
    errors = np.maximum(np.linalg.norm(own_root, axis=0), np.linalg.norm(typical_root, axis=0))  # the size of what both found to be 0
    unit = np.maximum(np.where(largest > 0, largest, errors), np.finfo(float).tiny)
    differ = np.diag((DIFFER * theirs / unit) ** 2 + TINY) + _covariance(typical_root / unit)
    gain = np.linalg.solve(differ + _covariance(own_root / unit), differ).T
    found: Vector = np.maximum(theirs + unit * (gain @ ((mine - theirs) / unit)), 0.0)
    return found


def _root(error: CostError) -> Vector:
    a, b, c, d, e, f = error.root
    return np.array(((a, b, d), (0.0, c, e), (0.0, 0.0, f)))


def _covariance(root: Vector) -> Vector:
    covariance: Vector = root.T @ root
    return covariance
