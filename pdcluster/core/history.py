"""What a row said before, as far as its sampling depends on it: how often each token came, the last tokens, and what
must not follow.

Made once for a request with `Shaping`, then grown token by token. After that only arrays of distinct tokens grow with
the context. It belongs to the row's sequence and survives preemption. A row from another node is given all tokens and
counts them anew.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.sampling import Shaping

Ids = NDArray[np.int64]
Numbers = NDArray[np.float32]

# Stands for every token, in front of a bad word that is shorter than the longest.
ANY = -1
# Before the first output token.
NOTHING = -2
HEADROOM = 64


class History:
    """Owned by the thread that owns the sequence. Lent to a step that computes it, which enters the token that it
    draws. The next step may begin before the sequence knows that token.

    The prompt counts for the repetition penalty only. Bad words and the other penalties look at the output.
    """

    __slots__ = ("_counts", "_ids", "_place", "_tail", "bias_ids", "biases", "last_ids", "prefixes", "shaping")

    def __init__(self, shaping: Shaping, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        self.shaping = shaping
        self.bias_ids: Ids = np.array([token for token, _ in shaping.biases], np.int64)
        self.biases: Numbers = np.array([bias for _, bias in shaping.biases], np.float32)
        self.prefixes, self.last_ids = _split(shaping.bad_words)
        self._tail: Ids = np.full(self.prefixes.shape[1], NOTHING)
        self._count(
            prompt if shaping.repetition != 1.0 else prompt[:0], output if shaping.counts_tokens else output[:0]
        )
        width = min(len(self._tail), len(output))
        if width:
            self._tail[-width:] = output[-width:]

    def _count(self, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        ids, where = np.unique(np.concatenate((prompt, output)), return_inverse=True)
        self._place: dict[int, int] = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._ids: Ids = np.empty(len(ids) + HEADROOM, np.int64)
        self._ids[: len(ids)] = ids
        self._counts: Numbers = np.zeros(len(self._ids), np.float32)
        self._counts[: len(ids)] = np.bincount(where[len(prompt) :], minlength=len(ids))

    @property
    def ids(self) -> Ids:
        """The distinct tokens that penalties look at."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Numbers:
        """How often each of `ids` was output; 0 for one that is in the prompt only."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        """The next output token."""
        if self.shaping.counts_tokens:
            place = self._place_of(token)  # first: it may make the arrays longer
            self._counts[place] += 1.0
        if len(self._tail):
            self._tail[:-1] = self._tail[1:]
            self._tail[-1] = token

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(len(self._ids), np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(len(self._counts), np.float32)))
        self._ids[place] = token
        return place

    def banned(self) -> Ids:
        """Tokens that would complete a bad word now."""
        if not len(self.last_ids):
            return self.last_ids
        matches = ((self.prefixes == ANY) | (self.prefixes == self._tail)).all(axis=1)
        found: Ids = self.last_ids[matches]
        return found


def history_of(shaping: Shaping | None, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> History | None:
    """None for a row that is free of all this."""
    return None if shaping is None else History(shaping, prompt, output)


def _split(bad_words: tuple[tuple[int, ...], ...]) -> tuple[Ids, Ids]:
    """All but the last token of each word, filled up in front to one width. And the last tokens."""
    width = max((len(word) for word in bad_words), default=1) - 1
    prefixes = np.full((len(bad_words), width), ANY, np.int64)
    for row, word in enumerate(bad_words):
        prefixes[row, width - len(word) + 1 :] = word[:-1]
    return prefixes, np.array([word[-1] for word in bad_words], np.int64)
