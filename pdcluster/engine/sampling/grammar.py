"""Grammars of requests, compiled for a model's vocabulary: off the step, each once, kept while in use or while there is
room.

A grammar that llguidance refuses, or does not finish in time, is refused by its own words, at once when it comes again.
Routers tried each before. A compile cannot be ended from outside. One that takes too long keeps its thread until it is
done, at the lowest priority. While there are few such, another takes its place.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdcluster.api.structured import library
from pdcluster.api.text.model_text import TextModel
from pdcluster.api.tools.markers import MARKERS
from pdcluster.core.errors import BadRequest, Overloaded, PdclusterError
from pdcluster.core.grammar import MAX_DEPTH, Grammar, depth_of
from pdcluster.engine.sampling.deadline_pool import yield_to_others

log = logging.getLogger(__name__)

# A bit per token id, lowest first.
Mask = NDArray[np.int32]

# Compilers recurse over what they read; it is virtual memory until it is used.
STACK_BYTES = 256 << 20

# A step of its automaton takes up to 2 KB; most masks take none.
BYTES_PER_MASK = 1 << 10
# Rows that a compiled grammar has begun with before any of them failed: the trial's and its own.
WORN_ROWS = 2

# What the library says of an automaton that all rows of a grammar share.
TOO_MANY_STATES = "too many states"

# Larger grammars compile one at a time, at a lower priority.
LARGE_CHARS, LARGE_PRIORITY = 32 << 10, 5

# What a compiled grammar takes beside its text, and for each character of it.
LEAST_BYTES, BYTES_PER_CHARACTER = 128 << 10, 64


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """cache_bytes: of compiled grammars that are kept. While those in use take more, others wait.
    compile_s: longest wait for one.
    max_late: compiles that may go on beyond it.
    refusals: how many are remembered.
    """

    cache_bytes: int = 256 << 20
    compile_s: float = 20.0
    max_queued: int = 64
    threads: int = 2
    max_late: int = 4
    refusals: int = 64


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What compiling needs of a model. tokens: what each id stands for, b"" for those that are no text."""

    tokens: Sequence[bytes]
    size: int
    eos_token_ids: Sequence[int]


