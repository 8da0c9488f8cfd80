"""Where an image's parts come from: all of it by hash, a base by digest, a bill of materials, and an audit that audits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts import audit, sbom
from scripts.image_packages import DOCKER, IMAGE_LOCKS, image_packages, locked_packages

ROOT = Path(__file__).parents[3]
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
BASE = "docker.io/library/python:3.11-slim-bookworm"
DIGEST = "sha256:" + "0123456789abcdef" * 4
LOCK = "".join(f"{pin} \\\n    --hash=sha256:{'ab' * 32}\n" for pin in ("jinja2==3.1.2", "requests==2.19.0"))
# What pip-audit 2.10.1 said with status 0 while the service knew none of the versions.
SKIPPED = {
    "dependencies": [
        {"name": "jinja2", "skip_reason": "Dependency not found on PyPI and could not be audited: jinja2 (3.1.2)"},
        {"name": "requests", "skip_reason": "Dependency not found on PyPI and could not be audited: requests (2.19.0)"},
    ],
    "fixes": [],
}
FOUND = {
    "dependencies": [
        {"name": "jinja2", "version": "3.1.2", "vulns": []},
        {
            "name": "requests",
            "version": "2.19.0",
            "vulns": [
                {"id": "PYSEC-2018-28", "fix_versions": ["2.20.0"], "aliases": ["CVE-2018-18074"], "description": "..."}
            ],
        },
    ],
    "fixes": [],
}
NOTHING = {
    "dependencies": [{"name": name, "version": "1", "vulns": []} for name in ("jinja2", "requests")],
    "fixes": [],
}


def executable(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file


# The packages of images


def test_every_package_of_an_image_is_installed_by_hash() -> None:
    """Only the wheel that the build made itself has none."""
    installs = [line.strip() for line in DOCKERFILE.splitlines() if "pip install" in line]
    unlocked = [
        line for line in installs if "--require-hashes --no-deps" not in line and "--no-deps /wheels/*.whl" not in line
    ]
    assert len(installs) == 9 and unlocked == []


def test_the_locks_of_an_image_are_those_of_its_stage() -> None:
    for (image, device), locks in IMAGE_LOCKS.items():
        stage = re.split(r"^FROM ", DOCKERFILE.partition(f"AS build-{image}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
        named = [name.replace("$DEVICE", device) for name in re.findall(r"/locks/([\w$-]+)\.lock", stage)]
        assert locks == tuple(name for name in named if device == "cpu" or name != "torch-cpu")
        assert len({each.name for each in image_packages(image, device)}) == len(image_packages(image, device))


def test_torch_of_every_image_has_a_version_and_a_hash() -> None:
    wanted = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for device in ("cpu", "cuda"):
        (torch,) = (each for each in image_packages("node", device) if each.name == "torch")
        assert [torch.public_version] == wanted and torch.hashes
        assert torch.version.endswith("+cpu") == (device == "cpu")


def test_what_builds_the_wheel_is_what_pyproject_asks_for() -> None:
    assert "hatchling" in {each.name for each in locked_packages(DOCKER / "build.lock")}
    assert 'requires = ["hatchling>=1.27"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("text", ["", "torch==2.13.0\n", LOCK + "wheel\n", LOCK.replace("ab" * 32, "ab")])
def test_a_lock_without_packages_or_hashes_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.lock").write_text(text)
    with pytest.raises(
        ValueError, match=r"a\.lock (locks no package|has '.*', which is no pinned package with hashes)"
    ):
        locked_packages(tmp_path / "a.lock")


def test_a_lock_that_lacks_a_hash_replaces_nothing(tmp_path: Path) -> None:
    """The script is copied: it writes beside itself."""
    for name in ("scripts/image_locks.sh", "constraints.txt", "pyproject.toml", "deploy/docker/build.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for said in ("hatchling==1.33.0", f"hatchling==1.33.0 \\\\\\n    --hash=sha256:{'ab' * 32}\\nplain==1", ""):
        uv = executable(tmp_path / "uv", f"#!/bin/sh\ncat >/dev/null\nprintf '{said}\\n'\n")
        command, environment = ("bash", tmp_path / "scripts" / "image_locks.sh", "build"), {**os.environ, "UV": str(uv)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20.0, check=False)
        assert done.returncode == 1 and "build.lock stays as it was" in done.stderr
        assert (tmp_path / "deploy/docker/build.lock").read_bytes() == (DOCKER / "build.lock").read_bytes()


# The audit


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "some.lock").write_text(LOCK)
    return tmp_path / "some.lock"


def fake_pip_audit(folder: Path, answer: object, status: int) -> str:
    said = answer if isinstance(answer, str) else json.dumps(answer)
    return str(executable(folder / "pip-audit", f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n"))


@pytest.mark.parametrize(
    ("answer", "status", "ends_with", "says"),
    [
        (NOTHING, 0, 0, "2 of 2 packages of 1 locks audited; no known vulnerability"),
        (FOUND, 1, 1, "requests 2.19.0: PYSEC-2018-28, fixed in 2.20.0"),
        (SKIPPED, 0, 2, "0 of 2 packages of 1 locks audited; failed"),
        ({"dependencies": [], "fixes": []}, 0, 2, "0 of 2 packages"),
        ("", 1, 2, "0 of 2 packages"),
        ({"dependencies": [FOUND["dependencies"][1], SKIPPED["dependencies"][0]]}, 1, 2, "1 of 2 packages"),
    ],
    ids=["clean", "vulnerable", "all skipped", "nothing asked", "failed", "one skipped"],
)
def test_an_audit_counts_what_it_audited(
    lock: Path, capsys: pytest.CaptureFixture[str], answer: object, status: int, ends_with: int, says: str
) -> None:
    assert audit.main([str(lock), "--pip-audit", fake_pip_audit(lock.parent, answer, status)]) == ends_with
    assert says in capsys.readouterr().out


def test_an_empty_lock_is_no_clean_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.lock").write_text("")
    assert audit.main([str(tmp_path / "empty.lock"), "--pip-audit", fake_pip_audit(tmp_path, NOTHING, 0)]) == 2
    assert "empty.lock locks no package" in capsys.readouterr().out


def test_an_audit_without_the_service_fails(lock: Path) -> None:
    """The real pip-audit, by a proxy that nobody runs."""
    nobody = dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        (sys.executable, "-m", "scripts.audit", str(lock)), cwd=ROOT, env={**os.environ, **nobody},
        capture_output=True, text=True, timeout=60.0, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "audit: 0 of 2 packages" in done.stdout, done.stdout + done.stderr


# The bill of materials


@pytest.mark.parametrize(("image", "device"), IMAGE_LOCKS)
def test_a_bill_lists_what_the_locks_do(tmp_path: Path, image: str, device: str) -> None:
    file, debian = tmp_path / "some" / "bill.json", tmp_path / "debian"
    debian.write_text("libc6 2.36-9+deb12u13 amd64\n")
    words = [image, "--device", device, "--base", f"{BASE}@{DIGEST}", "--debian", str(debian), "-o", str(file)]
    assert sbom.main(words) == 0
    first = file.read_bytes()
    bill = json.loads(first)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(first.decode()) is None
    hashes = {
        each["purl"].partition("?")[0]: {found["content"] for found in each["externalReferences"][0]["hashes"]}
        for each in bill["components"]
        if each.get("purl", "").startswith("pkg:pypi/")
    }
    assert hashes == {
        f"pkg:pypi/{each.name}@{each.version.replace('+', '%2B')}": set(each.hashes) for each in image_packages(image, device)
    }  # fmt: skip
    others = {
        each["name"]: each["version"] for each in bill["components"] if not each.get("purl", "").startswith("pkg:pypi/")
    }
    assert (
        others["docker.io/library/python"] == DIGEST and others["libc6"] == "2.36-9+deb12u13" and "pdcluster" in others
    )
    assert bill["metadata"]["component"]["name"] == f"pdcluster/{image}"
    assert sbom.main(words) == 0 and file.read_bytes() == first, "the same inputs give the same bytes"


@pytest.mark.parametrize(
    ("base", "name", "version"),
    [
        (BASE, "docker.io/library/python", "3.11-slim-bookworm"),
        ("127.0.0.1:5000/python", "127.0.0.1:5000/python", "latest"),
        (f"127.0.0.1:5000/python@{DIGEST}", "127.0.0.1:5000/python", DIGEST),
    ],
)
def test_a_bill_names_the_base(base: str, name: str, version: str) -> None:
    found = sbom.base_component(base)
    assert (found.name, found.version, found.purl is None) == (name, version, version != DIGEST)


# The script that builds


def build_images(folder: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """scripts/images.sh in a copy of what it reads, with a buildah that writes down what it is asked."""
    for name in (
        "scripts",
        "pdcluster/core/version.py",
        "pdcluster/__init__.py",
        "pdcluster/core/__init__.py",
        "pyproject.toml",
        "deploy/docker",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    executable(
        folder / "buildah",
        '#!/bin/sh\necho "$@" >>"$ASKED"\ncase "$*" in *dpkg-query*) echo "libc6 2.36-9 amd64" ;; from*) echo one ;; esac\n',
    )
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    environment = {
        **kept, "PATH": f"{folder}:/usr/bin:/bin", "ASKED": str(folder / "asked"), "PYTHON": sys.executable, "TAG": "1", **variables
    }  # fmt: skip
    command = ("bash", "-c", 'cd "$1" && exec bash scripts/images.sh router', "images", str(folder))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60.0, check=False)
    return done, (folder / "asked").read_text() if (folder / "asked").exists() else ""


def test_an_image_has_its_bill_beside_it(tmp_path: Path) -> None:
    done, asked = build_images(tmp_path, BASE=f"{BASE}@{DIGEST}", RELEASE="1")
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert f"--build-arg BASE={BASE}@{DIGEST} --build-arg DEVICE=cpu --target router" in asked
    bill = json.loads((tmp_path / "build" / "sbom" / "pdcluster-router-cpu-1.cdx.json").read_text())
    assert {"libc6", "pdcluster", "grpcio"} <= {each["name"] for each in bill["components"]}


def test_a_base_without_a_digest_is_warned_of(tmp_path: Path) -> None:
    done, asked = build_images(tmp_path)
    assert done.returncode == 0 and f"warning: BASE={BASE} has no digest" in done.stderr and f"BASE={BASE} " in asked


def test_a_release_needs_a_base_by_digest(tmp_path: Path) -> None:
    for base in (BASE, f"{BASE}@sha256:abc"):
        done, asked = build_images(tmp_path / base[-3:], RELEASE="1", BASE=base)
        assert done.returncode == 1 and "error: BASE=" in done.stderr and asked == ""
