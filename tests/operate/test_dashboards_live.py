"""All dashboards against a real Prometheus after real traffic: P/D with cached prompts, refusals, a killed node, a
drain and a shadow policy. Each panel has an answer, or stands below with the reason why it may have none. Each exported
metric is on a panel or left out with a reason. No alert fires that should not."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from processes import Up, running

from pdcluster import client as api

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "deploy" / "grafana"))
_SPEC = importlib.util.spec_from_file_location("panels", ROOT / "deploy" / "grafana" / "panels.py")
assert _SPEC is not None and _SPEC.loader is not None
panels = importlib.util.module_from_spec(_SPEC)
sys.modules["panels"] = panels
_SPEC.loader.exec_module(panels)

# Panels that may have no line after such traffic, and why.
EMPTY = {
    "Failed writes": "no write fails over the memory of one machine",
    "Chunks written again": "no chunk is damaged",
    "Pulls of cached KV": "these prompts are computed sooner than fetched",
}
SCRAPE_S = 1.0
NOT_OURS = ("python_", "process_", "scrape_", "up")


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[httpx.Client]:
    config = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    (folder / "prometheus.yml").write_text(config.replace("5s", "1s").replace("15s", "1s"))
    (folder / "rules.yml").write_text((ROOT / "deploy/prometheus/rules.yml").read_text())
    port = 19091
    process = subprocess.Popen(
        [
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20.0) as client:
            deadline = time.monotonic() + 30.0
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/-/ready").status_code == 200:
                        break
                assert time.monotonic() < deadline, "prometheus does not start"
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        process.wait(30.0)


def traffic(up: Up) -> None:
    """Some of everything that panels show."""
    long = list(range(10, 300))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: up.complete(long + [number], 24), range(24)))
        list(pool.map(lambda number: up.complete(long + [number], 24, n=2), range(8)))
    with api.Client(up.grpc) as client:
        client.complete("def f(", max_tokens=8)
    up.client.post("/v1/completions", json={"model": up.model, "prompt": "x", "max_tokens": -1})
    with contextlib.suppress(httpx.TimeoutException):  # a client that leaves
        up.client.post(
            "/v1/completions",
            json={"model": up.model, "prompt": "x", "max_tokens": 4000, "ignore_eos": True},
            timeout=0.3,
        )


def pdctl(up: Up, *words: str) -> None:
    argv = [sys.executable, "-m", "pdcluster_router.pdctl", *words, "--admin", up.admin]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60.0)


def answers(client: httpx.Client, expr: str) -> list[object]:
    plain = expr.replace("$__rate_interval", "1m").replace("$cluster", "up")
    plain = re.sub(r"\$(node|pool|tenant)", ".*", plain)
    now = time.time()
    reply = client.get("/api/v1/query_range", params={"query": plain, "start": now - 60, "end": now, "step": "5"})
    assert reply.status_code == 200, f"{plain}: {reply.text}"
    return [series for series in reply.json()["data"]["result"] if any(value != "NaN" for _, value in series["values"])]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed")
def test_every_panel_has_an_answer_and_every_metric_a_panel(tmp_path: Path) -> None:
    with (
        running(
            "--prefill", "2", "--decode", "2", "--targets", str(tmp_path / "targets.json"), "--set=router.mode=remote",
                        "--set=router.max_requests=12",
            "--set=node.scheduler.max_rows=4",

        ) as up,
        prometheus(tmp_path) as client,
    ):  # fmt: skip
        pdctl(up, "set", "policy", "--shadow", "round-robin")
        for _ in range(3):
            refused(up)
            held(up)
            traffic(up)
            time.sleep(SCRAPE_S)
        pdctl(up, "drain", "decode-1", "--timeout", "1")
        up.kill("decode-1")
        traffic(up)
        up.wait_nodes(4)
        time.sleep(3 * SCRAPE_S)
        check_panels(client)
        check_metrics(client)
        fired = {
            each["labels"]["alertname"]
            for each in client.get("/api/v1/alerts").json()["data"]["alerts"]
            if each["state"] == "firing"
        }
        assert fired <= {"PdclusterNodeDown"}, "only the node that was killed"


def held(up: Up) -> None:
    """Requests that wait for a decode node."""
    pdctl(up, "cordon", "decode-0", "decode-1")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(up.complete, "wait for it", 4) for _ in range(4)]
        time.sleep(SCRAPE_S)
        pdctl(up, "uncordon", "decode-0", "decode-1")
        for each in waiting:
            each.result(60.0)


def refused(up: Up) -> None:
    """More at once than may run and wait."""
    body = {"model": up.model, "prompt": "y", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(24) as pool:
        codes = list(pool.map(lambda _: up.client.post("/v1/completions", json=body).status_code, range(24)))
    assert 200 in codes and {429, 503} & set(codes), codes


def check_panels(client: httpx.Client) -> None:
    empty = set()
    for plan in panels.DASHBOARDS:
        for row in plan.rows:
            for panel in row.panels:
                if not any(answers(client, query.expr) for query in panel.queries):
                    empty.add(panel.title)
    assert empty <= set(EMPTY), f"empty without a reason: {empty - set(EMPTY)}"


def check_metrics(client: httpx.Client) -> None:
    names = client.get("/api/v1/label/__name__/values").json()["data"]
    ours = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for name in names
        if not name.startswith((*NOT_OURS, "pdcluster:", "ALERTS"))
    }
    ours = {name.removesuffix("_created") for name in ours if not name.endswith("_created")}
    shown = {
        name
        for plan in panels.DASHBOARDS for row in plan.rows for panel in row.panels for query in panel.queries
        for name in re.findall(r"pdcluster_\w+", query.expr)
    }  # fmt: skip
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    assert ours - shown - set(panels.NOT_SHOWN) == set(), "on no panel"
    unseen = {
        "pdcluster_node_transfer_failed_writes_total",
        "pdcluster_node_transfer_resent_chunks_total",
        "pdcluster_node_transfer_pulls_total",
    }
    assert shown - ours <= unseen, f"a panel shows what nobody exports: {shown - ours - unseen}"
