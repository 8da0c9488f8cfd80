"""Forecast of room: when rows and pages come free, from running rows and past steps. Guesses for `retry_after_s`.

A row's latest end is known, and many end sooner. So a guess is capped: a request that returns too early costs one
message, one that returns too late leaves a slot empty.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdcluster.scheduler.sequence import Sequence

SHORTEST_S = 0.005
LONGEST_S = 2.0
WEIGHT = 0.2


class Forecast:
    """Times of steps.

    default_s: the answer while no step was measured, and for what does not end by itself.
    """

    def __init__(self, token_budget: int, default_s: float) -> None:
        self._token_budget = token_budget
        self._default_s = default_s
        self._step_s: float | None = None

    def observe(self, step_s: float) -> None:
        """Learn from a step, from its launch to its results."""
        self._step_s = step_s if self._step_s is None else self._step_s + WEIGHT * (step_s - self._step_s)

    def step_s(self) -> float:
        """Seconds until the next step begins."""
        return self._seconds(1)

    def row_free_s(self, running: Iterable[Sequence]) -> float:
        """Seconds until the first of these rows ends."""
        return self._seconds(min(map(self._steps_left, running), default=None))

    def pages_free_s(self, running: Iterable[Sequence], missing: int) -> float:
        """Seconds until ending rows have returned that many pages: theirs, and those kept for their growth."""
        for steps, pages in sorted(
            (self._steps_left(sequence), sequence.num_pages + sequence.credit)
            for sequence in running
            if not sequence.remote
        ):
            missing -= pages
            if missing <= 0:
                return self._seconds(steps)
        return self._default_s

    def prompts_done_s(self, num_tokens: int) -> float:
        """Seconds until that many prompt tokens are computed."""
        return self._seconds(-(-num_tokens // self._token_budget))

    def _steps_left(self, sequence: Sequence) -> int:
        """Upper bound. A remote prefill leaves the batch with its first token."""
        prompt_steps = -(-sequence.num_pending // self._token_budget)
        return prompt_steps if sequence.remote else prompt_steps + sequence.max_total - sequence.num_tokens - 1

    def _seconds(self, steps: int | None) -> float:
        if steps is None or self._step_s is None:
            return self._default_s
        return min(max(steps * self._step_s, SHORTEST_S), LONGEST_S)
