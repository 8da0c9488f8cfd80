"""Calls of trainers over real HTTP, before a cluster whose answers a test sets: who may call, what each call does, and
what is refused by its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from scripted_admin import ScriptedAdmin, admin_node

from pdcluster.core.errors import ConfigError, PdclusterError
from pdcluster.core.weights import WeightsVersion
from pdcluster.settings.config import RouterConfig
from pdcluster_router.admin.operations import RolloutProgress, WeightsRollout
from pdcluster_router.control.calls import CALLS, TrainerCalls, label_of
from pdcluster_router.control.parameters import (
    Conflict,
    FinishUpdate,
    GivenUpdate,
    Parameters,
    StartUpdate,
    Unsupported,
)
from pdcluster_router.control.refused import REFUSED
from pdcluster_router.control.serve import control_surface
from pdcluster_router.queueing.pauses import USUAL_PAUSE_S, PauseMode

TOKEN = "0123456789abcdef0123456789abcdef"
SOURCE = "/models/tuned"


class TrainedCluster(ScriptedAdmin):
    """Implements Operations. loads: may be waited for. fails: what the next rollout says."""

    def __init__(self) -> None:
        super().__init__([admin_node("prefill-0", "prefill"), admin_node("decode-0", "decode")])
        self.paused: PauseMode | None = None
        self.num_running = 3
        self.loads = asyncio.Event()
        self.loads.set()
        self.fails = ""
        self.num_taken_back = 0

    async def pause(self, mode: PauseMode, max_pause_s: float) -> int:
        self.changes.append(("pause", mode, max_pause_s))
        self.paused = mode
        num_running, self.num_running = self.num_running, 0
        return num_running

    async def resume(self) -> bool:
        self.changes.append(("resume",))
        was_paused, self.paused = self.paused is not None, None
        return was_paused

    async def is_paused(self) -> bool:
        return self.paused is not None

    async def sleep(self, finish_s: float) -> list[str]:
        self.changes.append(("sleep", finish_s))
        return self._all_become("sleeping")

    async def wake(self) -> list[str]:
        self.changes.append(("wake",))
        return self._all_become("ready")

    def _all_become(self, state: Any) -> list[str]:
        changed = [node.name for node in self.node_list if node.state != state]
        self.node_list = [replace(node, state=state) for node in self.node_list]
        return changed

    async def load_weights(self, wanted: WeightsRollout) -> AsyncGenerator[RolloutProgress, None]:
        self.changes.append(("load", wanted))
        version = WeightsVersion(wanted.label, 1 + max(node.weights.epoch for node in self.node_list), "d")
        try:
            yield RolloutProgress("prefill-0", "loading", version, 0, 2)
            await self.loads.wait()
        except (GeneratorExit, asyncio.CancelledError):
            self.num_taken_back += 1
            raise
        if self.fails:
            raise PdclusterError(self.fails)
        self.node_list = [
            replace(node, weights=version, weights_source=wanted.source, state="ready") for node in self.node_list
        ]
        yield RolloutProgress("", "serving", version, 2, 2)


@asynccontextmanager
async def trainer(
    cluster: TrainedCluster, token_file: Path | None = None, token: str | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    config = RouterConfig(control="127.0.0.1:0", admin_token_file=token_file)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with (
        control_surface(cluster, config, None) as address,
        httpx.AsyncClient(base_url=f"http://{address}", headers=headers, trust_env=False, timeout=30.0) as client,
    ):
        yield client


@pytest.fixture
def cluster() -> TrainedCluster:
    return TrainedCluster()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return file


# ---------------------------------------------------------------- who may call


async def test_every_call_wants_the_admin_token(cluster: TrainedCluster, token_file: Path) -> None:
    async with trainer(cluster, token_file) as client:
        for path in [*CALLS, *REFUSED, "/nothing"]:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
                reply = await client.post(path, headers=headers)
                assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
                assert "Authorization: Bearer TOKEN" in reply.json()["message"] and TOKEN not in reply.text
    async with trainer(cluster, token_file, TOKEN) as client:
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
    assert cluster.changes == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:9"}, 200),
        ({"host": "evil.example"}, 403),  # a name that was made to point here
        ({"origin": "http://localhost"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
async def test_on_loopback_pages_in_browsers_may_not_call(
    cluster: TrainedCluster, headers: dict[str, str], status: int
) -> None:
    async with trainer(cluster) as client:
        assert (await client.post("/pause", headers=headers)).status_code == status
    assert bool(cluster.changes) == (status == 200)


async def test_it_is_off_unless_set_and_closed_beyond_loopback(cluster: TrainedCluster) -> None:
    async with control_surface(cluster, RouterConfig(), None) as address:
        assert address is None
    with pytest.raises(ConfigError, match=r"control at 0\.0\.0\.0:8002 .* --admin-token-file"):
        RouterConfig(control="0.0.0.0:8002")
    async with trainer(cluster) as client:
        taken = f"127.0.0.1:{client.base_url.port}"
        with pytest.raises(ConfigError, match="--control"):
            async with control_surface(cluster, RouterConfig(control=taken), None):
                pass


# ---------------------------------------------------------------- pauses


@pytest.mark.parametrize(
    ("path", "body", "mode", "max_pause_s"),
    [
        ("/pause", None, "abort", USUAL_PAUSE_S),
        ("/pause?mode=wait", None, "wait", USUAL_PAUSE_S),
        ("/pause?mode=keep&max_pause_s=60&clear_cache=true", None, "keep", 60.0),
        ("/pause?wait_for_inflight_requests=true", None, "wait", USUAL_PAUSE_S),
        ("/pause?mode=keep", {"max_pause_s": 30}, "keep", 30.0),
        ("/pause_generation", {}, "abort", USUAL_PAUSE_S),
        ("/pause_generation", {"mode": "retract"}, "keep", USUAL_PAUSE_S),
        ("/pause_generation", {"mode": "abort", "max_pause_s": 5.5}, "abort", 5.5),
    ],
)
async def test_pauses_in_the_words_of_both(
    cluster: TrainedCluster, path: str, body: dict[str, Any] | None, mode: str, max_pause_s: float
) -> None:
    async with trainer(cluster) as client:
        reply = await client.post(path, json=body) if body is not None else await client.post(path)
        assert reply.status_code == 200, reply.text
        assert reply.json() in (
            {"status": "paused", "requests": 3},
            {"status": "ok", "message": "paused; 3 requests were running"},
        )
        assert cluster.changes == [("pause", mode, max_pause_s)]
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert (await client.post("/resume")).json() == {"status": "resumed", "was_paused": True}
        assert (await client.post("/continue_generation", json={})).json()["message"] == "there was no pause"
        assert (await client.post("/continue_generation", json={"torch_empty_cache": False})).json()["status"] == "ok"


# ---------------------------------------------------------------- weights from disk


async def test_an_update_from_disk_has_all_nodes_go_over(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        assert (await client.get("/get_weight_version")).json()["weight_version"] == "base"
        body = {"model_path": SOURCE, "weight_version": "step-7", "load_format": None, "finish_s": 2.5}
        reply = await client.post("/update_weights_from_disk", json=body)
        assert reply.json() == {"success": True, "message": "2 of 2 nodes serve step-7 (epoch 1)"}
        assert cluster.changes == [("load", WeightsRollout(SOURCE, "step-7", 0, finish_s=2.5))]
        version = {"weight_version": "step-7", "epoch": 1, "digest": "d", "nodes": ["decode-0", "prefill-0"]}
        for path in ("/get_weight_version", "/weight_info"):
            told = (await client.get(path)).json()
            assert told == {"weight_version": "step-7", "weight_versions": [version]}
        info = (await client.get("/model_info")).json()
        assert (info["model_path"], info["weight_version"]) == (SOURCE, "step-7")
        again = await client.post("/update_weights_from_disk", json=body)
        assert again.status_code == 409 and "serve the weights 'step-7' already" in again.json()["message"]


async def test_nodes_with_different_weights_are_all_named(cluster: TrainedCluster) -> None:
    cluster.node_list[1] = replace(cluster.node_list[1], weights=WeightsVersion("new", 4, "x"))
    async with trainer(cluster) as client:
        told = (await client.get("/get_weight_version")).json()
    assert told["weight_version"] == "new"
    assert [(each["weight_version"], each["nodes"]) for each in told["weight_versions"]] == [
        ("new", ["decode-0"]),
        ("base", ["prefill-0"]),
    ]


async def test_weights_without_a_label_get_one_of_their_own(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        for epoch in (1, 2):
            reply = await client.post("/update_weights_from_disk", json={"model_path": SOURCE})
            assert reply.json()["message"] == f"2 of 2 nodes serve tuned:{epoch} (epoch {epoch})"
    assert label_of("/a/._ schön ä/", 3) == "sch-n-:3"
    assert label_of("..", 3) == "weights:3" and label_of("x" * 300, 3) == "x" * 40 + ":3"


async def test_what_a_rollout_says_is_the_answer(cluster: TrainedCluster) -> None:
    cluster.fails = "node decode-0: memory is short"
    async with trainer(cluster) as client:
        reply = await client.post("/update_weights_from_disk", json={"model_path": SOURCE, "abort_all_requests": True})
    assert reply.status_code == 500
    assert (reply.json()["success"], reply.json()["message"]) == (False, cluster.fails)
    assert [change[0] for change in cluster.changes] == ["pause", "load", "resume"]


@pytest.mark.parametrize("is_paused", [False, True])
async def test_requests_are_ended_before_an_update_that_wants_it(cluster: TrainedCluster, is_paused: bool) -> None:
    """A pause of the trainer's own stays."""
    async with trainer(cluster) as client:
        if is_paused:
            await client.post("/pause?mode=keep")
        body = {"model_path": SOURCE, "abort_all_requests": True}
        assert (await client.post("/update_weights_from_disk", json=body)).json()["success"]
        assert (await client.get("/is_paused")).json() == {"is_paused": is_paused}
    assert ("pause", "abort", USUAL_PAUSE_S) in cluster.changes


