"""Turns logits into tokens and logprobs. It keeps no state: a token depends only on its row's logits, sampling,
position and history.

Order: shaping (penalties, biases, bans), grammars, temperature, top_k, top_p (of what top_k left), min_p (of the most
likely). Every filter is one threshold, so tokens that tie with the last one kept are kept too. No order of sorting can
change the result. One uniform number per token, inverse CDF over token ids in float64. Logprobs are of the raw logits,
before all of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster.core.messages import Sampling, TokenLogprobs
from pdcluster.engine.sampling.constraint import masked
from pdcluster.engine.sampling.grammar import Mask
from pdcluster.engine.sampling.penalties import SamplingRow, shaped

# Counter-based random numbers: Philox4x32-10 over arrays. The same (seed, choice, position) gives the same number on
# any node, in any batch.

# 32-bit words, kept in 64 bits so that products do not overflow.
Words = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over each element of the arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice, position); seeds count modulo 2^64."""
    seed, choice, position = (
        np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], np.uint64) for values in (seeds, choices, positions)
    )
    counter = (position & _LOW, position >> _SHIFT, choice & _LOW, choice >> _SHIFT)
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _SHIFT))
    bits = ((high << _SHIFT) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


Scores = NDArray[np.float64]

NO_MASKS: Mapping[int, Mask] = MappingProxyType({})

# Most rows' filters are settled by that many of the best tokens, which are found without sorting the vocabulary.
FIRST_CANDIDATES = 1024


def sample(
    logits: Tensor, choices: Sequence[SamplingRow], eos_token_ids: Sequence[int], masks: Mapping[int, Mask] = NO_MASKS
) -> list[int | None]:
    """One token per row of float32 [rows, vocabulary], None for a row that is not of numbers. logits stay as they are.
    masks: by row, what its grammar allows; they hold whatever else is asked for."""
    changed = masked(shaped(logits, choices, eos_token_ids), masks)
    best = changed.argmax(dim=-1)  # what is no number is greater than all that are
    tokens: list[int | None] = best.tolist()
    for row, logit in enumerate(changed.gather(1, best[:, None])[:, 0].tolist()):
        if not math.isfinite(logit) and not math.isfinite(
            logits[row].max().item()
        ):  # else it may say nothing, for its grammar
            tokens[row] = None
    drawn = [row for row, choice in enumerate(choices) if choice.sampling.temperature > 0 and tokens[row] is not None]
    if drawn:
        chosen = _draw(changed[drawn].cpu().numpy().astype(np.float64), [choices[row] for row in drawn])
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprobs]:
    """Natural logprob of each row's token, and of its counts[row] most likely tokens, best first. ranked: and the
    token's rank; of equals it has the last one, as in vLLM.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    found = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    own = found[:, 0].tolist()
    ranks: list[int | None] = (logprobs >= found).sum(dim=-1).tolist() if ranked else [None] * len(own)
    most = min(max(counts), logprobs.shape[1])
    values, ids = logprobs.topk(most, dim=-1)
    return [
        TokenLogprobs(own[row], tuple(ids[row, :count].tolist()), tuple(values[row, :count].tolist()), ranks[row])
        if count
        else TokenLogprobs(own[row], rank=ranks[row])
        for row, count in enumerate(counts)
    ]


def sample_alone(
    logits: Tensor, choices: Sequence[SamplingRow], eos_token_ids: Sequence[int], masks: Mapping[int, Mask] = NO_MASKS
) -> list[int | None]:
    """`sample` of each row by itself: torch and numpy never see how many there are."""
    return [
        sample(logits[row : row + 1], [choice], eos_token_ids, {0: masks[row]} if row in masks else NO_MASKS)[0]
        for row, choice in enumerate(choices)
    ]


def logprobs_alone(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprobs]:
    """`token_logprobs` of each row by itself."""
    return [
        token_logprobs(logits[row : row + 1], [token], [count], ranked=ranked)[0]
        for row, (token, count) in enumerate(zip(tokens, counts, strict=True))
    ]


def _draw(logits: Scores, choices: Sequence[SamplingRow]) -> list[int]:
    samplings = [choice.sampling for choice in choices]
    scores = logits - logits.max(
        axis=1, keepdims=True
    )  # first: no temperature is so low that the best score is more than 0
    with np.errstate(over="ignore"):
        scores /= np.array([sampling.temperature for sampling in samplings])[:, None]
    weights = np.exp(scores)
    threshold = _thresholds(weights, samplings)
    if threshold is not None:
        weights[weights < threshold[:, None]] = 0.0
    cumulative = weights.cumsum(axis=1)
    numbers = uniforms(
        [s.seed for s in samplings], [s.choice for s in samplings], [choice.position for choice in choices]
    )
    target = numbers * cumulative[:, -1]
    found = (cumulative <= target[:, None]).sum(axis=1)
    last_kept = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)
    tokens: list[int] = np.minimum(found, last_kept).tolist()
    return tokens


def _thresholds(weights: Scores, samplings: Sequence[Sampling]) -> Scores | None:
    """Per row the least weight that stays, weights being exp(score - best score); None when no row filters."""
    vocabulary = weights.shape[1]
    top_k = np.array([vocabulary if s.top_k is None else min(s.top_k, vocabulary) for s in samplings])
    top_p = np.array([1.0 if s.top_p is None else s.top_p for s in samplings])
    min_p = np.array([0.0 if s.min_p is None else s.min_p for s in samplings])
    ranked = (top_k < vocabulary) | (top_p < 1.0)
    if not ranked.any():
        return min_p if min_p.any() else None
    thresholds = min_p
    for row in np.flatnonzero(ranked):
        thresholds[row] = max(thresholds[row], _rank_threshold(weights[row], int(top_k[row]), float(top_p[row])))
    return thresholds


def _rank_threshold(weights: Scores, top_k: int, top_p: float) -> float:
    """The weight of the last token that top_k and top_p keep."""
    vocabulary = len(weights)
    kth = float(np.partition(weights, vocabulary - top_k)[vocabulary - top_k]) if top_k < vocabulary else 0.0
    if top_p >= 1.0:
        return kth
    mass = top_p * float(weights[weights >= kth].sum())
    count = min(FIRST_CANDIDATES, vocabulary)
    while True:
        best = np.sort(np.partition(weights, vocabulary - count)[vocabulary - count :])[::-1]
        reached = np.flatnonzero(best.cumsum() >= mass)
        if len(reached) or count == vocabulary:
            last = int(reached[0]) if len(reached) else vocabulary - 1
            return max(kth, float(best[last]))
        count = min(count * 8, vocabulary)
