"""What is installed: one distribution, two import packages, no torch without asking, every dependency pinned."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
PINNED_EXTRAS = ("node", "grammar", "mooncake", "mooncake-cpu", "nixl", "otel", "browser", "ray", "dev")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(where)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = where.glob("*.whl")
    return built


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pdcluster", "pdcluster_router"}
    assert {"pdcluster/cli.py", "pdcluster_router/cli.py"} <= set(names(wheel))


def test_the_wheel_holds_the_bundled_model(wheel: Path) -> None:
    model = [name for name in names(wheel) if name.startswith("pdcluster/bundled/")]
    assert any(name.endswith("/config.json") for name in model)
    assert any(name.endswith(".safetensors") for name in model)
    assert any(name.endswith("/tokenizer.json") for name in model)


def test_the_wheel_holds_the_consoles_page(wheel: Path) -> None:
    page = {name.rpartition("/")[2] for name in names(wheel) if name.startswith("pdcluster_router/console/static/")}
    assert page == {"index.html", "console.css", "console.js", "icon.svg"}


def test_a_base_install_brings_no_torch(wheel: Path) -> None:
    requirements = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist") or []]
    base = {
        canonicalize_name(found.name)
        for found in requirements
        if found.marker is None or found.marker.evaluate({"extra": ""})
    }
    assert base, "the wheel has no dependencies at all"
    assert not base & {"torch", "transformers", "numba", "safetensors", "ray"}


def test_the_licence_comes_along(wheel: Path) -> None:
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/LICENSE") for name in names(wheel))


@pytest.mark.parametrize("command", ["pdcluster", "pdcluster-router"])
def test_a_command_is_installed(wheel: Path, command: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert f"{command} = " in archive.read(name).decode()


def test_every_dependency_is_pinned_and_the_pin_is_allowed() -> None:
    texts = PROJECT["dependencies"] + [
        text for extra in PINNED_EXTRAS for text in PROJECT["optional-dependencies"][extra]
    ]
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    for requirement in map(Requirement, texts):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version), (
            f"constraints.txt pins {requirement.name} {version}, pyproject wants {requirement.specifier}"
        )


def test_torch_is_pinned_to_one_version() -> None:
    assert PINS["torch"] == "2.13.0"
