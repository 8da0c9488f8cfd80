"""Reads a checkpoint's config.json. Keys that change a forward pass are honoured or refused by name. All others are
passed over.

The keys are those that transformers 5.23 reads for an architecture (`models/*/configuration_*.py`, `modeling_*.py`,
`modeling_rope_utils.py`). Added are keys that other engines read and transformers computes differently. A missing key
means what it means there. transformers is never imported, because that is slow.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar, cast

from pdcluster.checkpoint.end_tokens import eos_token_ids
from pdcluster.checkpoint.gguf import is_gguf, open_gguf
from pdcluster.checkpoint.text_files import read_text_files
from pdcluster.core.errors import ModelError
from pdcluster.engine.model.rope import RopeConfig
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

DEFAULT_THETA = 10000.0
ALIASES = {"LLaMAForCausalLM": "LlamaForCausalLM"}

# Keys that change a forward pass unless they have this value, or none, and what they change.
REQUIRED_VALUES: dict[str, tuple[object, str]] = {
    "partial_rotary_factor": (1.0, "only some dimensions of a head are rotated"),
    "rope_interleaved": (False, "neighbouring dimensions are rotated instead of halves"),
    "use_mrope": (False, "positions have several dimensions"),
    "is_encoder_decoder": (False, "only decoders are served"),
    "add_cross_attention": (False, "only decoders are served"),
    "dual_chunk_attention_config": (
        None,
        "positions are changed beyond a length; remove the key to serve plain attention",
    ),
}

# Where tools say that weights are stored in another form: transformers, MLX, compressed-tensors, older AWQ.
QUANTIZED = ("quantization_config", "quantization", "compression_config", "quant_config")

LAYER_KINDS = ("full_attention", "sliding_attention")
READ_ELSEWHERE = frozenset({"eos_token_id", "model_type", "architectures"})
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a family's keys mean where they are missing. num_kv_heads None: as many as heads; head_dim None: hidden_size
    / heads."""

    num_kv_heads: int | None
    max_position_embeddings: int
    head_dim: int | None = None


