"""pdcluster on a real Ray Serve: through the proxy and directly, with kills, scaling, a redeploy and the end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from ray_cluster import DEPLOY_S, GONE_S, MODEL, RayCluster, wait_until

from pdcluster.checkpoint.bundled import path as bundled_model
from pdcluster.rpc import bootstrap_pb2 as pb
from pdcluster.rpc import bootstrap_pb2_grpc as stubs

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

# Between two looks at a replica's health, as `pdcluster.ray` has it; after three bad ones Ray replaces it.
HEALTH_S = 5.0
NODE = {"ray_actor_options": {"num_cpus": 0.5}, "settings": {"node.threads": 1, "node.kv.memory_bytes": "128MiB"}}
ONE = {"prefill": {**NODE, "num_replicas": 1}, "decode": {**NODE, "num_replicas": 2}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    found = RayCluster(tmp_path_factory.mktemp("ray"))
    yield found
    found.stop()


class Load:
    """Clients that ask again and again, one half through the proxy, the other directly. `failures` must stay empty."""

    def __init__(
        self, cluster: RayCluster, num_clients: int = 4, max_tokens: int = 24, words: int = 8, pause_s: float = 0.0
    ) -> None:
        self._urls = itertools.cycle((cluster.proxy, f"http://{cluster.direct}"))
        self._body = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        self._words, self._pause_s = words, pause_s
        self._stop = threading.Event()
        self.num_right, self.failures = 0, list[str]()
        self._threads = [
            threading.Thread(target=self._run, args=(number, next(self._urls))) for number in range(num_clients)
        ]

    def _run(self, number: int, url: str) -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=120.0) as client:
            for turn in itertools.count():
                if self._stop.wait(self._pause_s):
                    return
                body = {**self._body, "prompt": f"def f{number}_{turn}(" + "x, " * self._words}
                try:
                    reply = client.post("/v1/completions", json=body)
                    if reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == body["max_tokens"]:
                        self.num_right += 1
                    else:
                        self.failures.append(f"{url}: {reply.status_code} {reply.text[:300]}")
                except httpx.HTTPError as error:
                    self.failures.append(f"{url}: {type(error).__name__} {error}")

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.wait(8)
        return self

    def wait(self, more: int) -> None:
        """Until so many more answers came."""
        wanted = self.num_right + more
        wait_until(lambda: self.num_right >= wanted or bool(self.failures), 120.0, lambda: f"{self.num_right} answers")

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self.failures, (
            "\n".join(self.failures[:5]) + f"\n{len(self.failures)} failures, {self.num_right} right"
        )


def complete(url: str, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "def f(", "max_tokens": 8, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60.0)


def test_requests_through_the_proxy_are_those_of_the_router(cluster: RayCluster) -> None:
    cluster.deploy(ONE)
    proxied, direct = complete(cluster.proxy), complete(f"http://{cluster.direct}")
    assert proxied.status_code == direct.status_code == 200, proxied.text
    assert proxied.json()["choices"] == direct.json()["choices"]
    for name in ("date", "x-request-id", "content-type"):
        assert len(proxied.headers.get_list(name)) == 1
    refused = httpx.get(f"{cluster.proxy}/v1/nothing", trust_env=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    body = {"model": MODEL, "prompt": "def f(", "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{cluster.proxy}/v1/completions", json=body, trust_env=False, timeout=60.0) as reply:
        assert [line for line in reply.iter_lines() if line][-1] == "data: [DONE]"
    assert httpx.get(f"{cluster.proxy}/readyz", trust_env=False).json()["status"] == "ready"


def test_rays_dashboard_names_deployments_and_our_nodes(cluster: RayCluster) -> None:
    assert set(cluster.application()["deployments"]) == {"Bootstrap", "Router", "Prefill", "Decode"}
    metrics = httpx.get(f"http://{cluster.direct}/metrics", trust_env=False).text
    for deployment, role in (("Prefill", "prefill"), ("Decode", "decode")):
        for replica in cluster.replicas(deployment):
            assert f'pdcluster_node_up{{node="{role}-{replica["replica_id"]}",role="{role}"}} 1.0' in metrics


def test_prometheus_finds_every_process(cluster: RayCluster) -> None:
    found = cluster.targets()
    assert {labels["cluster"] for _, labels in found} == {"pdcluster"}
    replicas = {
        f"{name.lower()}-{replica['replica_id']}"
        for name in ("Router", "Prefill", "Decode")
        for replica in cluster.replicas(name)
    }
    assert len(replicas) == 4
    assert {labels["process"] for _, labels in found} == replicas | {"bootstrap"}
    assert len({address for address, _ in found}) == 5
    for address, labels in found:
        text = httpx.get(f"http://{address}/metrics", trust_env=False, timeout=10.0).raise_for_status().text
        assert "pdcluster_build_info" in text, labels


def test_all_processes_have_the_applications_key_and_no_argument_shows_it(cluster: RayCluster) -> None:
    processes = [*cluster.processes("pdcluster.cli bootstrap"), *cluster.processes("pdcluster_router.cli")]
    processes += [*cluster.nodes("prefill"), *cluster.nodes("decode")]
    assert len(processes) == 5
    sections = ("BOOTSTRAP", "NODE", "ROUTER")
    keys = {each.environ()[f"PDCLUSTER_{name}_SECURITY_CLUSTER_KEY"] for each in processes for name in sections}
    (key,) = keys
    assert len(key) == 64
    assert not any(key in " ".join(each.cmdline()) for each in processes), "ps shows arguments to everybody"
    (bootstrap,) = {
        word for each in cluster.nodes("decode") for word in each.cmdline() if word.startswith("--set=node.bootstrap=")
    }
    with grpc.insecure_channel(bootstrap.rpartition("=")[2]) as channel, pytest.raises(grpc.RpcError) as refused:
        next(iter(stubs.BootstrapStub(channel).Watch(pb.WatchRequest(), timeout=20.0)))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_killed_node_process_is_started_again_in_its_replica_and_no_request_fails(cluster: RayCluster) -> None:
    replicas = {replica["replica_id"] for replica in cluster.replicas("Decode")}
    with Load(cluster) as load:
        pids = {process.pid for process in cluster.nodes("decode")}
        assert len(pids) == 2
        os.kill(min(pids), signal.SIGKILL)
        wait_until(lambda: len({each.pid for each in cluster.nodes("decode")} - {min(pids)}) == 2, GONE_S)
        wait_until(lambda: ups(cluster, "decode") == 2, GONE_S)
        load.wait(20)
        time.sleep(3 * HEALTH_S)
    assert {replica["replica_id"] for replica in cluster.replicas("Decode")} == replicas, "its health is asked anew"


def test_a_killed_actor_leaves_no_orphan_and_is_replaced(cluster: RayCluster) -> None:
    with Load(cluster) as load:
        replica = cluster.replicas("Decode")[0]
        (node,) = [
            each for each in cluster.nodes("decode") if f"decode-{replica['replica_id']}" in " ".join(each.cmdline())
        ]
        os.kill(replica["pid"], signal.SIGKILL)
        wait_until(lambda: not node.is_running() or node.status() == "zombie", 10.0)
        wait_until(
            lambda: (
                len(cluster.replicas("Decode")) == 2
                and replica["replica_id"] not in {each["replica_id"] for each in cluster.replicas("Decode")}
            ),
            GONE_S,
        )
        wait_until(lambda: ups(cluster, "decode") == 2, GONE_S)
        load.wait(20)
    assert len(cluster.nodes("decode")) == 2 and node.pid not in {each.pid for each in cluster.nodes("decode")}


def test_a_redeploy_with_another_setting_loses_nothing(cluster: RayCluster) -> None:
    before = {process.pid for process in cluster.nodes("prefill")}
    with Load(cluster) as load:
        changed = {"name": "Decode", "user_config": {"settings": {"node.kv.memory_bytes": "96MiB"}}}
        cluster.deploy(ONE, [changed])
        wait_until(
            lambda: (
                len(found := cluster.nodes("decode")) == 2
                and all("--set=node.kv.memory_bytes=96MiB" in each.cmdline() for each in found)
            ),
            DEPLOY_S,
        )
        load.wait(20)
    assert {process.pid for process in cluster.nodes("prefill")} == before, "nothing else was started again"


def test_other_weights_are_rolled_out_by_a_changed_value(
    cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Under another label the same tensors: so the load's answers stay right."""
    tuned = shutil.copytree(bundled_model(), tmp_path_factory.mktemp("weights") / "tuned")
    before = {process.pid for role in ("prefill", "decode") for process in cluster.nodes(role)}
    wish = {
        "name": "Router",
        "user_config": {"weights": {"label": "tuned", "source": str(tuned), "max_unavailable": 0}},
    }
    with Load(cluster) as load:
        cluster.deploy(ONE, [wish])
        wait_until(lambda: labels(cluster) == {"tuned"}, DEPLOY_S, lambda: str(labels(cluster)))
        load.wait(5)
    assert {process.pid for role in ("prefill", "decode") for process in cluster.nodes(role)} == before


