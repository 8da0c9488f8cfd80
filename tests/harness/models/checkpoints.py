"""Random checkpoints of every family for tests, and what transformers computes with them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from pdcluster.settings.config import cache_directory

# Compiled kernels are kept between test runs, for these and for the nodes of clusters.
KERNEL_CACHE = cache_directory()

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Shape:
    """A small model. rope: beside theta; config: extra keys of the family."""

    family: str
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 331
    hidden_size: int = 64
    num_layers: int = 2
    intermediate_size: int = 96
    tied: bool = False
    rope: dict[str, object] = field(default_factory=lambda: {"rope_type": "default"})
    config: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        extra = "-".join(str(key) for key in self.config)
        ratio = f"{self.num_heads}x{self.num_kv_heads}x{self.head_dim}"
        return f"{self.family}-{ratio}-v{self.vocab_size}-{'tied' if self.tied else 'untied'}-{self.rope['rope_type']}{'-' + extra if extra else ''}"


def build_config(shape: Shape, **changes: object) -> PretrainedConfig:
    values: dict[str, object] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": {"rope_theta": 10000.0, **shape.rope},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **({"sliding_window": None} if shape.family == "mistral" else {}),
        **shape.config,
        **changes,
    }
    return FAMILIES[shape.family](**values)


def build_model(shape: Shape, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Weights large enough that logits are far apart, biases and norms away from their trivial values."""
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, NAMES[shape.family])(build_config(shape)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * (2.0 / parameter.shape[1]) ** 0.5)
    return model.to(dtype)


def save(model: PreTrainedModel, directory: Path, shard_size: str = "1GB") -> Path:
    model.save_pretrained(directory, max_shard_size=shard_size)
    return directory


def prompt(length: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(3, vocab_size, length).astype(np.int32)


@dataclass(frozen=True)
class Expected:
    """What the reference does: greedy tokens, the least gap between the best two logits over all steps, and logprobs of
    the prompt's tokens."""

    tokens: list[int]
    least_gap: float
    prompt_logprobs: list[float]


@torch.no_grad()
def greedy(model: PreTrainedModel, token_ids: np.ndarray, count: int) -> Expected:
    """The reference's greedy continuation, with its own KV cache, never ending early."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    output = model(input_ids=ids, use_cache=True)
    logprobs = output.logits[0].float().log_softmax(-1)
    own = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    tokens: list[int] = []
    gaps: list[float] = []
    while True:
        best = output.logits[0, -1].float().topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        if len(tokens) == count:
            return Expected(tokens, min(gaps), own)
        output = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=output.past_key_values, use_cache=True)


def edit_config(directory: Path, remove: tuple[str, ...] = (), **changes: object) -> Path:
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw = {key: value for key, value in {**raw, **changes}.items() if key not in remove}
    path.write_text(json.dumps(raw))
    return directory
