"""What a reader asks of its node's ranks, which may be other processes: digests, and whether earlier orders are done.

Answers arrive asynchronously. Where all pools are in this process, they are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdcluster.transfer.layout.runs import SpanTable
from pdcluster.transfer.layout.spans import digest


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """value: None until the answer came; its arrival rings a backend's doorbell."""

    value: int | None = None


Answers = Sequence[PendingAnswer]


def are_here(answers: Answers) -> bool:
    return all(answer.value is not None for answer in answers)


class RankMemories(Protocol):
    def begin_digest(self, rank: int, spans: SpanTable) -> PendingAnswer:
        """xxh3-64 of these bytes of a rank's pool, after everything its backends were ordered before."""

    def mark(self) -> Answers:
        """The answers are complete once every rank has done its backends' earlier orders and handed over everything
        that arrived until then.
        """


class OwnMemories:
    """The pools of this process."""

    def __init__(self, memories: Sequence[memoryview]) -> None:
        self._memories = [memory.cast("B") for memory in memories]

    def begin_digest(self, rank: int, spans: SpanTable) -> PendingAnswer:
        return PendingAnswer(digest(self._memories[rank], spans))

    def mark(self) -> Answers:
        return ()
