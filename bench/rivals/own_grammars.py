"""This tree's structured output behind `bench.rivals.grammar_worker`.

python -m bench.rivals.own_grammars
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from bench.rivals.grammar_worker import Place, Worker
from pdcluster.api.structured import library
from pdcluster.api.structured.forms import check_grammar, grammar_of, json_form
from pdcluster.core.errors import BadRequest


class _Tokens:
    """What the library asks of a tokenizer. It is never called: no grammar here forces tokens."""

    def __init__(self, tokens: Sequence[bytes], eos: Sequence[int]) -> None:
        self.tokens, self.eos_token_id, self.bos_token_id = tokens, eos[0], None
        self.special_token_ids = list(eos)

    def __call__(self, text: bytes) -> list[int]:
        return []


class _Matcher:
    """A matcher with masks of its own."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words = matcher, words

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    def mask(self) -> NDArray[np.int32]:
        words = np.full((1, self._words), -1, np.int32)
        fill_next_token_bitmask(self._matcher, words, 0)
        row: NDArray[np.int32] = words[0]
        return row


class OwnGrammars:
    """A schema becomes a form, that a grammar, that a matcher, which each output copies."""

    version = version("llguidance")

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._words = 0

    def use(self, tokens: Sequence[bytes], eos: Sequence[int]) -> None:
        wrapper = llguidance.TokenizerWrapper(_Tokens(tokens, eos))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=list(eos))
        self._words = -(-len(tokens) // 32)

    def compile(self, schema: Any) -> Any:
        """Raises ValueError for what is refused."""
        matcher = library.matcher_of(self._tokenizer, source_of(schema))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def begin(self, compiled: Any) -> Place:
        return _Matcher(compiled.deep_copy(), self._words)


def source_of(schema: Any) -> str:
    """The text of its grammar. Raises ValueError for what is refused."""
    try:
        grammar = grammar_of(json_form(schema, "schema"), "schema")
        check_grammar(grammar, "schema")
    except BadRequest as error:
        raise ValueError(str(error)) from error
    return grammar.source


if __name__ == "__main__":
    Worker(OwnGrammars()).serve()
