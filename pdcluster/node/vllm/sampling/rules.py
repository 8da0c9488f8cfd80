"""What our logits processor does for a row beside vLLM's own sampling, by the code of our own engine.

Its state follows from the emitted tokens alone: those at the end of the prompt that earlier attempts emitted, and the
output. So a replay goes on exactly. It knows torch, and no vLLM.

A row that cannot go on must end, and a logits processor has no way to say so. It forces a token that no grammar allows
and that stands for no text. The row's parameters name it as a stop token, and whoever reads the output knows it.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster.core.bounds import DECODE_ERRORS, Count
from pdcluster.core.errors import BadRequest, Overloaded
from pdcluster.core.grammar import Grammar
from pdcluster.core.history import History, history_of
from pdcluster.core.sampling import Sampling
from pdcluster.core.step import Row
from pdcluster.engine.sampling.constraint import MASK_S, Constraints, masked, unbound
from pdcluster.engine.sampling.grammar import GrammarLimits, Grammars, Mask, Vocabulary, vocabulary_of
from pdcluster.engine.sampling.penalties import SamplingRow, shaped

log = logging.getLogger(__name__)

# Its name among the extra arguments of vLLM's sampling parameters.
RULES_KEY = "pdcluster_rules"
# Longest wait of a batch for a row's grammar, which a router has tried within 2 s. The row ends then.
COMPILE_S = 5.0
LOOK_MS = 50
# Ranks that sample side by side must not decide by their own clocks.
NO_LIMIT_S = 3600.0

# Compiled at the start, so that no row waits for the vocabulary: 2 s for 150,000 tokens.
WARMING = Grammar('start: "a"')

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)


class RowRules(msgspec.Struct, frozen=True, array_like=True):
    """sampling: with what vLLM does left out. num_emitted: last tokens of the prompt that count as output. dead_token:
    forced when the row cannot go on; None without a grammar."""

    sampling: Sampling
    num_emitted: Count = 0
    dead_token: Count | None = None


_DECODER = msgspec.msgpack.Decoder(RowRules)


def encode_rules(rules: RowRules) -> bytes:
    return msgspec.msgpack.encode(rules)


def decode_rules(data: object) -> RowRules:
    """Raises ValueError, as vLLM expects it."""
    if not isinstance(data, bytes):
        raise ValueError(f"{RULES_KEY} must be bytes, not {type(data).__name__}")
    try:
        return _DECODER.decode(data)
    except DECODE_ERRORS as error:
        raise ValueError(f"{RULES_KEY} cannot be read: {error}") from error


def dead_token_of(vocabulary: Vocabulary, stop_token_ids: Sequence[int] = ()) -> int | None:
    """The first token that is neither text nor an end; None where the model has none."""
    ends = {*vocabulary.eos_token_ids, *stop_token_ids}
    return next((token for token, text in enumerate(vocabulary.tokens) if not text and token not in ends), None)


class RuledRow:
    """A row with rules, and what it emitted so far. Made anew when vLLM takes the row into its batch again."""

    def __init__(self, key: str, rules: RowRules, prompt: Sequence[int]) -> None:
        cut = len(prompt) - rules.num_emitted
        if cut < 0:
            raise ValueError(f"{rules.num_emitted} emitted tokens, but a prompt of {len(prompt)}")
        self.key = key
        self.rules = rules
        self.began_at = time.monotonic()
        self._prompt = np.array(prompt[:cut], np.int32)
        self._emitted = np.array(prompt[cut:], np.int32)
        self._restart()

    def _restart(self) -> None:
        self.output = self._emitted
        self._buffer = self._emitted.copy()
        self.history: History | None = history_of(self.rules.sampling.shaping, self._prompt, self._emitted)

    def take(self, output: Sequence[int]) -> None:
        """The tokens that vLLM has drawn for the row, all of them."""
        known = len(self.output) - len(self._emitted)
        if len(output) < known:  # vLLM took some back
            self._restart()
            known = 0
        for token in output[known:]:
            self._append(token)

    def _append(self, token: int) -> None:
        length = len(self.output)
        if length == len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty(max(64, length), np.int32)))
        self._buffer[length] = token
        self.output = self._buffer[: length + 1]
        if self.history is not None:
            self.history.add(token)

    def sampling_row(self) -> SamplingRow:
        return SamplingRow(self.rules.sampling, 0, len(self.output), self.history)

    def step_row(self) -> Row:
        """As the code of grammars wants it."""
        return Row(
            self.key, _NO_IDS, 0, _NO_IDS, self.rules.sampling, output_index=len(self.output), output=self.output
        )


class BatchRules:
    """Applies the rules of a batch. Owned by the thread that samples.

    alone: whether no other rank samples the same rows. Else nothing may depend on this process's time.
    """

    def __init__(self, load: Callable[[], Vocabulary], eos_token_ids: Sequence[int], *, alone: bool = True) -> None:
        self._eos = tuple(eos_token_ids)
        self._grammars = Grammars(load, None if alone else GrammarLimits(compile_s=NO_LIMIT_S))
        self._constraints = Constraints(self._grammars, self._eos, MASK_S if alone else NO_LIMIT_S)
        self._wait_s = COMPILE_S if alone else NO_LIMIT_S
        self._keys = count()
        self._news = select.poll()
        self._news.register(self._grammars.news_fd, select.POLLIN)

    @classmethod
    def for_model(
        cls, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int], *, alone: bool = True
    ) -> BatchRules:
        made = cls(lambda: vocabulary_of(model_dir, vocab_size, eos_token_ids), eos_token_ids, alone=alone)
        made._is_compiled(WARMING)
        return made

    def row(self, rules: RowRules, prompt: Sequence[int]) -> RuledRow:
        """Begins to compile the row's grammar, while vLLM computes its prompt."""
        row = RuledRow(str(next(self._keys)), rules, prompt)
        if rules.sampling.grammar is not None:
            self._is_compiled(rules.sampling.grammar)
        return row

    def apply(self, logits: Tensor, rows: Mapping[int, RuledRow]) -> Tensor:
        """rows: by their place in logits, float32 [rows, vocabulary], which are changed."""
        if not rows:
            return logits
        places = list(rows)
        picked = logits[places]
        masks, dead = self._masks(list(rows.values()))
        free = [row.sampling_row() for row in rows.values()]
        for place in masks:
            free[place] = SamplingRow(unbound(free[place].sampling), 0, free[place].output_index, free[place].history)
        changed = masked(shaped(picked, free, self._eos), masks)
        for place, reason in dead.items():
            self._end(changed, place, rows[places[place]], reason)
        logits[places] = changed
        return logits

    def close(self) -> None:
        self._constraints.close()
        self._grammars.close()

    # ------------------------------------------------------------ grammars

    def _masks(self, rows: Sequence[RuledRow]) -> tuple[dict[int, Mask], dict[int, str]]:
        """By place: what rows with a grammar may say next, and why others cannot go on."""
        ready: list[int] = []
        dead: dict[int, str] = {}
        for place, row in enumerate(rows):
            if row.rules.sampling.grammar is None:
                continue
            if (reason := self._await(row.rules.sampling.grammar, row.began_at)) is None:
                ready.append(place)
            else:
                dead[place] = reason
        if not ready:
            return {}, dead
        masks, errors = self._constraints.of_step([rows[place].step_row() for place in ready])
        if self._grammars.is_full:
            self._grammars.trim({row.rules.sampling.grammar for row in rows if row.rules.sampling.grammar})
        dead |= {ready[index]: error.reason for index, error in errors.items()}
        return {ready[index]: mask for index, mask in masks.items()}, dead

    def _await(self, grammar: Grammar, began_at: float) -> str | None:
        """Wait until the grammar is compiled. Why it will not be, else None."""
        while True:
            answer = self._is_compiled(grammar)
            if answer is True:
                return None
            if isinstance(answer, str):
                return answer
            if time.monotonic() - began_at >= self._wait_s:
                return f"the grammar did not compile within {self._wait_s:g} s"
            self._news.poll(LOOK_MS)
            self._grammars.take_news()

    def _is_compiled(self, grammar: Grammar) -> bool | str:
        try:
            return self._grammars.want(grammar)
        except Overloaded:
            return False
        except BadRequest as error:
            return str(error)

    def _end(self, logits: Tensor, place: int, row: RuledRow, reason: str) -> None:
        log.warning("a row with a grammar ends after %d tokens: %s", len(row.output), reason)
        assert row.rules.dead_token is not None
        logits[place] = torch.finfo(torch.float32).min
        logits[place, row.rules.dead_token] = 0.0
