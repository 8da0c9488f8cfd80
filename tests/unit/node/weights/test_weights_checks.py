"""Which files may take the place of those that a node with vLLM serves. No vLLM runs."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
from safetensors.torch import load_file, save_file

from pdcluster.core.errors import ModelError
from pdcluster.core.messages import PrepareWeights
from pdcluster.core.weights import WeightsVersion
from pdcluster.node.vllm.engine.weight_files import weight_files_digest
from pdcluster.node.vllm.weights_change import check_same_model, check_weights

TUNED = WeightsVersion("tuned", 1)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "model"
    model = Path(checkpoints.save(checkpoints.build_model(checkpoints.Shape("qwen3"), 1), folder))
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    return model


@pytest.fixture
def other(serving: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(serving, tmp_path / "other"))


def set_config(model: Path, *left_out: str, **fields: object) -> None:
    file = model / "config.json"
    found = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in found.items() if name not in left_out}))


def change_tensors(model: Path, change: Callable[[dict[str, object]], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def check(source: Path, serving: Path, version: WeightsVersion = TUNED, *, pools: bool = False) -> WeightsVersion:
    message = PrepareWeights(1, version, str(source))
    return check_weights(message, serving, serving, pools=pools, stop=threading.Event()).version


def test_the_same_model_may_whoever_wrote_it(other: Path, serving: Path) -> None:
    set_config(other, "attention_dropout", "rms_norm_eps", _name_or_path="tuned", transformers_version="1", dtype=None)
    change_tensors(other, lambda tensors: tensors.update({name: each.half() for name, each in tensors.items()}))  # type: ignore[attr-defined]
    (other / "tokenizer.json").unlink()
    found = check(other, serving)
    assert found == WeightsVersion("tuned", 1, weight_files_digest(other, threading.Event()))
    assert check(other, serving, found) == found


def test_without_a_source_it_is_the_model_of_the_start(other: Path, serving: Path) -> None:
    found = check_weights(PrepareWeights(1, TUNED, ""), other, serving, pools=False, stop=threading.Event())
    assert found.directory == serving and found.version.digest == weight_files_digest(serving, threading.Event())


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1"),
        ({"num_attention_heads": 8}, "num_attention_heads is 8, and 4 here"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is "),
        ({"model_type": "qwen2"}, " is another model: "),
        ({"unknown_to_all": 1}, "unknown_to_all is 1, and missing here"),
    ],
)
def test_another_config_may_not(other: Path, serving: Path, fields: dict[str, object], what: str) -> None:
    set_config(other, **fields)
    with pytest.raises(ModelError, match="is another model") as refused:
        check_same_model(other, serving)
    assert what in str(refused.value)


def test_other_end_tokens_may_not(other: Path, serving: Path) -> None:
    (other / "generation_config.json").write_text('{"eos_token_id": 5}')
    with pytest.raises(ModelError, match=r"its end tokens are \(.*5.*\)"):
        check_same_model(other, serving)


def test_another_tokenizer_may_not(other: Path, serving: Path) -> None:
    (other / "tokenizer.json").write_text('{"version": "2.0"}')
    with pytest.raises(ModelError, match="another tokenizer"):
        check_same_model(other, serving)


def test_a_tensor_that_is_not_there_or_too_many_is_named(other: Path, serving: Path) -> None:
    """vLLM would keep its own, and say so in its log alone."""
    change_tensors(other, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"its tensor model.norm.weight is missing, and \(64,\) here"):
        check_same_model(other, serving)
    with pytest.raises(ModelError, match=r"its tensor model.norm.weight is \(64,\), and missing here"):
        check_same_model(serving, other)


def test_a_tensor_of_another_shape_is_named(other: Path, serving: Path) -> None:
    change_tensors(other, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:-1]}))  # type: ignore[index]
    with pytest.raises(ModelError, match=r"model.norm.weight is \(63,\), and \(64,\) here"):
        check_same_model(other, serving)


def test_files_of_another_digest_than_elsewhere_may_not(other: Path, serving: Path) -> None:
    with pytest.raises(ModelError, match="and abc was loaded elsewhere under that label"):
        check(other, serving, WeightsVersion("tuned", 1, "abc"))


def test_other_formats_and_pooling_models_may_not(other: Path, serving: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a pooling model's weights are not changed"):
        check(other, serving, pools=True)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(2000))
    with pytest.raises(ModelError):
        check(tmp_path / "model.gguf", serving)
    with pytest.raises(ModelError, match="does not exist"):
        check(tmp_path / "nothing", serving)


def test_a_config_that_cannot_be_read_is_named(other: Path, serving: Path) -> None:
    set_config(other, num_hidden_layers=3)  # it has two kinds of layers
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        check_same_model(other, serving)
    (other / "config.json").write_text("[]")
    with pytest.raises(ModelError):
        check_same_model(other, serving)
