"""Times the node's own steps, fits its cost model to them and judges steps that do not end. Owned by the node loop's
thread.

A step lasts from its launch until the next launch is possible. So the loop's work between steps is in the model:
requests wait for it, too.
"""

from __future__ import annotations

from collections.abc import Callable

from pdcluster.core.messages import CostReport
from pdcluster.core.step import StepPlan
from pdcluster.cost.cost import lately
from pdcluster.cost.fit import WARM, CostFit, Step, step_of

# An engine is stuck when nothing changed for LEAST_S, and for TIMES × what the next sign of progress should take.
LEAST_S = 2.0
TIMES = 5.0
# The part by which batch rows may lengthen a step with other rows.
BATCH_SLOWS = 0.05
# Bound of what nothing is known of: a compilation, and the first steps of their kind.
COLD_S = 60.0


class StepTimer:
    def __init__(self, chunk_tokens: int, clock: Callable[[], float]) -> None:
        self._fit = CostFit(chunk_tokens)
        self._clock = clock
        self._launched_at = 0.0
        self._done: StepPlan | None = None
        self.itl_s = 0.0
        # Called with every step that ended.
        self.on_step: Callable[[Step], None] | None = None

    def done(self, plan: StepPlan) -> None:
        """The step's results are taken in."""
        self._done = plan

    def ready(self) -> None:
        """The next step may be launched now."""
        if self._done is not None:
            step = step_of([(len(row.tokens), row.start) for row in self._done.rows], self._clock() - self._launched_at)
            self._fit.observe(step)
            if self.on_step is not None:
                self.on_step(step)
            if step.rows:
                self.itl_s = lately(self.itl_s, step.seconds, 1)
            self._done = None

    def launched(self) -> None:
        self._launched_at = self._clock()

    def progress_s(self, plan: StepPlan, num_layers: int) -> float | None:
        """Longest time to the next sign of progress in a step, with the model's own error. None: nothing is known.

        A layer is a sign where prompts are computed. A step of decode rows may be one piece.
        """
        step, cost = step_of([(len(row.tokens), row.start) for row in plan.rows], 0.0), self._fit.cost()
        seconds = 0.0
        if step.tokens:
            if cost.prefill.samples < WARM:
                return None
            work_s = cost.prefill.work_s(step.tokens, step.pairs)
            seconds += (work_s + cost.prefill.error.seconds((1.0, step.tokens, step.pairs), work_s)) / num_layers
        if step.rows:
            if cost.decode.samples < WARM:
                return None
            seconds += cost.decode.seconds(step.rows, step.context_tokens)
            seconds += cost.decode.error_s(step.rows, step.context_tokens)
        return seconds

    def most_batch_rows(self, rows: int, context_tokens: int) -> int:
        """Batch rows, alike, that lengthen a step of so many other rows by BATCH_SLOWS at most. As many as there are
        others while little is known.
        """
        cost = self._fit.cost().decode
        each_s = cost.added_s(rows, context_tokens) / rows
        if cost.samples < WARM or each_s <= 0.0:
            return rows
        return int(min(BATCH_SLOWS * cost.seconds(rows, context_tokens) / each_s, 1e6))

    def report(self) -> CostReport | None:
        """None before the first step."""
        return self._fit.cost().report() if self._fit.samples else None


class StuckWatch:
    """Judges whether the engine gets on with the step that it was given.

    A layer is a sign of progress; so are a step's end, a compilation, and a part of a long list of logprobs.

    expected_s: seconds to a step's next sign of progress. None: unknown.
    clock: one that stands while this process does.
    """

    def __init__(self, expected_s: Callable[[StepPlan], float | None], clock: Callable[[], float]) -> None:
        self._expected_s, self._clock = expected_s, clock
        self._seen: object = None
        self._since = clock()
        self.is_stuck = False

    def look(self, plan: StepPlan | None, signs: object, *, is_compiling: bool) -> None:
        """To be called in every turn. plan: the oldest in flight. signs: differ whenever the engine got on."""
        now = self._clock()
        if plan is None or signs != self._seen:
            self._seen, self._since, self.is_stuck = signs, now, False
        elif not self.is_stuck and now - self._since >= LEAST_S:
            expected_s = None if is_compiling else self._expected_s(plan)
            self.is_stuck = now - self._since >= (COLD_S if expected_s is None else TIMES * expected_s)

    @property
    def stood_s(self) -> float:
        """How long nothing changed."""
        return self._clock() - self._since