def vocabulary_of(model_dir: Path, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Special tokens are no text, but for the markers that models write in their answers."""
    pieces = TextModel.from_dir(model_dir).pieces
    tokens = [
        piece if index not in pieces.special or piece.decode(errors="replace") in MARKERS else b""
        for index, piece in enumerate(pieces.table)
    ]
    return Vocabulary(tokens[:size] + [b""] * (size - len(tokens)), size, eos_token_ids)


class Compiled:
    """A grammar for a vocabulary. Rows begin with copies of its matcher, which itself never moves."""

    def __init__(self, matcher: Any, vocabulary_size: int, memory_size_bytes: int) -> None:
        self.matcher = matcher
        # Rows that began with it, and masks that they made. All share one automaton, which grows with them.
        self.num_rows = self.num_masks = 0
        self.num_words = -(-vocabulary_size // 32)
        self.memory_size_bytes = memory_size_bytes

    @property
    def grown_bytes(self) -> int:
        """What the automaton took since, at most."""
        return min(self.num_masks, library.MAX_STATES) * BYTES_PER_MASK


class Constraint:
    """One output's place in its grammar."""

    def __init__(self, compiled: Compiled, grammar: Grammar | None = None) -> None:
        self.grammar = grammar
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        compiled.num_rows += 1
        self.num_tokens = 0

    def accept(self, token: int) -> bool:
        """False for a token that the grammar does not allow here."""
        self.num_tokens += 1
        return bool(self._matcher.consume_token(token))

    def mask(self) -> Mask:
        """Nothing is allowed where the grammar took more than the library's bounds (`fault`)."""
        words = np.empty(self._compiled.num_words, np.int32)
        self._compiled.num_masks += 1
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words[:] = 0  # the library would end the output
        return words

    @property
    def is_worn(self) -> bool:
        """Whether it failed because others had used up what the library allows."""
        return TOO_MANY_STATES in self.fault and self._compiled.num_rows > WORN_ROWS

    @property
    def fault(self) -> str:
        """Why nothing can follow; "" where something can."""
        return library.words(self._matcher.get_error()) if self._matcher.is_error() else ""


# Raises BadRequest for what it does not take.
Compiler = Callable[[Grammar], Compiled]


class Grammars:
    """want, trim and close from one thread, find from any; news_fd is readable when a compile is done. load: the
    vocabulary, asked for once."""

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        limits: GrammarLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        make: Callable[[Vocabulary], Compiler] | None = None,
    ) -> None:
        """make: a compiler for the vocabulary, None for llguidance's."""
        self._load = load
        self._make = make or _make_compiler
        self._limits = limits or GrammarLimits()
        self._clock = clock
        self._lock = threading.Condition()
        self._loading = threading.Lock()
        self._compiler: Compiler | None = None
        self._ready: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._bytes = 0
        # The grammars in use take more than all may.
        self._is_crowded = False
        # Why each is refused. Not the exception: its traceback would grow each time that it is raised.
        self._refused: OrderedDict[Grammar, str] = OrderedDict()
        # When each wanted compile began. None while it waits, for a thread or for the library.
        self._began: dict[Grammar, float | None] = {}
        self._queue: list[Grammar] = []
        self._num_threads = 0
        # Compiles that took too long and go on, each with its thread, which counts no more.
        self._late: dict[Grammar, int] = {}
        self._thread_of: dict[Grammar, int] = {}
        self._is_closed = False
        self.news_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def want(self, grammar: Grammar) -> bool:
        """Whether it can be used now; else it will be compiled. Raises BadRequest when it cannot be, Overloaded when
        too many are on their way."""
        with self._lock:
            if grammar in self._ready:
                self._ready.move_to_end(grammar)
                return True
            if (refused := self._refused.get(grammar)) is not None:
                raise BadRequest(refused)
            self._replace_late()
            if self._is_crowded and grammar not in self._began:
                raise Overloaded(
                    f"grammars of running requests take {self._bytes >> 20} MiB here, as many as may be; retry later",
                    1.0,
                    "grammars",
                )
            if grammar in self._late:
                raise BadRequest(f"the grammar did not compile within {self._limits.compile_s:g} s; send a simpler one")
            if len(self._late) >= self._limits.max_late and self._began.get(grammar) is None:
                raise Overloaded(
                    f"{len(self._late)} grammars take too long to compile here; retry later", 1.0, "grammars"
                )
            if grammar not in self._began:
                self._enqueue(grammar)
            return False

    @property
    def is_full(self) -> bool:
        """Whether it is time to `trim`; from any thread."""
        with self._lock:
            return self._is_crowded or self._bytes + self._grown() > self._limits.cache_bytes

    def trim(self, used: Set[Grammar]) -> None:
        """Let go of grammars that nobody uses, those first that were not asked for longest. A row's state can be made
        anew from its grammar only, so one in use stays, whatever it takes."""
        with self._lock:
            for grammar in [each for each in self._ready if each not in used]:
                if self._bytes + self._grown() <= self._limits.cache_bytes:
                    break
                self._bytes -= self._ready.pop(grammar).memory_size_bytes
            self._is_crowded = self._bytes > self._limits.cache_bytes

    def _grown(self) -> int:
        return sum(compiled.grown_bytes for compiled in self._ready.values())

    def forget(self, grammar: Grammar) -> None:
        """From any thread: it is compiled anew when it comes again."""
        with self._lock:
            if (compiled := self._ready.pop(grammar, None)) is not None:
                self._bytes -= compiled.memory_size_bytes

    def find(self, grammar: Grammar) -> Compiled | None:
        """The compiled one, None when it is not, or no longer, here."""
        with self._lock:
            return self._ready.get(grammar)

    def refuse(self, grammar: Grammar, reason: str) -> None:
        """From any thread: it compiles, but can not be used."""
        self.forget(grammar)
        with self._lock:
            self._remember(grammar, reason)

    def refusal(self, grammar: Grammar) -> str | None:
        """Why it can not be used, if that is known; from any thread."""
        with self._lock:
            return self._refused.get(grammar)

    def take_news(self) -> None:
        try:
            os.eventfd_read(self.news_fd)
        except BlockingIOError:
            return  # nothing since last time

    @property
    def num_bytes(self) -> int:
        return self._bytes

    @property
    def num_computing(self) -> int:
        """Threads within the compiler now; from any thread."""
        with self._lock:
            return len(self._thread_of)

    def __len__(self) -> int:
        return len(self._ready)

    def close(self) -> None:
        """Threads end after what they compile now; nobody waits for them. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._queue.clear()
            self._lock.notify_all()
            os.close(self.news_fd)

    # ------------------------------------------------------------ threads

    def _enqueue(self, grammar: Grammar) -> None:
        if depth_of(grammar.source) > MAX_DEPTH:
            raise BadRequest(f"the grammar is nested more than {MAX_DEPTH} levels deep; send a flatter one")
        if len(self._queue) >= self._limits.max_queued:
            raise Overloaded(f"{len(self._queue)} grammars wait to be compiled; retry later", 1.0, "grammars")
        self._queue.append(grammar)
        self._began[grammar] = None
        self._staff()
        self._lock.notify()

    def _replace_late(self) -> None:
        for grammar, began in self._began.items():
            if began is not None and grammar not in self._late and self._clock() - began >= self._limits.compile_s:
                self._late[grammar] = self._thread_of[grammar]
                self._num_threads -= 1
                yield_to_others(self._thread_of[grammar])
                self._lock.notify_all()  # a large one may go on beside it
        self._staff()

    def _staff(self) -> None:
        """As many threads as there is work for. None in the place of the last compile that may be late: those that wait
        are told."""
        wanted = min(
            self._limits.threads, len(self._began) - len(self._late), max(self._limits.max_late - len(self._late), 0)
        )
        while self._num_threads < wanted:
            size = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=self._work, name="grammars", daemon=True).start()
            except RuntimeError as error:  # what waits asks again, and may get one then
                log.warning("no thread to compile a grammar: %s", error)
                return
            finally:
                threading.stack_size(size)
            self._num_threads += 1

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._next() is not None or self._is_closed)
                grammar = self._next()
                if self._is_closed or grammar is None:
                    return
                self._queue.remove(grammar)
                self._thread_of[grammar] = threading.get_native_id()
            if is_large(grammar):
                yield_to_others(priority=LARGE_PRIORITY)
            answer = self._compile(grammar)
            with self._lock:
                del self._began[grammar], self._thread_of[grammar]
                was_late = self._late.pop(grammar, None) is not None
                if self._is_closed:
                    return
                self._keep(grammar, answer)
                os.eventfd_write(self.news_fd, 1)
                is_slow = is_large(grammar) and not was_late
                self._num_threads -= is_slow
                self._staff()
                self._lock.notify_all()
                if was_late or is_slow:  # its priority cannot be raised again
                    return

    def _next(self) -> Grammar | None:
        """The smallest that waits. Large ones leave a thread to the others."""
        found = min(self._queue, key=lambda each: len(each.source), default=None)
        if found is None or not is_large(found) or self._limits.threads == 1:
            return found
        is_free = not any(is_large(each) for each in self._thread_of if each not in self._late)
        return found if is_free else None

    def _compile(self, grammar: Grammar) -> Compiled | str:
        """The compiled grammar, or a text that says why there is none."""
        began = time.perf_counter()
        try:
            with self._loading:
                if self._compiler is None:
                    self._compiler = self._make(self._load())
            with self._lock:
                self._began[grammar] = self._clock()
            compiled = self._compiler(grammar)
        except PdclusterError as error:
            return str(error)
        except Exception as error:  # the top of a thread: a vocabulary that the library does not take
            log.exception("a grammar did not compile")
            return f"the grammar does not compile here: {type(error).__name__}; the node's log has more"
        log.debug("a grammar of %d characters compiled in %.3f s", len(grammar.source), time.perf_counter() - began)
        return compiled

    def _keep(self, grammar: Grammar, answer: Compiled | str) -> None:
        if isinstance(answer, str):
            self._remember(grammar, answer)
            return
        self._ready[grammar] = answer
        self._bytes += answer.memory_size_bytes

    def _remember(self, grammar: Grammar, reason: str) -> None:
        self._refused[grammar] = reason
        if len(self._refused) > self._limits.refusals:
            self._refused.popitem(last=False)


def is_large(grammar: Grammar) -> bool:
    """Whether its compile may take tenths of a second."""
    return len(grammar.source) > LARGE_CHARS


def _make_compiler(vocabulary: Vocabulary) -> Compiler:
    tokenizer = tokenizer_of(vocabulary)

    def compile_(grammar: Grammar) -> Compiled:
        matcher = library.matcher_of(tokenizer, grammar.source)
        if matcher.is_error():
            raise BadRequest(f"the grammar does not compile: {library.words(matcher.get_error())}")
        compiled = Compiled(matcher, vocabulary.size, LEAST_BYTES + BYTES_PER_CHARACTER * len(grammar.source))
        first = Constraint(compiled)
        if not first.mask().any():
            raise BadRequest(
                f"the grammar allows no output at all with this model's tokens ({first.fault}); send another one"
            )
        return compiled

    return compile_


def tokenizer_of(vocabulary: Vocabulary) -> Any:
    """The library's own view of the vocabulary."""
    if not vocabulary.eos_token_ids:
        raise BadRequest("structured output needs a model with an end-of-sequence token, and this one has none")
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        log.error("llguidance cannot be imported: %s", error)
        raise BadRequest(library.MISSING) from error
    ends = list(vocabulary.eos_token_ids)
    return LLTokenizer(TokenizerWrapper(_Tokens(list(vocabulary.tokens), ends)), eos_token=ends)


class _Tokens:
    """A vocabulary as the library reads it. It asks for no tokens of a text, as our grammars force none."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: list[int]) -> None:
        self.tokens, self.eos_token_id = tokens, ends[0]
        self.special_token_ids = ends

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("text is not tokenized here")
