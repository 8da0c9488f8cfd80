"""Steps in flight: launched and not taken in. Pure.

At most two: the running one, and one planned behind it before its tokens are known (`Scheduler.look_ahead`).
Requirements:

1. A sequence that ends keeps its pages until the last step that computes it is over.
2. A step behind a failed one is void when it needs that one's tokens: its results are not taken in, and nothing may
   follow it.
3. A page that left a sequence's table keeps an owner until the steps in flight are over: they may read the old table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdcluster.core.errors import IntegrityError
from pdcluster.core.lifecycle import Residence
from pdcluster.core.step import StepPlan, StepResult
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.sequence import Sequence


@dataclass(slots=True)
class StepInFlight:
    """One step.

    sequences: of the plan's rows, in order.
    kept: pages with one owner too many (3).
    is_void: see 2.
    """

    plan: StepPlan
    sequences: list[Sequence]
    launched_at: float
    kept: list[int] = field(default_factory=list)
    is_void: bool = False


class StepsInFlight:
    """Owned by one scheduler, oldest first."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._flights: deque[StepInFlight] = deque()
        self._landed_at = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def followable(self) -> StepInFlight | None:
        """The step in flight that may have another behind it; None for none."""
        return self._flights[0] if len(self._flights) == 1 and not self._flights[0].is_void else None

    def ending(self) -> Iterator[Sequence]:
        """Ended sequences that keep their pages for a step."""
        return iter(
            {
                id(each): each
                for flight in self._flights
                for each in flight.sequences
                if each.state is Residence.FINISHED
            }.values()
        )

    def launch(self, plan: StepPlan, sequences: list[Sequence], now: float) -> None:
        for sequence in sequences:
            sequence.num_in_flight += 1
        self._flights.append(StepInFlight(plan, sequences, now))

    def check(self, plan: StepPlan, result: StepResult) -> None:
        """Raises IntegrityError when these are no results of the oldest step."""
        if not self._flights or plan is not self._flights[0].plan:
            raise IntegrityError("update was called for a step that is not in flight, or not the oldest")
        if self._flights[0].is_void:
            raise IntegrityError("the engine gave results of a step whose tokens were to come from one that failed")
        if [row.request for row in plan.rows] != [answer.request for answer in result.rows]:
            raise IntegrityError("the engine's result has other rows than the plan")
        for row, answer in zip(plan.rows, result.rows, strict=True):
            if answer.error is None and (row.sampling is None) != (answer.token is None):
                raise IntegrityError(
                    f"{row.request}: the engine gave {'no' if answer.token is None else 'a'} token, the plan says "
                    "otherwise"
                )

    def land(self, now: float) -> tuple[StepInFlight, float]:
        """The oldest step is over, after so much engine time. Its pages are free for others, unless another step writes
        there.
        """
        flight = self._flights.popleft()
        began_at, self._landed_at = max(flight.launched_at, self._landed_at), now
        self._pool.release(flight.kept)
        for sequence in flight.sequences:
            sequence.num_in_flight -= 1
            if sequence.state is Residence.FINISHED and not sequence.num_in_flight:
                self._pool.release(sequence.take_pages())
        return flight, now - began_at

    def void(self) -> None:
        """The last landed step has failed."""
        for flight in self._flights:
            flight.is_void = any(row.follows for row in flight.plan.rows)

    def keep(self, pages: list[int]) -> None:
        """Keep pages until the newest step is over. The caller gave each an owner for that."""
        if pages:
            self._flights[-1].kept += pages
