"""Models by the names of repositories, from a server that plays the hub. Each look-up is a process: the hub's library
reads its settings once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fake_hub
import pytest
from fake_hub import COMMIT, NAME, FakeHub

from pdcluster.checkpoint.hub import is_repository, served_name

LOOK_UP = """
import logging, sys
from pathlib import Path
from pdcluster.core.errors import ModelError
from pdcluster.checkpoint.hub import local_model
logging.basicConfig(level=logging.DEBUG)
try:
    print(local_model(Path(sys.argv[1])))
except ModelError as error:
    print("refused:", error)
"""
TIMEOUT_S = 60
INDEX = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'


def files(*, sharded: bool = False) -> dict[str, bytes]:
    weights = {f"model-0000{part}-of-00002.safetensors": b"w" * 300_000 for part in (1, 2)} if sharded else {}
    return {
        "config.json": b"{}",
        "tokenizer.json": b"{ }",
        "tokenizer_config.json": b"{  }",
        "model.safetensors": b"s" * 500_000,
        "pytorch_model.bin": b"b" * 1000,
        "original/consolidated.00.pth": b"o" * 1000,
        "onnx/model.onnx": b"x",
        "README.md": b"# tiny",
        **({"model.safetensors.index.json": INDEX} if sharded else {}),
        **weights,
    }


def environment_of(url: str, cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return kept | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def start(model: str, url: str, cache: Path, **settings: str) -> subprocess.Popen[str]:
    environment = environment_of(url, cache) | settings
    command = [sys.executable, "-W", "ignore", "-c", LOOK_UP, model]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def look_up(model: str, url: str, cache: Path, **settings: str) -> str:
    """What it prints: the directory, or why there is none."""
    process = start(model, url, cache, **settings)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    if "HF_TOKEN" in settings:
        assert settings["HF_TOKEN"] not in out + err
    return out.strip()


def fill(model: str, folder: Path, url: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "pdcluster.launch.fill", model, str(folder)]
    return subprocess.run(command, env=environment_of(url, cache), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)  # fmt: skip


def test_only_the_files_that_are_served_are_fetched_and_once(tmp_path: Path) -> None:
    extra = "additional_chat_templates"
    hub = FakeHub(files() | {f"{extra}/tool_use.jinja": b"t", f"{extra}/rag.jinja": b"r"})
    with fake_hub.serving(hub) as url:
        first = look_up(NAME, url, tmp_path)
        again = look_up(f"{NAME}@v1.0", url, tmp_path)
    assert first == again and Path(first).name == COMMIT
    served = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert hub.fetched == dict.fromkeys([f"{extra}/tool_use.jinja", *served], 1)
    assert sorted(os.listdir(first)) == [extra, *served]
    assert served_name(Path(first)) == NAME


def test_of_shards_those_that_the_index_names_are_fetched(tmp_path: Path) -> None:
    hub = FakeHub(files(sharded=True))
    with fake_hub.serving(hub) as url:
        found = look_up(f"{NAME}@{COMMIT}", url, tmp_path)
    assert "model.safetensors" not in hub.fetched
    assert (Path(found) / "model-00002-of-00002.safetensors").stat().st_size == 300_000


@pytest.mark.parametrize("name", ["*", "e*.py", "[a-z]*.safetensors", "../evil.safetensors", "evil.py"])
def test_an_index_fetches_no_other_files_than_weights(name: str, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    hub = FakeHub(files(sharded=True) | {"model.safetensors.index.json": index, "evil.py": b"import os"})
    with fake_hub.serving(hub) as url:
        told = look_up(NAME, url, tmp_path)
    assert told.startswith("refused:") and "no name of a safetensors file" in told
    assert "evil.py" not in hub.fetched and "README.md" not in hub.fetched


def test_what_is_in_the_cache_is_served_offline_and_without_the_hub(tmp_path: Path) -> None:
    with fake_hub.serving(FakeHub(files())) as url:
        found = look_up(NAME, url, tmp_path)
    assert look_up(NAME, url, tmp_path, HF_HUB_OFFLINE="1") == found
    assert look_up(NAME, url, tmp_path) == found  # nobody listens there any more


def test_a_folder_is_filled_once_and_appears_when_it_is_whole(tmp_path: Path) -> None:
    """As the chart's Job does."""
    hub, folder = FakeHub(files(sharded=True), is_gated=True), tmp_path / "claim" / "tiny"
    second = "model-00002-of-00002.safetensors"
    with fake_hub.serving(hub) as url:
        refused = fill(NAME, folder, url, tmp_path)
        assert refused.returncode == 1 and "is gated: accept its terms" in refused.stderr
        assert not folder.exists()
        hub.is_gated = False
        hub.cuts[second] = 1
        assert fill(NAME, folder, url, tmp_path).returncode == 0
    assert sorted(os.listdir(folder)) == [
        "config.json", "model-00001-of-00002.safetensors", second, "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert (folder / second).read_bytes() == b"w" * 300_000
    assert os.listdir(folder.parent) == ["tiny"]
    again = fill(NAME, folder, "http://127.0.0.1:9", tmp_path)  # nobody is asked any more
    assert again.returncode == 0 and "nothing was downloaded" in again.stdout


def test_a_token_is_sent_and_never_told(tmp_path: Path) -> None:
    hub = FakeHub(files(), token="hf_secret_of_mine")
    with fake_hub.serving(hub) as url:
        assert "hides it" in look_up(NAME, url, tmp_path)
        assert "hides it" in look_up(NAME, url, tmp_path, HF_TOKEN="hf_wrong_one")
        assert look_up(NAME, url, tmp_path, HF_TOKEN="hf_secret_of_mine").endswith(COMMIT)
    assert "hf_secret_of_mine" in hub.tokens


@pytest.mark.parametrize(
    ("model", "hub", "error"),
    [
        ("org/gone", FakeHub(files()), "has no repository org/gone, or hides it; check the name"),
        (f"{NAME}@v9", FakeHub(files()), "has no revision 'v9'"),
        (NAME, FakeHub(files(), is_gated=True), "is gated: accept its terms"),
        (NAME, FakeHub({"model.safetensors.index.json": b"{"}), "no valid safetensors index"),
    ],
    ids=["no repository", "no revision", "gated", "broken index"],
)
def test_what_the_hub_does_not_give_is_one_line_with_the_way_out(
    model: str, hub: FakeHub, error: str, tmp_path: Path
) -> None:
    with fake_hub.serving(hub) as url:
        told = look_up(model, url, tmp_path)
    assert told.startswith("refused:") and error in told and "\n" not in told


@pytest.mark.parametrize(
    ("settings", "error"), [({}, "cannot be reached and"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")]
)
def test_a_hub_that_cannot_be_reached_is_told_soon(settings: dict[str, str], error: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    told = look_up(NAME, "http://127.0.0.1:9", tmp_path, **settings)
    assert error in told and "\n" not in told
    assert time.monotonic() - begin < 30  # 10 s, three times


def test_a_download_that_breaks_off_is_gone_on_with(tmp_path: Path) -> None:
    """Whether the library goes on by itself or is started again, no half file is taken for a whole one."""
    hub = FakeHub(files())
    hub.cuts["model.safetensors"] = 1
    with fake_hub.serving(hub) as url:
        found = look_up(NAME, url, tmp_path)
        if found.startswith("refused:"):
            assert "broke off" in found
            found = look_up(NAME, url, tmp_path)
    assert (Path(found) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert hub.fetched["model.safetensors"] == 2


def test_two_nodes_of_a_host_fetch_each_file_once(tmp_path: Path) -> None:
    hub = FakeHub(files(sharded=True))
    with fake_hub.serving(hub) as url:
        both = [start(NAME, url, tmp_path) for _ in range(2)]
        found = {process.communicate(timeout=TIMEOUT_S)[0].strip() for process in both}
    assert len(found) == 1 and found.pop().endswith(COMMIT)
    assert set(hub.fetched.values()) == {1}


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        ("org/name", True),
        ("meta-llama/Llama-3.2-1B", True),
        ("org/name@main", True),
        ("org/name@refs/pr/1", True),
        ("./org/name", False),
        ("/org/name", False),
        ("org/name/more", False),
        ("../name", False),
        ("name", False),
        ("org/file.gguf", False),
        ("here/model", False),
    ],
)
def test_what_is_a_name_of_a_repository(
    model: str, is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    path = Path(model) if not model.startswith("./") else tmp_path / model
    assert is_repository(path) is is_one


def test_models_have_the_names_that_users_know() -> None:
    assert served_name(Path("/cache/models--org--a--b/snapshots/0123")) == "org/a--b"
    assert served_name(Path("/models/Tiny-Q4_1.gguf")) == "Tiny-Q4_1"
    assert served_name(Path("/models/Qwen3-0.6B/")) == "Qwen3-0.6B"
