"""The health ports of a cluster's processes: all can be probed and scraped, and a node that stands says so."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from processes import running

from pdcluster.telemetry.health import BEAT_S
from tests.chaos.freeze import frozen

pytestmark = pytest.mark.timeout(300)

# A node's engine is stuck after 2 s, and after 5 times its step; three times that.
STUCK_S = 20.0
# A verdict may be as old as a beat when the port tells it; three times that, on a busy machine.
LATE_S = 3 * 3 * BEAT_S


def get(address: str, path: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        return client.get(f"http://{address}{path}")


def test_every_process_is_probed_and_scraped_and_a_frozen_engine_is_not_alive(tmp_path: Path) -> None:
    targets = tmp_path / "targets.json"
    with running("--prefill", "1", "--decode", "1", "--targets", str(targets), "--set=router.mode=remote") as up:
        up.complete("hello", 40)  # enough steps for the node to know how long one takes
        found = {each["labels"]["process"]: each["targets"][0] for each in json.loads(targets.read_text())}
        assert set(found) == {"bootstrap", "prefill-0", "decode-0", "router"}
        for name, address in found.items():
            assert get(address, "/livez").status_code == 200, name
            deadline = time.monotonic() + LATE_S
            while (ready := get(address, "/readyz")).status_code != 200:
                assert time.monotonic() < deadline, f"{name}: {ready.text}"
                time.sleep(0.05)
        time.sleep(0.5)  # snapshots are replaced four times a second
        node = get(found["decode-0"], "/metrics").text
        assert 'pdcluster_engine_step_seconds_count{phase="decode"}' in node and 'node="decode-0"' in node
        assert "pdcluster_bootstrap_nodes 2.0" in get(found["bootstrap"], "/metrics").text
        assert "pdcluster_http_requests_total" in get(found["router"], "/metrics").text
        assert get(found["router"], "/readyz").json()["can_serve"] is True

        with frozen(up.pid_of("decode-0"), while_computing=True):
            asking = threading.Thread(target=up.complete, args=("hello there", 64))
            asking.start()
            deadline = time.monotonic() + STUCK_S
            while get(found["decode-0"], "/livez").status_code == 200:
                assert time.monotonic() < deadline, "the engine stands, and the node says it is alive"
                time.sleep(0.1)
            assert "no progress" in get(found["decode-0"], "/readyz").json()["reasons"][0]
        asking.join(30.0)
        while get(found["decode-0"], "/livez").status_code != 200:
            assert time.monotonic() < deadline + STUCK_S
            time.sleep(0.1)

        while not get(found["router"], "/readyz").json()["can_serve"]:  # it may still say that the node is stuck
            assert time.monotonic() < deadline + STUCK_S
            time.sleep(0.1)
        os.kill(up.pid_of("decode-0"), signal.SIGSTOP)  # after its lease the router has no pair
        while (degraded := get(found["router"], "/readyz")).json()["can_serve"]:
            time.sleep(0.1)
        assert (degraded.status_code, degraded.json()["status"]) == (200, "degraded")
        os.kill(up.pid_of("decode-0"), signal.SIGCONT)
        while not get(found["router"], "/readyz").json()["can_serve"]:
            time.sleep(0.1)
