"""Clusters on machines with no address but ::1, really run: every listener and dialer takes IPv6."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 240.0
_SPEC = importlib.util.find_spec("nixl_cu12")
SMALL = ("--set=node.kv.memory_bytes=64MiB", "--set=router.mode=remote")
# In a network of its own, whose loopback has lost 127.0.0.1.
ALONE = (
    "unshare", "--user", "--map-root-user", "--net", "sh", "-ec",
    'ip link set lo up; ip addr del 127.0.0.1/8 dev lo; exec "$@"', "alone",
)  # fmt: skip


def can_be_alone() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run((*ALONE, "true"), capture_output=True, timeout=30.0, check=False).returncode == 0


pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(LIMIT_S + 30),
    pytest.mark.skipif(not can_be_alone(), reason="a network without IPv4 cannot be made here"),
]
CASES = {
    "tcp": ("--transfer", "tcp"),
    "shm": ("--transfer", "shm"),
    "mooncake": ("--transfer", "mooncake"),
    "nixl": ("--transfer", "nixl"),
    "two ranks and two workers": ("--transfer", "tcp", "--tp", "2", "--workers", "2"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cluster_serves_on_a_machine_that_has_only_ipv6(case: str) -> None:
    if case == "nixl" and _SPEC is None:
        pytest.skip("the package nixl-cu12 is not installed")
    paths = (ROOT, ROOT / "router", ROOT / "tests" / "harness" / "cluster")
    done = subprocess.run(
        (*ALONE, sys.executable, str(HERE / "ipv6_only.py"), *CASES[case], *SMALL), capture_output=True, text=True,
        timeout=LIMIT_S, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-5000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["usage"]["mode"] == "remote" and found["usage"]["transfer"] == CASES[case][1]
    assert len(found["nodes"]) == 2
