"""Checks of work that only a node can make: its vocabulary, and what an answer may hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import Work
from pdcluster.node.outbox import MAX_ROWS_BYTES, most_bytes


@dataclass(frozen=True, slots=True)
class WorkChecks:
    """max_len: tokens of the longest request."""

    vocab_size: int
    max_len: int

    def check(self, work: Work, tokens: npt.NDArray[np.int32]) -> None:
        """Raises BadRequest for work that no node with this model can run.

        tokens: those of work.token_ids.
        """
        for bad in (int(np.min(tokens)), int(np.max(tokens))):
            if not 0 <= bad < self.vocab_size:
                raise BadRequest(
                    f"token id {bad} is out of range; this model has ids 0 to {self.vocab_size - 1}", "prompt"
                )
        self._check_logprobs(work)
        self._check_shaping(work)

    def _check_shaping(self, work: Work) -> None:
        """Refuse ids outside the logits. They would fail the whole step, with other requests' rows."""
        shaping = work.sampling.shaping
        if shaping is None:
            return
        for name, ids in (
            ("logit_bias", [token for token, _ in shaping.biases]),
            ("bad_words", chain.from_iterable(shaping.bad_words)),
        ):
            highest = max(ids, default=0)
            if highest >= self.vocab_size:
                raise BadRequest(f"{name} has token id {highest}; this model has ids 0 to {self.vocab_size - 1}", name)

    def _check_logprobs(self, work: Work) -> None:
        """Bound the logprobs: what a request produced goes out again in one row when its router lost it."""
        sampling = work.sampling
        num_output = max(min(sampling.max_tokens, self.max_len - work.num_prompt), 0)
        most = most_bytes(work.num_prompt, sampling.prompt_logprobs, num_output, sampling.logprobs)
        if most > MAX_ROWS_BYTES:
            raise BadRequest(
                f"logprobs of {work.num_prompt} prompt and {num_output} output tokens may take {most >> 20} MiB, an "
                "answer may take "
                f"{MAX_ROWS_BYTES >> 20} MiB; ask for fewer alternatives, fewer max_tokens or a shorter prompt",
                "logprobs",
            )
