"""A Ray cluster of one machine for tests, started and ended by its own processes, and pdcluster on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MARK = "PROCESS_OF_TEST"
START_S, DEPLOY_S, GONE_S = 60.0, 240.0, 90.0
TRIES = 3
MODEL = "pystdlib-3m"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RayCluster:
    """`ray start --head --block`. A start may fail by Ray's own limit of 30 s, so it is tried again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.ports = {name: free_port() for name in ("gcs", "dashboard", "proxy", "router", "bootstrap")}
        self.environment = {
            **os.environ, MARK: self.mark, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'router'}", "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "5",
        }  # fmt: skip
        for _ in range(TRIES):
            if self._start():
                return
        raise AssertionError(f"Ray did not start in {TRIES} tries; see {folder}")

    def _start(self) -> bool:
        command = (
            BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={self.ports['gcs']}",
            f"--dashboard-port={self.ports['dashboard']}", "--num-cpus=16", "--disable-usage-stats",
            "--object-store-memory=100000000", f"--temp-dir=/tmp/ray-{self.mark[:6]}",
        )  # fmt: skip
        with (self.folder / "ray.log").open("ab") as output:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True, cwd=self.folder
            )
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.dashboard}/api/version", trust_env=False, timeout=5.0).status_code == 200:
                    return True
            time.sleep(0.5)
        self.stop()
        return False

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.ports['dashboard']}"

    @property
    def proxy(self) -> str:
        return f"http://127.0.0.1:{self.ports['proxy']}"

    @property
    def direct(self) -> str:
        (found,) = (labels["__meta_pdcluster_http"] for _, labels in self.targets() if labels["component"] == "router")
        return found

    def targets(self) -> list[tuple[str, dict[str, str]]]:
        """Health addresses and labels of all processes."""
        reply = httpx.get(f"{self.proxy}/-/pdcluster", trust_env=False, timeout=10.0).raise_for_status()
        return [(address, group["labels"]) for group in reply.json() for address in group["targets"]]

    # ------------------------------------------------------------ what is deployed

    def deploy(self, args: Mapping[str, Any], deployments: Sequence[Mapping[str, Any]] = ()) -> None:
        """Send a configuration as `serve deploy` does, and wait until it runs."""
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.ports["proxy"]},
            "applications": [
                {
                    "name": "pdcluster", "route_prefix": "/", "import_path": "pdcluster.ray:build_pd_app",
                    "args": {
                        "bootstrap": {"port": self.ports["bootstrap"]},
                        "router": {"port": self.ports["router"], "settings": {"router.console": "none"}},
                        **args,
                    },
                    "deployments": [dict(each) for each in deployments],
                }
            ],
        }  # fmt: skip
        file = self.folder / "app.yaml"
        file.write_text(yaml.safe_dump(config))
        self.serve("deploy", str(file))
        time.sleep(2.0)
        wait_until(lambda: self._status() == "RUNNING", DEPLOY_S, lambda: str(self.application()))

    def _status(self) -> str:
        found = self.application()
        assert found.get("status") != "DEPLOY_FAILED", found.get("message")
        return str(found.get("status"))

    def serve(self, *words: str) -> None:
        environment = {**self.environment, "RAY_DASHBOARD_ADDRESS": self.dashboard}
        done = subprocess.run(
            (BIN / "serve", *words), env=environment, capture_output=True, text=True, timeout=120.0, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def application(self) -> dict[str, Any]:
        reply = httpx.get(f"{self.dashboard}/api/serve/applications/", trust_env=False, timeout=20.0)
        return dict(reply.json().get("applications", {}).get("pdcluster", {}))

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        found = self.application().get("deployments", {}).get(deployment, {}).get("replicas", [])
        return [replica for replica in found if replica["state"] == "RUNNING"]

    # ------------------------------------------------------------ its processes

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes of this cluster whose command line has all the words."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                is_ours = process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
                if is_ours and all(word in line for word in words):
                    found.append(process)
        return found

    def nodes(self, role: str) -> list[psutil.Process]:
        """Our own processes of a role that replicas started, so without their ranks."""
        found = []
        for process in self.processes("pdcluster.cli", "node", f"--set=node.role={role}"):
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if parent is not None and parent.cmdline()[:1] and parent.cmdline()[0].startswith("ray::"):
                    found.append(process)
        return found

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            psutil.wait_procs(self.processes(), timeout=15.0)
        self.process.wait()


def wait_until(holds: Callable[[], bool], within_s: float, explain: Callable[[], str] = str) -> None:
    until = time.monotonic() + within_s
    while True:
        with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
            if holds():
                return
        assert time.monotonic() < until, f"it did not come to be within {within_s:g} s: {explain()}"
        time.sleep(0.3)
