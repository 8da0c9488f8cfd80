"""Grammars of requests, compiled for a model's vocabulary: off the step, each once, kept while in use or while there is
room. The only module that knows xgrammar. It is imported when the first grammar comes, because transformers comes with
it and takes seconds.

A grammar that xgrammar refuses, or does not finish in time, is refused by its own words, at once when it comes again. A
compile cannot be ended from outside. One that takes too long keeps its thread until it is done, at the lowest priority.
While there are few such, another takes its place.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdcluster.api.text.model_text import TextModel
from pdcluster.api.tools.markers import MARKERS
from pdcluster.core.errors import BadRequest, Overloaded, PdclusterError
from pdcluster.core.grammar import MAX_DEPTH, Grammar, depth_of
from pdcluster.engine.sampling.deadline_pool import yield_to_others

# Whether every rule of a grammar in EBNF can come to an end. A rule that needs itself never does: an output that
# enters it goes on until its tokens
# run out.

# Kinds of expressions that have others in them, as xgrammar numbers them in its own JSON of a grammar (version 16).
RULE, SEQUENCE, CHOICES, REPEAT = 4, 5, 6, 8


def endless_rule(serialized: str) -> str | None:
    """The name of a rule that never ends, None when all do. serialized: by `xgrammar.Grammar.serialize_json`."""
    grammar = json.loads(serialized)
    data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
    expressions = [data[start : start + 2 + data[start + 1]] for start in starts]
    bodies = [rule[1] for rule in grammar["rules"]]
    users: list[list[int]] = [[] for _ in bodies]
    for rule, body in enumerate(bodies):
        for used in _rules_in(body, expressions):
            users[used].append(rule)
    ending, waiting = set[int](), list(range(len(bodies)))
    while waiting:
        rule = waiting.pop()
        if rule not in ending and _ends(bodies[rule], expressions, ending):
            ending.add(rule)
            waiting += users[rule]
    endless = next((rule for rule in range(len(bodies)) if rule not in ending), None)
    return None if endless is None else str(grammar["rules"][endless][0])


def _rules_in(index: int, expressions: list[list[int]]) -> list[int]:
    kind, _, *parts = expressions[index]
    if kind in (SEQUENCE, CHOICES):
        return [rule for part in parts for rule in _rules_in(part, expressions)]
    return parts[:1] if kind in (RULE, REPEAT) else []


def _ends(index: int, expressions: list[list[int]], ending: set[int]) -> bool:
    """By the rules that are known to end."""
    kind, _, *parts = expressions[index]
    if kind == RULE:
        return parts[0] in ending
    if kind == SEQUENCE:
        return all(_ends(part, expressions, ending) for part in parts)
    if kind == CHOICES:
        return any(_ends(part, expressions, ending) for part in parts)
    return kind != REPEAT or parts[1] == 0 or parts[0] in ending


log = logging.getLogger(__name__)

# A bit per token id, lowest first.
Mask = NDArray[np.int32]

# Compilers recurse over what they read; it is virtual memory until it is used.
STACK_BYTES = 256 << 20

TRIAL_TOKENS = 16
# Of the compiler's own time, for all tokens that are tried. Each row of a step waits for the slowest one's mask. Most
# need a hundredth of it.
TRIAL_S = 2.0

# Characters before a guilty part that an error quotes.
MOST_BEFORE = 200

# How the library begins its errors: time, file and line.
ORIGIN = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")

NEEDS_LIBRARY = "structured output needs xgrammar, which this node does not have; install pdcluster[grammar] there"


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


class Constraint:
    """One output's place in its grammar."""

    def __init__(self, compiled: Any, grammar: Grammar | None = None) -> None:
        import xgrammar

        self.grammar = grammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = -(-compiled.tokenizer_info.vocab_size // 32)
        self.num_tokens = 0

    def accept(self, token: int) -> bool:
        """False for a token that the grammar does not allow here."""
        self.num_tokens += 1
        return bool(self._matcher.accept_token(token))

    def mask(self) -> Mask:
        words = np.full((1, self._words), -1, np.int32)
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(words, 0)
        else:
            words[:] = 0
        row: Mask = words[0]
        return row


class Grammars:
    """want, trim and close from one thread, find from any; news_fd is readable when a compile is done. load: the
    vocabulary, asked for once."""

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        limits: GrammarLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        make: Callable[[Vocabulary], Any] | None = None,
    ) -> None:
        """make: a compiler for the vocabulary, None for xgrammar's."""
        self._load = load
        self._make = make or _make_compiler
        self._limits = limits or GrammarLimits()
        self._clock = clock
        self._lock = threading.Condition()
        self._loading = threading.Lock()
        self._compiler: Any = None
        self._ready: OrderedDict[Grammar, Any] = OrderedDict()
        self._bytes = 0
        # The grammars in use take more than all may.
        self._is_crowded = False
        # Why each is refused. Not the exception: its traceback would grow each time that it is raised.
        self._refused: OrderedDict[Grammar, str] = OrderedDict()
        # When each wanted compile began. None while it waits, for a thread or for the library.
        self._began: dict[Grammar, float | None] = {}
        self._queue: deque[Grammar] = deque()
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
        return self._is_crowded or self._bytes > self._limits.cache_bytes

    def trim(self, used: Set[Grammar]) -> None:
        """Let go of grammars that nobody uses, those first that were not asked for longest. A row's state can be made
        anew from its grammar only, so one in use stays, whatever it takes."""
        with self._lock:
            for grammar in [each for each in self._ready if each not in used]:
                if self._bytes <= self._limits.cache_bytes:
                    break
                self._bytes -= self._ready.pop(grammar).memory_size_bytes
            self._is_crowded = self._bytes > self._limits.cache_bytes

    def find(self, grammar: Grammar) -> Any:
        """The compiled one, None when it is not, or no longer, here."""
        with self._lock:
            return self._ready.get(grammar)

    def refuse(self, grammar: Grammar, reason: str) -> None:
        """From any thread: it compiles, but can not be used."""
        with self._lock:
            if (compiled := self._ready.pop(grammar, None)) is not None:
                self._bytes -= compiled.memory_size_bytes
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
                self._lock.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return
                grammar = self._queue.popleft()
                self._thread_of[grammar] = threading.get_native_id()
            answer = self._compile(grammar)
            with self._lock:
                del self._began[grammar], self._thread_of[grammar]
                was_late = self._late.pop(grammar, None) is not None
                if self._is_closed:
                    return
                self._keep(grammar, answer)
                self._staff()
                os.eventfd_write(self.news_fd, 1)
                if was_late:
                    return

    def _compile(self, grammar: Grammar) -> Any:
        """The compiled grammar, or a text that says why there is none."""
        began = time.perf_counter()
        try:
            with self._loading:
                if self._compiler is None:
                    self._compiler = self._make(self._load())
            with self._lock:
                self._began[grammar] = self._clock()
            compiled = self._compiler.compile_structural_tag(f'{{"type":"structural_tag","format":{grammar.source}}}')
            _check_ends(grammar)
            _try(compiled)
        except PdclusterError as error:
            return str(error)
        except ImportError as error:
            log.error("xgrammar cannot be imported: %s", error)
            return NEEDS_LIBRARY
        except (
            Exception
        ) as error:  # the library raises RuntimeError and ValueError of many kinds for what it does not take
            return f"the grammar does not compile: {_words(error)}{_behind(self._compiler, grammar)}"
        log.debug("a grammar of %d characters compiled in %.3f s", len(grammar.source), time.perf_counter() - began)
        return compiled

    def _keep(self, grammar: Grammar, answer: Any) -> None:
        if isinstance(answer, str):
            self._remember(grammar, answer)
            return
        self._ready[grammar] = answer
        self._bytes += answer.memory_size_bytes

    def _remember(self, grammar: Grammar, reason: str) -> None:
        self._refused[grammar] = reason
        if len(self._refused) > self._limits.refusals:
            self._refused.popitem(last=False)


