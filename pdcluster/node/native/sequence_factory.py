"""Turns the work of a message into a sequence of the native engine's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdcluster.core.messages import Work
from pdcluster.node.legs import key_of
from pdcluster.node.work_checks import WorkChecks
from pdcluster.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceFactory:
    checks: WorkChecks
    block_tokens: int
    clock: Callable[[], float]

    def make(self, work: Work, *, remote: bool) -> Sequence:
        """Make a sequence. Raises BadRequest for work that no node with this model can run."""
        sequence = Sequence(work, key=key_of(work), remote=remote, arrived=self.clock(), block_tokens=self.block_tokens)
        self.checks.check(work, sequence.tokens)
        return sequence
