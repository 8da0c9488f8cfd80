"""Texts that a compiled grammar allows, drawn byte by byte through its masks, and whether it allows a given one."""

from __future__ import annotations

import json
import random
from functools import cache

import xgrammar

EOS = 256
CLOSING = b'"}]'


@cache
def _compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(
        [bytes([byte]) for byte in range(256)] + [b""], xgrammar.VocabType.RAW, vocab_size=EOS + 1, stop_token_ids=[EOS]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compiled(form: dict) -> xgrammar.CompiledGrammar:
    return _compiler().compile_structural_tag(json.dumps({"type": "structural_tag", "format": form}))


def allows(grammar: xgrammar.CompiledGrammar, text: str | bytes) -> bool:
    """As a whole."""
    matcher = xgrammar.GrammarMatcher(grammar)
    data = text.encode() if isinstance(text, str) else text
    return all(matcher.accept_token(byte) for byte in data) and matcher.accept_token(EOS)


def texts(grammar: xgrammar.CompiledGrammar, pending_messages: str, most: int) -> list[str]:
    """All that it allows of so many letters at most."""
    matcher, found = xgrammar.GrammarMatcher(grammar), list[str]()

    def walk(text: str) -> None:
        if matcher.accept_token(EOS):
            found.append(text)
            matcher.rollback(1)
        for letter in pending_messages if len(text) < most else "":
            if matcher.accept_token(ord(letter)):
                walk(text + letter)
                matcher.rollback(1)

    walk("")
    return found


def drawn(grammar: xgrammar.CompiledGrammar, seed: int, most: int = 400) -> bytes | None:
    """One that ends, None where it did not within `most` bytes. The longer it is, the more it wants to end."""
    generator, matcher, text = random.Random(seed), xgrammar.GrammarMatcher(grammar), bytearray()
    words = xgrammar.allocate_token_bitmask(1, EOS + 1)
    hurry = generator.uniform(0.01, 0.2)
    for index in range(most):
        matcher.fill_next_token_bitmask(words, 0)
        bits = [int(word) & 0xFFFFFFFF for word in words[0].tolist()]
        allowed = [token for token in range(EOS + 1) if bits[token >> 5] >> (token & 31) & 1]
        assert allowed, f"the grammar allows nothing behind {bytes(text)!r}"
        closing = [token for token in allowed if token == EOS or token in CLOSING]
        printable = [token for token in allowed if 32 <= token < 127]
        is_late = generator.random() < hurry + index / most
        kind = closing if closing and is_late else printable if printable and generator.random() < 0.7 else allowed
        token = generator.choice(kind)
        assert matcher.accept_token(token)
        if token == EOS:
            return bytes(text)
        text.append(token)
    return None
