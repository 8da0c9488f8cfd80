"""Directories as users have them: configs mean what transformers reads in them, and what cannot be served is refused by
name before it loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import Shape
from model_configs import REFUSED, SERVED, Json
from safetensors.torch import load_file, save_file
from tiny_tokenizers import byte_level_files
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdcluster.checkpoint.inspection import check_model_files
from pdcluster.core.errors import ModelError
from pdcluster.engine.model.config import ModelConfig, parse_config, read_config
from pdcluster.engine.model.rope import attention_scale, inverse_frequencies
from pdcluster.engine.model.weights import load_weights


def theirs(raw: Json) -> PretrainedConfig:
    """As transformers reads it. It knows a model by its type, and neither an old name nor numbers of another kind."""
    known = {
        key: int(value) if key == "num_hidden_layers" else value
        for key, value in raw.items()
        if key not in ("architectures", "auto_map")
    }
    nulls = {
        key
        for key, value in known.items()
        if value is None and key in ("layer_types", "partial_rotary_factor", "quantization_config")
    }
    known |= {"torch_dtype": "float16"} if known.get("torch_dtype") in ("half", "auto", "torch.bfloat16") else {}
    return AutoConfig.for_model(**{key: value for key, value in known.items() if key not in nulls})


@pytest.mark.parametrize("name", list(SERVED))
def test_a_config_means_what_transformers_reads_in_it(name: str) -> None:
    raw = SERVED[name]
    found, expected = parse_config(raw), theirs(raw)
    for ours, key in (
        (found.hidden_size, "hidden_size"),
        (found.intermediate_size, "intermediate_size"),
        (found.num_layers, "num_hidden_layers"),
        (found.num_heads, "num_attention_heads"),
        (found.num_kv_heads, "num_key_value_heads"),
        (found.rms_norm_eps, "rms_norm_eps"),
        (found.max_position_embeddings, "max_position_embeddings"),
        (found.tie_word_embeddings, "tie_word_embeddings"),
        (found.vocab_size, "vocab_size"),
    ):
        assert ours == getattr(expected, key), key
    assert found.head_dim == (
        getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
    )
    if found.family in ("llama", "qwen3"):
        assert found.qkv_bias == expected.attention_bias
    if found.family != "llama":
        assert found.sliding_window == expected.sliding_window
    assert_same_rope(found, expected)


def assert_same_rope(found: ModelConfig, expected: PretrainedConfig) -> None:
    ours = inverse_frequencies(found.rope, found.head_dim)
    kind = expected.rope_parameters["rope_type"]
    if kind == "default":
        base = expected.rope_parameters["rope_theta"]
        torch.testing.assert_close(ours, 1.0 / base ** (torch.arange(0, found.head_dim, 2) / found.head_dim))
        assert attention_scale(found.rope) == 1.0
        return
    inverse, scale = ROPE_INIT_FUNCTIONS[kind](expected, torch.device("cpu"))
    torch.testing.assert_close(ours, inverse)
    assert attention_scale(found.rope) == pytest.approx(scale)


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_config_that_would_be_computed_wrong_is_refused_by_name(name: str) -> None:
    raw, error = REFUSED[name]
    with pytest.raises(ModelError, match=error):
        parse_config(raw, raw.get("eos_token_id"))


# ------------------------------------------------------------ directories


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    checkpoints.save(
        checkpoints.build_model(Shape("llama", vocab_size=512, hidden_size=128), seed=1, dtype=torch.bfloat16),
        directory,
    )
    for name, content in byte_level_files().items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in original.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def remove(*names: str) -> Callable[[Path], None]:
    return lambda model: [(model / name).unlink() for name in names] and None


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(content) and None


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda model: [change(model) for change in changes] and None


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def dangle(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("../../blobs/gone")


def retype(name: str, kind: torch.dtype) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        tensors = {key: tensor.clone() for key, tensor in load_file(model / "model.safetensors").items()}
        tensors[name] = tensors.get(name, torch.zeros(8)).to(kind)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return change


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n"
INDEX = json.dumps(
    {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
).encode()
ALL = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights are a git-lfs pointer": (put("model.safetensors", POINTER),
    r"model\.safetensors is a git-lfs pointer.*git lfs pull"),
    "the tokenizer is a git-lfs pointer": (put("tokenizer.json", POINTER), r"tokenizer\.json is a git-lfs pointer"),
    "a LoRA adapter": (both(remove("config.json", "model.safetensors"), put("adapter_config.json", b"{}")),
    "is a LoRA adapter.*merge"),
    "a LoRA adapter with a config": (both(remove("model.safetensors"), put("adapter_config.json", b"{}")),
    "is a LoRA adapter"),
    "weights as .bin": (both(remove("model.safetensors"), put("pytorch_model.bin", b"x")),
    r"pytorch_model\.bin, but only safetensors"),
    "weights as .pth": (both(remove("model.safetensors"), put("consolidated.00.pth", b"x")), r"consolidated\.00\.pth"),
    "no weights": (remove("model.safetensors"), "has no weights"),
    "no tokenizer": (remove("tokenizer.json"), r"no tokenizer\.json; nothing can turn.*AutoTokenizer"),
    "a slow tokenizer": (both(remove("tokenizer.json"), put("tokenizer.model", b"x")),
    r"no tokenizer\.json; it has tokenizer\.model"),
    "empty": (remove(*ALL), "is empty"),
    "no config": (remove("config.json"), r"has no config\.json"),
    "its maker's format": (both(remove(*ALL), put("params.json", b"{}"), put("consolidated.00.pth", b"x")),
    r"params\.json.*own format"),
    "a diffusers pipeline": (both(remove(*ALL), put("model_index.json", b"{}")), "diffusers"),
    "a directory of GGUF files": (both(remove(*ALL), put("tiny.gguf", b"GGUF")), r"give one of them: .*tiny\.gguf"),
    "a cut download": (cut, "the download was cut"),
    "no safetensors": (put("model.safetensors", b"<html>not found</html>"), "no safetensors file, or was cut"),
    "a broken header": (put("model.safetensors", (8).to_bytes(8, "little") + b"notjson!"), "broken header"),
    "fp8 tensors": (retype("model.layers.1.mlp.up_proj.weight", torch.float8_e4m3fn),
    r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight is stored as F8_E4M3.*bfloat16 release"),
    "tensors of bytes": (retype("model.norm.weight", torch.uint8), r"model\.norm\.weight is stored as U8"),
    "a missing shard": (put("model.safetensors.index.json", INDEX),
    r"names model-00001-of-00002\.safetensors, which is not in"),
    "a broken index": (put("model.safetensors.index.json", b"{"), "no valid safetensors index"),
    "a link to nothing": (dangle, r"is a link to \.\./\.\./blobs/gone"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_directory_is_refused_by_name_before_it_loads(name: str, model: Path) -> None:
    change, error = BROKEN[name]
    change(model)
    with pytest.raises(ModelError, match=error):
        check_model_files(model)


def test_a_buffer_of_an_old_checkpoint_may_have_any_type(model: Path) -> None:
    retype("model.layers.0.self_attn.rotary_emb.inv_freq", torch.float64)(model)
    check_model_files(model)
    load_weights(model, read_config(model))


def test_whole_directories_are_taken_however_they_are_reached(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced = tmp_path / "a model, with spaces"
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(model.iterdir())):
        (blobs / str(index)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / str(index), snapshot))
    model.rename(spaced)
    link = tmp_path / "link"
    link.symlink_to(spaced)
    monkeypatch.chdir(tmp_path)
    for path in (spaced, Path(f"{spaced}/"), link, snapshot, Path(spaced.name)):
        check_model_files(path)
        load_weights(path, read_config(path))


def test_files_and_what_is_not_there_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    for path, error in (
        (model / "model.safetensors", "is a file; give its directory"),
        (tmp_path / "gone", "does not exist; give a Hugging Face directory"),
        (tmp_path / "gone.gguf", "does not exist"),
    ):
        with pytest.raises(ModelError, match=error):
            check_model_files(path)
    (tmp_path / "pointer.gguf").write_bytes(POINTER)
    with pytest.raises(ModelError, match="git-lfs pointer"):
        check_model_files(tmp_path / "pointer.gguf")


def test_a_router_with_a_tokenizer_of_its_own_needs_none_in_the_directory(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    check_model_files(model, needs_tokenizer=False)
