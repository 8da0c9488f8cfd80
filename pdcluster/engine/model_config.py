"""Reads a checkpoint's config.json strictly: every key that changes the result is honoured or refused by name, and keys we do not know are refused.

It does not read weights, and it never imports transformers (slow, and lenient where we must not be).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

from pdcluster.api.gguf_file import is_gguf, open_gguf
from pdcluster.engine.rope import RopeConfig
from pdcluster.errors import ModelError
from pdcluster.kv.layout import DType, KVLayout

Family = Literal["llama", "qwen2", "qwen3", "mistral"]
Json = dict[str, object]
T = TypeVar("T")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
}

# fmt: off
HARMLESS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "attention_dropout", "bad_words_ids", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_decoder", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tie_encoder_decoder", "tokenizer_class", "torchscript",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
})
# fmt: on
"""Keys that do not change what a forward computes at inference."""

MUST_BE = {
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
"""Keys that are fine at one value only (absent counts as that value)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder, as the engine needs to know it. sliding_window: sequences up to this length are not affected by it; None without one."""

    architecture: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    stored_dtype: str | None
    """What the config says the weights are in; None when it does not say."""

    def kv_layout(self, page_tokens: int, dtype: DType) -> KVLayout:
        """Pages that hold every head."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, page_tokens, dtype)


def read_config(model_dir: Path) -> ModelConfig:
    """Parse config.json and generation_config.json of a Hugging Face directory, or what a GGUF file says; raises ModelError."""
    if is_gguf(model_dir):
        raw = open_gguf(model_dir).config
        return parse_config(raw, raw["eos_token_id"])
    raw = _load_json(model_dir / "config.json")
    generation = model_dir / "generation_config.json"
    source = _load_json(generation) if generation.exists() else {}
    eos = source.get("eos_token_id", raw.get("eos_token_id"))
    return parse_config(raw, eos)


def parse_config(raw: Json, eos: object = None) -> ModelConfig:
    """The config from its JSON object; `eos` is the end-of-sequence id or ids that apply."""
    keys = _Keys(raw)
    architecture, family = _family(keys)
    for name, value in MUST_BE.items():
        keys.require(name, value)
    if keys.take("hidden_act", str) != "silu":
        raise ModelError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")
    hidden_size, num_heads = keys.take("hidden_size", int), keys.take("num_attention_heads", int)
    num_layers = keys.take("num_hidden_layers", int)
    max_len = keys.take("max_position_embeddings", int)
    vocab_size = keys.take("vocab_size", int)
    bias = _biases(keys, family)
    config = ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.take("intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.take("num_key_value_heads", int, num_heads) if family == "llama" else keys.take("num_key_value_heads", int),
        head_dim=_head_dim(keys, family, hidden_size, num_heads),
        rms_norm_eps=keys.take("rms_norm_eps", float),
        rope=_rope(keys, max_len),
        max_position_embeddings=max_len,
        tie_word_embeddings=keys.take("tie_word_embeddings", bool, False),
        qkv_bias=bias[0],
        output_bias=bias[1],
        mlp_bias=bias[2],
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(keys, family, num_layers),
        eos_token_ids=_token_ids(eos, vocab_size),
        stored_dtype=_stored_dtype(keys),
    )
    keys.ignore("eos_token_id", "model_type")
    keys.finish()
    _check_shape(config)
    return config


