"""Nodes that sleep: their memory goes back to the system, routers hold, and waking gives the same tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from processes import EXACT, Up, ask, running
from safetensors.torch import load_file
from weight_versions import greedy, make_versions

from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.weights.publisher import Publisher

PROMPT, NUM_TOKENS = [50, 300, 41, 17, 900, 12], 12
POOL = 64 << 20
NODES = ("prefill-0", "decode-0")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_versions(tmp_path_factory.mktemp("versions"), "base", "tuned")


@pytest.fixture(scope="module")
def up(versions: dict[str, Path]) -> Iterator[Up]:
    flags = ("--model", str(versions["base"]), "--prefill", "1", "--decode", "1", "--set", "node.threads=1")
    with running(*flags, *EXACT) as made:
        yield made


@pytest.fixture(scope="module")
def right(versions: dict[str, Path]) -> dict[str, list[int]]:
    found = {label: greedy(directory, PROMPT, NUM_TOKENS) for label, directory in versions.items()}
    assert found["base"] != found["tuned"]
    return found


@pytest.fixture
def admin(up: Up) -> Iterator[stubs.AdminStub]:
    with grpc.insecure_channel(up.admin) as channel:
        yield stubs.AdminStub(channel)


def resident(up: Up) -> dict[str, int]:
    return {node: psutil.Process(up.pid_of(node)).memory_info().rss for node in NODES}


def states(admin: stubs.AdminStub) -> list[str]:
    return [node.state for node in admin.ListNodes(pb.ListNodesRequest(), timeout=10).nodes]


def test_memory_goes_back_and_waking_gives_the_same_tokens(
    up: Up, versions: dict[str, Path], right: dict[str, list[int]], admin: stubs.AdminStub
) -> None:
    assert ask(up, PROMPT, NUM_TOKENS)[0] == right["base"]
    before = resident(up)
    assert sorted(admin.Sleep(pb.SleepRequest(), timeout=60).nodes) == sorted(NODES)
    asleep = resident(up)
    weights = (versions["base"] / "model.safetensors").stat().st_size
    for node in NODES:
        assert before[node] - asleep[node] >= 0.9 * (POOL + weights), up.output()
    assert states(admin) == ["sleeping"] * 2
    # It sleeps already, and nothing changes.
    assert list(admin.Sleep(pb.SleepRequest(), timeout=60).nodes) == []

    held = threading.Thread(target=lambda: answers.append(ask(up, PROMPT, NUM_TOKENS)[0]))
    answers: list[list[int]] = []
    held.start()
    held.join(1.0)
    assert held.is_alive() and not answers
    assert sorted(admin.Wake(pb.WakeRequest(), timeout=60).nodes) == sorted(NODES)
    held.join(60)
    assert answers == [right["base"]], up.output()
    assert states(admin) == ["ready"] * 2
    assert list(admin.Wake(pb.WakeRequest(), timeout=60).nodes) == []


def test_a_stream_that_runs_goes_on_after_sleep(up: Up, right: dict[str, list[int]], admin: stubs.AdminStub) -> None:
    """Its KV is gone with the pools, so it is computed again."""
    answers: list[list[int]] = []
    long = threading.Thread(target=lambda: answers.append(ask(up, PROMPT, 400)[0]))
    expected = ask(up, PROMPT, 400)[0]
    long.start()
    long.join(0.3)
    admin.Sleep(pb.SleepRequest(mode="keep"), timeout=60)
    assert not answers and long.is_alive()
    admin.Wake(pb.WakeRequest(), timeout=60)
    long.join(60)
    assert answers == [expected], up.output()


def test_weights_that_were_pushed_are_there_after_sleep(
    up: Up, versions: dict[str, Path], right: dict[str, list[int]], admin: stubs.AdminStub
) -> None:
    with Publisher(up.admin) as publisher:
        publisher.push(load_file(versions["tuned"] / "model.safetensors"), "tuned", finish_s=5.0)
    assert ask(up, PROMPT, NUM_TOKENS)[0] == right["tuned"]
    admin.Sleep(pb.SleepRequest(), timeout=60)
    admin.Wake(pb.WakeRequest(), timeout=60)
    tokens, reply = ask(up, PROMPT, NUM_TOKENS)
    assert tokens == right["tuned"] and reply["usage"]["pdcluster"]["weights"][0]["label"] == "tuned", up.output()


def test_a_push_to_nodes_that_sleep_wakes_them_with_what_was_pushed(
    up: Up, versions: dict[str, Path], right: dict[str, list[int]], admin: stubs.AdminStub
) -> None:
    admin.Sleep(pb.SleepRequest(), timeout=60)
    with Publisher(up.admin) as publisher:
        publisher.push(load_file(versions["base"] / "model.safetensors"), "base-again", finish_s=5.0)
    assert states(admin) == ["ready"] * 2
    assert list(admin.Wake(pb.WakeRequest(), timeout=60).nodes) == []
    assert ask(up, PROMPT, NUM_TOKENS)[0] == right["base"], up.output()


def test_a_load_that_fails_wakes_nodes_with_what_they_had(
    up: Up, versions: dict[str, Path], right: dict[str, list[int]], admin: stubs.AdminStub, tmp_path: Path
) -> None:
    wanted = pb.LoadWeightsRequest(source=str(tmp_path), label="none", releases_first=True)
    with pytest.raises(grpc.RpcError, match="rollout of none"):
        list(admin.LoadWeights(wanted, timeout=60))
    assert states(admin) == ["ready"] * 2
    assert ask(up, PROMPT, NUM_TOKENS)[0] == right["base"], up.output()
    wanted = pb.LoadWeightsRequest(source=str(versions["tuned"]), label="tuned-2", releases_first=True)
    stages = [(at.node, at.stage) for at in admin.LoadWeights(wanted, timeout=60)]
    assert ("prefill-0", "sleeping") in stages and stages[-1] == ("", "serving")
    assert ask(up, PROMPT, NUM_TOKENS)[0] == right["tuned"], up.output()


def test_a_node_wakes_only_with_the_weights_that_it_had(
    up: Up, versions: dict[str, Path], right: dict[str, list[int]], admin: stubs.AdminStub
) -> None:
    file = versions["tuned"] / "model.safetensors"
    own, other = file.read_bytes(), (versions["base"] / "model.safetensors").read_bytes()
    admin.Sleep(pb.SleepRequest(), timeout=60)
    file.write_bytes(other)
    with pytest.raises(grpc.RpcError, match="the files differ"):
        admin.Wake(pb.WakeRequest(), timeout=60)
    assert states(admin) == ["sleeping"] * 2
    file.write_bytes(own)
    admin.Wake(pb.WakeRequest(), timeout=60)
    assert ask(up, PROMPT, NUM_TOKENS)[0] == right["tuned"], up.output()


def test_nodes_sleep_before_their_first_load_and_a_signal_ends_them(
    versions: dict[str, Path], right: dict[str, list[int]]
) -> None:
    """The second one sleeps with the first weights when no other node serves these any more."""
    flags = ("--model", str(versions["base"]), "--prefill", "1", "--decode", "1", "--set", "node.threads=1")
    with running(*flags, *EXACT) as up, grpc.insecure_channel(up.admin) as channel:
        admin = stubs.AdminStub(channel)
        wanted = pb.LoadWeightsRequest(source=str(versions["tuned"]), label="tuned", releases_first=True)
        assert list(admin.LoadWeights(wanted, timeout=120))[-1].done == 2, up.output()
        assert ask(up, PROMPT, NUM_TOKENS)[0] == right["tuned"]
        admin.Sleep(pb.SleepRequest(), timeout=60)
        with Publisher(up.admin) as publisher:  # under a label of its own, then once more while its nodes sleep
            publisher.push(load_file(versions["base"] / "model.safetensors"), "pushed", finish_s=0.0)
            admin.Sleep(pb.SleepRequest(), timeout=60)
            publisher.push(load_file(versions["base"] / "model.safetensors"), "pushed", finish_s=0.0)
        admin.Resume(pb.ResumeRequest(), timeout=10)
        assert ask(up, PROMPT, NUM_TOKENS)[0] == right["base"], up.output()
        admin.Sleep(pb.SleepRequest(), timeout=60)
