"""How a request wants its output tokens chosen, and what is told beside the tokens. Plain parts of messages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdcluster.core.bounds import Count, Positive, Seconds, Share
from pdcluster.core.grammar import Grammar

MAX_BIASES = 1024
MAX_BAD_WORDS = 128
# Numbers that a step may have to look at for each token of a row. A bad word is two: at the start of a text, and behind
# a space.
MAX_BAD_WORD_TOKENS = 32

# Alternatives beside a token.
MAX_LOGPROBS = 1024


# Logits are divided by it. Less makes infinite ones.
LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0


class Shaping(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a row's logits by what it said before, or token by token. Penalties at their neutral values change
    nothing.

    repetition: divides positive logits of tokens in prompt or output, multiplies negative ones.
    presence, frequency: subtracted from logits of output tokens, once, and once per occurrence.
    biases: added.
    bad_words: token sequences of which the last token is never drawn after the others.
    """

    repetition: Annotated[float, Meta(ge=LEAST_REPETITION, le=MOST_REPETITION)] = 1.0
    presence: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    biases: Annotated[
        tuple[tuple[Count, Annotated[float, Meta(ge=-100.0, le=100.0)]], ...], Meta(max_length=MAX_BIASES)
    ] = ()
    bad_words: Annotated[
        tuple[Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)], ...],
        Meta(max_length=2 * MAX_BAD_WORDS),
    ] = ()

    @property
    def counts_tokens(self) -> bool:
        """Whether it depends on which tokens came before."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How output tokens are chosen. temperature 0 is greedy. None switches a filter off.

    seed and choice key the counter-based generator together with the token's position. So any node draws the same
    numbers.

    logprobs: number of alternatives beside each output token's own logprob (0: only its own). None for none.
    shaping: None for nothing.
    grammar: None for anything.
    """

    max_tokens: Positive
    seed: int
    choice: Count = 0
    min_tokens: Count = 0
    temperature: Seconds = 1.0
    top_k: Positive | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    stop_token_ids: tuple[Count, ...] = ()
    ignore_eos: bool = False
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    shaping: Shaping | None = None
    grammar: Grammar | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position: of the token itself, and of the most likely tokens, best first.

    rank: of the token itself, 1 for the most likely; None where nobody asked. A node of an earlier version says none.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: Positive | None = None
