"""config.json: what is honoured, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdcluster.core.errors import ModelError
from pdcluster.engine.model.config import Json, parse_config, read_config
from pdcluster.engine.model.rope import RopeConfig
from pdcluster.kv.layout import KVLayout

BASE: Json = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
}
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def raw(family: str = "llama", **changes: object) -> Json:
    fixed = {"sliding_window": None} if family == "mistral" else {}
    return {**BASE, "architectures": [FAMILIES[family]], "model_type": family, **fixed, **changes}


def without(*names: str) -> Json:
    return {key: value for key, value in raw().items() if key not in names}


def test_a_plain_llama_config_is_read_as_it_stands() -> None:
    config = parse_config(raw(), eos=[7, 9])
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (4, 2, 16, 2)
    assert config.rope == RopeConfig(10000.0)
    assert config.eos_token_ids == (7, 9)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings) == (
        False,
    ) * 5
    assert config.kv_layout(16, "bfloat16") == KVLayout(2, 2, 16, 16, "bfloat16")


@pytest.mark.parametrize(
    ("family", "qkv", "output", "norm"),
    [
        ("llama", False, False, False),
        ("qwen2", True, False, False),
        ("qwen3", False, False, True),
        ("mistral", False, False, False),
    ],
)
def test_biases_and_norms_follow_from_the_family(family: str, qkv: bool, output: bool, norm: bool) -> None:
    config = parse_config(raw(family))
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (qkv, output, norm)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_bias_covers_the_output_too(family: str) -> None:
    config = parse_config(raw(family, attention_bias=True))
    assert (config.qkv_bias, config.output_bias) == (True, True)


def test_qwen3_heads_have_128_dimensions_unless_told() -> None:
    assert parse_config(raw("qwen3")).head_dim == 128
    assert parse_config(raw("qwen3", head_dim=32)).head_dim == 32


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_key_the_model_cannot_be_computed_without_is_missed_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} is missing"):
        parse_config(without(name))


def test_llama_without_kv_heads_has_as_many_as_heads() -> None:
    assert parse_config(without("num_key_value_heads")).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization": {"bits": 4}}, "quantization says that the weights are quantised"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"model_type": "qwen2"}, "name two models"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected int"),
        ({"hidden_size": True}, "hidden_size is True; expected int"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_size": 66}, "no multiple of num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(changes: Json, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(raw(**changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {"attention_bias": False}), ("mistral", {"attention_bias": True}), ("qwen3", {"mlp_bias": True})],
)
def test_a_bias_that_the_family_fixes_is_not_read(family: str, changes: Json) -> None:
    assert parse_config(raw(family, **changes)) == parse_config(raw(family))


def test_what_is_passed_over_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        parse_config(raw(unsloth_version="2025.1", _attn_implementation="sdpa", some_key_of_a_library={"a": 1}))
    assert [record.getMessage() for record in caplog.records] == [
        "config.json: passed over, as they change no forward pass: _attn_implementation, some_key_of_a_library, "
        "unsloth_version"
    ]


def test_keys_without_effect_at_inference_are_accepted() -> None:
    without_effect = {
        "initializer_range": 0.5,
        "use_cache": True,
        "transformers_version": "5",
        "pretraining_tp": 1,
        "attention_dropout": 0.0,
    }
    assert parse_config(raw(**without_effect, bos_token_id=1)) == parse_config(raw())


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {}, None),
        ("mistral", {"sliding_window": 256}, 256),
        ("qwen2", {"sliding_window": 256}, None),
        ("qwen2", {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen2", {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 1}, 256),
        (
            "qwen3",
            {"sliding_window": 256, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            256,
        ),
        ("qwen3", {"sliding_window": 256, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_the_sliding_window_is_known_when_some_layer_slides(family: str, changes: Json, window: int | None) -> None:
    assert parse_config(raw(family, **changes)).sliding_window == window


def test_mistral_that_does_not_mention_its_window_has_the_library_default() -> None:
    config = raw("mistral")
    del config["sliding_window"]
    assert parse_config(config).sliding_window == 4096


def test_sliding_layers_without_sliding_are_a_contradiction() -> None:
    with pytest.raises(ModelError, match="one of them is wrong"):
        parse_config(raw("qwen2", layer_types=["sliding_attention"] * 2))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_total_length_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(ModelError, match=f"{kind}.*pages cannot hold"):
        parse_config(raw(rope_scaling={"rope_type": kind, "factor": 2.0}))


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = parse_config(raw(rope_theta=5000.0, rope_scaling=scaling))
    new = parse_config(raw(rope_parameters={**scaling, "rope_theta": 5000.0}))
    assert old == new
    assert old.rope == RopeConfig(
        5000.0, "llama3", factor=8.0, original_max_len=64, low_freq_factor=1.0, high_freq_factor=4.0
    )


def test_the_oldest_spelling_of_the_rope_type_is_read() -> None:
    assert parse_config(raw(rope_scaling={"type": "linear", "factor": 2.0})).rope == RopeConfig(
        10000.0, "linear", factor=2.0
    )


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "su"}, "rope type 'su'"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "mrope", "mrope_section": [1]}, "rope type 'mrope'"),
        ({"rope_type": "linear", "factor": 0.0}, "factor 0.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}, "must differ"),
    ],
)
def test_rope_parameters_are_read_strictly(rope: Json, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(raw(rope_parameters=rope))


def test_two_ropes_that_differ_are_refused() -> None:
    with pytest.raises(ModelError, match=r"rope_scaling .*2\.0.* and rope_parameters .*4\.0.* differ"):
        parse_config(
            raw(
                rope_scaling={"rope_type": "linear", "factor": 2.0},
                rope_parameters={"rope_type": "linear", "factor": 4.0},
            )
        )


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rope_that_names_two_types_is_refused(name: str) -> None:
    rope = {"rope_type": "default", "type": "linear", "factor": 2.0}
    with pytest.raises(ModelError, match=rf"{name} has the rope_type 'default' and the type 'linear'; keep"):
        parse_config(raw(**{name: rope}))
    assert parse_config(raw(**{name: rope | {"rope_type": "linear"}})).rope.type == "linear"
    assert parse_config(raw(**{name: rope | {"rope_type": None}})).rope.type == "linear"


@pytest.mark.parametrize("eos", [100, -1, [2, "x"], True])
def test_an_end_token_outside_the_vocabulary_is_refused(eos: object) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        parse_config(raw(), eos=eos)


def test_end_tokens_of_all_files_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw(eos_token_id=3)))
    assert read_config(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 3], "temperature": 0.6}))
    assert read_config(tmp_path).eos_token_ids == (4, 3)
    tokenizer = {
        "added_tokens": [{"id": 9, "content": "<|end|>"}],
        "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 2}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for token, expected in (
        ("<|end|>", (4, 3, 9)),
        ({"content": "</s>"}, (4, 3, 2)),
        ("<none>", (4, 3)),
        (None, (4, 3)),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert read_config(tmp_path).eos_token_ids == expected


def test_an_end_that_the_model_cannot_say_is_refused(tmp_path: Path) -> None:
    """A fine-tuned tokenizer may have more tokens than the model; then no answer would end."""
    (tmp_path / "config.json").write_text(json.dumps(raw(eos_token_id=3)))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 100, "content": "<|end|>"}]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    with pytest.raises(ModelError, match="eos_token_id 100 is no token id of a vocabulary of 100"):
        read_config(tmp_path)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_config(tmp_path)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)