class _Keys:
    """The keys of a JSON object, each taken once with its type, so that what nobody took can be refused."""

    def __init__(self, raw: Json, where: str = "config.json") -> None:
        self._raw = raw
        self._where = where
        self._left = set(raw)

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key that is there, else the default; None counts as absent. No default: the key is required."""
        value = self.optional(name, kind)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._where}: {name} is missing; the model cannot be computed without it")
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        self._left.discard(name)
        value = self._raw.get(name)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self._where}: {name} is {value!r}; expected {kind.__name__}")
        return value

    def has(self, name: str) -> bool:
        return name in self._raw

    def require(self, name: str, value: object) -> None:
        self._left.discard(name)
        found = self._raw.get(name)
        if found is not None and found != value:
            raise ModelError(f"{self._where}: {name} {found!r} is not supported; only {value!r} is")

    def ignore(self, *names: str) -> None:
        self._left.difference_update(names)

    def finish(self, harmless: frozenset[str] = HARMLESS) -> None:
        unknown = sorted(self._left - harmless)
        if unknown:
            raise ModelError(f"{self._where}: unknown key {unknown[0]!r} = {self._raw[unknown[0]]!r}; it may change the result, so it is not ignored")


def _family(keys: _Keys) -> tuple[str, Family]:
    names = keys.take("architectures", list)
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ModelError(f"config.json: architectures {names!r} is not supported; supported are {', '.join(FAMILIES)}")
    return names[0], FAMILIES[names[0]]


def _biases(keys: _Keys, family: Family) -> tuple[bool, bool, bool]:
    """Biases of (q, k and v), (attention output), (MLP). A family that fixes them refuses a config that says otherwise."""
    if family == "llama":
        attention = keys.take("attention_bias", bool, False)
        return attention, attention, keys.take("mlp_bias", bool, False)
    if family == "qwen3":
        attention = keys.take("attention_bias", bool, False)
        keys.require("mlp_bias", False)
        return attention, attention, False
    keys.require("attention_bias", family == "qwen2")
    keys.require("mlp_bias", False)
    return family == "qwen2", False, False


def _head_dim(keys: _Keys, family: Family, hidden_size: int, num_heads: int) -> int:
    given = keys.optional("head_dim", int)
    if given is not None:
        return given
    if family == "qwen3":
        return 128
    if hidden_size % num_heads:
        raise ModelError(f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads} and head_dim is not given")
    return hidden_size // num_heads


def _sliding_window(keys: _Keys, family: Family, num_layers: int) -> int | None:
    window = keys.optional("sliding_window", int)
    types = keys.take("layer_types", list, [])
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ModelError(f"config.json: layer_types has {sorted(map(str, unknown))[0]!r}; only full_attention is supported")
    if types and len(types) != num_layers:
        raise ModelError(f"config.json: layer_types names {len(types)} layers, num_hidden_layers is {num_layers}")
    if family == "llama":
        if window is not None or "sliding_attention" in types:
            raise ModelError(f"config.json: sliding_window {window} is not supported for LlamaForCausalLM; it must be null")
        return None
    if family == "mistral":
        return window if keys.has("sliding_window") else 4096
    used = keys.take("use_sliding_window", bool, False)
    first = keys.take("max_window_layers", int, 28)
    if "sliding_attention" in types and not used:
        raise ModelError("config.json: layer_types has 'sliding_attention' while use_sliding_window is false; one of them is wrong")
    slides = "sliding_attention" in types if types else first < num_layers
    return (window if keys.has("sliding_window") else 4096) if used and slides else None


def _rope(keys: _Keys, max_len: int) -> RopeConfig:
    theta = keys.optional("rope_theta", float)
    old, new = keys.optional("rope_scaling", dict), keys.optional("rope_parameters", dict)
    if old and new and old != new:
        raise ModelError("config.json: rope_scaling and rope_parameters are both given and differ; keep one")
    raw = cast(Json, new or old or {})
    rope = _Keys(raw, "config.json: " + ("rope_parameters" if new else "rope_scaling"))
    kind = rope.optional("rope_type", str) or rope.optional("type", str) or "default"
    rope.ignore("type")
    theta = rope.take("rope_theta", float, theta or 10000.0)
    rope.require("partial_rotary_factor", 1.0)
    match kind:
        case "default":
            config = RopeConfig(theta)
        case "linear":
            config = RopeConfig(theta, "linear", factor=rope.take("factor", float))
        case "llama3":
            config = _llama3(rope, theta, max_len)
        case "yarn":
            config = _yarn(rope, theta, max_len)
        case "dynamic" | "longrope":
            raise ModelError(f"config.json: rope type {kind!r} is not supported: its keys depend on the total length, so pages cannot hold them")
        case _:
            raise ModelError(f"config.json: rope type {kind!r} is not supported; default, linear, llama3 and yarn are")
    rope.finish(frozenset())
    return config


def _llama3(rope: _Keys, theta: float, max_len: int) -> RopeConfig:
    low, high = rope.take("low_freq_factor", float), rope.take("high_freq_factor", float)
    if low == high:
        raise ModelError(f"config.json: rope low_freq_factor and high_freq_factor are both {low}; they must differ")
    return RopeConfig(
        theta,
        "llama3",
        factor=rope.take("factor", float),
        original_max_len=rope.take("original_max_position_embeddings", int, max_len),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: _Keys, theta: float, max_len: int) -> RopeConfig:
    return RopeConfig(
        theta,
        "yarn",
        factor=rope.take("factor", float),
        original_max_len=rope.take("original_max_position_embeddings", int, max_len),
        beta_fast=rope.take("beta_fast", float, 32.0),
        beta_slow=rope.take("beta_slow", float, 1.0),
        attention_factor=rope.optional("attention_factor", float),
        mscale=rope.optional("mscale", float),
        mscale_all_dim=rope.optional("mscale_all_dim", float),
        truncate=rope.take("truncate", bool, True),
    )


def _stored_dtype(keys: _Keys) -> str | None:
    old, new = keys.optional("torch_dtype", str), keys.optional("dtype", str)
    return new or old


def _token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ModelError(f"eos_token_id {token!r} is no token id of a vocabulary of {vocab_size}")
    return tuple(ids)


def _check_shape(config: ModelConfig) -> None:
    counts = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
    }
    for name, value in counts.items():
        if value < 1:
            raise ModelError(f"config.json: {name} is {value}; it must be at least 1")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"config.json: num_attention_heads {config.num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}")
    if config.head_dim % 2:
        raise ModelError(f"config.json: head_dim {config.head_dim} is odd; rotary embedding needs pairs")


def _load_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; give the directory of a Hugging Face checkpoint") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return cast(Json, value)
