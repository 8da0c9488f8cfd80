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
from helm_chart import (
    EXAMPLES,
    KEY,
    KEYED,
    NAMESPACE,
    ROOT,
    Values,
    in_pod,
    lay_out_models,
    places_of,
    pod_address,
    rendered,
    secret_files,
)
from pod_network import NAMESPACED, Pod, Request

from pdcluster.checkpoint import bundled
from pdcluster.settings.config import cache_directory

LIMIT_S = 500.0
LARGE_POOL = re.compile(r"(node\.kv\.memory_bytes=)\d+GiB")
SERVED = {"cpu-production": "qwen3-0.6b", "hub-model": "qwen3-0.6b"}
CASES: Mapping[str, Sequence[Values]] = {
    "defaults": [KEYED],
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
    for each in objects:
        if each["kind"] not in ("Deployment", "StatefulSet"):
            continue
        name, is_set = each["metadata"]["name"], each["kind"] == "StatefulSet"
        for number in range(each["spec"]["replicas"] if is_set else 1):
            own = f"{name}-{number}" if is_set else f"{name}-5d8f-x1"
            address = pod_address(objects, len(found))
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
    places = places_of(spec, container)
    mounts = {"/cache/pdcluster": str(cache_directory())}
    if "/model" in places:
        mounts["/model"] = str(folder / "claim")
    if "HF_HOME" in env:
        mounts[env["HF_HOME"]] = str(folder / "hub")
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "health")
    entry = str(ROOT / "deploy" / "docker" / "entrypoint.sh")
    *before, last = [shlex.join(("sh", entry, *step)) for step in steps]
    return Pod(
        name=name, address=address, hosts=hosts, argv=["sh", "-ec", "; ".join((*before, f"exec {last}"))], env=env, files=secret_files(places),
        mounts=mounts, memory=num_bytes(container["resources"]["limits"]["memory"]),
        health=(port, container["readinessProbe"]["httpGet"]["path"]),
    )  # fmt: skip


def variable(given: dict[str, Any], address: str, name: str) -> str:
    if "value" in given:
        return str(given["value"])
    field = given["valueFrom"].get("fieldRef", {}).get("fieldPath")
    return {"metadata.name": name, "status.podIP": address, None: "secret"}[field]


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
