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

from pdcluster.checkpoint import bundled

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "pdcluster"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
TOOLS = ROOT / ".venv-deploy" / "bin"
HELM = shutil.which("helm", path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}") or "helm"
NAMESPACE = "llm"
# Containers with a process of ours, called by its section of the settings.
SECTIONS = ("node", "router", "bootstrap")
KEY = "sk-acme-0123456789"
# What the secrets of the examples hold, by key.
SECRETS = {
    "cluster-key": "k" * 32,
    "admin-token": "t" * 32,
    "scaler-token": "s" * 32,
    "tenants.toml": f'[acme]\nkeys = ["{KEY}"]\n',
}
# A file of values, or what one holds.
Values = Path | Mapping[str, Any]
# What the chart asks for before it makes anything, unless `auth.insecure` says otherwise.
KEYED = {"auth": {"clusterKey": {"existingSecret": "keys"}, "scalerToken": {"existingSecret": "keys"}}}


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


def with_key(*values: Values) -> tuple[Values, ...]:
    """Files stand for themselves; other values get the secrets that every cluster needs."""
    return values if any(isinstance(each, Path) for each in values) else (KEYED, *values)


def template(*values: Values) -> subprocess.CompletedProcess[str]:
    return bare_template(*with_key(*values))


def bare_template(*values: Values) -> subprocess.CompletedProcess[str]:
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
            if container["name"] in SECTIONS:
                yield container["name"], container


def settings_of(container: dict[str, Any]) -> dict[str, str]:
    """What its arguments set. A setting that is given twice is an error."""
    words = [word.removeprefix("--set=") for word in container["args"] if word.startswith("--set=")]
    pairs = [tuple(word.split("=", 1)) for word in words]
    assert len(dict(pairs)) == len(pairs), f"a setting is given twice: {words}"
    return dict(pairs)


def pod_address(objects: Sequence[dict[str, Any]], number: int) -> str:
    """The address of one of a release's pods, in the family of its Services."""
    is_new = any(each.get("spec", {}).get("ipFamilies") == ["IPv6"] for each in objects)
    return f"fd00:7::{number + 16:x}" if is_new else f"10.7.0.{number + 16}"


def places_of(pod: dict[str, Any], container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The volumes of a container, by where it has them."""
    volumes = {each["name"]: each for each in pod["volumes"]}
    return {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}


def secret_files(places: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """What a container finds in its secrets, by path."""
    return {
        f"{place}/{key}": content
        for place, volume in places.items()
        if "secret" in volume
        for key, content in SECRETS.items()
    }


def lay_out_models(folder: Path) -> None:
    """The bundled model as folders of a claim, and as a snapshot in the hub's cache."""
    for name in ("Qwen3-0.6B", "Qwen3-32B"):
        shutil.copytree(bundled.path(), folder / "claim" / name)
    repository = folder / "hub" / "hub" / "models--Qwen--Qwen3-0.6B"
    shutil.copytree(bundled.path(), repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")


def in_pod(text: str, address: str, name: str) -> str:
    """An argument as Kubernetes completes it by the pod's variables."""
    return text.replace("$(POD_IP)", address).replace("$(POD_NAME)", name)
