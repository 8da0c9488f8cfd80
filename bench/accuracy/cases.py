"""What `bench.accuracy` predicts, and how far off predictions are: texts as token ids, the positions that count, and
errors beside a reference.

Pure arithmetic and files; it runs no model. A directory holds one run's cases (`cases.json`) and the reference's
logprobs (`reference.npy`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.accuracy.models import texts

Floats = NDArray[np.float32]

LENGTHS = (256, 512, 1024, 2048)
# Tokens of some texts, by their place.
LONGEST = {0: 8192, 20: 8192, 3: 4096, 31: 4096}
# Last tokens of a text that are also computed as rows that decode.
MOST_TAIL = 24
BLOCK = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One text. positions: those whose next token is predicted, ascending; the last `tail` of them follow each other up
    to the text's end."""

    name: str
    ids: list[int]
    positions: list[int]
    tail: int


@dataclass(frozen=True, slots=True)
class Errors:
    """One number for each position: how far the right token's logprob is off, KL divergence from the reference, whether
    the best token is its own."""

    logprob: Floats
    divergence: Floats
    is_equal: NDArray[np.bool_]


def make_cases(tokenizer: Tokenizer, num_positions: int, most_tokens: int, every: int = 1) -> list[Case]:
    """every: of the texts only each so manieth is taken. Texts of less than eight tokens are left out."""
    found = []
    for place, (name, text) in enumerate(texts()):
        length = min(LONGEST.get(place, LENGTHS[place % len(LENGTHS)]), most_tokens)
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:length]
        if place % every == 0 and len(ids) >= 8:
            found.append(_case(name, ids, num_positions))
    return found


def _case(name: str, ids: list[int], num_positions: int) -> Case:
    last = len(ids) - 2
    tail = min(MOST_TAIL, last // 2)
    spread = np.linspace(0, last, min(num_positions, last + 1)).astype(int).tolist()
    return Case(name, ids, sorted({*spread, *range(last + 1 - tail, last + 1)}), tail)


def save_cases(cases: Sequence[Case], directory: Path) -> None:
    (directory / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


def load_cases(directory: Path) -> list[Case]:
    return [Case(**case) for case in json.loads((directory / "cases.json").read_text())]


class Reference:
    """The logprobs of a model in float32, [positions of all cases after each other, vocabulary], on disk."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "reference.npy"
        cases = load_cases(directory)
        counts = [len(case.positions) for case in cases]
        self._first = dict(zip((case.name for case in cases), np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
        self._size = sum(counts)

    def write(self, logprobs: Iterator[Floats]) -> None:
        """logprobs: of each case in order."""
        rows, begin = None, 0
        for some in logprobs:
            if rows is None:
                rows = open_memmap(self._path, "w+", np.float32, (self._size, some.shape[1]))
            rows[begin : begin + len(some)] = some
            begin += len(some)

    def errors_of(self, case: Case, places: Sequence[int], logprobs: Floats) -> Errors:
        """logprobs: a row for each of those places among the case's positions."""
        rows, parts = np.load(self._path, mmap_mode="r"), []
        targets = np.array([case.ids[case.positions[place] + 1] for place in places])
        for begin in range(0, len(places), BLOCK):
            chosen = [self._first[case.name] + place for place in places[begin : begin + BLOCK]]
            exact, given = rows[chosen], logprobs[begin : begin + BLOCK]
            each, target = np.arange(len(chosen)), targets[begin : begin + BLOCK]
            off = np.abs(given[each, target] - exact[each, target])
            divergence = (np.exp(exact) * (exact - given)).sum(axis=1)
            parts.append(Errors(off, divergence, given.argmax(axis=1) == exact.argmax(axis=1)))
        return join(parts)


def join(parts: Sequence[Errors]) -> Errors:
    return Errors(
        np.concatenate([part.logprob for part in parts]),
        np.concatenate([part.divergence for part in parts]),
        np.concatenate([part.is_equal for part in parts]),
    )
