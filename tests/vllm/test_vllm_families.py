"""Families that only vLLM serves, through a transfer: mixture of experts, and multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_kit import VOCAB, EngineAtHand, prompt, start_engine

READY_S = 400.0
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
# Ranks and widths of DeepSeek's own checkpoints: kernels exist for these.
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    # Dense in every layer: a choice of experts may follow from the rounding of a prompt that is one token longer.
    "first_k_dense_replace": 2,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}
# Tokens that are compared. vLLM's latent attention on CPUs rounds so that a decode step and a prompt say other tokens in
# one engine, too; over some steps that changes tokens here.
COMPARED = {"qwen3_moe": 7, "deepseek_v2": 3}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", MOE),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", MLA),
}


def saved_model(family: str, folder: Path) -> Path:
    config, name, own = FAMILIES[family]
    torch.manual_seed(3)
    model = getattr(transformers, name)(getattr(transformers, config)(**SHARED, **own, initializer_range=0.2))
    model.eval().to(torch.float32).save_pretrained(folder / family)
    return folder / family


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineAtHand, EngineAtHand, int]]:
    """Two engines, and how many of their tokens are compared."""
    model = saved_model(request.param, tmp_path_factory.mktemp("family"))
    engines = []
    try:
        for _ in range(2):
            engines.append(start_engine(model, lease_s=20))
            engines[-1].wait_ready(READY_S)
        yield EngineAtHand(engines[0]), EngineAtHand(engines[1]), COMPARED[request.param]
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("length", [2, 31, 32, 33, 100, 513])
def test_tokens_through_a_transfer_are_those_of_one_engine(
    pair: tuple[EngineAtHand, EngineAtHand, int], length: int
) -> None:
    """In both engines the last prompt token is a decode step."""
    prefill, decode, compared = pair
    begin = prompt(length - 1)
    alone = prefill.run(begin, salt=f"alone{length}").tokens
    token_ids = [*begin, alone[0]]
    parked = prefill.run(token_ids, parks=True, fence="fence").last
    answer = decode.run(token_ids, reference=parked.reference, fence="fence", salt=f"n{length}")
    assert answer.last.finish == "length", answer.last
    assert answer.tokens[:compared] == alone[1 : 1 + compared] and len(set(alone)) > 1
