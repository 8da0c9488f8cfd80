"""Group-relative policy optimisation (GRPO): Shao et al., DeepSeekMath, arXiv:2402.03300, 2024, section 4.1.

The advantage of a sample is its reward beside those of its group: the mean is taken off, and the rest is divided by the
standard deviation. There is no critic. The importance ratio is between the policy and the weights that made the sample;
it is clipped as in PPO. The penalty on the distance from a reference model is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from examples.rl.rollouts import Sample

CLIP = 0.2
SMALLEST_SPREAD = 1e-6
MAX_GRADIENT_NORM = 1.0


def advantages(rewards: Tensor) -> Tensor:
    """rewards: [groups, samples]. The same shape; 0 in a group whose rewards are all equal."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, correction=0, keepdim=True) + SMALLEST_SPREAD)


def loss(logprobs: Tensor, old_logprobs: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """logprobs, old_logprobs, mask: [samples, tokens]; advantage: [samples]. The mean over samples of the mean over
    their tokens.
    """
    ratio = (logprobs - old_logprobs).exp()
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[:, None])
    return -((gain * mask).sum(dim=1) / mask.sum(dim=1)).mean()


@dataclass(frozen=True, slots=True)
class Update:
    """max_delta, mean_delta: between the trainer's and the cluster's logprobs of the same tokens, before the step."""

    loss: float
    max_delta: float
    mean_delta: float


class Policy:
    """The trained model, by transformers in float32, and its optimiser."""

    def __init__(self, model: Path, *, learning_rate: float) -> None:
        self._network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
        self._optimiser = torch.optim.AdamW(self._network.parameters(), lr=learning_rate, weight_decay=0.0)

    def weights(self) -> Mapping[str, Tensor]:
        """By the names of Hugging Face. They change with the next update."""
        found: Mapping[str, Tensor] = self._network.state_dict()
        return found

    def update(self, groups: Sequence[Sequence[Sample]], rewards: Tensor) -> Update:
        """One step of the optimiser on all samples. rewards: [groups, samples]."""
        samples = list(chain.from_iterable(groups))
        old, mask = padded([sample.logprobs for sample in samples], torch.float32)
        logprobs = self._logprobs(samples)
        deltas = (logprobs.detach() - old)[mask].abs()
        objective = loss(logprobs, old, advantages(rewards).flatten(), mask)
        self._optimiser.zero_grad()
        objective.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), MAX_GRADIENT_NORM)
        self._optimiser.step()
        return Update(float(objective.detach()), float(deltas.max()), float(deltas.mean()))

    def _logprobs(self, samples: Sequence[Sample]) -> Tensor:
        """Of the samples' tokens: [samples, tokens], in float32. Positions beyond a sample's end hold anything."""
        tokens, _ = padded([sample.tokens for sample in samples], torch.int64)
        whole, _ = padded([sample.prompt + sample.tokens for sample in samples], torch.int64)
        logits = self._network(input_ids=whole).logits
        starts = torch.tensor([len(sample.prompt) - 1 for sample in samples])
        places = starts[:, None] + torch.arange(tokens.shape[1])
        places = places.clamp(max=whole.shape[1] - 1)[:, :, None].expand(-1, -1, logits.shape[2])
        each: Tensor = logits.gather(1, places).log_softmax(dim=2)
        return each.gather(2, tokens[:, :, None]).squeeze(2)


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as [rows, longest], filled up with 0, and a mask of what is not filler."""
    lengths = torch.tensor([len(row) for row in rows])
    found = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
    return found, torch.arange(found.shape[1]) < lengths[:, None]
