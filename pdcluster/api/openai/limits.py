"""What a request may ask of one model: lengths, token ids in range, and the Sampling from its fields and the model's
defaults.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pdcluster.api.openai.requests import Common
from pdcluster.api.text.model_text import SamplingDefaults
from pdcluster.api.text.text_bound import TextBound
from pdcluster.core.errors import BadRequest, ContextTooLong
from pdcluster.core.grammar import Grammar
from pdcluster.core.sampling import Sampling, Shaping

# Below this many ids, Python is faster than a call of numpy.
FEW = 32

# An array's own `max` is this behind a Python function, which costs more than a thousand ids.
_largest = np.maximum.reduce

SHORTEN = "shorten it or serve with a higher --max-len"

# OpenAI's default for plain completions. A chat goes on to the end of the context.
DEFAULT_COMPLETION_TOKENS = 16


class ModelLimits(Protocol):
    """Limits of a model.
    max_len: prompt and output tokens together.
    vocab_size: number of ids with an embedding.
    """

    @property
    def max_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> array[int]:
    if token_ids and not _are_within(token_ids, vocab_size):
        index, token_id = next(
            (index, token_id) for index, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size
        )
        raise BadRequest(
            f"{param}[{index}] is {token_id}, which is no token id of this model; ids go from 0 to {vocab_size - 1}",
            param,
        )
    return token_ids if isinstance(token_ids, array) else array("i", token_ids)


def _are_within(token_ids: Sequence[int], vocab_size: int) -> bool:
    if isinstance(token_ids, array) and len(token_ids) > FEW:
        return bool(
            _largest(np.frombuffer(token_ids, np.uint32)) < vocab_size
        )  # unsigned: negative ids are larger than all others
    return min(token_ids) >= 0 and max(token_ids) < vocab_size


def check_prompt(num_tokens: int, limits: ModelLimits, param: str, least_output: int = 1) -> None:
    if num_tokens == 0:
        raise BadRequest(f"{param} has no tokens; send a prompt with at least one", param)
    if num_tokens + least_output > limits.max_len:
        raise ContextTooLong(limits.max_len, f"{param} has {num_tokens} tokens; {SHORTEN}", param, num_tokens)


def check_bytes(text: str, bound: TextBound, limits: ModelLimits, param: str) -> None:
    """Bound the bytes of a text before it is tokenized."""
    size = bound.excess_bytes(text, limits.max_len)
    if size:
        however = f"{param} has {size} bytes of text, which makes more; {SHORTEN}"
        raise ContextTooLong(limits.max_len, however, param, limits.max_len)


def check_text(text: str, bound: TextBound, limits: ModelLimits, param: str) -> None:
    """Check, before a prompt is tokenized, whether it can fit."""
    check_bytes(text, bound, limits, param)
    if bound.is_clearly_over(text, limits.max_len):
        however = f"{param} has {len(text)} characters of text, which make more; {SHORTEN}"
        raise ContextTooLong(limits.max_len, however, param, limits.max_len)


def check_output(num_tokens: int, limits: ModelLimits, param: str) -> None:
    """Bound the ids to be detokenized. No model's answer has more."""
    if num_tokens > limits.max_len:
        raise BadRequest(
            f"{param} has {num_tokens} ids, this model takes and gives {limits.max_len} at most; send them in parts",
            param,
        )


def output_tokens(asked: int | None, default: int | None, num_prompt: int, limits: ModelLimits, param: str) -> int:
    """max_tokens of one request: the requested value if it fits, else the default or all that is left."""
    left = limits.max_len - num_prompt
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        however = f"the prompt's {num_prompt} tokens and {param} {asked} make {num_prompt + asked}"
        raise ContextTooLong(limits.max_len, f"{however}; lower {param} to at most {left} or shorten the prompt", param)
    return asked


def check_least(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens is {min_tokens}, more than the {max_tokens} output tokens allowed; lower it or raise "
            "max_tokens",
            "min_tokens",
        )


def build_sampling(
    request: Common,
    defaults: SamplingDefaults,
    limits: ModelLimits,
    *,
    max_tokens: int,
    seed: int,
    logprobs: int | None,
    shaping: Shaping | None = None,
    grammar: Grammar | None = None,
) -> Sampling:
    min_tokens = request.min_tokens or 0
    check_least(min_tokens, max_tokens)
    top_k = defaults.top_k if request.top_k is None else request.top_k
    top_p = defaults.top_p if request.top_p is None else request.top_p
    min_p = defaults.min_p if request.min_p is None else request.min_p
    return Sampling(
        max_tokens=max_tokens,
        seed=seed,
        min_tokens=min_tokens,
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        # neutral values switch the filter off
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=top_p if top_p is not None and top_p < 1 else None,
        min_p=min_p if min_p else None,
        stop_token_ids=tuple(check_token_ids(request.stop_token_ids, limits.vocab_size, "stop_token_ids"))
        if request.stop_token_ids
        else (),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        shaping=shaping,
        grammar=grammar,
    )


def wire_seed(seed: int) -> int:
    """OpenAI's seeds are signed 64-bit numbers and the generator's key has 63 bits. The same seed always gives the same
    key.
    """
    return seed & (2**63 - 1)
