"""Our sampling parameters as vLLM's, and vLLM's logprobs as ours. What does not map is refused by name.

1. vLLM counts all of a replay's prompt as prompt. So max_tokens and min_tokens are what is left, and presence and
   frequency penalties of a replay are our processor's work.
2. Which tokens end an answer is our decision: vLLM gets them as stop tokens and ignores its own.
3. Our processor has the bad words by id, the grammar, and those penalties and biases whose order differs: vLLM adds
   biases before penalties. Where there is no processor all of these are refused.
4. top_k, top_p and min_p are vLLM's own. It filters by min_p first, so top_p is of what min_p left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import PARAM
from pdcluster.core.sampling import Sampling, Shaping, TokenLogprobs
from pdcluster.node.vllm.engine.interface import Finish
from pdcluster.node.vllm.sampling.rules import RULES_KEY, RowRules, encode_rules

if TYPE_CHECKING:
    from vllm import SamplingParams

# Of vLLM's: it raises smaller temperatures, and its GPU runner keeps so many stop tokens of a row.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
MAX_STOP_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SamplerFacts:
    """What the mapping depends on.

    eos_token_ids: as our checkpoint code finds them.
    max_logprobs: vLLM's --max-logprobs; -1 for the whole vocabulary.
    has_rules: whether our logits processor runs. Not with speculation in vLLM's first runner, nor in pooling models.
    dead_token: of `rules.dead_token_of`; None where the model has none, and grammars are refused.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    has_rules: bool = True
    dead_token: int | None = None


class VllmLogprob(Protocol):
    logprob: float
    rank: int | None


def to_vllm(sampling: Sampling, num_emitted: int, facts: SamplerFacts) -> SamplingParams:
    """num_emitted: last tokens of the prompt that earlier attempts emitted. Raises BadRequest."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    _check(sampling, facts)
    shaping = sampling.shaping or Shaping()
    ours = _is_ours(shaping, num_emitted)
    rules = _rules(sampling, num_emitted, facts)
    min_left = max(min(sampling.min_tokens, sampling.max_tokens) - num_emitted, 0)
    return SamplingParams(
        max_tokens=sampling.max_tokens - num_emitted,
        min_tokens=0 if _counts_min_tokens(sampling) else min_left,
        seed=seed_of(sampling.seed, sampling.choice),
        temperature=sampling.temperature,
        top_k=1 if sampling.top_p == 0.0 else sampling.top_k or 0,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p or 0.0,
        stop_token_ids=list(_stop_tokens(sampling, facts)),
        ignore_eos=True,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        repetition_penalty=1.0 if ours else shaping.repetition,
        presence_penalty=0.0 if ours else shaping.presence,
        frequency_penalty=0.0 if ours else shaping.frequency,
        logit_bias=None if ours or not shaping.biases else dict(shaping.biases),
        extra_args=None if rules is None else {RULES_KEY: encode_rules(rules)},
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
        skip_clone=True,
    )


def check(sampling: Sampling, num_emitted: int, facts: SamplerFacts) -> None:
    """Raises BadRequest for what `to_vllm` would refuse. Needs no vllm."""
    _check(sampling, facts)
    _rules(sampling, num_emitted, facts)


def for_prefill(sampling: Sampling) -> SamplingParams:
    """Of a leg that computes the prompt alone. The decode node draws every token, so this one's is dropped."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        prompt_logprobs=sampling.prompt_logprobs,
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
        skip_clone=True,
    )


def seed_of(seed: int, choice: int) -> int:
    """One seed of 63 bits, the same on every node. vLLM takes no generator of its own for -1."""
    data = (seed & (1 << 64) - 1).to_bytes(8, "little") + (choice & (1 << 64) - 1).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"pdcluster.seed").digest(), "little") >> 1


def ending_of(sampling: Sampling, facts: SamplerFacts, stop_token: int) -> Finish:
    """Why an answer ended that vLLM stopped at a token: "eos", "stop", or "error" where its grammar could not be
    followed."""
    if sampling.grammar is not None and stop_token == facts.dead_token:
        return "error"
    return "eos" if not sampling.ignore_eos and stop_token in facts.eos_token_ids else "stop"


def from_vllm_logprobs(
    entries: Mapping[int, VllmLogprob], token: int, count: int, *, ranked: bool = False
) -> TokenLogprobs:
    """vLLM's entry of one position: the token itself and the `count` best. ranked: and the token's rank."""
    own = entries[token]
    best = sorted(entries.items(), key=lambda each: (-each[1].logprob, each[1].rank or 0))[:count]
    return TokenLogprobs(
        own.logprob,
        tuple(found for found, _ in best),
        tuple(entry.logprob for _, entry in best),
        own.rank if ranked else None,
    )


# ------------------------------------------------------------ inside


def _is_ours(shaping: Shaping, num_emitted: int) -> bool:
    """Whether our processor does the penalties and biases. Rules 1 and 3."""
    counts_output = shaping.presence != 0.0 or shaping.frequency != 0.0
    return (counts_output and num_emitted > 0) or (shaping.counts_tokens and bool(shaping.biases))


