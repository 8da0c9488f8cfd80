"""Texts that a compiled grammar allows, drawn byte by byte through its masks, and whether it allows a given one."""

from __future__ import annotations

import json
import random
from functools import cache

import llguidance
import numpy as np

from pdcluster.core.errors import BadRequest

CLOSING = frozenset(b'"}]')
# How JSON is spaced: no blank, or one behind a comma and a colon.
SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@cache
def _tokenizer() -> llguidance.LLTokenizer:
    """A token for each byte, and one that ends."""
    return llguidance.LLTokenizer("byte")


def compiled(schema: object) -> llguidance.LLMatcher:
    """Raises BadRequest for what is refused."""
    source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACING)
    matcher = llguidance.LLMatcher(_tokenizer(), source, log_level=0)
    if matcher.is_error():
        raise BadRequest(matcher.get_error())
    return matcher


def allows(grammar: llguidance.LLMatcher, text: str | bytes) -> bool:
    """As a whole."""
    matcher, data = grammar.deep_copy(), text.encode() if isinstance(text, str) else text
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def drawn(grammar: llguidance.LLMatcher, seed: int, most: int = 400) -> bytes | None:
    """One that ends, None where it did not within twice `most` bytes. Behind `most` it closes whatever it can."""
    generator, matcher, text = random.Random(seed), grammar.deep_copy(), bytearray()
    end, hurry = _tokenizer().eos_token, generator.uniform(0.01, 0.2)
    for index in range(2 * most):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, f"the grammar allows nothing behind {bytes(text)!r}"
        closing = [token for token in allowed if token == end or token in CLOSING]
        printable = [token for token in allowed if 32 <= token < 127]
        is_late = generator.random() < hurry + index / most
        kind = closing if closing and is_late else printable if printable and generator.random() < 0.7 else allowed
        token = generator.choice(kind)
        if token == end:
            assert matcher.is_accepting(), f"the mask ends behind {bytes(text)!r}, the grammar does not"
            return bytes(text)
        assert matcher.consume_token(token), f"the grammar refuses {token} behind {bytes(text)!r}"
        text.append(token)
    return None
