"""The Helm chart as helm renders it. Needs the tools of scripts/deploy_tools.sh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "pdcluster"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
TOOLS = ROOT / ".venv-deploy" / "bin"
HELM = shutil.which("helm", path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}") or "helm"
NAMESPACE = "llm"
# A file of values, or what one holds.
Values = Path | Mapping[str, Any]


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((HELM, *words), capture_output=True, text=True, timeout=60.0, check=False)


def with_values(command: Sequence[str], *values: Values) -> subprocess.CompletedProcess[str]:
    """helm with files of values, as users have them: numbers of a file are not those of --set."""
    with tempfile.TemporaryDirectory() as folder:
        words = []
        for number, each in enumerate(values):
            file = each if isinstance(each, Path) else Path(folder) / f"{number}.yaml"
            if not isinstance(each, Path):
                file.write_text(json.dumps(each))  # which is YAML
            words += ["--values", str(file)]
        return helm(*command, *words)


def template(*values: Values) -> subprocess.CompletedProcess[str]:
    return with_values(("template", "pd", str(CHART), "--namespace", NAMESPACE), *values)


def rendered(*values: Values) -> list[dict[str, Any]]:
    done = template(*values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def refusal(*values: Values) -> str:
    """Why helm does not render it."""
    done = template(*values)
    assert done.returncode != 0
    return done.stderr


def named(objects: Sequence[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """The objects of a kind, by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pods(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name of the object, spec) of each kind of pod."""
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def processes(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(section, container) of each pod's process of ours."""
    for _, pod in pods(objects):
        for container in pod["containers"]:
            if container["name"] in ("node", "router", "bootstrap"):
                yield container["name"], container


def settings_of(container: dict[str, Any]) -> dict[str, str]:
    """What its arguments set. A setting that is given twice is an error."""
    words = [word.removeprefix("--set=") for word in container["args"] if word.startswith("--set=")]
    pairs = [tuple(word.split("=", 1)) for word in words]
    assert len(dict(pairs)) == len(pairs), f"a setting is given twice: {words}"
    return dict(pairs)


def in_pod(text: str, address: str, name: str) -> str:
    """An argument as Kubernetes completes it by the pod's variables."""
    return text.replace("$(POD_IP)", address).replace("$(POD_NAME)", name)
