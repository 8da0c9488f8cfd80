"""GGUF files: tensors, config and tokenizer are those of the model that they were made of, and files that are not right
are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import gguf_files
import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE, LLAMA3, Shape
from driver import Driver, greedy
from gguf import GGMLQuantizationType as Kind
from tiny_tokenizers import byte_level_files, sentencepiece_files
from tokenizers import Tokenizer

from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint.gguf_tokenizer import text_files
from pdcluster.checkpoint.text_files import files_digest, read_text_files
from pdcluster.core.errors import ModelError
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.model.config import read_config
from pdcluster.engine.model.weights import load_weights

SIZE = 512
SHAPES = {
    "llama": Shape("llama", vocab_size=SIZE, hidden_size=128, num_kv_heads=4),
    "llama, tied": Shape("llama", vocab_size=SIZE, hidden_size=128, tied=True, config={"attention_bias": True}),
    "qwen2": Shape("qwen2", vocab_size=SIZE, hidden_size=128),
    "qwen3": Shape("qwen3", vocab_size=SIZE, hidden_size=128, head_dim=64),
}
TEXTS = (
    "The dog sleeps. 12  345",
    "def greet(name):\n\treturn 'né e' <tool> <|end|>",
    "Grüße 日本語 \U0001f600",
    "  two  spaces ",
)


def built(name: str) -> tuple[Any, str]:
    return checkpoints.build_model(SHAPES[name], seed=3), SHAPES[name].family


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_file_gives_the_tokens_of_the_model_it_was_made_of(name: str, tmp_path: Path) -> None:
    """In float32 tensors are equal, and so is what they compute; rotated heads would give something else."""
    model, arch = built(name)
    file = gguf_files.write(tmp_path / "tiny.gguf", model, arch)
    prompt = checkpoints.prompt(20, SIZE)
    expected = checkpoints.greedy(model, prompt, 6)
    engine = Engine(EngineConfig(file, KERNEL_CACHE, dtype="float32", page_tokens=16, num_pages=8))
    try:
        (job,) = Driver(engine).run([prompt], [greedy(6, prompt_logprobs=0)])
    finally:
        engine.close()
    assert job.tokens == expected.tokens
    np.testing.assert_allclose([entry.logprob for entry in job.prompt_logprobs], expected.prompt_logprobs, atol=2e-3)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.F16], ids=lambda kind: kind.name)
def test_quantised_tensors_are_near_to_those_they_were_made_of(kind: Kind, tmp_path: Path) -> None:
    model, arch = built("llama")
    file = gguf_files.write(tmp_path / "tiny.gguf", model, arch, kind=kind)
    config = read_config(file)
    weights = load_weights(file, config, "float32")
    for found, expected in (
        (weights.layers[1].q, model.model.layers[1].self_attn.q_proj.weight),
        (weights.layers[0].k, model.model.layers[0].self_attn.k_proj.weight),
        (weights.layers[1].down, model.model.layers[1].mlp.down_proj.weight),
        (weights.head, model.lm_head.weight),
    ):
        error = (found - expected).norm() / expected.norm()
        assert error < {"Q8_0": 0.01, "Q4_1": 0.12, "F16": 0.001}[kind.name]
    assert load_weights(file, config).dtype == "bfloat16"


def test_llama_3_scaling_is_known_by_its_tensor(tmp_path: Path) -> None:
    from pdcluster.checkpoint.gguf import LLAMA3_ROPE, _llama3_factors

    model, arch = built("llama")
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, **LLAMA3_ROPE}
    factors = _llama3_factors(rope, 32).astype(np.float32)
    file = gguf_files.write(tmp_path / "tiny.gguf", model, arch, tensors={"rope_freqs.weight": factors})
    config = read_config(file)
    assert (config.rope.type, config.rope.factor, config.rope.original_max_len) == ("llama3", 8.0, 8192)
    load_weights(file, config)
    given = LLAMA3 | {"rope_theta": 10000.0}
    base = 10000.0 ** (-torch.arange(0, 32, 2) / 32)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = Shape("llama", rope={**LLAMA3_ROPE, "rope_type": "llama3", "factor": 8.0})
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](checkpoints.build_config(shape), torch.device("cpu"))
    np.testing.assert_allclose(_llama3_factors(given | LLAMA3_ROPE, 32), (base / inverse).numpy(), rtol=1e-4)
    other = gguf_files.write(tmp_path / "other.gguf", model, arch, tensors={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not Llama 3's"):
        read_config(other)


def test_a_byte_level_tokenizer_is_that_of_the_original(tmp_path: Path) -> None:
    model, arch = built("llama")
    found = TextModel.from_dir(gguf_files.write(tmp_path / "tiny.gguf", model, arch))
    original = TextModel(byte_level_files())
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=True)
        assert ids == original.encode(text, add_special_tokens=True)
        assert found.decode(ids) == original.decode(ids)
    assert found.eos_token_ids == original.eos_token_ids


def test_a_sentencepiece_tokenizer_is_that_of_the_original(tmp_path: Path) -> None:
    model, arch = built("llama")
    file = gguf_files.write(tmp_path / "tiny.gguf", model, arch, tokenizer=gguf_files.sentencepiece_keys(SIZE))
    found, original = TextModel.from_dir(file), TextModel(sentencepiece_files())
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False)
        assert found.decode(ids) == original.decode(ids)
    bos = gguf_files.sentencepiece_keys(SIZE)["bos_token_id"]
    assert found.encode("a", add_special_tokens=True)[0] == bos


@pytest.mark.parametrize("begins", [True, False, None])
@pytest.mark.parametrize("ends", [True, False, None])
def test_prompts_begin_and_end_as_the_file_says(begins: bool | None, ends: bool | None) -> None:
    """Where it does not say, a byte-level tokenizer adds nothing. Its tokenizer.json alone decides."""
    keys = gguf_files.byte_level_keys(SIZE) | {"add_bos_token": begins, "add_eos_token": ends}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}
    files = text_files(metadata, {}, "tiny.gguf")
    ids = Tokenizer.from_buffer(files["tokenizer.json"]).encode("a").ids
    assert (ids[0] == keys["bos_token_id"], ids[-1] == keys["eos_token_id"]) == (bool(begins), bool(ends))
    assert list(TextModel(files).encode("a", add_special_tokens=True)) == ids


def test_the_chat_template_comes_along(tmp_path: Path) -> None:
    model, arch = built("llama")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = gguf_files.write(tmp_path / "tiny.gguf", model, arch, keys={"tokenizer.chat_template": template})
    assert TextModel.from_dir(file).render_chat([{"role": "user", "content": "hi"}]) == "hi"


def test_a_chat_template_for_tools_comes_along(tmp_path: Path) -> None:
    model, arch = built("llama")
    keys = {
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "tools:{{ messages[0].content }}",
        "tokenizer.chat_template.rag": "{{ documents }}",
    }
    text = TextModel.from_dir(gguf_files.write(tmp_path / "tiny.gguf", model, arch, keys=keys))
    chat = [{"role": "user", "content": "hi"}]
    assert (text.render_chat(chat), text.render_chat(chat, tools=[{}])) == ("hi", "tools:hi")


def test_files_of_other_weights_have_the_same_text(tmp_path: Path) -> None:
    model, arch = built("llama")
    one = gguf_files.write(tmp_path / "one.gguf", model, arch)
    other = gguf_files.write(
        tmp_path / "other.gguf", model, arch, tensors={"token_embd.weight": np.zeros((SIZE, 128), np.float32)}
    )
    assert files_digest(read_text_files(one)) == files_digest(read_text_files(other))


def with_keys(**keys: Any) -> dict[str, Any]:
    return {"keys": keys}


def tokenizer(**changes: Any) -> dict[str, Any]:
    keys = gguf_files.byte_level_keys(SIZE) | changes
    return {"tokenizer": {name: value for name, value in keys.items() if value is not None}}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"keys": {"llama.expert_count": 8}}, "8 experts"),
        ({"keys": {"llama.block_count": None}}, "llama.block_count is None"),
        ({"keys": {"llama.rope.dimension_count": 16}}, "only 16 of 32 dimensions are rotated"),
        ({"keys": {"llama.rope.scaling.type": "longrope"}}, "rope scaling 'longrope'"),
        ({"keys": {"llama.attention.value_length": 64}}, "values 64"),
        ({"keys": {"split.count": 3}}, "one of 3 parts"),
        ({"keys": {"llama.attention.sliding_window": 128}}, "sliding window of 128"),
        (tokenizer(pre="unheard-of"), "tokenizer.ggml.pre. is 'unheard-of'"),
        (tokenizer(pre=None), "tokenizer.ggml.pre. is None"),
        (tokenizer(model="bert"), "tokenizer is 'bert'"),
        (tokenizer(tokens=None), "has no tokenizer"),
        (tokenizer(merges=None), "no merges"),
        (tokenizer(eos_token_id=9999), "eos_token_id is 9999"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "layers.1.mlp.up_proj.weight is missing"),
        ({"tensors": {"blk.1.ffn_up.weight": np.zeros((5, 128), np.float32)}}, "shape"),
        ({"tensors": {"blk.0.ssm_a": np.zeros(5, np.float32)}}, "tensor blk.0.ssm_a is not one of"),
        ({"tensors": {"token_embd.weight": None}}, "token_embd.weight is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    model, arch = built("llama")
    file = gguf_files.write(tmp_path / "tiny.gguf", model, arch, **changes)
    with pytest.raises(ModelError, match=error):
        TextModel.from_dir(file)
        load_weights(file, read_config(file))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    model, _ = built("llama")
    with pytest.raises(ModelError, match="architecture is 'mamba'; llama, qwen2, qwen3 are supported"):
        read_config(gguf_files.write(tmp_path / "tiny.gguf", model, "mamba"))


@pytest.mark.parametrize("damage", ["cut", "cut in the header", "no gguf", "version", "type", "empty"])
def test_a_damaged_file_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    model, arch = built("llama")
    file = gguf_files.write(tmp_path / "tiny.gguf", model, arch)
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[-20_000:]
    elif damage == "cut in the header":
        del data[2000:]
    elif damage == "no gguf":
        data[:4] = b"PK\x03\x04"
    elif damage == "version":
        data[4:8] = (99).to_bytes(4, "little")
    elif damage == "empty":
        data.clear()
    else:
        name = b"blk.0.ffn_up.weight"
        place = data.index(name) + len(name) + 4 + 16
        data[place : place + 4] = (77).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        load_weights(file, read_config(file))
