"""What a step hands to the step that follows it: the tokens that it drew, before anybody outside the engine knows them. It draws nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pdcluster.core.errors import ModelError
from pdcluster.core.step import Row, RowError, RowResult, StepPlan


@dataclass(frozen=True, slots=True)
class Fed:
    """By index of a plan's rows: the tokens that they go on with, and why some got none. Those compute on token 0 in pages of their own, draw
    nothing, and end."""

    tokens: Mapping[int, int] = field(default_factory=dict)
    errors: Mapping[int, RowError] = field(default_factory=dict)

    def with_output(self, index: int, row: Row) -> Row:
        """The row whose output has its token, where anything looks at that."""
        if row.output is None or index not in self.tokens:
            return row
        return replace(row, output=np.append(row.output, np.int32(self.tokens[index])))


NOTHING_FED = Fed()


class Following:
    """Used by the engine's worker thread alone."""

    def __init__(self) -> None:
        self._drawn: dict[str, RowResult] | None = {}

    def begin(self, plan: StepPlan) -> Fed:
        """A step starts; until `end` it counts as one that failed. Raises ModelError when it follows one that did."""
        drawn, self._drawn = self._drawn, None
        followers = [(index, row.request) for index, row in enumerate(plan.rows) if row.follows]
        if not followers:
            return NOTHING_FED
        if drawn is None:
            raise ModelError("the step failed whose tokens this one was to go on with")
        results = [(index, drawn[request]) for index, request in followers]
        tokens = {index: 0 if result.token is None else result.token for index, result in results}
        return Fed(tokens, {index: result.error for index, result in results if result.error is not None})

    def end(self, plan: StepPlan, results: tuple[RowResult, ...]) -> None:
        """The step is done. Histories grow here, and not where its results are taken in: the next step may have begun by then."""
        for row, result in zip(plan.rows, results, strict=True):
            if row.history is not None and result.token is not None:
                row.history.add(result.token)
        self._drawn = {result.request: result for result in results}
