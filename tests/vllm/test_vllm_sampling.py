"""Our sampling parameters as vLLM's: what maps, and what is refused by name. And the second runner's processor."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny_tokenizers import byte_level_files, with_config

from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import Grammar
from pdcluster.core.sampling import Sampling, Shaping
from pdcluster.node.vllm.sampling.parameters import SamplerFacts, ending_of, for_prefill, seed_of, to_vllm
from pdcluster.node.vllm.sampling.rules import RULES_KEY, decode_rules

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed in this environment", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

FACTS = SamplerFacts(1000, (2, 3), 20, dead_token=7)
PLAIN = Sampling(max_tokens=50, seed=11)
GRAMMAR = Grammar('start: "a"')


def test_what_vllm_has_is_vllm_s() -> None:
    shaping = Shaping(presence=0.5, frequency=0.25)
    sampling = Sampling(
        max_tokens=50, seed=11, choice=2, min_tokens=9, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1,
        stop_token_ids=(40, 2), logprobs=4, prompt_logprobs=0, shaping=shaping,
    )  # fmt: skip
    params = to_vllm(sampling, 0, FACTS)
    assert (params.max_tokens, params.min_tokens, params.temperature) == (50, 9, 0.7)
    assert (params.top_k, params.top_p, params.min_p) == (5, 0.9, 0.1)
    assert (params.logprobs, params.prompt_logprobs) == (4, 0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, 0.25, 1.0)
    assert params.stop_token_ids == [40, 2, 3] and params.ignore_eos and not params.detokenize
    assert params.extra_args is None and params.seed == seed_of(11, 2) != seed_of(11, 1)
    params = to_vllm(replace(PLAIN, shaping=Shaping(biases=((9, 1.5),)), top_p=0.0), 0, FACTS)
    assert params.logit_bias == {9: 1.5} and (params.top_k, params.top_p) == (1, 1.0)
    assert to_vllm(replace(PLAIN, ignore_eos=True), 0, FACTS).stop_token_ids == []


def test_a_replay_asks_for_what_is_left_and_its_penalties_are_ours() -> None:
    sampling = replace(PLAIN, min_tokens=9, shaping=Shaping(presence=0.5, repetition=1.2, biases=()))
    params = to_vllm(sampling, 4, FACTS)
    assert (params.max_tokens, params.min_tokens) == (46, 5)
    assert (params.presence_penalty, params.repetition_penalty) == (0.0, 1.0)
    rules = decode_rules(params.extra_args[RULES_KEY])
    assert rules.num_emitted == 4 and rules.sampling.shaping == sampling.shaping and rules.sampling.min_tokens == 0
    assert to_vllm(sampling, 20, FACTS).min_tokens == 0
    only_repetition = to_vllm(replace(PLAIN, shaping=Shaping(repetition=1.2)), 4, FACTS)
    assert only_repetition.repetition_penalty == 1.2 and only_repetition.extra_args is None


def test_grammars_are_ours_with_their_min_tokens_and_a_token_that_says_they_failed() -> None:
    sampling = replace(PLAIN, grammar=GRAMMAR, min_tokens=3)
    params = to_vllm(sampling, 0, FACTS)
    rules = decode_rules(params.extra_args[RULES_KEY])
    assert params.min_tokens == 0 and params.stop_token_ids == [2, 3, 7]
    assert (rules.sampling.min_tokens, rules.sampling.grammar, rules.dead_token) == (3, GRAMMAR, 7)
    assert [ending_of(sampling, FACTS, token) for token in (2, 7, 40)] == ["eos", "error", "stop"]
    assert ending_of(PLAIN, FACTS, 7) == "stop"


def test_a_prefill_leg_draws_one_token_that_nobody_uses() -> None:
    params = for_prefill(replace(PLAIN, grammar=GRAMMAR, prompt_logprobs=2))
    assert (params.max_tokens, params.prompt_logprobs, params.extra_args) == (1, 2, None)


@pytest.mark.parametrize(
    ("changes", "facts", "param"),
    [
        ({"temperature": 0.005}, {}, "temperature"),
        ({"temperature": 2.5}, {}, "temperature"),
        ({"logprobs": 21}, {}, "logprobs"),
        ({"prompt_logprobs": 21}, {}, "prompt_logprobs"),
        ({"stop_token_ids": (1000,)}, {}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(10, 140))}, {}, "stop_token_ids"),
        ({"shaping": Shaping(biases=((1000, 1.0),))}, {}, "logit_bias"),
        ({"shaping": Shaping(bad_words=((1, 1000),))}, {}, "bad_words"),
        ({"grammar": GRAMMAR}, {"dead_token": None}, "grammar"),
        ({"grammar": GRAMMAR}, {"has_rules": False}, "grammar"),
        ({"shaping": Shaping(bad_words=((1,),))}, {"has_rules": False}, "bad_words"),
        ({"shaping": Shaping(presence=1.0)}, {"has_rules": False}, "presence_penalty"),
        ({"shaping": Shaping(biases=((1, 1.0),))}, {"has_rules": False}, "logit_bias"),
        ({"min_p": 0.1}, {"has_rules": False}, "min_p"),
    ],
)
def test_what_does_not_map_is_refused_by_name(changes: dict[str, Any], facts: dict[str, Any], param: str) -> None:
    values = {"vocab_size": 1000, "eos_token_ids": (2, 3), "max_logprobs": 20, "dead_token": 7} | facts
    with pytest.raises(BadRequest) as refused:
        to_vllm(replace(PLAIN, **changes), 5, SamplerFacts(**values))
    assert refused.value.param == param


def test_seeds_are_stable_and_fit() -> None:
    assert seed_of(1, 0) == 7 or 0 <= seed_of(1, 0) < 1 << 63
    assert seed_of(1, 0) == 4109859006856218934
    assert len({seed_of(seed, choice) for seed in (-1, 0, 1, 1 << 63) for choice in range(4)}) == 16
    assert all(0 <= seed_of(seed, 0) < 1 << 63 for seed in range(-500, 500))


def slots(tmp_path: Path, speculation: object = None) -> Any:
    from pdcluster.node.vllm.sampling.logits import RuledSlots

    for name, data in with_config(byte_level_files(), eos_token="<|eos|>").items():
        (tmp_path / name).write_bytes(data)
    model = SimpleNamespace(tokenizer=str(tmp_path), model=str(tmp_path), get_vocab_size=lambda: 448)
    parallel = SimpleNamespace(tensor_parallel_size=1)
    config = SimpleNamespace(model_config=model, parallel_config=parallel, speculative_config=speculation)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=torch.zeros((4, 32), dtype=torch.int32)),
        total_len=SimpleNamespace(gpu=torch.zeros(4, dtype=torch.int32)),
        prompt_len=SimpleNamespace(np=np.zeros(4, np.int32)),
    )
    return RuledSlots(config, states), states


def test_the_second_runner_s_rows_are_read_from_their_slots(tmp_path: Path) -> None:
    processor, states = slots(tmp_path)
    facts = SamplerFacts(448, (1,), 20, dead_token=0)
    banned = replace(PLAIN, shaping=Shaping(bad_words=((5, 6),)))
    assert processor.add_request(2, to_vllm(banned, 1, facts)) and not processor.add_request(
        1, to_vllm(PLAIN, 0, facts)
    )
    states.all_token_ids.gpu[2, :4] = torch.tensor([9, 5, 5, 5])  # a prompt of two, its last emitted before
    states.prompt_len.np[2], states.total_len.gpu[2] = 2, 2
    context = SimpleNamespace(idx_mapping_np=np.array([1, 2]))
    for total, last in ((2, 5), (3, 6), (4, 5)):
        states.all_token_ids.gpu[2, total - 1] = last
        states.total_len.gpu[2] = total
        changed = processor.apply(torch.ones((2, 448)), context)
        assert bool(changed[1, 6] < -1e30) == (last == 5) and bool((changed[0] == 1).all())
    assert not processor.add_request(2, to_vllm(PLAIN, 0, facts))
    assert bool((processor.apply(torch.ones((2, 448)), context) == 1).all())


def test_the_second_runner_does_not_start_with_speculation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without speculative decoding"):
        slots(tmp_path, speculation=object())