def _check_ends(grammar: Grammar) -> None:
    """Raises BadRequest for a client's own grammar that an output may enter and never leave. Those that the router
    wrote have no such part."""
    from xgrammar import Grammar as Parsed

    form = json.loads(grammar.source)
    if isinstance(form, dict) and form.get("type") == "grammar":
        rule = endless_rule(Parsed.from_ebnf(str(form["grammar"])).serialize_json())
        if rule is not None:
            raise BadRequest(f"the grammar's rule {rule} never ends, as it always needs itself; give it a way out")


def _words(error: Exception) -> str:
    """What the library says, without the place in its source, and not endlessly."""
    text = ORIGIN.sub("", str(error).strip()) or type(error).__name__
    return text if len(text) <= 500 else text[:500] + "…"


def _behind(compiler: Any, grammar: Grammar) -> str:
    """The part that does not compile, by the text before it (of a call its tool's name). "" where there are no
    parts.
    """
    for begin, content in parts_of(grammar):
        try:
            compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": content}))
        except Exception:  # what it raises was told
            return f" (behind {begin.strip()})"
    return ""


def parts_of(grammar: Grammar) -> Iterator[tuple[str, object]]:
    """What follows something fixed. A source that is not what this cluster's routers write has none."""
    try:
        found: list[object] = [json.loads(grammar.source)]
    except (ValueError, RecursionError):
        return
    while found:
        form = found.pop()
        if not isinstance(form, dict):
            continue
        content = form.get("content")
        if (
            form.get("type") == "tag"
            and isinstance(content, dict)
            and content.get("type") in ("json_schema", "grammar")
        ):
            yield str(form.get("begin", ""))[:MOST_BEFORE], content
        lists = [form.get(name) for name in ("elements", "tags")]
        found += reversed([content, *(part for parts in lists if isinstance(parts, list) for part in parts)])


def _make_compiler(vocabulary: Vocabulary) -> Any:
    import xgrammar

    if not vocabulary.eos_token_ids:
        raise BadRequest("structured output needs a model with an end-of-sequence token, and this one has none")
    info = xgrammar.TokenizerInfo(
        list(vocabulary.tokens),
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary.size,
        stop_token_ids=list(vocabulary.eos_token_ids),
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _try(compiled: Any) -> None:
    """Say something in it. Raises BadRequest for a grammar that allows nothing (an endless recursion), or that gets
    slower with every token."""
    constraint, generator, stops = (
        Constraint(compiled),
        np.random.default_rng(0),
        compiled.tokenizer_info.stop_token_ids,
    )
    until = time.thread_time() + TRIAL_S
    for number in range(TRIAL_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))
        if not number and not len(allowed):
            raise BadRequest("the grammar allows no output at all with this model's tokens; send another one")
        longer = allowed[~np.isin(allowed, stops)]
        if not len(longer) or not constraint.accept(int(generator.choice(longer))):
            return
        if time.thread_time() > until:
            raise BadRequest(
                f"the grammar took more than {TRIAL_S:g} s for {number + 1} tokens that were tried; send a less "
                "ambiguous one"
            )
