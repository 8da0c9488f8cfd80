"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_tokenizers import byte_level_files, sentencepiece_files
from transformers import PreTrainedModel

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Arrays = dict[str, np.ndarray]


def tensors_of(model: PreTrainedModel, arch: str) -> Arrays:
    """Under llama.cpp's names; the heads of a Llama's queries and keys with neighbours rotated instead of halves."""
    found = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        array = value.float().numpy()
        heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}.get(
            stem.rsplit(".", 1)[-1]
        )
        if arch == "llama" and heads:
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if stem in NAMES:
            found[f"{NAMES[stem]}.{kind}"] = array
        else:
            _, _, layer, rest = stem.split(".", 3)
            found[f"blk.{layer}.{LAYER_NAMES[rest]}.{kind}"] = array
    return found


def byte_level_keys(size: int) -> dict[str, Any]:
    """The tiny byte-level tokenizer, with names for ids up to `size` that nothing means."""
    content = json.loads(byte_level_files()["tokenizer.json"])
    tokens = {index: token for token, index in content["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, 1)
    for added in content["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], 3 if added["special"] else 4
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [tokens.get(index, f"[PAD{index}]") for index in range(size)],
        "token_type": [kinds.get(index, 5) for index in range(size)],
        "merges": [" ".join(merge) if isinstance(merge, list) else merge for merge in content["model"]["merges"]],
        "bos_token_id": content["model"]["vocab"]["<|bos|>"],
        "eos_token_id": content["model"]["vocab"]["<|eos|>"],
        "add_bos_token": True,
    }


def sentencepiece_keys(size: int) -> dict[str, Any]:
    content = json.loads(sentencepiece_files()["tokenizer.json"])
    tokens = {index: token for token, index in content["model"]["vocab"].items()}
    merges = [
        "".join(merge) if isinstance(merge, list) else merge.replace(" ", "") for merge in content["model"]["merges"]
    ]
    order = {token: index for index, token in reversed(list(enumerate(merges)))}
    kinds = {index: 6 if token.startswith("<0x") else 1 for index, token in tokens.items()}
    kinds |= {
        content["model"]["vocab"]["<unk>"]: 2,
        content["model"]["vocab"]["<s>"]: 3,
        content["model"]["vocab"]["</s>"]: 3,
    }
    return {
        "model": "llama",
        "tokens": [tokens.get(index, f"[PAD{index}]") for index in range(size)],
        "token_type": [kinds.get(index, 5) for index in range(size)],
        "scores": [-float(order.get(tokens.get(index, ""), 1000)) for index in range(size)],
        "bos_token_id": content["model"]["vocab"]["<s>"],
        "eos_token_id": content["model"]["vocab"]["</s>"],
    }


def write(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """keys, tensors: more or other ones than the model's; None leaves one out. kind: of matrices."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    settings: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    settings |= {
        f"tokenizer.ggml.{name}": value for name, value in (tokenizer or byte_level_keys(config.vocab_size)).items()
    }
    for name, value in {**settings, **(keys or {})}.items():
        _put(writer, name, value)
    for name, array in {**tensors_of(model, arch), **(tensors or {})}.items():
        if array is None:
            continue
        if kind != gguf.GGMLQuantizationType.F32 and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _put(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, list(value))
