"""What a reader asks about the memory of its node's ranks, which may be other processes: digests, and whether they have
done what they were told.

Answers come when they come; where all pools are in this process they are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdcluster.transfer.layout.runs import SpanTable
from pdcluster.transfer.layout.spans import digest


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """value: None until it came, which rings a backend's bell."""

    value: int | None = None


Answers = Sequence[PendingAnswer]


def are_here(answers: Answers) -> bool:
    return all(answer.value is not None for answer in answers)


class RankMemories(Protocol):
    def begin_digest(self, rank: int, spans: SpanTable) -> PendingAnswer:
        """xxh3-64 of these bytes of a rank's pool, after everything that its backends were told before."""

    def mark(self) -> Answers:
        """All here once every rank has done what its backends were told before, and everything that arrived until then
        was handed over."""


class OwnMemories:
    """Of pools in this process."""

    def __init__(self, memories: Sequence[memoryview]) -> None:
        self._memories = [memory.cast("B") for memory in memories]

    def begin_digest(self, rank: int, spans: SpanTable) -> PendingAnswer:
        return PendingAnswer(digest(self._memories[rank], spans))

    def mark(self) -> Answers:
        return ()
