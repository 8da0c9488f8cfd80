"""Frequencies and scaling equal those of transformers, bit by bit where the model depends on it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdcluster.engine.model.config import parse_config
from pdcluster.engine.model.rope import Rope, attention_scale, inverse_frequencies

VARIANTS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0},
    "yarn with all it has": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn with its factor given": {
        "rope_type": "yarn",
        "factor": 2.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_frequencies_and_scale_equal_the_reference(variant: str, head_dim: int) -> None:
    theirs = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters=dict(VARIANTS[variant]),
        max_position_embeddings=131072,
    )
    embedding = LlamaRotaryEmbedding(theirs)
    ours = parse_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    torch.testing.assert_close(inverse_frequencies(ours, head_dim), embedding.inv_freq, rtol=0, atol=0)
    assert attention_scale(ours) == pytest.approx(embedding.attention_scaling)


@pytest.mark.parametrize("variant", VARIANTS)
def test_angles_equal_the_reference_at_far_positions(variant: str) -> None:
    theirs = LlamaConfig(
        hidden_size=512, num_attention_heads=4, rope_parameters=dict(VARIANTS[variant]), max_position_embeddings=131072
    )
    ours = parse_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    positions = torch.tensor([0, 1, 31, 4095, 30000])
    cos, sin = Rope(ours, 128, "cpu").angles(positions)
    expected = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos, expected[0][0, :, :64], rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, expected[1][0, :, :64], rtol=0, atol=1e-5)