DEFAULTS: dict[Family, Defaults] = {
    "llama": Defaults(None, 2048),
    "mistral": Defaults(8, 4096 * 32),
    "qwen2": Defaults(32, 32768),
    "qwen3": Defaults(32, 32768, head_dim=128),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder, as the engine needs to know it. sliding_window: sequences up to this length are not affected by
    it; None without one."""

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
    # What the config says the weights are in; None when it does not say.
    stored_dtype: str | None

    def kv_layout(self, page_tokens: int, dtype: DType) -> KVLayout:
        """Pages that hold every head."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, page_tokens, dtype)


def read_config(model_dir: Path) -> ModelConfig:
    """The config of a Hugging Face directory, or what a GGUF file says; raises ModelError."""
    if is_gguf(model_dir):
        return parse_config(open_gguf(model_dir).config, eos_token_ids(read_text_files(model_dir)))
    raw = _load_json(model_dir / "config.json")
    return parse_config(raw, eos_token_ids(read_text_files(model_dir)))


def parse_config(raw: Json, eos: object = None) -> ModelConfig:
    """The config from its JSON object; `eos` is the end-of-sequence id or ids that apply."""
    keys = _Keys(raw)
    architecture, family = _family(keys)
    defaults = DEFAULTS[family]
    _refuse_quantized(keys)
    for name, (value, change) in REQUIRED_VALUES.items():
        keys.require(name, value, change)
    if keys.take("hidden_act", str, "silu") not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")
    hidden_size, num_heads = keys.take("hidden_size", int), keys.take("num_attention_heads", int)
    num_layers = keys.take("num_hidden_layers", int)
    max_len = keys.take("max_position_embeddings", int, defaults.max_position_embeddings)
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
        num_kv_heads=keys.take("num_key_value_heads", int, defaults.num_kv_heads or num_heads),
        head_dim=_head_dim(keys, defaults.head_dim, hidden_size, num_heads),
        rms_norm_eps=keys.take("rms_norm_eps", float, 1e-6),
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
    _tell_passed_over(keys.left - READ_ELSEWHERE)
    _check_shape(config)
    return config


@lru_cache(maxsize=64)
def _tell(names: str) -> None:
    """Once for each set of names: a process reads a config several times."""
    log.info("config.json: passed over, as they change no forward pass: %s", names)


def _tell_passed_over(names: Set[str]) -> None:
    if names:
        _tell(", ".join(sorted(names)))


class _Keys:
    """The keys of a JSON object, each taken once with its type, so that what nobody took can be told."""

    def __init__(self, raw: Json, where: str = "config.json") -> None:
        self._raw = raw
        self._where = where
        # What nobody took.
        self.left = set(raw)

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key that is there, else the default; None counts as absent. No default: the key is
        required."""
        value = self.optional(name, kind)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._where}: {name} is missing; the model cannot be computed without it")
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        self.left.discard(name)
        value = self._raw.get(name)
        if value is None:
            return None
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self._where}: {name} is {value!r}; expected {kind.__name__}")
        return value

    def has(self, name: str) -> bool:
        return name in self._raw

    def get(self, name: str) -> object:
        """The value of a key of any type; None counts as absent."""
        self.left.discard(name)
        return self._raw.get(name)

    def require(self, name: str, value: object, change: str) -> None:
        found = self.get(name)
        if found is not None and found != value:
            raise ModelError(f"{self._where}: {name} {_short(found)} is not supported ({change}); only {value!r} is")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _family(keys: _Keys) -> tuple[str, Family]:
    """By the architecture, as other engines do; by model_type where a config names none, as transformers does."""
    names, kind = keys.take("architectures", list, []), keys.optional("model_type", str)
    known = [name for name in map(_alias, names) if name in FAMILIES]
    if not names and kind in FAMILIES.values():
        known = [name for name, family in FAMILIES.items() if family == kind]
    if len(known) != 1 or len(names) > 1:
        what = f"architectures {names!r}" if names else f"model_type {kind!r} without architectures"
        raise ModelError(
            f"config.json: {what} is not supported; supported are {', '.join(FAMILIES)}{_hint(keys, names)}"
        )
    family = FAMILIES[known[0]]
    if kind in FAMILIES.values() and kind != family:
        raise ModelError(
            f"config.json: architectures {names!r} and model_type {kind!r} name two models; correct one of them"
        )
    return known[0], family


def _alias(name: object) -> str:
    return ALIASES.get(str(name), str(name))


def _hint(keys: _Keys, names: list[object]) -> str:
    if keys.get("text_config") is not None or keys.get("vision_config") is not None:
        return "; models that see or hear are not served yet"
    if any(str(name).endswith("Model") for name in names):
        return "; this one has no head that gives tokens: take the causal language model"
    return ""


def _refuse_quantized(keys: _Keys) -> None:
    for name in QUANTIZED:
        found = keys.get(name)
        if found is not None:
            method = (
                found.get("quant_method") or found.get("quant_algo") or found.get("bits")
                if isinstance(found, dict)
                else found
            )
            way_out = (
                "take the model's bfloat16 release, or a GGUF file; --quantization int8 quantises when it is loaded"
            )
            raise ModelError(
                f"config.json: {name} says that the weights are quantised ({_short(method)}), which is not "
                f"supported; {way_out}"
            )


def _biases(keys: _Keys, family: Family) -> tuple[bool, bool, bool]:
    """Biases of (q, k and v), (attention output), (MLP). Qwen2 and Mistral fix them, whatever a config says."""
    if family == "llama":
        attention = keys.take("attention_bias", bool, False)
        return attention, attention, keys.take("mlp_bias", bool, False)
    if family == "qwen3":
        attention = keys.take("attention_bias", bool, False)
        return attention, attention, False
    return family == "qwen2", False, False


def _head_dim(keys: _Keys, default: int | None, hidden_size: int, num_heads: int) -> int:
    given = keys.optional("head_dim", int) or default
    if given is not None:
        return given
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads} and head_dim "
            "is not given"
        )
    return hidden_size // num_heads


def _sliding_window(keys: _Keys, family: Family, num_layers: int) -> int | None:
    window = keys.optional("sliding_window", int)
    types = keys.take("layer_types", list, [])
    if unknown := {str(kind) for kind in types}.difference(LAYER_KINDS):
        raise ModelError(f"config.json: layer_types has {min(unknown)!r}; only full_attention is supported")
    if types and len(types) != num_layers:
        raise ModelError(f"config.json: layer_types names {len(types)} layers, num_hidden_layers is {num_layers}")
    if family == "llama":  # whose class knows no window
        if "sliding_attention" in types:
            raise ModelError(
                "config.json: layer_types has 'sliding_attention', which is not supported for LlamaForCausalLM"
            )
        return None
    if family == "mistral":
        return window if keys.has("sliding_window") else 4096
    used = keys.take("use_sliding_window", bool, False)
    first = keys.take("max_window_layers", int, 28)
    if "sliding_attention" in types and not used:
        raise ModelError(
            "config.json: layer_types has 'sliding_attention' while use_sliding_window is false; one of them is wrong"
        )
    slides = "sliding_attention" in types if types else first < num_layers
    return (window if keys.has("sliding_window") else 4096) if used and slides else None


def _rope(keys: _Keys, max_len: int) -> RopeConfig:
    """From rope_scaling (old) or rope_parameters (new); both may be there if they say the same, in whatever
    spelling."""
    theta = keys.optional("rope_theta", float)
    original = keys.optional("original_max_position_embeddings", int) or max_len
    old, new = keys.optional("rope_scaling", dict), keys.optional("rope_parameters", dict)
    found = [
        (name, raw, _rope_of(cast(Json, raw), name, theta, original))
        for name, raw in (("rope_scaling", old), ("rope_parameters", _of_full_attention(new)))
        if raw
    ]
    if len(found) == 2 and found[0][2] != found[1][2]:
        raise ModelError(f"config.json: rope_scaling {_short(old)} and rope_parameters {_short(new)} differ; keep one")
    return found[-1][2] if found else RopeConfig(theta or DEFAULT_THETA)


def _of_full_attention(raw: dict[str, object] | None) -> dict[str, object] | None:
    """Some configs have parameters for each kind of layer."""
    if raw and set(raw) <= set(LAYER_KINDS):
        return cast("dict[str, object] | None", raw.get("full_attention"))
    return raw


def _rope_of(raw: Json, name: str, theta: float | None, max_len: int) -> RopeConfig:
    rope = _Keys(raw, f"config.json: {name}")
    kind = _rope_kind(rope, name)
    theta = rope.take("rope_theta", float, theta or DEFAULT_THETA)
    rope.require("partial_rotary_factor", 1.0, "only some dimensions of a head are rotated")
    match kind:
        case "default":
            config = RopeConfig(theta)
        case "linear":
            config = RopeConfig(theta, "linear", factor=rope.take("factor", float))
        case "llama3":
            config = _llama3(rope, theta, max_len)
        case "yarn":
            config = _yarn(rope, theta, max_len)
        case "dynamic" | "longrope" | "su":
            raise ModelError(
                f"config.json: rope type {kind!r} is not supported: its keys depend on the total length, so pages "
                "cannot hold them"
            )
        case _:
            raise ModelError(f"config.json: rope type {kind!r} is not supported; default, linear, llama3 and yarn are")
    if config.type != "default" and config.factor <= 0:
        raise ModelError(f"config.json: {name} has the factor {config.factor}; it must be greater than 0")
    _tell_passed_over({f"{name}.{key}" for key in rope.left})
    return config


def _rope_kind(rope: _Keys, name: str) -> str:
    """From rope_type (new) or type (old); both may be there if they say the same."""
    new, old = rope.optional("rope_type", str), rope.optional("type", str)
    if new is not None and old is not None and new != old:
        raise ModelError(f"config.json: {name} has the rope_type {new!r} and the type {old!r}; keep the right one")
    return new or old or "default"


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
    """ "auto" leaves it to the weights."""
    old, new = keys.optional("torch_dtype", str), keys.optional("dtype", str)
    said = (new or old or "auto").removeprefix("torch.")
    return None if said == "auto" else said


def _token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
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
        raise ModelError(
            f"config.json: num_attention_heads {config.num_heads} is no multiple of num_key_value_heads "
            f"{config.num_kv_heads}"
        )
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
