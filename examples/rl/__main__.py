"""Trains the bundled model with rollouts of a cluster of this machine.

    python -m examples.rl [--steps N] [--seed N] [--json FILE]

Starts one prefill node, one decode node, bootstrap and router. Each step pushes the weights, samples 8 answers to each
prompt, compares the trainer's logprobs with the cluster's, and takes one step of GRPO. The reward is a toy: how many
of the tokens have an upper-case letter. It ends with 1 where a token was made by other weights, or a logprob differs by
more than 1e-4, or those of a step by more than 1e-5 on average.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer

from examples.rl.grpo import Policy
from examples.rl.local_cluster import RunningCluster, local_cluster
from examples.rl.rollouts import RolloutClient, Sample
from pdcluster.checkpoint import bundled
from pdcluster.weights.publisher import Publisher

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n",
    "import os\n",
    "def test_split(self):\n",
    "for name in names:\n",
    "if not isinstance(value, str):\n",
    "# Return the number of\n",
    "try:\n    import ",
)
GROUP_SIZE, MAX_TOKENS = 8, 24
SEEDS_PER_RUN = 1 << 20
LEARNING_RATE = 3e-4
MAX_DELTA, MEAN_DELTA = 1e-4, 1e-5


@dataclass(frozen=True, slots=True)
class Step:
    """reward: mean over all samples. push_s, rollout_s, train_s: seconds of each part."""

    step: int
    reward: float
    loss: float
    max_delta: float
    mean_delta: float
    push_s: float
    rollout_s: float
    train_s: float

    def line(self) -> str:
        return (
            f"step {self.step:3}  reward {self.reward:.3f}  |delta| max {self.max_delta:.1e} mean {self.mean_delta:.1e}"
            f"  push {self.push_s:.2f} s  rollouts {self.rollout_s:.2f} s  training {self.train_s:.2f} s"
        )


class UpperCase:
    """The reward of a sample: the share of its tokens with an upper-case letter."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
        self._has_it = [any(letter.isupper() for letter in text) for text in texts]

    def of(self, sample: Sample) -> float:
        return sum(self._has_it[token] for token in sample.tokens) / len(sample.tokens)


def train(cluster: RunningCluster, num_steps: int, seed: int) -> Iterator[Step]:
    """Steps as they end. seed: of all samples."""
    model = bundled.path()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts, reward = [tokenizer.encode(prompt).ids for prompt in PROMPTS], UpperCase(tokenizer)
    policy = Policy(model, learning_rate=LEARNING_RATE)
    client = RolloutClient(cluster.url, cluster.model, group_size=GROUP_SIZE, max_tokens=MAX_TOKENS)
    with Publisher(cluster.admin) as publisher, client:
        for step in range(num_steps):
            times = [time.monotonic()]
            version = publisher.push(policy.weights(), f"step-{step}")
            times.append(time.monotonic())
            groups = client.sample(prompts, version, seed * SEEDS_PER_RUN + step * len(prompts))
            times.append(time.monotonic())
            rewards = torch.tensor([[reward.of(sample) for sample in group] for group in groups])
            update = policy.update(groups, rewards)
            times.append(time.monotonic())
            parts = [end - start for start, end in pairwise(times)]
            yield Step(step, float(rewards.mean()), update.loss, update.max_delta, update.mean_delta, *parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the steps there")
    options = parser.parse_args(arguments)
    # The same sums on any machine, and cores for the nodes.
    torch.set_num_threads(1)
    began = time.monotonic()
    steps = []
    with local_cluster() as cluster:
        for step in train(cluster, options.steps, options.seed):
            print(step.line(), flush=True)
            steps.append(step)
    print(f"{len(steps)} steps in {time.monotonic() - began:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(step) for step in steps], indent=2))
    far = [step.step for step in steps if not (step.max_delta <= MAX_DELTA and step.mean_delta <= MEAN_DELTA)]
    if far:
        print(f"error: the logprobs of steps {far} differ from the trainer's")
    return int(bool(far))


if __name__ == "__main__":
    raise SystemExit(main())