async def test_a_trainer_that_leaves_takes_its_rollout_back(cluster: TrainedCluster) -> None:
    cluster.loads.clear()
    async with trainer(cluster) as client:
        with pytest.raises(httpx.ReadTimeout):
            body = {"model_path": SOURCE, "abort_all_requests": True}
            await client.post("/update_weights_from_disk", json=body, timeout=0.2)
        async with asyncio.timeout(10):
            while not cluster.num_taken_back or cluster.paused is not None:
                await asyncio.sleep(0.01)
        assert (await client.get("/get_weight_version")).json()["weight_version"] == "base"


async def test_a_router_that_stops_says_so_and_takes_rollouts_back(cluster: TrainedCluster) -> None:
    cluster.loads.clear()
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        async with control_surface(cluster, RouterConfig(control="127.0.0.1:0"), None) as address:
            url = f"http://{address}/update_weights_from_disk"
            asked = asyncio.create_task(client.post(url, json={"model_path": SOURCE}))
            async with asyncio.timeout(10):
                while not cluster.changes:
                    await asyncio.sleep(0.01)
        assert cluster.num_taken_back == 1
        reply = await asked
    assert reply.status_code == 503 and "the router stops" in reply.json()["message"]


# ---------------------------------------------------------------- vLLM's three steps


