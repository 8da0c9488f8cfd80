"""Times the node's own steps and fits its cost model to them. Owned by the node loop's thread.

A step lasts from its launch until the next launch is possible. So the loop's work between steps is in the model:
requests wait for it, too.
"""

from __future__ import annotations

from collections.abc import Callable

from pdcluster.core.messages import CostReport
from pdcluster.core.step import StepPlan
from pdcluster.cost.cost import lately
from pdcluster.cost.fit import CostFit, step_of


class StepTimer:
    def __init__(self, chunk_tokens: int, clock: Callable[[], float]) -> None:
        self._fit = CostFit(chunk_tokens)
        self._clock = clock
        self._launched_at = 0.0
        self._done: StepPlan | None = None
        self.itl_s = 0.0

    def done(self, plan: StepPlan) -> None:
        """The step's results are taken in."""
        self._done = plan

    def ready(self) -> None:
        """The next step may be launched now."""
        if self._done is not None:
            step = step_of([(len(row.tokens), row.start) for row in self._done.rows], self._clock() - self._launched_at)
            self._fit.observe(step)
            if step.rows:
                self.itl_s = lately(self.itl_s, step.seconds, 1)
            self._done = None

    def launched(self) -> None:
        self._launched_at = self._clock()

    def report(self) -> CostReport | None:
        """None before the first step."""
        return self._fit.cost().report() if self._fit.samples else None
