"""The smallest scheduler there can be: hands out pages, cuts prompts in chunks and runs an engine to the end. For tests
of the engine alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pdcluster.core.history import History, history_of
from pdcluster.core.messages import Sampling, TokenLogprobs
from pdcluster.core.step import Row, RowResult, StepPlan
from pdcluster.engine.engine import Engine


@dataclass
class Job:
    """One prompt and what came of it. arrives: the step before which it is not scheduled."""

    prompt: np.ndarray
    sampling: Sampling
    chunk: int
    pages: np.ndarray
    arrives: int = 0
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    history: History | None = None

    def __post_init__(self) -> None:
        self.history = history_of(self.sampling.shaping, self.prompt, self.prompt[:0])

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.sampling.max_tokens

    def row(self, name: str) -> Row:
        if self.tokens:
            last = np.array([self.tokens[-1]], np.int32)
            return Row(name, last, self.computed, self.pages, self.sampling, len(self.tokens), history=self.history)
        end = min(self.computed + self.chunk, len(self.prompt))
        done = end == len(self.prompt)
        return Row(
            name,
            self.prompt[self.computed : end],
            self.computed,
            self.pages,
            self.sampling if done else None,
            prompt_logprobs=self.sampling.prompt_logprobs,
            next_token=None if done else int(self.prompt[end]),
            history=self.history,
        )

    def take(self, row: Row, result: RowResult) -> None:
        self.computed += len(row.tokens)
        self.prompt_logprobs += result.prompt_logprobs
        if result.token is not None:
            self.tokens.append(result.token)
        if result.logprobs is not None:
            self.logprobs.append(result.logprobs)


class Driver:
    """Pages are handed out in a shuffled order, so that nothing works by lying side by side."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free = np.random.default_rng(7).permutation(engine.num_pages).astype(np.int32)

    def run(
        self, prompts: list[np.ndarray], samplings: list[Sampling], *, chunk: int = 1 << 20, stagger: int = 0
    ) -> list[Job]:
        """All jobs to their end, batched: each joins `stagger` steps after the one before."""
        jobs: list[Job] = []
        given = 0
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            needed = self._engine.layout.num_pages(len(prompt) + sampling.max_tokens)
            jobs.append(Job(prompt, sampling, chunk, self._free[given : given + needed], index * stagger))
            given += needed
        assert given <= len(self._free)
        step = 0
        while not all(job.finished for job in jobs):
            self._step([job for job in jobs if not job.finished and job.arrives <= step])
            step += 1
        return jobs

    def _step(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        rows = [(job, job.row(str(index))) for index, job in enumerate(jobs)]
        rows.sort(key=lambda pair: len(pair[1].tokens) > 1)
        result = self._engine.step(StepPlan(tuple(row for _, row in rows)))
        for (job, row), found in zip(rows, result.rows, strict=True):
            assert found.request == row.request
            job.take(row, found)


def greedy(count: int, **fields: object) -> Sampling:
    return Sampling(max_tokens=count, seed=0, temperature=0.0, **fields)
