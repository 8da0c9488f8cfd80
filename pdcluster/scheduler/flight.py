"""Steps that were launched and not taken in yet: what they compute, and what must not be given to anybody until they
are over. Pure.

At most two: the one that runs, and one planned behind it before its tokens are known (`Scheduler.look_ahead`).
Requirements:
 1. A sequence that ends keeps its pages until the last step that computes it is over: the row behind may be one that
    nobody wants any more.
 2. A step behind one that failed is void when its tokens were to come from that: its results must not be taken in, and
    nothing may follow it.
 3. A page that left a sequence's table while a step was in flight keeps an owner until that step is over: it may be
    read by the table as it was.
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
    """sequences: of the plan's rows, in their order; kept: pages with one owner too many (3); is_void: see 2."""

    plan: StepPlan
    sequences: list[Sequence]
    launched_at: float
    kept: list[int] = field(default_factory=list)
    is_void: bool = False


class StepsInFlight:
    """Of one scheduler, oldest first."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._flights: deque[StepInFlight] = deque()
        self._landed_at = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def followable(self) -> StepInFlight | None:
        """The step in flight, when there is one that may have another behind it."""
        return self._flights[0] if len(self._flights) == 1 and not self._flights[0].is_void else None

    def ending(self) -> Iterator[Sequence]:
        """Sequences that ended and keep their pages for a step."""
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
        """The oldest step is over, and how long the engine was at it: what it wrote to is free for others, unless
        another one writes there, too."""
        flight = self._flights.popleft()
        began_at, self._landed_at = max(flight.launched_at, self._landed_at), now
        self._pool.release(flight.kept)
        for sequence in flight.sequences:
            sequence.num_in_flight -= 1
            if sequence.state is Residence.FINISHED and not sequence.num_in_flight:
                self._pool.release(sequence.take_pages())
        return flight, now - began_at

    def void(self) -> None:
        """The step that landed last has failed."""
        for flight in self._flights:
            flight.is_void = any(row.follows for row in flight.plan.rows)

    def keep(self, pages: list[int]) -> None:
        """Until the newest step is over; its caller gave each an owner for that."""
        if pages:
            self._flights[-1].kept += pages
