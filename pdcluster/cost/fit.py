"""Fits a node's cost model to the steps it runs: least squares with forgetting, never negative. Pure arithmetic.

A step with prompt tokens is prefill_fixed + token·tokens + pair·pairs + row·rows + context·context. One without is
decode_fixed + row·rows + context·context. So a mixed step teaches both halves, and rows beside a chunk do not count as
prompt work.

1. Squares are of relative errors. A decode step of a millisecond counts as much as a chunk of a second.
2. The two kinds of steps are forgotten apart, each only when one of its kind comes. A day of decoding does not wash out
   what prefill costs.
3. The fit is tied, weakly, to the one before it. What recent steps say nothing about stays as it was.
4. A step that took several times what is usual is clipped. If it becomes usual, the fit follows. Among the first steps,
   a slow one counts as others of its length do.
5. Error bars: each step is predicted before it is learned from. The spread is the error that nine of ten of the last
   ones stayed within. The model's own error is the inverse of the weighted sums, by the usual formula of least squares.
   What nobody measured has the weak tie alone, so its bars are wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from pdcluster.cost.cost import CostError, DecodeCost, NodeCost, PrefillCost, Root

Vector = NDArray[np.float64]

FORGET = 0.995
# Weight of the last fit, in samples.
TIE = 0.003
# Times the usual relative error that a step may be off; never less than FLOOR.
CLIP = 4.0
FLOOR = 0.5
# Steps of a kind before errors are judged.
WARM = 8
# Share of steps that the error bars are to hold.
COVERED = 0.9
# Last steps of a kind whose errors are kept.
WINDOW = 128
# For the model's own error. Steps that agree do not say what others would take.
LEAST_SPREAD = 0.01
# Steps after which the fit is solved though nobody asked, so that errors are those of a recent one.
SOLVE_STEPS = 16
# A share that no error bar exceeds: nothing is known then.
MOST_OFF = 10.0
SHORTEST_S = 1e-6
# A small model on a processor. The first step scales it.
PRIOR = np.array([2e-3, 1e-4, 1e-8, 2e-3, 2e-4, 1e-7])


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward computed, and how long it took. tokens, pairs: of rows with more than one token; rows,
    context_tokens: of the others."""

    tokens: int
    pairs: float
    rows: int
    context_tokens: int
    seconds: float


class StepKind:
    """Weighted sums over the steps of one kind."""

    def __init__(self) -> None:
        self.gram = np.zeros((6, 6))
        self.moment = np.zeros(6)
        self.usual_error = FLOOR / CLIP
        self.samples = 0
        self.weight = 0.0
        self._errors = np.zeros(WINDOW)
        self._num_errors = 0

    def spread(self) -> float:
        """Rule 5. Few errors say little of the largest tenth: then it is FLOOR at least."""
        known = np.sort(self._errors[: min(self._num_errors, WINDOW)])
        rank = ceil(COVERED * (len(known) + 1))
        if rank > len(known):
            return min(max(FLOOR, float(known[-1]) if len(known) else FLOOR), MOST_OFF)
        return min(float(known[rank - 1]), MOST_OFF)

    def add(self, features: Vector, seconds: float, predicted: float) -> None:
        usual = predicted if self.samples >= WARM else max(predicted, seconds / (1.0 + FLOOR))
        weight = 1.0 / usual**2
        self.gram = FORGET * self.gram + weight * np.outer(features, features)
        self.moment = FORGET * self.moment + weight * seconds * features
        self.weight = FORGET * self.weight + 1.0
        self.samples += 1

    def note_error(self, seconds: float, predicted: float) -> None:
        """Those of the first steps are the prior's."""
        if self.samples >= WARM:
            self._errors[self._num_errors % WINDOW] = abs(seconds / predicted - 1.0)
            self._num_errors += 1

    def clip(self, seconds: float, predicted: float) -> float:
        """Rule 4; also learns what is usual."""
        if self.samples < WARM:
            return seconds
        reach = max(CLIP * self.usual_error, FLOOR)
        error = min(max(seconds / predicted - 1.0, -reach), reach)
        self.usual_error += 0.05 * (abs(error) - self.usual_error)
        return predicted * (1.0 + error)


