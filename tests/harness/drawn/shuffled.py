"""Runs requests through everything that may happen to them, by a seeded die: any batch, any chunk, recomputed, handed
to another engine, begun on KV that another request left. What a request says must not depend on it; `alone` says what
that is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pdcluster.core.history import history_of
from pdcluster.core.messages import Sampling, TokenLogprobs
from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.engine import Engine


@dataclass
class Life:
    """One request and where it stands. events: what happened to it."""

    name: str
    prompt: np.ndarray
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0
    home: int = 0
    pages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    events: set[str] = field(default_factory=set)

    @property
    def known(self) -> np.ndarray:
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.sampling.max_tokens

    def row(self, most: int) -> Row:
        known = self.known
        end = min(self.computed + most, len(known))
        history = history_of(self.sampling.shaping, self.prompt, known[len(self.prompt) :])
        sampling = self.sampling if end == len(known) else None
        return Row(
            self.name,
            known[self.computed : end],
            self.computed,
            self.pages,
            sampling,
            len(self.tokens),
            history=history,
        )


def alone(engine: Engine, lives: list[Life]) -> list[torch.Tensor]:
    """Each by itself, its prompt in one step; returns the KV of all its tokens but the last."""
    found = []
    for life in lives:
        life.pages = np.arange(engine.layout.num_pages(len(life.prompt) + life.sampling.max_tokens), dtype=np.int32)
        while not life.finished:
            _step(engine, [(life, 1 << 20)])
        found.append(kv_of(engine, life))
    return found


class Shuffle:
    """engines: any number, their page sizes may differ."""

    def __init__(self, engines: list[Engine], seed: int, *, most_running: int = 12) -> None:
        self.engines = engines
        self._die = np.random.default_rng(seed)
        self._free = [self._die.permutation(engine.num_pages).tolist() for engine in engines]
        self._most_running = most_running

    def run(self, lives: list[Life]) -> list[torch.Tensor]:
        waiting, running = list(lives), list[Life]()
        found: dict[str, torch.Tensor] = {}
        while waiting or running:
            while waiting and len(running) < self._most_running:
                running.append(self._begin(waiting.pop(0), running))
            for life in running:
                self._befall(life)
            for index, engine in enumerate(self.engines):
                here = [life for life in running if life.home == index and self._die.random() < 0.7]
                if here:
                    _step(engine, [(life, self._most_tokens()) for life in here])
            for life in [life for life in running if life.finished]:
                found[life.name] = kv_of(self.engines[life.home], life)
                self._give_pages(life)
                running.remove(life)
        return [found[life.name] for life in lives]

    def _most_tokens(self) -> int:
        return int(self._die.choice([1, 2, 3, 7, 16, 33, 64, 150, 1000]))

    def _begin(self, life: Life, running: list[Life]) -> Life:
        """Somewhere; on the KV of a prefix that another request computed there, if one has it."""
        life.home = int(self._die.integers(len(self.engines)))
        self._take_pages(life)
        for other in running:
            shared = _common(life.prompt, other.known[: other.computed])
            if other.home == life.home and shared > 1 and self._die.random() < 0.8:
                life.computed = min(shared, len(life.prompt) - 1)
                _copy(self.engines[life.home], other.pages, self.engines[life.home], life.pages, life.computed)
                life.events.add("prefix")
                break
        return life

    def _befall(self, life: Life) -> None:
        if life.computed and self._die.random() < 0.04:
            life.computed = 0  # preempted, or migrated without its KV: what it decoded is a prompt's part now
            life.events.add("recomputed")
        if len(self.engines) > 1 and life.computed and self._die.random() < 0.05:
            source, old = self.engines[life.home], life.pages
            self._give_pages(life)
            life.home = (life.home + 1) % len(self.engines)
            self._take_pages(life)
            _copy(source, old, self.engines[life.home], life.pages, life.computed)
            life.events.add("handed over")

    def _take_pages(self, life: Life) -> None:
        needed = self.engines[life.home].layout.num_pages(len(life.prompt) + life.sampling.max_tokens)
        free = self._free[life.home]
        assert needed <= len(free)
        life.pages = np.array([free.pop(int(self._die.integers(len(free)))) for _ in range(needed)], np.int32)

    def _give_pages(self, life: Life) -> None:
        self._free[life.home] += life.pages.tolist()


def kv_of(engine: Engine, life: Life) -> torch.Tensor:
    """Bits of the keys and values of all tokens that have some: [tokens, layer, K or V, head, dim]."""
    return _tokens(engine, life.pages, life.computed).clone().view(torch.int16)


def _step(engine: Engine, work: list[tuple[Life, int]]) -> None:
    rows = [(life, life.row(most)) for life, most in work]
    rows.sort(key=lambda pair: len(pair[1].tokens) > 1)
    result = engine.step(StepPlan(tuple(row for _, row in rows)))
    for (life, row), found in zip(rows, result.rows, strict=True):
        life.computed += len(row.tokens)
        if found.token is not None:
            life.tokens.append(found.token)
            assert found.logprobs is not None
            life.logprobs.append(found.logprobs)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _tokens(engine: Engine, pages: np.ndarray, count: int) -> torch.Tensor:
    at, size = torch.arange(count), engine.layout.page_tokens
    return engine.pool.tensor[torch.from_numpy(pages.astype(np.int64))[at // size], :, :, :, at % size]


def _copy(source: Engine, old: np.ndarray, target: Engine, new: np.ndarray, count: int) -> None:
    at, size = torch.arange(count), target.layout.page_tokens
    target.pool.tensor[torch.from_numpy(new.astype(np.int64))[at // size], :, :, :, at % size] = _tokens(
        source, old, count
    )
