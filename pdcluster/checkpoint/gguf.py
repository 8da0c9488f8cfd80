"""Reads a GGUF file of a Llama, Qwen2 or Qwen3: its settings as a Hugging Face config.json, its tokenizer as text
files. It reads no weights.

One reader then checks both kinds of models. Needs the package `gguf`, but no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pdcluster.checkpoint.gguf_tokenizer import text_files
from pdcluster.core.errors import ModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SUFFIX = ".gguf"
ROPE_FACTORS = "rope_freqs.weight"
# Of every Llama 3.1 to 3.3; a file holds only what follows from them.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
Json = dict[str, Any]


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX and path.is_file()


@dataclass(frozen=True)
class GgufFile:
    """metadata: the file's keys.
    tensors: those of the package, by name, mapped from the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @cached_property
    def architecture(self) -> str:
        found = self.metadata.get("general.architecture")
        if found not in ARCHITECTURES:
            raise ModelError(f"{self.path}: its architecture is {found!r}; {', '.join(ARCHITECTURES)} are supported")
        return str(found)

    @cached_property
    def config(self) -> Json:
        """A Hugging Face config.json."""
        self._refuse_other_kinds()
        heads, width, layers = (
            self._number(name) for name in ("attention.head_count", "embedding_length", "block_count")
        )
        head_dim = self._optional("attention.key_length", width // heads)
        config = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "hidden_size": width,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._optional("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", float),
            "vocab_size": self._vocab_size(),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "rope_parameters": self._rope(head_dim),
            "eos_token_id": self._ends(),
            "torch_dtype": "bfloat16",
        }
        if self.architecture == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in self.tensors
        return config

    @cached_property
    def text_files(self) -> dict[str, bytes]:
        return text_files(self.metadata, self.config, str(self.path))

    def _refuse_other_kinds(self) -> None:
        if self._get("expert_count"):
            raise ModelError(
                f"{self.path}: it has {self._get('expert_count')} experts, but only dense models are supported"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{self.path}: it is one of {self.metadata['split.count']} parts; join them with llama-gguf-split "
                "--merge"
            )
        if self._get("attention.sliding_window"):
            raise ModelError(
                f"{self.path}: its sliding window of {self._get('attention.sliding_window')} is not supported; take "
                "another model"
            )
        key, value = self._get("attention.key_length"), self._get("attention.value_length")
        if None not in (key, value) and key != value:
            raise ModelError(
                f"{self.path}: keys have {key} dimensions and values {value}, but only equal ones are supported"
            )

    def _get(self, name: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}")

    def _number(self, name: str, kind: type = int) -> Any:
        found = self._get(name)
        if not isinstance(found, kind):
            raise ModelError(f"{self.path}: {self.architecture}.{name} is {found!r}; expected {kind.__name__}")
        return found

    def _optional(self, name: str, default: int) -> int:
        return default if self._get(name) is None else int(self._number(name))

    def _vocab_size(self) -> int:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{self.path}: tensor token_embd.weight is missing; take a file of the whole model")
        return int(embedding.shape[-1])

    def _ends(self) -> list[int]:
        named = (self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return sorted({int(index) for index in named if index is not None})

    def _rope(self, head_dim: int) -> Json:
        rotated = self._optional("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelError(
                f"{self.path}: only {rotated} of {head_dim} dimensions are rotated, which is not supported"
            )
        theta = float(self._get("rope.freq_base") or 10000.0)
        kind = self._get("rope.scaling.type") or "none"
        if ROPE_FACTORS in self.tensors:
            return self._llama3_rope(theta, head_dim)
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": self._number("rope.scaling.factor", float)}
        if kind == "yarn":
            original = self._number("rope.scaling.original_context_length")
            return {
                "rope_type": "yarn",
                "rope_theta": theta,
                "factor": self._number("rope.scaling.factor", float),
                "original_max_position_embeddings": original,
            }
        raise ModelError(f"{self.path}: rope scaling {kind!r} is not supported; none, linear and yarn are")

    def _llama3_rope(self, theta: float, head_dim: int) -> Json:
        """The file holds what each frequency is divided by. The largest is the factor. The others have to follow from
        it.
        """
        factors = np.asarray(self.tensors[ROPE_FACTORS].data, np.float32)
        found = {"rope_type": "llama3", "rope_theta": theta, "factor": float(factors.max()), **LLAMA3_ROPE}
        if factors.shape != (head_dim // 2,) or not np.allclose(factors, _llama3_factors(found, head_dim), rtol=1e-3):
            raise ModelError(
                f"{self.path}: {ROPE_FACTORS} is not Llama 3's rope scaling, which is the only one with a tensor "
                "that is supported"
            )
        return found


def _llama3_factors(rope: Json, head_dim: int) -> Any:
    base = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * base / (2 * math.pi)
    blend = np.clip((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0, 1)
    return 1 / ((1 - blend) / rope["factor"] + blend)


@dataclass(frozen=True)
class _Opened:
    """place: path, device, inode and size. While the file is mapped no other one gets its inode.
    head: a digest of the bytes before the tensors, head_bytes of them.
    """

    place: tuple[Path, int, int, int]
    head: bytes
    head_bytes: int
    file: GgufFile


_last: _Opened | None = None


def open_gguf(path: Path) -> GgufFile:
    """Raises ModelError for a file that is no GGUF, or is damaged. The last one is not read again as long as it is the
    same file and begins with the same bytes; its tensors are mapped and as they are now.
    """
    global _last
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        place = path, state.st_dev, state.st_ino, state.st_size
        if _last is None or _last.place != place or xxhash.xxh3_128_digest(file.read(_last.head_bytes)) != _last.head:
            _last = None  # before the next one takes as much memory
            _last = _read(path, place)
    return _last.file


def _read(path: Path, place: tuple[Path, int, int, int]) -> _Opened:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(
            f"{path} is a GGUF file, which needs the package gguf: pip install 'pdcluster[node]'"
        ) from error
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the package raises nothing narrower
        raise ModelError(
            f"{path} cannot be read as GGUF: {error or type(error).__name__}; download it again"
        ) from error
    head = reader.data[: int(reader.data_offset)]
    return _Opened(place, xxhash.xxh3_128_digest(head.data), len(head), GgufFile(path, metadata, tensors))
