"""Reads the tensors of a Hugging Face checkpoint, mapped from its safetensors files or copies of these, and says which
weights they are.

Tensors that are served in their stored type stay views of the files. Laid-out weights are copies beside them. It
refuses tensors that are missing or left over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdcluster.checkpoint.gguf import is_gguf, open_gguf
from pdcluster.checkpoint.held_files import weight_files
from pdcluster.checkpoint.inspection import OBSOLETE, check_stored_type
from pdcluster.checkpoint.weights_digest import Digester, WeightsDigest
from pdcluster.core.errors import ModelError
from pdcluster.engine.model.config import ModelConfig
from pdcluster.engine.model.gguf_weights import digest_gguf, gguf_tensors
from pdcluster.kv.layout import DType
from pdcluster.kv.pool import TORCH_DTYPE

DTypeChoice = Literal["auto", "float32", "bfloat16"]

# What each stored type is computed in unless somebody says otherwise.
SERVED_AS: dict[str, DType] = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float16": "bfloat16",
    "half": "bfloat16",
    "float": "float32",
    "float64": "float32",
}
HEAD = "lm_head.weight"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Biases and the q/k norms are None where the family has none."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model. head is the embedding itself when the two are tied. digest: of the whole checkpoint, also
    when these are a rank's share of it."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    dtype: DType
    digest: WeightsDigest


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: DTypeChoice = "auto",
    device: str = "cpu",
    threads: int = 1,
    files: Sequence[Path] = (),
) -> Weights:
    """Map, check and digest every tensor of the checkpoint. Raises ModelError for the first one that is missing, left
    over, or of the wrong type or shape.

    files: copies of its weight files (`checkpoint.held_files`); none: its own.
    """
    with Digester(threads) as digests:
        if is_gguf(model_dir):
            chosen = _choose_dtype(dtype, config, {})
            before, file = model_dir.stat(), open_gguf(model_dir)
            digest_gguf(file, digests)
            stored = gguf_tensors(file, TORCH_DTYPE[chosen])
            _check_unchanged(model_dir, before)
        else:
            stored = _open_all(files or weight_files(model_dir), config, digests)
            chosen = _choose_dtype(dtype, config, stored)
        return _taken(_Taker(stored, TORCH_DTYPE[chosen], device), config, chosen, digests)


def expected_tensors(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that a checkpoint of the model must have, and of those that it may have."""
    shapes = _Shapes()
    with Digester(1) as digests:
        _taken(shapes, config, "float32", digests)
    tied: dict[str, tuple[int, ...]] = {}
    if config.tie_word_embeddings:
        tied[HEAD] = config.vocab_size, config.hidden_size
    return shapes.taken, tied


def _check_unchanged(file: Path, before: os.stat_result) -> None:
    """Digests and values of a GGUF file are made one after the other. Raises ModelError where they may differ."""
    now = file.stat()
    if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
        raise ModelError(f"{file} changed while it was read; load it again when it is whole")


def _taken(take: _Tensors, config: ModelConfig, dtype: DType, digests: Digester) -> Weights:
    width = config.hidden_size
    embedding = take("model.embed_tokens.weight", config.vocab_size, width)
    layers = tuple(_layer(take, config, index) for index in range(config.num_layers))
    norm = take("model.norm.weight", width)
    head = _tied_head(take, embedding) if config.tie_word_embeddings else take(HEAD, config.vocab_size, width)
    take.finish()
    return Weights(embedding, layers, norm, head, dtype, digests.result(repr(config), config.num_layers))


