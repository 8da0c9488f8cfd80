"""The chart's containers as processes, with exactly the arguments and variables that helm renders from files of values.

Each pod has a network of its own, with the names that Services would give, and the files that its volumes would bring.
Only KV pools are no larger than 1 GiB: the machines of the examples have more memory than this one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pod_network
import pytest
from helm_chart import CHART, EXAMPLES, NAMESPACE, ROOT, Values, in_pod, rendered
from pod_network import NAMESPACED, Pod, Request

from pdcluster.checkpoint import bundled
from pdcluster.settings.config import cache_directory

LIMIT_S = 500.0
KEY = "sk-acme-0123456789"
# What the secrets of the examples hold, by key.
SECRETS = {"cluster-key": "k" * 32, "admin-token": "t" * 32, "tenants.toml": f'[acme]\nkeys = ["{KEY}"]\n'}
LARGE_POOL = re.compile(r"(node\.kv\.memory_bytes=)\d+GiB")
SERVED = {"cpu-production": "qwen3-0.6b", "hub-model": "qwen3-0.6b"}
CASES: Mapping[str, Sequence[Values]] = {
    "defaults": [CHART / "values.yaml"],
    **{file.stem: [file] for file in EXAMPLES},
    "IPv6": [{
        "ipFamily": "IPv6", "auth": {"clusterKey": {"existingSecret": "keys"}, "adminToken": {"existingSecret": "keys"}},
        "poolDefaults": {"settings": {"node.kv.memory_bytes": 67108864}}, "router": {"settings": {"router.mode": "remote"}},
    }],
}  # fmt: skip


def has_namespaces() -> bool:
    done = subprocess.run((*NAMESPACED, "true"), capture_output=True, check=False) if shutil.which("unshare") else None
    return done is not None and done.returncode == 0 and shutil.which("ip") is not None


pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(not has_namespaces(), reason="namespaces cannot be made here, or iproute2 is missing"),
]


def num_bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def pods_of(objects: Sequence[dict[str, Any]], folder: Path) -> list[Pod]:
    """One pod of each Deployment, and all of the StatefulSet, whose names the others are told."""
    found: list[Pod] = []
    is_new = any(each.get("spec", {}).get("ipFamilies") == ["IPv6"] for each in objects)
    for each in objects:
        if each["kind"] not in ("Deployment", "StatefulSet"):
            continue
        name, is_set = each["metadata"]["name"], each["kind"] == "StatefulSet"
        for number in range(each["spec"]["replicas"] if is_set else 1):
            own = f"{name}-{number}" if is_set else f"{name}-5d8f-x1"
            address = f"fd00:7::{len(found) + 16:x}" if is_new else f"10.7.0.{len(found) + 16}"
            host = [f"{own}.{name}.{NAMESPACE}.svc"] if is_set else []
            found.append(pod_of(each["spec"]["template"]["spec"], own, address, host, folder))
    return found


def pod_of(spec: dict[str, Any], name: str, address: str, hosts: list[str], folder: Path) -> Pod:
    container = spec["containers"][0]
    steps = [
        [LARGE_POOL.sub(r"\g<1>1GiB", in_pod(word, address, name)) for word in each["args"]]
        for each in [*spec.get("initContainers", []), container]
    ]
    env = {each["name"]: variable(each, address, name) for each in container["env"]}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    volumes = {each["name"]: each for each in spec["volumes"]}
    places = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    mounts = {"/cache/pdcluster": str(cache_directory())}
    if "/model" in places:
        mounts["/model"] = str(folder / "claim")
    if "HF_HOME" in env:
        mounts[env["HF_HOME"]] = str(folder / "hub")
    files = {
        f"{place}/{key}": content
        for place, volume in places.items()
        if "secret" in volume
        for key, content in SECRETS.items()
    }
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "health")
    entry = str(ROOT / "deploy" / "docker" / "entrypoint.sh")
    *before, last = [shlex.join(("sh", entry, *step)) for step in steps]
    return Pod(
        name=name, address=address, hosts=hosts, argv=["sh", "-ec", "; ".join((*before, f"exec {last}"))], env=env, files=files,
        mounts=mounts, memory=num_bytes(container["resources"]["limits"]["memory"]),
        health=(port, container["startupProbe"]["httpGet"]["path"]),
    )  # fmt: skip


def variable(given: dict[str, Any], address: str, name: str) -> str:
    if "value" in given:
        return str(given["value"])
    field = given["valueFrom"].get("fieldRef", {}).get("fieldPath")
    return {"metadata.name": name, "status.podIP": address, None: "secret"}[field]


def lay_out_models(folder: Path) -> None:
    """The bundled model as a claim's folder, and as a snapshot in the hub's cache."""
    shutil.copytree(bundled.path(), folder / "claim" / "Qwen3-0.6B")
    repository = folder / "hub" / "hub" / "models--Qwen--Qwen3-0.6B"
    shutil.copytree(bundled.path(), repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")


def started(pods: list[Pod], requests: list[Request]) -> dict[str, Any]:
    done = subprocess.run(
        (*NAMESPACED, sys.executable, pod_network.__file__), input=json.dumps({"pods": pods, "requests": requests}),
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_containers_start_with_the_rendered_arguments_and_serve(case: str, tmp_path: Path) -> None:
    lay_out_models(tmp_path)
    pods = pods_of(rendered(*CASES[case]), tmp_path)
    (router,) = [pod for pod in pods if "-router-" in pod["name"]]
    body = {
        "model": SERVED.get(case, bundled.path().name),
        "prompt": "def read(path):",
        "max_tokens": 8,
        "ignore_eos": True,
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    asked: list[Request] = [
        {"address": router["address"], "port": 8000, "path": "/v1/completions", "headers": headers, "body": body},
        *({"address": pod["address"], "port": pod["health"][0], "path": "/metrics", "headers": {}, "body": None} for pod in pods),
    ]  # fmt: skip
    found = started(pods, asked)
    (status, answer), *metrics = found["answers"]
    assert status == 200, (answer, found["said"])
    assert json.loads(answer)["usage"]["completion_tokens"] == 8
    assert [status for status, text in metrics if "pdcluster_" in text] == [200] * len(pods)
    assert set(found["codes"].values()) == {0}, (found["codes"], found["said"])
    if case == "IPv6":
        assert json.loads(answer)["usage"]["pdcluster"]["transfer"] == "tcp"
