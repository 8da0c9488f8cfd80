"""`pdcluster up` with directories as users have them: good ones serve, broken ones end it soon, with a line that names
the fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import checkpoints
import fake_hub
import gguf_files
import pytest
import torch
from checkpoints import Shape
from fake_hub import FakeHub
from safetensors.torch import load_file, save_file
from tiny_tokenizers import byte_level_files

ENDS_S = 10.0
# Other tests run beside this one.
MARGIN = 3.0
READY_S, STOP_S = 90.0, 30.0
SHAPE = Shape("llama", vocab_size=512, hidden_size=128)
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return checkpoints.build_model(SHAPE, seed=1, dtype=torch.bfloat16)


@pytest.fixture
def model(network: torch.nn.Module, tmp_path: Path) -> Path:
    directory = checkpoints.save(network, tmp_path / "tiny")
    for name, content in byte_level_files().items():
        (directory / name).write_bytes(content)
    return directory


@contextmanager
def started(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """`pdcluster up` on free ports; ended by its pid."""
    command = [sys.executable, "-m", "pdcluster.cli", "up", "--http", "127.0.0.1:0", "--grpc", "none", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_S)


def served_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("ready in"):
            return line.split()[4].removesuffix("/v1")
    raise AssertionError("".join(said))


def completes(url: str, name: str | None = None) -> str:
    """The name of the model that answers, as it says: of the first one, or of that name."""
    if name is None:
        with urlopen(f"{url}/v1/models", timeout=STOP_S) as reply:
            name = json.load(reply)["data"][0]["id"]
    body = {"model": name, "prompt": "The dog", "max_tokens": 4, "temperature": 0}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=STOP_S) as reply:
        answer = json.load(reply)
    assert answer["usage"]["completion_tokens"] >= 1
    return str(answer["model"])


def as_float16(model: Path) -> Path:
    """Stored in half precision, with keys of several tools and both spellings of rope."""
    tensors = {name: tensor.half() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    scaling = {"rope_type": "linear", "factor": 2.0}
    return checkpoints.edit_config(
        model, dtype="float16", unsloth_version="2025.1", _attn_implementation="sdpa",
        rope_scaling=scaling | {"type": "linear"},
        rope_parameters=scaling | {"rope_theta": 10000.0},
    )  # fmt: skip


def as_auto(model: Path) -> Path:
    return checkpoints.edit_config(
        model, dtype="auto", torch_dtype="auto", quantization_config=None, some_training_setting={"lr": 1e-4}
    )


def as_sharded(model: Path) -> Path:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    for shard, some in (
        ("model-00001-of-00002.safetensors", names[::2]),
        ("model-00002-of-00002.safetensors", names[1::2]),
    ):
        save_file({name: tensors[name] for name in some}, model / shard, metadata={"format": "pt"})
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return model


def as_snapshot(model: Path) -> Path:
    snapshot = model.parent / "with spaces" / "models--org--name" / "snapshots" / "0123456789"
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    return snapshot


def as_gguf(model: Path) -> Path:
    return gguf_files.write(model.parent / "tiny-Q8_0.gguf", checkpoints.build_model(SHAPE, seed=1), "llama")


GOOD: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "float16": (as_float16, ()),
    "auto, in float32": (as_auto, ("--dtype", "float32")),
    "sharded": (as_sharded, ()),
    "a snapshot": (as_snapshot, ()),
    "gguf": (as_gguf, ()),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "float16" else pytest.mark.full) for name in GOOD]
)
def test_a_directory_as_users_have_it_serves(name: str, model: Path) -> None:
    change, flags = GOOD[name]
    with started("--model", str(change(model)), *flags) as process:
        completes(served_url(process))


@pytest.mark.timeout(200)
def test_a_model_of_the_hub_is_served_under_its_name_and_others(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    with fake_hub.serving(FakeHub(files)) as hub:
        settings = {
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        with started("--model", fake_hub.NAME) as process:
            url = served_url(process)
            assert completes(url) == fake_hub.NAME
            for path in ("org/tiny", "org%2Ftiny"):
                with urlopen(f"{url}/v1/models/{path}", timeout=STOP_S) as reply:
                    assert json.load(reply)["id"] == fake_hub.NAME
            with pytest.raises(HTTPError) as refused:
                urlopen(f"{url}/v1/models/org/other", timeout=STOP_S)
            told = json.load(refused.value)
            assert (
                refused.value.code == 404
                and told["error"]["code"] == "model_not_found"
                and "org/tiny" in told["error"]["message"]
            )
    (snapshot,) = (tmp_path / "hub").glob("hub/models--*/snapshots/*")
    with started("--model", str(snapshot), "--served-model-name", "mine,org/alias") as process:  # the hub is gone
        url = served_url(process)
        with urlopen(f"{url}/v1/models", timeout=STOP_S) as reply:
            assert [each["id"] for each in json.load(reply)["data"]] == ["mine", "org/alias"]
        for name in ("mine", "org/alias"):
            assert completes(url, name) == name


def put(name: str, content: str) -> Change:
    return lambda model: (model / name).write_text(content)


def config(**changes: object) -> Change:
    return lambda model: checkpoints.edit_config(model, **changes)


def drop_a_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


BAD: dict[str, tuple[Change, str]] = {
    "quantised": (config(quantization_config={"quant_method": "awq"}), "weights are quantised ('awq')"),
    "another architecture": (config(architectures=["MixtralForCausalLM"]), "MixtralForCausalLM"),
    "a tensor is missing": (drop_a_tensor, "model.norm.weight is missing"),
    "weights of another shape": (config(hidden_size=256, head_dim=32), "has shape"),
    "a broken template": (put("chat_template.jinja", "{% for m in messages %}"), "template"),
    "a broken tokenizer": (put("tokenizer.json", '{"version": "1.0"}'), "tokenizer.json"),
    "a broken generation_config": (put("generation_config.json", "{"), "generation_config.json"),
    "a wrong generation_config": (put("generation_config.json", '{"temperature": -1}'), "temperature"),
    "a git-lfs pointer": (put("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), "git-lfs pointer"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "an adapter": (lambda model: ((model / "model.safetensors").unlink(), put("adapter_config.json", "{}")(model)),
    "is a LoRA adapter"),
    "broken JSON": (put("config.json", "{"), "config.json"),
}  # fmt: skip
SAMPLE = ("quantised", "a broken template", "a git-lfs pointer")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.full) for name in BAD])
def test_a_broken_directory_ends_it_soon_with_a_line_that_names_the_fault(name: str, model: Path) -> None:
    change, error = BAD[name]
    change(model)
    begin = time.monotonic()
    with started("--model", str(model)) as process:
        output, _ = process.communicate(timeout=ENDS_S * MARGIN)
    assert time.monotonic() - begin < ENDS_S * MARGIN
    assert process.returncode != 0
    told = output[output.index("error: ") :]
    assert error in told
