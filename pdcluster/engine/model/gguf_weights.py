"""The tensors of a GGUF file under their Hugging Face names, dequantised.

llama.cpp rotates neighbouring dimensions of a head, Hugging Face rotates its halves. So files of Llamas hold queries
and keys in another order, which is undone here. Those of Qwen are in the order of Hugging Face.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdcluster.checkpoint.gguf import ROPE_FACTORS, GgufFile
from pdcluster.checkpoint.weights_digest import Digester
from pdcluster.core.errors import ModelError

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# No type of safetensors, because rows of a file may lie in another order.
KIND = "gguf"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_tensors(file: GgufFile, dtype: torch.dtype) -> dict[str, Tensor]:
    """One after the other, so that no more than one is float32 beside those of `dtype`. Every process holds its own
    copy."""
    return {name: torch.from_numpy(_values(file, tensor)).to(dtype) for name, tensor in _named(file)}


def digest_gguf(file: GgufFile, digests: Digester) -> None:
    """What the file holds, under the names of Hugging Face."""
    for name, tensor in _named(file):
        digests.add(name, f"{KIND} {tensor.tensor_type.name}", tensor.shape.tolist(), tensor.data)


def _named(file: GgufFile) -> Iterator[tuple[str, Any]]:
    for name, tensor in file.tensors.items():
        if name != ROPE_FACTORS:
            yield _name_of(file, name), tensor


def _name_of(file: GgufFile, name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    found = LAYER.fullmatch(name)
    if found is None or found[2] not in LAYER_NAMES:
        raise ModelError(
            f"{file.path}: tensor {name} is not one of the architecture {file.architecture!r}; take another "
            "conversion of the model"
        )
    return f"model.layers.{found[1]}.{LAYER_NAMES[found[2]]}.{found[3]}"


def _values(file: GgufFile, tensor: Any) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    from gguf import dequantize

    name, kind, data = tensor.name, tensor.tensor_type, tensor.data
    try:
        values = np.array(dequantize(data, kind), np.float32)
    except (NotImplementedError, KeyError) as error:
        way_out = "take a Q4 to Q8, F16 or BF16 file"
        raise ModelError(
            f"{file.path}: tensor {name} is quantised as {kind.name}, which is not supported; {way_out}"
        ) from error
    except ValueError as error:
        raise ModelError(f"{file.path}: tensor {name} cannot be read: {error}; download it again") from error
    if file.architecture == "llama" and ".attn_q." in name:
        return _halves(values, file.config["num_attention_heads"])
    if file.architecture == "llama" and ".attn_k." in name:
        return _halves(values, file.config["num_key_value_heads"])
    return values


def _halves(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], heads: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Of each head's rows, pairs of neighbours become two halves."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
