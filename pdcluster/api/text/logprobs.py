"""Logprobs in OpenAI's two shapes: a list of objects for chat, parallel lists for plain completions. A prompt's are in
vLLM's shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from pdcluster.api.text.choice_text import Token
from pdcluster.api.text.detokenizer import Pieces

# Stands for minus infinity, which JSON cannot write.
LEAST_LOGPROB = -9999.0


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """rank: 1 for the most likely; null for the prompt's own token where its node is of an earlier version."""

    logprob: float
    rank: int | None
    decoded_token: str


# One per token of the prompt, by token id, as in vLLM; null for the first.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


def prompt_logprobs(tokens: Sequence[Token], pieces: Pieces) -> PromptLogprobs:
    return [_ranked(token, pieces) for token in tokens]


def _ranked(token: Token, pieces: Pieces) -> dict[int, PromptLogprob] | None:
    if token.logprobs is None:
        return None
    own, rank = _finite(token.logprobs.logprob), token.logprobs.rank
    found = {token.id: PromptLogprob(own, rank, _readable(pieces.of(token.id)))}
    for rank, (other, logprob) in enumerate(zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True), 1):
        found[other] = PromptLogprob(_finite(logprob), rank, _readable(pieces.of(other)))
    return found


def chat_logprobs(tokens: Sequence[Token], pieces: Pieces) -> ChatLogprobs:
    content = []
    for token in tokens:
        if token.logprobs is None:
            continue
        raw = pieces.of(token.id)
        alternatives = [
            TopLogprob(_readable(pieces.of(other)), _finite(logprob), list(pieces.of(other)))
            for other, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
        ]
        content.append(ChatTokenLogprob(_readable(raw), _finite(token.logprobs.logprob), list(raw), alternatives))
    return ChatLogprobs(content)


def completion_logprobs(tokens: Sequence[Token], pieces: Pieces) -> CompletionLogprobs:
    reply = CompletionLogprobs([], [], [], [])
    for token in tokens:
        reply.tokens.append(_unambiguous(pieces.of(token.id)))
        reply.token_logprobs.append(None if token.logprobs is None else _finite(token.logprobs.logprob))
        reply.top_logprobs.append(_alternatives(token, pieces))
        reply.text_offset.append(token.offset)
    return reply


def _alternatives(token: Token, pieces: Pieces) -> dict[str, float] | None:
    """By text, best first. The token itself is always included, as in OpenAI. None when none were requested."""
    if token.logprobs is None or not token.logprobs.top_ids:
        return None
    found: dict[str, float] = {}
    for other, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True):
        found.setdefault(_unambiguous(pieces.of(other)), _finite(logprob))
    found.setdefault(_unambiguous(pieces.of(token.id)), _finite(token.logprobs.logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _readable(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _unambiguous(raw: bytes) -> str:
    """The token's text. A part of a character is its bytes in hex, as OpenAI writes them, so that lists and keys stay
    distinct.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in raw])