def _open_all(paths: Iterable[Path], config: ModelConfig, digests: Digester) -> dict[str, Tensor]:
    """What takes no part in the model is not digested: buffers that follow from the config, and a copy of the embedding
    as the head of a model whose two are tied."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (a handle, not a dict)
                    kind = file.get_slice(name).get_dtype()
                    check_stored_type(path, name, kind)
                    tensor = tensors[name] = file.get_tensor(name)
                    if not name.endswith(OBSOLETE) and not (config.tie_word_embeddings and name == HEAD):
                        digests.add(name, kind, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
    return tensors


def _choose_dtype(choice: DTypeChoice, config: ModelConfig, stored: dict[str, Tensor]) -> DType:
    if choice != "auto":
        return choice
    declared = config.stored_dtype
    if declared is None:
        declared = str(next((tensor.dtype for tensor in stored.values()), torch.float32)).removeprefix("torch.")
    served = SERVED_AS.get(declared)
    if served is None:
        raise ModelError(
            f"the checkpoint's type {declared!r} is not served; choose --dtype float32 or --dtype bfloat16"
        )
    if served != declared:
        log.info(
            "the checkpoint is %s and is served as %s; --dtype float32 serves it without rounding", declared, served
        )
    return served


class _Tensors(Protocol):
    """What a model's tensors are taken from."""

    def __call__(self, name: str, *shape: int) -> Tensor: ...

    def has(self, name: str) -> bool: ...

    def finish(self) -> None: ...


class _Shapes:
    """Notes what would be taken."""

    def __init__(self) -> None:
        self.taken: dict[str, tuple[int, ...]] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        self.taken[name] = shape
        return torch.empty(0)

    def has(self, name: str) -> bool:
        return False

    def finish(self) -> None:
        """Nothing is left over."""


class _Taker:
    """Hands out each tensor once, checked, cast and moved, so that what nobody took can be refused."""

    def __init__(self, stored: dict[str, Tensor], dtype: torch.dtype, device: str) -> None:
        self._stored = stored
        self._dtype = dtype
        self._device = device

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = self._stored.pop(name, None)
        if tensor is None:
            raise ModelError(f"tensor {name} is missing from the checkpoint")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, the config says {shape}")
        return tensor.to(self._device, self._dtype)

    def has(self, name: str) -> bool:
        return name in self._stored

    def finish(self) -> None:
        extra = sorted(name for name in self._stored if not name.endswith(OBSOLETE))
        if extra:
            raise ModelError(
                f"tensor {extra[0]} is in the checkpoint but not in the architecture its config names ({len(extra)} "
                "such tensors)"
            )


def _tied_head(take: _Tensors, embedding: Tensor) -> Tensor:
    """Some checkpoints store the tied head a second time; that is fine as long as it is the same."""
    if take.has(HEAD) and not torch.equal(take(HEAD, *embedding.shape), embedding):
        raise ModelError(
            f"tensor {HEAD} differs from model.embed_tokens.weight, but the config says tie_word_embeddings"
        )
    return embedding


def _layer(take: _Tensors, config: ModelConfig, index: int) -> LayerWeights:
    at = f"model.layers.{index}."
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def bias(wanted: bool, name: str, size: int) -> Tensor | None:
        return take(f"{at}{name}.bias", size) if wanted else None

    return LayerWeights(
        input_norm=take(f"{at}input_layernorm.weight", width),
        q=take(f"{at}self_attn.q_proj.weight", queries, width),
        k=take(f"{at}self_attn.k_proj.weight", keys, width),
        v=take(f"{at}self_attn.v_proj.weight", keys, width),
        o=take(f"{at}self_attn.o_proj.weight", width, queries),
        post_norm=take(f"{at}post_attention_layernorm.weight", width),
        gate=take(f"{at}mlp.gate_proj.weight", inner, width),
        up=take(f"{at}mlp.up_proj.weight", inner, width),
        down=take(f"{at}mlp.down_proj.weight", width, inner),
        q_bias=bias(config.qkv_bias, "self_attn.q_proj", queries),
        k_bias=bias(config.qkv_bias, "self_attn.k_proj", keys),
        v_bias=bias(config.qkv_bias, "self_attn.v_proj", keys),
        o_bias=bias(config.output_bias, "self_attn.o_proj", width),
        gate_bias=bias(config.mlp_bias, "mlp.gate_proj", inner),
        up_bias=bias(config.mlp_bias, "mlp.up_proj", inner),
        down_bias=bias(config.mlp_bias, "mlp.down_proj", width),
        q_norm=take(f"{at}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=take(f"{at}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
    )
