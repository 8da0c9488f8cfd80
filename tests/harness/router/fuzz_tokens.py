"""What a simulated model says: each token follows from the prompt, the seed, the choice and the position. So a token
that is wrong, doubled or missing is seen at once."""

from __future__ import annotations

import random
from array import array
from functools import lru_cache
from hashlib import blake2b

from fuzz_plan import VOCAB, Ask

from pdcluster.core.messages import FinishReason, Work

EOS = 2
FIRST_WORD = 10
PREFIX_TOKENS = 48
TOKEN_BYTES = 4


def prompt_of(seed: int, ask: Ask) -> array[int]:
    """Choices of one prompt have it in common."""
    own = random.Random(f"{seed}/{ask.parent or ask.name}")
    tokens = [own.randrange(FIRST_WORD, VOCAB) for _ in range(ask.num_prompt)]
    if ask.prefix is not None:
        shared = random.Random(f"{seed}/{ask.prefix}")
        prefix = [shared.randrange(FIRST_WORD, VOCAB) for _ in range(PREFIX_TOKENS)]
        tokens = (prefix + tokens)[: ask.num_prompt]
    return array("i", tokens)


def eos_at(seed: int) -> int | None:
    """At which position a model ends its answer by itself."""
    return (None, None, None, 0, 1, 3, 9)[seed % 7]


def said(prompt: bytes, seed: int, choice: int, position: int, weights: str) -> int:
    if position == eos_at(seed):
        return EOS
    digest = blake2b(f"{seed}/{choice}/{position}".encode(), key=_key(prompt, weights), digest_size=4).digest()
    return FIRST_WORD + int.from_bytes(digest, "big") % (VOCAB - FIRST_WORD)


@lru_cache(maxsize=4096)
def _key(prompt: bytes, weights: str) -> bytes:
    return blake2b(prompt, key=weights.encode(), digest_size=16).digest()


def token_at(work: Work, position: int, weights: str) -> int:
    prompt = work.token_ids[: TOKEN_BYTES * work.num_prompt]
    return said(prompt, work.sampling.seed, work.sampling.choice, position, weights)


def ending(work: Work, num_output: int, last: int, max_len: int) -> FinishReason | None:
    """Why a node ends an answer of so many tokens; None: it goes on."""
    if last == EOS and not work.sampling.ignore_eos:
        return "eos"
    is_full = num_output >= work.sampling.max_tokens or work.num_prompt + num_output >= max_len
    return "length" if is_full else None
