"""The tensors of a GGUF file under their Hugging Face names, dequantised.

llama.cpp rotates neighbouring dimensions of a head, Hugging Face rotates its halves. So files of Llamas hold queries
and keys in another order, which is undone here. Those of Qwen are in the order of Hugging Face.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pdcluster.checkpoint.gguf import ROPE_FACTORS, GgufFile
from pdcluster.core.errors import ModelError

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
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
SAMPLED_BLOCKS, BLOCK_BYTES = 64, 4096


def gguf_tensors(file: GgufFile, dtype: torch.dtype) -> dict[str, Tensor]:
    """One after the other, so that no more than one is float32 beside those of `dtype`. Every process holds its own
    copy."""
    return dict(_tensors(file, dtype))


def gguf_digest(file: GgufFile, config: str) -> str:
    """As `weights.weights_digest`: the parsed config, the file's size, its tensors' names, types, shapes and places,
    and sampled blocks."""
    digest = hashlib.blake2b(config.encode(), digest_size=16)
    size = file.path.stat().st_size
    shapes = [
        (tensor.name, int(tensor.tensor_type), tensor.shape.tolist(), int(tensor.data_offset))
        for tensor in file.tensors.values()
    ]
    digest.update(f"{size}:{shapes}".encode())
    begin = min((place for _, _, _, place in shapes), default=0)
    with file.path.open("rb") as data:
        for block in range(SAMPLED_BLOCKS):
            data.seek(begin + (max(size - begin - BLOCK_BYTES, 0) * block) // (SAMPLED_BLOCKS - 1))
            digest.update(data.read(BLOCK_BYTES))
    return digest.hexdigest()


def _tensors(file: GgufFile, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in file.tensors.items():
        if name != ROPE_FACTORS:
            yield _name_of(file, name), torch.from_numpy(_values(file, name, tensor)).to(dtype)


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


def _values(file: GgufFile, name: str, tensor: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    from gguf import dequantize

    kind, data = tensor.tensor_type, tensor.data  # type: ignore[attr-defined]
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
