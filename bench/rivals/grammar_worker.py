"""A library of grammars as a process, for `bench.structured`: one answer `@{…}` for each line of its input.

    {"kind": "bytes"}                                              one token for each byte from now on
    {"kind": "load", "directory": …, "size": …, "eos": […]}        the tokens of a checkpoint from now on
    {"kind": "judge", "schema": …, "texts": […]}                   which of the texts are allowed, each as a whole
    {"kind": "walk", "schema": …, "seed": …, "steps": …}           seconds of a compile and of a random walk's masks,
                                                                   and tokens of a mask that were not accepted

A schema that is refused is answered with the reason. A process that takes too long for a line ends.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# CPU seconds that a line may take.
MOST_S = 20
# Bytes that end strings, arrays and objects, or go on to the next part.
CLOSING = b'"}],'
# How often a walk takes a token that begins with one of them, where it may.
CLOSING_SHARE = 0.4


class Place(Protocol):
    """Where an output stands in its grammar."""

    def accept(self, token: int) -> bool: ...

    def mask(self) -> NDArray[np.int32]: ...


class Library(Protocol):
    """What a process speaks for. use: has the tokens by id, those that are no text are empty."""

    version: str

    def use(self, tokens: Sequence[bytes], eos: Sequence[int]) -> None: ...

    def compile(self, schema: Any) -> Any:
        """Raises ValueError for what is refused."""

    def begin(self, compiled: Any) -> Place: ...


class Worker:
    """Answers lines about one library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._eos: Sequence[int] = ()
        self._is_closing = np.zeros(0, np.bool_)

    def serve(self) -> None:
        _answer({"version": self._library.version})
        for line in sys.stdin:
            asked = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, MOST_S)
            _answer(getattr(self, f"_{asked.pop('kind')}")(**asked))
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _bytes(self) -> dict[str, object]:
        self._use([bytes([byte]) for byte in range(256)] + [b""], [256])
        return {}

    def _load(self, directory: str, size: int, eos: list[int]) -> dict[str, object]:
        self._use(tokens_of(directory, size, eos), eos)
        return {}

    def _use(self, tokens: Sequence[bytes], eos: Sequence[int]) -> None:
        self._library.use(tokens, eos)
        self._eos = eos
        self._is_closing = np.array([token[:1] in CLOSING and token != b"" for token in tokens])
        self._is_closing[list(eos)] = True

    def _judge(self, schema: object, texts: list[str]) -> dict[str, object]:
        try:
            compiled = self._library.compile(schema)
        except ValueError as error:
            return {"refused": str(error)}
        return {"allowed": [self._allows(compiled, text.encode()) for text in texts]}

    def _allows(self, compiled: Any, text: bytes) -> bool:
        place = self._library.begin(compiled)
        return all(place.accept(byte) for byte in text) and place.accept(self._eos[0])

    def _walk(self, schema: object, seed: int, steps: int) -> dict[str, object]:
        begin = time.perf_counter()
        try:
            compiled = self._library.compile(schema)
            place = self._library.begin(compiled)
        except ValueError as error:
            return {"refused": str(error)}
        compile_s = time.perf_counter() - begin
        generator, masks_s, num_wrong = random.Random(seed), list[float](), 0
        for _ in range(steps):
            begin = time.perf_counter()
            mask = place.mask()
            masks_s.append(time.perf_counter() - begin)
            token = self._drawn(mask, generator)
            is_wrong = token not in self._eos and not place.accept(token)
            num_wrong += is_wrong
            if is_wrong or token in self._eos:
                place = self._library.begin(compiled)
        return {"compile_s": compile_s, "masks_s": masks_s, "num_wrong": num_wrong}

    def _drawn(self, mask: NDArray[np.int32], generator: random.Random) -> int:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        closing = allowed[self._is_closing[allowed]]
        chosen = closing if len(closing) and generator.random() < CLOSING_SHARE else allowed
        return int(chosen[generator.randrange(len(chosen))])


def tokens_of(directory: str, size: int, eos: list[int]) -> list[bytes]:
    """As the engine of the tree that is imported reads them."""
    from pathlib import Path

    from pdcluster.engine.sampling.grammar import vocabulary_of

    return list(vocabulary_of(Path(directory), size, eos).tokens)


def _answer(what: dict[str, object]) -> None:
    print("@" + json.dumps(what), flush=True)
