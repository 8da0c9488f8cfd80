"""Parts of the example of reinforcement learning: the objective, and whose weights made a sample."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from examples.rl import grpo
from examples.rl.rollouts import Sample, check_weights, weights_of
from pdcluster.checkpoint import bundled
from pdcluster.core.weights import WeightsVersion

VERSION = WeightsVersion("step-3", 4, "d3")
WHOLE = {"from": 0, "to": 5, "label": "step-3", "digest": "d3", "epoch": 4}


def test_an_advantage_is_a_reward_beside_those_of_its_group() -> None:
    found = grpo.advantages(torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.3]]))
    assert torch.allclose(found, torch.tensor([[-1.0, 1.0, -1.0, 1.0], [0.0] * 4]), atol=1e-4)


def test_each_sample_counts_the_same_however_long_it_is() -> None:
    logprobs = torch.zeros(2, 4, requires_grad=True)
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    found = grpo.loss(logprobs, torch.zeros(2, 4), torch.tensor([1.0, -1.0]), mask)
    found.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor([[-0.125] * 4, [0.5, 0.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("advantage", "ratio", "slope"), [(1.0, 1.1, -1.1), (1.0, 1.3, 0), (-1.0, 0.7, 0), (-1.0, 1.3, 1.3)]
)
def test_a_ratio_beyond_the_clip_pulls_no_further(advantage: float, ratio: float, slope: float) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    grpo.loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.tensor([[True]])).backward()
    assert logprobs.grad is not None and float(logprobs.grad) == pytest.approx(slope)


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled.path()


def test_an_update_compares_logprobs_token_by_token(model: Path) -> None:
    """Samples of different lengths, each scored alone, and one logprob that is off by 0.5."""
    network = grpo.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    samples = []
    for prompt, tokens in (((50, 300, 41), (17, 900)), ((12,), (60, 61, 62, 2))):
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        scored = logits.log_softmax(dim=1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        samples.append(Sample(prompt, tokens, tuple(scored.tolist())))
    rewards = torch.tensor([[0.0, 1.0]])
    right = grpo.Policy(model, learning_rate=1e-4).update([samples], rewards)
    assert right.max_delta < 1e-5
    first = samples[0]
    samples[0] = Sample(first.prompt, first.tokens, (first.logprobs[0], first.logprobs[1] + 0.5))
    wrong = grpo.Policy(model, learning_rate=1e-4).update([samples], rewards)
    assert wrong.max_delta == pytest.approx(0.5, abs=1e-4) and wrong.mean_delta == pytest.approx(0.5 / 6, abs=1e-4)


def test_weights_of_choices_stand_by_their_index() -> None:
    one = {"usage": {"pdcluster": {"weights": [WHOLE]}}}
    assert weights_of(one) == [[WHOLE]]
    both = {"usage": {"pdcluster": {"choices": [{"weights": [WHOLE]}, {"weights": []}]}}}
    assert weights_of(both) == [[WHOLE], []]


def test_a_sample_is_taken_where_its_version_made_all_of_it() -> None:
    check_weights([WHOLE], VERSION, 5)


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [WHOLE | {"to": 4}],
        [WHOLE | {"label": "step-2"}],
        [WHOLE | {"digest": "d2"}],
        [WHOLE | {"epoch": 3}],
        [WHOLE | {"to": 2, "label": "step-2", "digest": "d2", "epoch": 3}, WHOLE | {"from": 2}],
    ],
)
def test_other_weights_or_tokens_of_unknown_weights_are_refused(ranges: list[dict[str, object]]) -> None:
    with pytest.raises(RuntimeError, match=r"5 tokens was made by .* and not by step-3"):
        check_weights(ranges, VERSION, 5)
