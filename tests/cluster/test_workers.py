"""A router of two worker processes, as a user starts it, over eight fake nodes: both serve, Admin answers for both, and
one may be killed."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import httpx
import openai
import psutil
import pytest
from fake_cluster import FakeNodes, RouterProcess, fake_cluster, until

from bench.fakes.fake_node import Speed
from pdcluster import client as api
from pdcluster.rpc import admin_pb2 as pb

pytestmark = pytest.mark.timeout(180)

ROLES = ["prefill"] * 3 + ["decode"] * 3 + ["mixed"] * 2
SPEED = Speed(prefill_s=0.0005, token_s=0.002)
MOST_STREAMS = 32
# Output tokens of a request that runs for as long as a test looks at it.
LONG = 20_000


@dataclass
class Running:
    nodes: FakeNodes
    router: RouterProcess


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with fake_cluster(ROLES, SPEED, num_pages=300) as (bootstrap, nodes):
        router = RouterProcess(bootstrap, "--workers", "2", "--name", "router")
        try:
            until(lambda: all(len(view) == len(ROLES) for view in router.views().values()) and len(router.views()) == 2)
            yield Running(nodes, router)
        finally:
            assert router.stop() == 0


def ids_of(router: RouterProcess) -> set[str]:
    return {request.id.rpartition("-")[0] for request in router.admin.ListRequests(pb.ListRequestsRequest()).requests}


def answers_as(router: RouterProcess) -> str:
    """The id that the worker gave which got a new connection."""
    return httpx.get(f"{router.url}/health", trust_env=False, timeout=60.0).headers["x-request-id"]


def prompts(chance: random.Random, count: int) -> list[list[int]]:
    """Turns of conversations that share a system prompt; small pools, so that nodes evict all the time."""
    system = [chance.randrange(10, 400) for _ in range(300)]
    talks = [list(system) for _ in range(40)]
    made = []
    for _ in range(count):
        talk = chance.choice(talks)
        talk += [chance.randrange(10, 400) for _ in range(chance.randrange(32, 200))]
        if len(talk) > 1500:
            del talk[300:]
        made.append(list(talk))
    return made


def serve(router: RouterProcess, asked: list[list[int]], num_clients: int = 16) -> list[str]:
    """The ids of all requests, each of which must be answered."""
    queue, ids = iter(asked), itertools.count()

    async def client(http: httpx.AsyncClient) -> list[str]:
        found = []
        for prompt in queue:
            body = {"model": "fake", "prompt": prompt, "max_tokens": 1 + len(prompt) % 4, "ignore_eos": True}
            reply = await http.post("/v1/completions", json=body, headers={"x-request-id": f"mine-{next(ids)}"})
            assert reply.status_code == 200, reply.text
            found.append(reply.json()["id"].removeprefix("cmpl-"))
        return found

    async def all_clients() -> list[str]:
        async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60) as http:
            return list(itertools.chain(*await asyncio.gather(*(client(http) for _ in range(num_clients)))))

    return asyncio.run(all_clients())


class Streams:
    """Long streams, one connection each, on both workers. ended: why, by the request's id."""

    def __init__(self, router: RouterProcess, max_tokens: int = LONG) -> None:
        self._router = router
        self._max_tokens = max_tokens
        self.ended: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(MOST_STREAMS)
        self._futures: list[Future[None]] = []
        while {name[:3] for name in self.ids} != {"w0-", "w1-"}:  # the kernel chooses who gets a connection
            assert len(self._futures) < MOST_STREAMS, "one worker gets no connections"
            self._futures += [self._pool.submit(self._follow) for _ in range(4)]
            until(lambda: len(self.ids) == len(self._futures))

    @property
    def ids(self) -> set[str]:
        return ids_of(self._router)

    def _follow(self) -> None:
        body = {"model": "fake", "prompt": [7] * 40, "max_tokens": self._max_tokens, "stream": True, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{self._router.url}/v1/completions", json=body, trust_env=False, timeout=60
        ) as reply:
            name, last = reply.headers["x-request-id"], ""
            try:
                for line in reply.iter_lines():
                    last = line or last
            except httpx.HTTPError as error:
                last = type(error).__name__
            self.ended[name] = last

    def close(self) -> None:
        for name in self.ids:
            self._router.admin.CancelRequest(pb.CancelRequestRequest(id=name, reason="the test is over"))
        for future in self._futures:
            future.result(timeout=90)
        self._pool.shutdown()


