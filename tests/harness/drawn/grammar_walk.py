"""Texts that a grammar allows, drawn byte by byte through its masks, and whether it allows a given one."""

from __future__ import annotations

import random
from typing import NamedTuple

from llguidance import LLMatcher

from pdcluster.api.structured import library
from pdcluster.api.structured.forms import Form, check_grammar, grammar_of, json_form
from pdcluster.core.errors import BadRequest

EOS = library.byte_tokenizer().eos_token
CLOSING = b'"}]'


class Walkable(NamedTuple):
    """A grammar for a vocabulary of single bytes."""

    matcher: LLMatcher

    def begin(self) -> LLMatcher:
        return self.matcher.deep_copy()


def compiled(form: Form, param: str = "schema") -> Walkable:
    """Raises BadRequest for what the library does not take."""
    return walkable(grammar_of(form, param).source, param)


def of_schema(schema: object) -> Walkable:
    """Raises BadRequest for what is refused, also where it is found after some bytes."""
    form = json_form(schema, "schema")
    check_grammar(grammar_of(form, "schema"), "schema")
    return compiled(form)


def walkable(source: str, param: str = "source") -> Walkable:
    matcher = library.matcher_of(library.byte_tokenizer(), source)
    if matcher.is_error():
        raise BadRequest(f"{param} makes a grammar that cannot be kept: {library.words(matcher.get_error())}", param)
    return Walkable(matcher)


def allows(grammar: Walkable, text: str | bytes) -> bool:
    """As a whole."""
    matcher = grammar.begin()
    data = text.encode() if isinstance(text, str) else text
    return all(matcher.try_consume_tokens([byte]) for byte in data) and matcher.is_accepting()


def begins(grammar: Walkable, text: str) -> bool:
    """As the beginning of a whole."""
    matcher = grammar.begin()
    return all(matcher.try_consume_tokens([byte]) for byte in text.encode())


def texts(grammar: Walkable, letters: str, most: int) -> list[str]:
    """All that it allows of so many letters at most."""
    matcher, found = grammar.begin(), list[str]()

    def walk(text: str) -> None:
        if matcher.is_accepting():
            found.append(text)
        for letter in letters if len(text) < most else "":
            if matcher.try_consume_tokens([ord(letter)]):
                walk(text + letter)
                matcher.rollback(1)

    walk("")
    return found


def drawn(grammar: Walkable, seed: int, most: int = 400) -> bytes | None:
    """One that ends, None where it did not within twice `most` bytes. Behind `most` it closes whatever it can."""
    generator, matcher, text = random.Random(seed), grammar.begin(), bytearray()
    hurry = generator.uniform(0.01, 0.2)
    for index in range(2 * most):
        bits = matcher.compute_bitmask()
        assert not matcher.is_error(), f"behind {bytes(text)!r}: {matcher.get_error()}"
        allowed = [token for token in (*range(256), EOS) if bits[token >> 3] >> (token & 7) & 1]
        closing = [token for token in allowed if token == EOS or token in CLOSING]
        printable = [token for token in allowed if 32 <= token < 127]
        is_late = generator.random() < hurry + index / most
        kind = closing if closing and is_late else printable if printable and generator.random() < 0.7 else allowed
        token = generator.choice(kind)
        if token == EOS:
            assert matcher.is_accepting(), f"the mask ends behind {bytes(text)!r}, the grammar does not"
            return bytes(text)
        assert matcher.consume_token(token), f"the grammar refuses {token} behind {bytes(text)!r}"
        text.append(token)
    return None
