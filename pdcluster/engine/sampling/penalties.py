"""What happens to a row's logits before anything is drawn: penalties, then biases, then bans. Rows without any cost
nothing.

1. Repetition, frequency and presence as in vLLM. Repetition divides positive logits and multiplies negative ones. The
   other two are OpenAI's subtraction.
2. logit_bias on the result, as in SGLang. vLLM adds it before the penalties. Only a token with both a bias and a
   repetition penalty shows the difference.
3. Tokens that are ruled out, whatever their bias: the last one of a bad word, and ends before min_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster.core.history import History, Ids
from pdcluster.core.sampling import Sampling

# Not minus infinity: a row whose every token is ruled out must still have a best one.
RULED_OUT = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row asks for.

    position: of the token to be chosen, which keys the generator.
    output_index: how many tokens were output before.
    history: None without shaping.
    """

    sampling: Sampling
    position: int
    output_index: int = 0
    history: History | None = None


def shaped(logits: Tensor, choices: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> Tensor:
    """The same tensor when no row asks for a change, else a changed copy."""
    histories = [(row, choice.history) for row, choice in enumerate(choices) if choice.history is not None]
    banned = _bans(choices, eos_token_ids, logits.shape[1])
    if not histories and not banned:
        return logits
    logits = logits.clone()
    _penalise(logits, [(row, history) for row, history in histories if len(history.ids)])
    _add_biases(logits, [(row, history) for row, history in histories if len(history.biases)])
    if banned:
        logits[_places(banned, logits)] = RULED_OUT
    return logits


def _penalise(logits: Tensor, histories: Sequence[tuple[int, History]]) -> None:
    if not histories:
        return
    places = _places([(row, history.ids) for row, history in histories], logits)
    sizes = [len(history.ids) for _, history in histories]
    counts = _tensor(np.concatenate([history.counts for _, history in histories]), logits)
    shapings = [history.shaping for _, history in histories]
    repetition, frequency, presence = (
        _tensor(np.repeat(np.array(values, np.float32), sizes), logits)
        for values in (
            [shaping.repetition for shaping in shapings],
            [shaping.frequency for shaping in shapings],
            [shaping.presence for shaping in shapings],
        )
    )
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    logits[places] = values


def _add_biases(logits: Tensor, histories: Sequence[tuple[int, History]]) -> None:
    if histories:
        places = _places([(row, history.bias_ids) for row, history in histories], logits)
        logits[places] += _tensor(np.concatenate([history.biases for _, history in histories]), logits)


def _bans(choices: Sequence[SamplingRow], eos_token_ids: Sequence[int], vocab_size: int) -> list[tuple[int, Ids]]:
    """By row, the tokens that may not come next: ends of rows that are too short to end, and bad words."""
    banned: list[tuple[int, Ids]] = []
    for row, choice in enumerate(choices):
        if choice.output_index < choice.sampling.min_tokens and (
            ends := _ending(choice.sampling, eos_token_ids, vocab_size)
        ):
            banned.append((row, np.array(ends, np.int64)))
        if choice.history is not None and len(words := choice.history.banned()):
            banned.append((row, words))
    return banned


def _ending(sampling: Sampling, eos_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    ids = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)]
    return [token for token in ids if 0 <= token < vocab_size]


def _places(ids_of_rows: Sequence[tuple[int, Ids]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Index of these tokens of these rows."""
    rows = np.repeat(np.array([row for row, _ in ids_of_rows], np.int64), [len(ids) for _, ids in ids_of_rows])
    return _tensor(rows, logits), _tensor(np.concatenate([ids for _, ids in ids_of_rows]), logits)


def _tensor(values: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
