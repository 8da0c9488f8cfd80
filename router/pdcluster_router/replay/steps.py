"""How long a node's steps take while nothing joins or leaves: closed forms, so that simulated time jumps from change to change.

A step carries all decode rows and, beside them, at most one chunk of a prompt. It takes

    max(fixed cost of decoding, fixed cost of prefill + token_s × chunk) + pair_s × pairs of the chunk + row_s × rows + context_s × context

because weights are read once for both (chunked prefill's gain), while attention adds up (its price). From step to step the context grows by the
number of rows and the chunk's pairs by chunk², so the times of n steps sum to a polynomial of second degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from pdcluster.cost.cost import NodeCost, num_pairs


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` steps of which the first takes first_s and each later one growth_s more than the one before."""

    start_s: float
    first_s: float
    growth_s: float
    count: int

    def after(self, steps: int) -> float:
        """The moment at which `steps` steps are done."""
        return self.start_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    @property
    def end_s(self) -> float:
        return self.after(self.count)

    def steps_until(self, moment: float) -> int:
        """Least number of whole steps that end at `moment` or later, at most `count`."""
        elapsed = moment - self.start_s
        if elapsed <= 0:
            return 0
        half = self.growth_s / 2
        linear = self.first_s - half
        if half * self.count < 1e-9 * linear:
            estimate = elapsed / self.first_s
        else:
            estimate = (sqrt(linear * linear + 4 * half * elapsed) - linear) / (2 * half)
        steps = min(max(ceil(estimate - 1e-9), 1), self.count)
        while steps > 1 and self.after(steps - 1) >= moment:
            steps -= 1
        while steps < self.count and self.after(steps) < moment:
            steps += 1
        return steps


def segment(cost: NodeCost, start_s: float, count: int, rows: int, context: int, chunk: int = 0, done: int = 0) -> Segment:
    """count steps of `rows` rows with `context` tokens in all; each computes `chunk` more tokens of a prompt, `done` of which are there already."""
    decode, prefill = cost.decode, cost.prefill
    first_s = decode.fixed_s if rows else 0.0
    growth_s = 0.0
    if chunk:
        first_s = max(first_s, prefill.fixed_s + prefill.token_s * chunk) + prefill.pair_s * num_pairs(chunk, done)
        growth_s = prefill.pair_s * chunk * chunk
    if rows:
        first_s += decode.row_s * rows + decode.context_s * context
        growth_s += decode.context_s * rows
    return Segment(start_s, first_s, growth_s, count)
