"""Fits the cost model to vLLM's engine steps. Owned by the node loop's thread.

vLLM says when a step ended and how many prompt and output tokens it had, not which requests they are of. So this keeps
books of the requests that vLLM has. Prompts are taken to be computed in the order in which they came.

1. A step begins when the one before it ended, or when the first request came that it could compute, if that is later.
   So the time of an idle engine counts for nothing.
2. Requests that wait for KV from another node give the engine nothing to do, and vLLM does not say when their KV came.
   A step that begins with such requests alone is not timed.
3. Counts that the books do not explain make the step's work unknown. It is not timed either, and the next one is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdcluster.core.messages import CostReport
from pdcluster.cost.cost import lately, num_pairs
from pdcluster.cost.fit import CostFit, Step


@dataclass(slots=True)
class EngineRow:
    """A request that vLLM has.

    num_tokens: of its prompt.
    num_known: of these, that have KV by now.
    num_output: tokens that it emitted.
    """

    num_tokens: int
    num_known: int
    came_at: float
    is_fetched: bool
    num_output: int = 0

    @property
    def is_prompt(self) -> bool:
        return self.num_known < self.num_tokens

    @property
    def context(self) -> int:
        return self.num_tokens + self.num_output


class StepCosts:
    """add and remove: as the node hands requests to vLLM and takes them back. step: when vLLM tells of one."""

    def __init__(self, chunk_tokens: int) -> None:
        self._fit = CostFit(chunk_tokens)
        self._requests: dict[str, EngineRow] = {}
        self._ended_at: float | None = None
        # Whether the engine had work of its own when the last step ended.
        self._was_busy = False
        self.itl_s = 0.0

    def add(self, key: str, num_tokens: int, now: float, *, num_cached: int = 0, is_fetched: bool = False) -> None:
        """is_fetched: its KV comes from another node; then vLLM computes the last token alone."""
        num_known = num_tokens - 1 if is_fetched else min(num_cached, num_tokens - 1)
        self._requests[key] = EngineRow(num_tokens, num_known, now, is_fetched)

    def found_cached(self, key: str, num_cached: int) -> None:
        """vLLM found so much of a prompt in its cache. It says so with the first token, before that step is told."""
        if (request := self._requests.get(key)) is not None and request.is_prompt:
            request.num_known = max(request.num_known, min(num_cached, request.num_tokens - 1))

    def remove(self, key: str) -> None:
        """The request ended or was aborted. Unknown keys are no fault: an abort may come late."""
        self._requests.pop(key, None)

    def step(
        self,
        ended_at: float,
        num_prompt_tokens: int,
        outputs: Iterable[tuple[str, int]],
        finished: Iterable[str] = (),
    ) -> Step | None:
        """An engine step that ended. None where it is not timed.

        outputs: tokens by request, also of those that finished in it.
        """
        began_at = self._began_at()
        emitted = {key: count for key, count in outputs if count}
        work = self._work(num_prompt_tokens, emitted)
        for key in finished:
            self.remove(key)
        self._ended_at = ended_at
        self._was_busy = any(not each.is_fetched or each.num_output for each in self._requests.values())
        if work is None or began_at is None or ended_at <= began_at:
            return None
        step = Step(*work, ended_at - began_at)
        self._fit.observe(step)
        if step.rows:
            self.itl_s = lately(self.itl_s, step.seconds, 1)
        return step

    def report(self) -> CostReport | None:
        """None before the first step."""
        return self._fit.cost().report() if self._fit.samples else None

    def _began_at(self) -> float | None:
        """Rules 1 and 2."""
        if self._was_busy and self._ended_at is not None:
            return self._ended_at
        came = [each.came_at for each in self._requests.values() if not each.is_fetched]
        if not came or any(each.is_fetched for each in self._requests.values()):
            return None
        return min(came) if self._ended_at is None else max(min(came), self._ended_at)

    def _work(self, num_prompt_tokens: int, emitted: dict[str, int]) -> tuple[int, float, int, int] | None:
        """Tokens and pairs of chunks, rows and their contexts; None where the books do not explain the step."""
        rows = context = 0
        is_known = emitted.keys() <= self._requests.keys()
        decoding = [self._requests[key] for key in emitted if key in self._requests]
        chunks, left = self._chunks(num_prompt_tokens, emitted)
        for request in decoding:
            if not request.is_prompt and request.num_output:
                rows += 1
                context += request.context
        for request, new in chunks:
            request.num_known += new
        for key, count in emitted.items():
            if (drawn := self._requests.get(key)) is not None:
                is_known &= not drawn.is_prompt
                drawn.num_known, drawn.num_output = drawn.num_tokens, drawn.num_output + count
        if left or not is_known:
            return None
        return self._sum(chunks, rows, context)

    def _chunks(self, num_prompt_tokens: int, emitted: dict[str, int]) -> tuple[list[tuple[EngineRow, int]], int]:
        """Which prompts the step's tokens are of: those that emitted their first token are done, then the eldest. And
        tokens that are of none."""
        waiting = [(key, each) for key, each in self._requests.items() if each.is_prompt]
        waiting.sort(key=lambda pair: pair[0] not in emitted)
        chunks: list[tuple[EngineRow, int]] = []
        for _, request in waiting:
            new = min(num_prompt_tokens, request.num_tokens - request.num_known)
            if new:
                chunks.append((request, new))
                num_prompt_tokens -= new
        return chunks, num_prompt_tokens

    @staticmethod
    def _sum(chunks: list[tuple[EngineRow, int]], rows: int, context: int) -> tuple[int, float, int, int]:
        """A prompt's single token is a row, as in our own engine."""
        tokens, pairs = 0, 0.0
        for request, new in chunks:
            if new == 1:
                rows, context = rows + 1, context + request.num_known
            else:
                tokens, pairs = tokens + new, pairs + num_pairs(new, request.num_known - new)
        return tokens, pairs, rows, context