class CostFit:
    """Owned by one thread. `cost` solves, so it is asked once per report, not once per step."""

    def __init__(self, chunk_tokens: int = 0, prior: Vector = PRIOR) -> None:
        self._chunk_tokens = chunk_tokens
        self._values = prior.copy()
        self._scale = prior.copy()
        self._prefill = StepKind()
        self._decode = StepKind()
        self._is_stale = False
        # Of all steps so far; None: not worked out yet.
        self._cost: NodeCost | None = None

    @property
    def samples(self) -> int:
        return self._prefill.samples + self._decode.samples

    def observe(self, step: Step) -> None:
        if step.seconds <= 0 or not (step.tokens or step.rows):
            return
        features = _features(step)
        if not self.samples:
            self._scale_prior(features, step.seconds)
        kind = self._prefill if step.tokens else self._decode
        predicted = max(float(features @ self._values), SHORTEST_S)
        kind.note_error(step.seconds, predicted)
        kind.add(features, kind.clip(step.seconds, predicted), predicted)
        self._is_stale = True
        self._cost = None
        if kind.samples <= WARM or not self.samples % SOLVE_STEPS:
            self._solve()

    def cost(self) -> NodeCost:
        """Worked out once for the steps so far: an idle node reports it again and again."""
        if self._cost is None:
            self._cost = self._work_out()
        return self._cost

    def _work_out(self) -> NodeCost:
        if self._is_stale:
            self._solve()
        strengths, directions = np.linalg.eigh(self._precision())
        wide = directions / np.sqrt(np.maximum(strengths, TIE))
        fixed, token, pair, decode_fixed, row, context = self._values.tolist()
        return NodeCost(
            PrefillCost(
                fixed,
                token,
                pair,
                self._chunk_tokens,
                self._prefill.samples,
                self._error(self._prefill, wide, slice(0, 3)),
            ),
            DecodeCost(decode_fixed, row, context, self._decode.samples, self._error(self._decode, wide, slice(3, 6))),
        )

    def _error(self, kind: StepKind, wide: Vector, half: slice) -> CostError:
        """Of the coefficients of one half. The others are just as uncertain. wide: a root of the inverse of all that is
        known.
        """
        spread = kind.spread()
        noise = max(spread, LEAST_SPREAD)
        upper = np.asarray(np.linalg.qr(wide[half].T, mode="r"), np.float64) * self._scale[half] * noise
        a, b, d, _, c, e, _, _, f = upper.ravel().tolist()
        seen = float(np.sum((kind.gram * np.outer(self._scale, self._scale)) * (wide @ wide.T)))
        doubt = min(noise * sqrt(max(seen, 0.0) / kind.weight), MOST_OFF) if kind.weight else MOST_OFF
        root: Root = (a, b, c, d, e, f)
        return CostError(spread, doubt, root)

    def _scale_prior(self, features: Vector, seconds: float) -> None:
        factor = seconds / max(float(features @ self._values), SHORTEST_S)
        self._values *= factor
        self._scale *= factor

    def _solve(self) -> None:
        """In units of the prior, so that the tie (rule 3) pulls at every coefficient alike."""
        moment = self._prefill.moment + self._decode.moment
        last = self._values / self._scale
        self._values = least_nonnegative(self._precision(), moment * self._scale + TIE * last) * self._scale
        self._is_stale = False

    def _precision(self) -> Vector:
        """What is known of the coefficients, in units of the prior: the sums, and the tie."""
        gram = self._prefill.gram + self._decode.gram
        precision: Vector = gram * np.outer(self._scale, self._scale) + TIE * np.eye(6)
        return precision


def least_nonnegative(gram: Vector, moment: Vector) -> Vector:
    """The x ≥ 0 with the least x·gram·x / 2 − moment·x, by active sets; gram is positive definite."""
    free = np.ones(len(moment), bool)
    for _ in range(4 * len(moment)):
        x = np.zeros(len(moment))
        x[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free]) if free.any() else 0.0
        if (x < 0).any():
            free[int(np.argmin(x))] = False
            continue
        slope = np.where(free, 0.0, moment - gram @ x)
        if slope.max() <= 1e-9 * max(1.0, float(np.abs(moment).max())):
            return x
        free[int(np.argmax(slope))] = True
    return np.maximum(x, 0.0)


def _features(step: Step) -> Vector:
    is_prefill = step.tokens > 0
    return np.array([is_prefill, step.tokens, step.pairs, not is_prefill, step.rows, step.context_tokens], np.float64)


def step_of(rows: Sequence[tuple[int, int]], seconds: float) -> Step:
    """The step of rows given as (tokens computed, tokens before them)."""
    chunks = [(new, cached) for new, cached in rows if new > 1]
    singles = [cached for new, cached in rows if new == 1]
    return Step(
        tokens=sum(new for new, _ in chunks),
        pairs=sum(new * (cached + new / 2) for new, cached in chunks),
        rows=len(singles),
        context_tokens=sum(singles) + len(singles),
        seconds=seconds,
    )
