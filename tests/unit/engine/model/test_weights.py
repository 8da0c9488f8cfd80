"""Reading checkpoints: sharing, shards, and refusals that name the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import Shape
from safetensors.torch import load_file, save_file

from pdcluster.checkpoint.held_files import weight_files
from pdcluster.core.errors import ModelError
from pdcluster.engine.model.config import read_config
from pdcluster.engine.model.weights import Weights, load_weights

SHAPE = Shape("qwen2", hidden_size=32, intermediate_size=48, head_dim=16, vocab_size=51)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.build_model(SHAPE, seed=1), tmp_path)


def load(model_dir: Path) -> Weights:
    return load_weights(model_dir, read_config(model_dir))


def rewrite(model_dir: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})


def mapped(model_dir: Path) -> bool:
    return str(model_dir / "model.safetensors") in Path("/proc/self/maps").read_text()


def test_every_tensor_is_read_with_its_biases(model_dir: Path) -> None:
    weights = load(model_dir)
    stored = load_file(model_dir / "model.safetensors")
    assert weights.dtype == "float32"
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.head, stored["lm_head.weight"])
    second = weights.layers[1]
    assert second.q_bias is not None and torch.equal(second.q_bias, stored["model.layers.1.self_attn.q_proj.bias"])
    assert second.o_bias is None and second.q_norm is None and second.gate_bias is None
    assert torch.equal(second.down, stored["model.layers.1.mlp.down_proj.weight"])


def test_weights_stay_mapped_views_of_the_file(model_dir: Path) -> None:
    assert not mapped(model_dir)
    weights = load(model_dir)
    assert mapped(model_dir)
    del weights


def test_shards_are_put_together(model_dir: Path, tmp_path: Path) -> None:
    sharded = checkpoints.save(checkpoints.build_model(SHAPE, seed=1), tmp_path / "sharded", shard_size="10KB")
    assert len(weight_files(sharded)) > 2
    assert torch.equal(load(sharded).layers[1].up, load(model_dir).layers[1].up)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.bias", "lm_head.weight"])
def test_a_missing_tensor_is_named(model_dir: Path, name: str) -> None:
    rewrite(model_dir, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        load(model_dir)


def test_an_extra_tensor_is_named(model_dir: Path) -> None:
    rewrite(model_dir, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(16)}))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.q_norm\.weight is in the checkpoint"):
        load(model_dir)


def test_a_layer_more_than_the_config_says_is_refused(model_dir: Path) -> None:
    checkpoints.edit_config(model_dir, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ModelError, match=r"model\.layers\.1\."):
        load(model_dir)


def test_frequency_buffers_of_old_checkpoints_are_ignored(model_dir: Path) -> None:
    head = load(model_dir).head.clone()
    rewrite(model_dir, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert torch.equal(load(model_dir).head, head)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(model_dir: Path) -> None:
    rewrite(model_dir, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(31,\), the config says \(32,\)"):
        load(model_dir)


def test_a_tensor_of_a_quantised_type_is_refused(model_dir: Path) -> None:
    rewrite(model_dir, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I8"):
        load(model_dir)


def test_a_tied_head_is_the_embedding_itself_and_a_stored_copy_must_agree(tmp_path: Path) -> None:
    tied = Shape("llama", hidden_size=32, head_dim=16, vocab_size=51, tied=True)
    directory = checkpoints.save(checkpoints.build_model(tied, seed=1), tmp_path)
    weights = load(directory)
    assert weights.head is weights.embedding
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    load(directory)
    rewrite(directory, lambda tensors: tensors["lm_head.weight"].add_(1.0))
    with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
        load(directory)


def test_weights_are_cast_when_asked_and_half_precision_is_served_as_bfloat16(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_config(model_dir)
    assert load_weights(model_dir, config, "bfloat16").layers[0].q.dtype == torch.bfloat16
    rewrite(model_dir, lambda tensors: tensors.update({name: tensor.half() for name, tensor in tensors.items()}))
    for said in ("float16", "torch.float16", "auto", None):
        checkpoints.edit_config(model_dir, dtype=said)
        with caplog.at_level("INFO"):
            assert load(model_dir).norm.dtype == torch.bfloat16
        assert "the checkpoint is float16 and is served as bfloat16" in caplog.text
        caplog.clear()
    checkpoints.edit_config(model_dir, dtype="float8_e4m3fn")
    with pytest.raises(ModelError, match=r"float8_e4m3fn.*--dtype float32"):
        load(model_dir)
    assert load_weights(model_dir, config, "float32").norm.dtype == torch.float32


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="neither"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["missing.safetensors", "../model.safetensors"])
def test_an_index_that_names_a_file_that_is_not_there_is_refused(model_dir: Path, name: str) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        weight_files(model_dir)


def test_a_torn_file_is_refused_by_name(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(model_dir)
