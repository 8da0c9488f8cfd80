"""Two versions of one model's weights as directories, and what each answers."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pdcluster.checkpoint.bundled import path as bundled_model

# Of each tensor's own spread. Greedy answers of two versions differ within a few tokens.
NOISE = 0.3


def make_versions(folder: Path, *labels: str) -> dict[str, Path]:
    """The bundled model in float32 under the first label, and others that differ from it, by label."""
    source = load_file(bundled_model() / "model.safetensors")
    made = {}
    for seed, label in enumerate(labels):
        made[label] = folder / label
        shutil.copytree(bundled_model(), made[label])
        save_file(_changed(source, seed), made[label] / "model.safetensors", metadata={"format": "pt"})
    return made


def _changed(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    chance, found = torch.Generator().manual_seed(seed), {}
    for name, tensor in tensors.items():
        whole = tensor.float()
        noise = torch.randn(whole.shape, generator=chance) * whole.std() * NOISE if seed else torch.zeros_like(whole)
        found[name] = whole + noise
    return found


@lru_cache(maxsize=8)
def network(directory: Path) -> torch.nn.Module:
    """By transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def greedy(directory: Path, prompt: list[int], count: int) -> list[int]:
    """The tokens that follow a prompt."""
    with torch.no_grad():
        made = network(directory).generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
    return [int(token) for token in made[0, len(prompt) :]]
