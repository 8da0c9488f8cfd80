"""Turns the Work of a message into the scheduler's Sequence, after checking what only this node can know: its vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdcluster.errors import BadRequest
from pdcluster.messages import Work
from pdcluster.node.legs import key_of
from pdcluster.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceFactory:
    vocab_size: int
    block_tokens: int
    clock: Callable[[], float]

    def make(self, work: Work, *, remote: bool) -> Sequence:
        """Raises BadRequest for work that no node with this model can run."""
        sequence = Sequence(work, key=key_of(work), remote=remote, arrived=self.clock(), block_tokens=self.block_tokens)
        tokens = sequence.tokens
        for bad in (int(np.min(tokens)), int(np.max(tokens))):
            if not 0 <= bad < self.vocab_size:
                raise BadRequest(f"token id {bad} is out of range; this model has ids 0 to {self.vocab_size - 1}", "prompt")
        return sequence