def test_two_hundred_requests_are_served_by_both_and_each_can_be_explained(running: Running) -> None:
    router = running.router
    ids = serve(router, prompts(random.Random(1), 200))
    by_worker = {prefix: [name for name in ids if name.startswith(prefix)] for prefix in ("w0-", "w1-")}
    assert len(set(ids)) == 200 and all(by_worker.values()) and sum(map(len, by_worker.values())) == 200
    for name in ids[::10]:
        (told,) = router.admin.Explain(pb.ExplainRequest(id=name)).json
        assert f'"request":"{name}-0"' in told
    assert {
        router.admin.Explain(pb.ExplainRequest(id=f"mine-{number}")).json[0].count('"client_id"')
        for number in range(0, 200, 10)
    } == {1}
    with pytest.raises(grpc.RpcError) as caught:
        router.admin.Explain(pb.ExplainRequest(id="w1-nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_both_kinds_of_clients_work_unchanged(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.router.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        reply = client.completions.create(
            model="fake", prompt="def add(a, b):", max_tokens=5, n=2, extra_body={"ignore_eos": True}
        )
        assert [choice.finish_reason for choice in reply.choices] == ["length"] * 2
    seen = set()
    for _ in range(20):
        with api.Client(running.router.grpc) as grpc_client:
            seen.add(grpc_client.complete([5, 6, 7], max_tokens=3, ignore_eos=True).finish_reasons)
    assert seen == {("length",)}


def test_one_scrape_covers_all_workers_and_counts_nodes_once(running: Running) -> None:
    serve(running.router, prompts(random.Random(2), 40))
    found = running.router.metrics()
    counts = [
        found[f'pdcluster_http_requests_total{{endpoint="/v1/completions",status="200",worker="{worker}"}}']
        for worker in (0, 1)
    ]
    assert all(counts)
    assert [found[f'pdcluster_worker_up{{worker="{worker}"}}'] for worker in (0, 1)] == [1.0, 1.0]
    assert sum(name.startswith("pdcluster_node_up{") for name in found) == len(ROLES)


def test_a_request_that_any_worker_has_is_listed_and_cancelled(running: Running) -> None:
    streams = Streams(running.router)
    try:
        ids = streams.ids
        for name in sorted(ids):
            assert (
                running.router.admin.CancelRequest(pb.CancelRequestRequest(id=name, reason="a runaway")).cancelled == 1
            )
        until(lambda: set(streams.ended) == ids)
        assert all("a runaway" in last for last in streams.ended.values())
    finally:
        streams.close()


def test_what_an_operator_sets_holds_for_all_workers_and_is_told_once_each(running: Running) -> None:
    admin = running.router.admin
    assert admin.SetPolicy(pb.SetPolicyRequest(shadow="least-load")).shadow == "least-load"
    assert {policy_of(running.router) for _ in range(10)} == {("seconds", "least-load")}
    assert admin.SetPolicy(pb.SetPolicyRequest(shadow="")).shadow == ""
    told = [event.message for event in admin.Events(pb.EventsRequest()) if event.kind == "policy"]
    assert {"worker 0: the shadow is least-load", "worker 1: the shadow is least-load"} <= set(told)
    assert {node.state for node in admin.ListNodes(pb.ListNodesRequest()).nodes} == {"ready"}


def policy_of(router: RouterProcess) -> tuple[str, str]:
    found = router.admin.GetPolicy(pb.GetPolicyRequest())
    return found.live, found.shadow


def test_after_a_thousand_requests_the_views_agree_and_a_killed_worker_is_exact_again(running: Running) -> None:
    router, nodes, chance = running.router, running.nodes, random.Random(3)
    serve(router, prompts(chance, 700))
    until(lambda: list(router.views().values()) == [nodes.digests()] * 2)

    streams = Streams(router)
    try:
        doomed = {name for name in streams.ids if name.startswith("w0-")}
        spared = streams.ids - doomed
        assert doomed and spared
        former, spare = router.worker(0), router.spare()
        former.send_signal(signal.SIGKILL)
        until(lambda: set(streams.ended) == doomed)
        assert set(streams.ended.values()) <= {"RemoteProtocolError", "ReadError"}, (
            "connections of the dead worker fail, no other"
        )
        took_s = until(
            lambda: len(router.views()) == 2 and all(len(view) == len(ROLES) for view in router.views().values())
        )
        until(lambda: answers_as(router).startswith("w0-"))
        warm_s = router.metrics()['pdcluster_worker_warm_seconds{worker="0"}']
        print(
            f"a killed worker is exact again after {took_s:.2f} s; of these its view of {len(ROLES)} nodes took "
            f"{warm_s:.3f} s"
        )
        assert router.worker(0).pid == spare.pid and streams.ids == spared
        assert router.spare().pid != spare.pid
    finally:
        streams.close()
    assert all("the test is over" in streams.ended[name] for name in spared), (
        "the other worker's streams went on to their end"
    )

    ids = serve(router, prompts(chance, 300))
    assert {name[:3] for name in ids} == {"w0-", "w1-"}
    until(lambda: list(router.views().values()) == [nodes.digests()] * 2)
    until(lambda: not any(node.pages.num_used for node in nodes.nodes))
    assert router.metrics()['pdcluster_worker_restarts_total{worker="0"}'] == 1.0


def test_at_last_shutting_down_lets_both_workers_finish_what_they_stream_and_leaves_no_process(
    running: Running,
) -> None:
    router = running.router  # the tests before this one have used it
    children = [router.worker(0), router.worker(1), router.spare()]
    streams = Streams(router, max_tokens=800)
    ids = streams.ids
    assert router.stop() == 0
    until(lambda: set(streams.ended) == ids)
    assert set(streams.ended.values()) == {"data: [DONE]"}
    assert not any(psutil.pid_exists(child.pid) for child in children)
