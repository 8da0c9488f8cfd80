"""Turns the Work of a message into the scheduler's Sequence, after checking what only this node can know: its vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import Work
from pdcluster.node.legs import key_of
from pdcluster.node.outbox import MAX_ROWS_BYTES, most_bytes
from pdcluster.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceFactory:
    vocab_size: int
    block_tokens: int
    max_len: int
    clock: Callable[[], float]

    def make(self, work: Work, *, remote: bool) -> Sequence:
        """Raises BadRequest for work that no node with this model can run."""
        sequence = Sequence(work, key=key_of(work), remote=remote, arrived=self.clock(), block_tokens=self.block_tokens)
        tokens = sequence.tokens
        for bad in (int(np.min(tokens)), int(np.max(tokens))):
            if not 0 <= bad < self.vocab_size:
                raise BadRequest(f"token id {bad} is out of range; this model has ids 0 to {self.vocab_size - 1}", "prompt")
        self._check_logprobs(work)
        self._check_shaping(work)
        return sequence

    def _check_shaping(self, work: Work) -> None:
        """An id that the logits do not have would fail the whole step, other requests' rows too."""
        shaping = work.sampling.shaping
        if shaping is None:
            return
        for name, ids in (("logit_bias", [token for token, _ in shaping.biases]), ("bad_words", chain.from_iterable(shaping.bad_words))):
            highest = max(ids, default=0)
            if highest >= self.vocab_size:
                raise BadRequest(f"{name} has token id {highest}; this model has ids 0 to {self.vocab_size - 1}", name)

    def _check_logprobs(self, work: Work) -> None:
        """What a request produced goes out again in one row when its router lost it."""
        sampling = work.sampling
        num_output = max(min(sampling.max_tokens, self.max_len - work.num_prompt), 0)
        most = most_bytes(work.num_prompt, sampling.prompt_logprobs, num_output, sampling.logprobs)
        if most > MAX_ROWS_BYTES:
            raise BadRequest(
                f"logprobs of {work.num_prompt} prompt and {num_output} output tokens may take {most >> 20} MiB, an answer may take "
                f"{MAX_ROWS_BYTES >> 20} MiB; ask for fewer alternatives, fewer max_tokens or a shorter prompt",
                "logprobs",
            )