def _counts_min_tokens(sampling: Sampling) -> bool:
    """Whether our processor does, since a grammar may leave nothing but an end, and vLLM withholds ends that are
    ignored."""
    return sampling.grammar is not None or sampling.ignore_eos


def _stop_tokens(sampling: Sampling, facts: SamplerFacts) -> tuple[int, ...]:
    ends = () if sampling.ignore_eos else facts.eos_token_ids
    dead = () if sampling.grammar is None or facts.dead_token is None else (facts.dead_token,)
    return tuple(dict.fromkeys((*sampling.stop_token_ids, *ends, *dead)))


def _rules(sampling: Sampling, num_emitted: int, facts: SamplerFacts) -> RowRules | None:
    shaping = sampling.shaping or Shaping()
    if not _is_ours(shaping, num_emitted):
        shaping = Shaping(bad_words=shaping.bad_words)
    needs_min = sampling.min_tokens > num_emitted and _counts_min_tokens(sampling)
    needs_min &= sampling.grammar is not None or bool(sampling.stop_token_ids)
    if sampling.grammar is None and shaping == Shaping() and not needs_min:
        return None
    if not facts.has_rules:
        raise _needs_rules(sampling, num_emitted)
    ours = replace(
        sampling,
        seed=0,
        min_tokens=sampling.min_tokens if needs_min else 0,
        shaping=None if shaping == Shaping() else shaping,
        logprobs=None,
        prompt_logprobs=None,
    )
    return RowRules(ours, num_emitted, facts.dead_token if sampling.grammar is not None else None)


def _needs_rules(sampling: Sampling, num_emitted: int) -> BadRequest:
    shaping = sampling.shaping or Shaping()
    way_out = "these vLLM nodes run without our logits processor (speculative decoding); start them without it"
    if sampling.grammar is not None:
        return BadRequest(f"structured output is not possible here: {way_out}", PARAM)
    if shaping.bad_words:
        return BadRequest(f"bad_words are not possible here: {way_out}", "bad_words")
    if shaping.counts_tokens and num_emitted:
        return BadRequest(f"penalties cannot be continued by another node: {way_out}", "presence_penalty")
    if shaping.counts_tokens:
        return BadRequest(f"logit_bias beside penalties is not possible here: {way_out}", "logit_bias")
    return BadRequest(f"min_tokens beside ignore_eos is not possible here: {way_out}", "min_tokens")


def _check(sampling: Sampling, facts: SamplerFacts) -> None:
    _check_temperature(sampling.temperature)
    _check_logprobs("logprobs", sampling.logprobs, facts)
    _check_logprobs("prompt_logprobs", sampling.prompt_logprobs, facts)
    if not facts.has_rules and sampling.min_p:
        raise BadRequest("vLLM heeds no min_p with speculative decoding; leave it out, use top_p", "min_p")
    if not facts.has_rules and sampling.shaping is not None and sampling.shaping.biases:
        raise BadRequest("vLLM heeds no logit_bias with speculative decoding; leave it out", "logit_bias")
    if sampling.grammar is not None and facts.dead_token is None:
        raise BadRequest("structured output needs a model with a token that is no text, and this one has none", PARAM)
    if len(_stop_tokens(sampling, facts)) > MAX_STOP_TOKENS:
        most = MAX_STOP_TOKENS - len(facts.eos_token_ids) - 1
        raise BadRequest(f"vLLM takes at most {most} stop tokens beside the model's own; send fewer", "stop_token_ids")
    _check_ids(sampling, facts.vocab_size)


def _check_temperature(temperature: float) -> None:
    if 0.0 < temperature < LEAST_TEMPERATURE:
        raise BadRequest(
            f"vLLM takes no temperature between 0 and {LEAST_TEMPERATURE}, but {temperature:g} was sent; send 0",
            "temperature",
        )
    if temperature > MOST_TEMPERATURE:
        raise BadRequest(
            f"vLLM takes temperatures up to {MOST_TEMPERATURE:g}, but {temperature:g} was sent; send a lower one",
            "temperature",
        )


def _check_logprobs(name: str, wanted: int | None, facts: SamplerFacts) -> None:
    if wanted is not None and wanted > facts.max_logprobs >= 0:
        raise BadRequest(
            f"{name} may be at most {facts.max_logprobs} on these nodes, not {wanted}; start them with a greater "
            "--max-logprobs",
            name,
        )


def _check_ids(sampling: Sampling, vocab_size: int) -> None:
    shaping = sampling.shaping or Shaping()
    named: Sequence[tuple[str, Sequence[int]]] = (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", [token for token, _ in shaping.biases]),
        ("bad_words", [token for word in shaping.bad_words for token in word]),
    )
    for name, ids in named:
        if (most := max(ids, default=-1)) >= vocab_size:
            raise BadRequest(f"{name} has token {most}, but the model's vocabulary has {vocab_size}", name)