def labels(cluster: RayCluster) -> set[str]:
    """Of the weights that nodes serve."""
    text = httpx.get(f"http://{cluster.direct}/metrics", trust_env=False, timeout=10.0).text
    return set(re.findall(r'^pdcluster_node_weights{.*label="([^"]+)".*} 1', text, re.MULTILINE))


def test_pools_grow_and_shrink_by_what_the_router_predicts(cluster: RayCluster) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3, "downscale_delay_s": 5.0}
    scaled = {name: value for name, value in ONE["decode"].items() if name != "num_replicas"}
    router = {
        "port": cluster.ports["router"],
        "settings": {"router.console": "none", "router.itl_s": 0.001, "router.slo.ttft_s": 60},
    }
    cluster.deploy({**ONE, "router": router, "decode": {**scaled, "autoscaling_config": scaling}})
    wait_until(lambda: len(cluster.replicas("Decode")) == 1, DEPLOY_S, lambda: str(cluster.application()))
    with Load(cluster, num_clients=12, max_tokens=64) as load:
        wait_until(lambda: len(cluster.replicas("Decode")) == 3, DEPLOY_S, lambda: str(cluster.application()))
        load.wait(30)
    with Load(cluster, num_clients=2, max_tokens=4, pause_s=1.0) as load:
        until = time.monotonic() + DEPLOY_S
        while len(cluster.replicas("Decode")) > 1 or len(cluster.nodes("decode")) > 1:
            assert time.monotonic() < until, cluster.application()
            load.wait(2)
            time.sleep(2.0)


def test_shutdown_leaves_no_process(cluster: RayCluster) -> None:
    assert cluster.processes("pdcluster.cli")
    cluster.serve("shutdown", "-y")
    wait_until(lambda: not cluster.processes("pdcluster.cli") and not cluster.processes("pdcluster_router"), GONE_S,
               lambda: str([each.cmdline() for each in cluster.processes("pdcluster")]))  # fmt: skip


def ups(cluster: RayCluster, role: str) -> int:
    with contextlib.suppress(httpx.HTTPError):
        text = httpx.get(f"http://{cluster.direct}/metrics", trust_env=False, timeout=10.0).text
        return sum(line.startswith("pdcluster_node_up") and f'role="{role}"' in line for line in text.splitlines())
    return -1


def test_the_schema_of_yaml_in_the_repository_is_rays() -> None:
    """In a process of its own: Ray's modules warn when they are imported."""
    code = "import json; from ray.serve.schema import ServeDeploySchema as S; print(json.dumps(S.model_json_schema()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120.0, check=True)
    kept = Path(__file__).parents[1] / "unit" / "deploy" / "ray_serve_schema.json"
    assert json.loads(done.stdout) == json.loads(kept.read_text())