async def test_an_update_in_steps_pauses_loads_and_resumes(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        started = await client.post("/start_weight_update", json={"max_pause_s": 90})
        assert started.json() == {"message": "Weight update started"}
        given = await client.post("/update_weights", json={"update_info": {"model_path": SOURCE}})
        assert given.status_code == 200
        done = await client.post("/finish_weight_update", json={"weight_version": "step-1", "finish_s": 0})
        assert done.json() == {"message": "Weight update finished: 2 of 2 nodes serve step-1 (epoch 1)"}
    wanted = WeightsRollout(SOURCE, "step-1", 0, finish_s=0.0)
    assert cluster.changes == [("pause", "keep", 90.0), ("load", wanted), ("resume",)]


async def test_an_update_in_steps_leaves_a_pause_that_was_there(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        await client.post("/pause?mode=wait")
        await client.post("/start_weight_update")
        await client.post("/update_weights", json={"update_info": {"model_path": SOURCE}})
        assert (await client.post("/finish_weight_update")).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
    assert [change[0] for change in cluster.changes] == ["pause", "load"]


async def test_steps_in_a_wrong_order_are_refused(cluster: TrainedCluster) -> None:
    info = {"update_info": {"model_path": SOURCE}}
    async with trainer(cluster) as client:
        for path, body in (("/update_weights", info), ("/finish_weight_update", {})):
            reply = await client.post(path, json=body)
            assert reply.status_code == 409 and "call /start_weight_update" in reply.json()["message"]
        await client.post("/start_weight_update")
        again = await client.post("/start_weight_update")
        assert again.status_code == 409 and "/resume" in again.json()["message"]
        empty = await client.post("/finish_weight_update")
        assert empty.status_code == 409 and "call /update_weights before" in empty.json()["message"]
        await client.post("/update_weights", json=info)
        assert (await client.post("/update_weights", json=info)).status_code == 409
        await client.post("/resume")
        assert (await client.post("/finish_weight_update")).status_code == 409
    assert [change[0] for change in cluster.changes] == ["pause", "resume"]


async def test_a_finish_that_fails_leaves_the_update_open(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        await client.post("/start_weight_update")
        await client.post("/update_weights", json={"update_info": {"model_path": SOURCE}})
        cluster.fails = "node decode-0 is gone"
        assert (await client.post("/finish_weight_update")).status_code == 500
        assert cluster.paused == "keep"
        cluster.fails = ""
        assert (await client.post("/finish_weight_update")).status_code == 200
        assert cluster.paused is None


async def test_an_update_whose_trainer_died_closes_with_its_pause(cluster: TrainedCluster) -> None:
    now = 0.0
    calls = TrainerCalls(cluster, lambda: now)
    await calls.start_update(StartUpdate(max_pause_s=10.0))
    await calls.give_update(GivenUpdate(update_info={"model_path": SOURCE}))
    now = 10.0
    with pytest.raises(Conflict, match="max_pause_s is over"):
        await calls.finish_update(FinishUpdate())
    await calls.start_update(StartUpdate())


async def test_a_start_that_fails_opens_nothing(cluster: TrainedCluster) -> None:
    async def refuse(mode: PauseMode, max_pause_s: float) -> int:
        raise PdclusterError("worker 1 did not answer")

    calls, own_pause = TrainerCalls(cluster), cluster.pause
    cluster.pause = refuse  # type: ignore[method-assign]
    with pytest.raises(PdclusterError, match="worker 1"):
        await calls.start_update(StartUpdate())
    assert cluster.changes == [("resume",)]
    cluster.pause = own_pause  # type: ignore[method-assign]
    await calls.start_update(StartUpdate())


# ---------------------------------------------------------------- sleep and caches


async def test_sleep_and_wake_in_vllms_words(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        for level in (1, 2):
            reply = await client.post(f"/sleep?level={level}&mode=keep")
            assert reply.json() == {"status": "sleeping", "nodes": ["prefill-0", "decode-0"]}
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await client.post("/wake_up?tags=weights&tags=kv_cache")).json()["status"] == "awake"
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
            assert cluster.paused is None
    assert cluster.changes[:2] == [("pause", "keep", USUAL_PAUSE_S), ("sleep", 0.0)]


@pytest.mark.parametrize("is_paused", [False, True])
async def test_memory_is_released_and_taken_again_in_sglangs_words(cluster: TrainedCluster, is_paused: bool) -> None:
    """Nothing is lost by it, and a pause of the trainer's own stays."""
    async with trainer(cluster) as client:
        if is_paused:
            await client.post("/pause_generation", json={"mode": "retract"})
        for _ in range(2):  # nodes that sleep already stay asleep
            assert (await client.post("/release_memory_occupation", json={"tags": None})).json()["success"]
        assert cluster.paused == "keep"
        body = {"tags": ["kv_cache", "weights", "cuda_graph"]}
        woken = await client.post("/resume_memory_occupation", json=body)
        assert woken.json()["nodes"] == ["prefill-0", "decode-0"]
        assert (cluster.paused is not None) == is_paused


async def test_a_release_that_fails_halfway_is_taken_back_by_the_next_resume(cluster: TrainedCluster) -> None:
    own_sleep = cluster.sleep

    async def half(finish_s: float) -> list[str]:
        cluster.node_list[0] = replace(cluster.node_list[0], state="sleeping")
        raise PdclusterError("node decode-0 has no room")

    async with trainer(cluster) as client:
        cluster.sleep = half  # type: ignore[method-assign]
        assert (await client.post("/release_memory_occupation")).status_code == 500
        assert cluster.paused == "keep"  # a node sleeps
        cluster.sleep = own_sleep  # type: ignore[method-assign]
        assert (await client.post("/release_memory_occupation")).status_code == 200
        assert (await client.post("/resume_memory_occupation")).status_code == 200
        assert cluster.paused is None


async def test_a_caller_that_leaves_before_any_node_sleeps_leaves_no_pause(cluster: TrainedCluster) -> None:
    asked = asyncio.Event()

    async def hang(finish_s: float) -> list[str]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    cluster.sleep = hang  # type: ignore[method-assign]
    async with trainer(cluster) as client:
        call = asyncio.ensure_future(client.post("/sleep"))
        await asked.wait()
        call.cancel()
        async with asyncio.timeout(10.0):
            while cluster.paused is not None:
                await asyncio.sleep(0.02)


async def test_nothing_ends_for_what_is_refused_anyway(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        body = {"model_path": SOURCE, "weight_version": "one", "abort_all_requests": True}
        assert (await client.post("/update_weights_from_disk", json=body)).status_code == 200
        cluster.changes.clear()
        assert (await client.post("/update_weights_from_disk", json=body)).status_code == 409
        assert (
            await client.post("/update_weights_from_disk", json={**body, "weight_version": "no label"})
        ).status_code == 400
        assert (await client.post("/start_weight_update", json={"max_pause_s": -5})).status_code == 400
        cluster.node_list[1] = replace(cluster.node_list[1], engine="vllm")
        refused = await client.post("/sleep")
        assert refused.status_code == 400 and "decode-0 runs vllm" in refused.json()["message"]
        assert cluster.changes == []


async def test_an_update_that_was_given_up_while_it_loads_ends_no_later_one(cluster: TrainedCluster) -> None:
    cluster.loads.clear()
    async with trainer(cluster) as client:
        await client.post("/start_weight_update")
        await client.post("/update_weights", json={"update_info": {"model_path": SOURCE}})
        finish = asyncio.ensure_future(client.post("/finish_weight_update", json={"weight_version": "one"}))
        while not any(change[0] == "load" for change in cluster.changes):
            await asyncio.sleep(0.01)
        await client.post("/resume")
        await client.post("/start_weight_update")
        cluster.loads.set()
        assert (await finish).status_code == 200
        assert cluster.paused == "keep"  # that of the second update, which is still open
        assert (await client.post("/start_weight_update")).status_code == 409


async def test_an_update_ends_no_pause_that_the_trainer_asked_for_since(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        await client.post("/start_weight_update")
        await client.post("/pause?mode=keep")
        await client.post("/update_weights", json={"update_info": {"model_path": SOURCE}})
        assert (await client.post("/finish_weight_update")).status_code == 200
        assert cluster.paused == "keep"
        await client.post("/resume")
        await client.post("/release_memory_occupation")
        await client.post("/wake_up")
        await client.post("/pause?mode=keep")
        await client.post("/release_memory_occupation")
        await client.post("/resume_memory_occupation")
        assert cluster.paused == "keep"


async def test_the_label_that_sleepers_have_may_be_loaded(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        body = {"model_path": SOURCE, "weight_version": "one"}
        assert (await client.post("/update_weights_from_disk", json=body)).status_code == 200
        await client.post("/release_memory_occupation")
        assert (await client.post("/update_weights_from_disk", json=body)).status_code == 200


async def test_a_flush_says_that_nothing_is_dropped(cluster: TrainedCluster) -> None:
    """Clients wait for it before they begin, without a pause."""
    async with trainer(cluster) as client:
        for method, path in (
            ("GET", "/flush_cache?timeout=3"),
            ("POST", "/flush_cache"),
            ("POST", "/reset_prefix_cache"),
        ):
            reply = await client.request(method, path)
            assert reply.status_code == 200 and "nothing was dropped" in reply.json()["message"]


# ---------------------------------------------------------------- what is refused by its name


@pytest.mark.parametrize("path", REFUSED)
async def test_calls_without_a_meaning_say_what_to_use_instead(cluster: TrainedCluster, path: str) -> None:
    async with trainer(cluster) as client:
        # Before a body comes: that of tensors has no bound.
        reply = await client.post(path, content=b"x" * (1 << 20))
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "unsupported"
        assert reply.json()["message"] == f"{path} is refused: {REFUSED[path]}"
        assert (await client.get("/is_paused")).status_code == 200
    assert cluster.changes == []


DISK = {"model_path": SOURCE}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause?mode=in_place", {}, "use keep"),
        ("/pause?mode=stop", {}, "allowed are abort, wait, keep"),
        ("/pause?clear_cache=false", {}, "clear_cache=false is refused"),
        ("/pause?mode=keep&wait_for_inflight_requests=1", {}, "say one"),
        ("/pause_generation", {"mode": "in_place"}, "use retract"),
        ("/pause_generation", {"mode": "keep"}, "allowed are abort, retract"),
        ("/pause?mode=keep&mode=keep", {}, "'mode' comes twice"),
        ("/pause?mode=keep", {"mode": "keep"}, "'mode' comes twice"),
        ("/pause?max_pause_s=soon", {}, "max_pause_s"),
        ("/pause", [1], "must be a JSON object"),
        ("/continue_generation", {"empty_cache": True}, "has no 'empty_cache'; it takes torch_empty_cache"),
        ("/resume", {"mode": "keep"}, "it takes nothing"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": ""}, "model_path"),
        ("/update_weights_from_disk", DISK | {"weight_versoin": "a"}, "has no 'weight_versoin'; it takes "),
        ("/update_weights_from_disk", DISK | {"load_format": "dummy"}, "load_format 'dummy' is refused"),
        ("/update_weights_from_disk", DISK | {"flush_cache": False}, "flush_cache=false is refused"),
        ("/update_weights_from_disk", DISK | {"is_async": True}, "is_async is refused"),
        ("/update_weights_from_disk", DISK | {"keep_pause": True}, "pause first with /pause_generation"),
        ("/update_weights_from_disk", DISK | {"token_step": 4}, "token_step is refused"),
        ("/update_weights_from_disk", DISK | {"manifest": {}}, "manifest is refused"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format=false is refused"),
        ("/update_weights", {"update_info": {"names": ["a"], "shapes": [[1]]}}, "weights.publisher.Publisher"),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}, "weights.publisher.Publisher"),
        ("/update_weights", {"update_info": DISK | {"packed": True}}, "update_info has no 'packed'"),
        ("/update_weights", {"update_info": DISK | {"load_format": "pt"}}, "load_format 'pt' is refused"),
        ("/sleep?level=0", {}, "use /pause"),
        ("/sleep?level=3", {}, "allowed are 1 and 2"),
        ("/sleep?mode=in_place", {}, "use keep"),
        ("/sleep?tags=weights", {}, "has no 'tags'"),
        ("/wake_up?tags=weights", {}, "nodes sleep and wake whole"),
        ("/wake_up", {"tags": []}, "nodes sleep and wake whole"),
        ("/wake_up?tags=brain", {}, "known are cuda_graph, kv_cache, weights"),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, "nodes release all or nothing"),
        ("/resume_memory_occupation", {"tags": ["weights"]}, "nodes sleep and wake whole"),
        ("/reset_prefix_cache?reset_running_requests=true", {}, "/pause?mode=keep"),
        ("/reset_prefix_cache?reset_external=true", {}, "reset_external is refused"),
        ("/flush_cache?timeout=-1", {}, "timeout"),
    ],
)
async def test_parameters_that_would_mix_or_mean_nothing_are_refused_by_name(
    cluster: TrainedCluster, path: str, body: Any, words: str
) -> None:
    async with trainer(cluster) as client:
        if path == "/update_weights":
            await client.post("/start_weight_update")
            cluster.changes.clear()
        reply = await client.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["message"] and reply.json()["message"] == reply.json()["error"]["message"]
        assert reply.json()["success"] is False
    assert cluster.changes == []


async def test_unknown_paths_methods_and_bodies_are_answered_as_json(cluster: TrainedCluster) -> None:
    async with trainer(cluster) as client:
        unknown = await client.post("/v1/completions", json={})
        assert unknown.status_code == 404 and "/update_weights_from_disk" in unknown.json()["message"]
        for path in set(CALLS) - {"/flush_cache"}:
            reply = await client.request("GET" if CALLS[path].methods == ("POST",) else "POST", path)
            assert reply.status_code == 405 and reply.headers["allow"] == CALLS[path].methods[0]
        for content in (b"{", b"\xff", b"[" * 50_000):
            reply = await client.post("/pause", content=content)
            assert reply.status_code == 400 and "the body is no JSON" in reply.json()["message"]
        large = await client.post("/pause", content=b"{" + b" " * (1 << 16) + b"}")
        assert large.status_code == 413
        assert (await client.post("/pause", content=b"null")).status_code == 200
    assert len(cluster.changes) == 1


def test_every_call_says_what_it_takes() -> None:
    assert not set(CALLS) & set(REFUSED)
    for path, call in CALLS.items():
        assert path.startswith("/") and issubclass(call.parameters, Parameters)
    assert Unsupported.http_status == 400
