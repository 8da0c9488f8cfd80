"""What processes do beyond loopback without a secret, what a web page reaches on loopback, and the key of one run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from processes import running

from pdcluster.rpc import bootstrap_pb2 as pb
from pdcluster.rpc import bootstrap_pb2_grpc as stubs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 240.0
# A network of its own, with an address that is not loopback and that nobody else reaches.
ALONE = (
    "unshare", "--user", "--map-root-user", "--net", "sh", "-ec",
    'ip link set lo up; ip addr add 10.1.2.3/32 dev lo; exec "$@"', "alone",
)  # fmt: skip
SMALL = ("--set=node.kv.memory_bytes=64MiB", "--set=router.mode=remote", "--transfer", "tcp")

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def can_be_alone() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run((*ALONE, "true"), capture_output=True, timeout=30.0, check=False).returncode == 0


needs_network = pytest.mark.skipif(not can_be_alone(), reason="a network of its own cannot be made here")


def alone(what: str, folder: Path) -> dict[str, Any]:
    paths = (ROOT, ROOT / "router", ROOT / "tests" / "harness" / "cluster")
    done = subprocess.run(
        (*ALONE, sys.executable, str(HERE / "own_network.py"), what, str(folder)), capture_output=True, text=True, cwd=ROOT,
        timeout=LIMIT_S, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-5000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_network
def test_without_a_key_nothing_starts_beyond_loopback(tmp_path: Path) -> None:
    found = alone("keyless", tmp_path)
    assert found.get("failed") == ["bootstrap", "prefill", "decode"], found
    for name, insecure in (("bootstrap", "bootstrap"), ("prefill", "links,kv"), ("decode", "links,kv")):
        said = found["logs"][name]
        assert "--security-cluster-key-file FILE" in said and f"--insecure {insecure}" in said, said


@needs_network
def test_with_a_key_a_cluster_serves_beyond_loopback(tmp_path: Path) -> None:
    found = alone("keyed", tmp_path)
    assert found["reply"]["status"] == 200 and found["reply"]["mode"] == "remote", found
    assert found["reply"]["foreign"] == 200, "beyond loopback any host is answered: a gateway's"
    assert found["strangers"] == {
        "console": 401,
        "control": 401,
        "admin": "UNAUTHENTICATED",
        "scaler": "UNAUTHENTICATED",
    }
    assert not any("is open to everybody" in log for log in found["logs"].values())
    assert found["logs"]["router"].count("can be reached from other machines without an API key") == 1


@needs_network
def test_what_is_left_open_by_name_serves_and_warns(tmp_path: Path) -> None:
    found = alone("open", tmp_path)
    assert found["reply"]["status"] == 200, found
    assert found["strangers"] == {"console": 200, "control": 200, "admin": "OK", "scaler": "OK"}
    assert "bootstrap at 10.1.2.3:0 (bootstrap.listen) is open to everybody" in found["logs"]["bootstrap"]
    for surface in ("links", "kv"):
        assert re.search(rf"{surface} at 10\.1\.2\.3\S* \S+ is open to everybody", found["logs"]["decode"])


@needs_network
def test_up_for_everybody_listens_beyond_loopback_for_its_api_alone(tmp_path: Path) -> None:
    found = alone("up", tmp_path)
    assert found["beyond"] == found["served"]
    assert len(found["warnings"]) == 1


@pytest.mark.parametrize(
    ("flags", "secret", "surfaces"),
    [
        (("--admin", "0.0.0.0:0"), "--admin-token-file", "admin"),
        (("--console", "[::]:0"), "--admin-token-file", "console"),
        (("--control", "0.0.0.0:0"), "--admin-token-file", "control"),
        (("--set", "router.scaler=0.0.0.0:0"), "--scaler-token-file", "scaler"),
    ],
)
def test_a_router_without_a_token_says_what_it_wants(flags: tuple[str, ...], secret: str, surfaces: str) -> None:
    command = (sys.executable, "-m", "pdcluster_router.cli", "--http", "127.0.0.1:0", "--grpc", "none", *flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert f"pass {secret} FILE" in done.stderr and f"--insecure {surfaces}" in done.stderr


def test_a_page_elsewhere_cannot_use_a_cluster_by_a_name_that_points_here() -> None:
    with running(*SMALL, "--set=router.http_hosts=llm.internal") as up:
        port = up.url.rpartition(":")[2]
        body = {"model": up.model, "prompt": "def f(", "max_tokens": 2}
        for path, payload in (("/v1/models", None), ("/metrics", None), ("/v1/completions", body)):
            method = "GET" if payload is None else "POST"
            for host, status in (("evil.example", 403), ("localhost", 200), ("127.0.0.1", 200), ("llm.internal", 200)):
                reply = up.client.request(method, path, json=payload, headers={"host": f"{host}:{port}"})
                assert reply.status_code == status, (path, host, reply.text)
                assert status == 200 or "router.http_hosts" in reply.text


def test_up_secure_keeps_others_out_and_leaves_no_key_behind() -> None:
    with running(*SMALL, "--secure") as up:
        assert up.complete("def read(path):" * 40, 4)["headers"]["x-pdcluster-mode"] == "remote"  # type: ignore[index]
        lines = [" ".join(child.cmdline()) for child in up.children()]
        (file,) = {Path(found[1]) for line in lines for found in re.finditer(r"cluster_key_file=(\S+)", line)}
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert not any(file.read_text().strip() in line for line in lines), "ps shows arguments to everybody"
        (address,) = {found[1] for line in lines for found in re.finditer(r"--bootstrap (\S+)", line)}
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            next(iter(stubs.BootstrapStub(channel).Watch(pb.WatchRequest(), timeout=20.0)))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert up.complete("def read(path):", 2)["usage"]
    assert not file.parent.exists()
