"""Weights that change while a cluster of real processes serves: every answer is that of one version."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from processes import EXACT, Up, running
from weight_versions import greedy, make_versions

from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs

PROMPTS = [[50 + 7 * number, 300, 41, 17 + number, 900, 12] for number in range(4)]
NUM_TOKENS = 60
CLIENTS = 4


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_versions(tmp_path_factory.mktemp("versions"), "base", "tuned")


@pytest.fixture(scope="module")
def served(versions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that nodes are started with. A test overwrites it."""
    return Path(shutil.copytree(versions["base"], tmp_path_factory.mktemp("served") / "model"))


@pytest.fixture(scope="module")
def up(served: Path) -> Iterator[Up]:
    flags = ("--model", str(served), "--prefill", "2", "--decode", "2", "--set", "node.threads=1")
    with running(*flags, *EXACT, "--set", "router.fallback=on-failure") as made:
        yield made


@pytest.fixture(scope="module")
def right(versions: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What each version answers, prompt by prompt."""
    found = {
        label: [greedy(directory, prompt, NUM_TOKENS) for prompt in PROMPTS] for label, directory in versions.items()
    }
    assert all(one != other for one, other in zip(found["base"], found["tuned"], strict=True))
    return found


class Clients:
    """Ask again and again until the block ends. answers: (prompt's number, tokens, when it came)."""

    def __init__(self, up: Up) -> None:
        self._up, self._is_over = up, threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self.answers: list[tuple[int, list[int], float]] = []
        # The same with the ranges of weights that the answers name.
        self.ranged: list[tuple[int, list[int], list[dict[str, Any]]]] = []

    def __enter__(self) -> Clients:
        self._asking = [self._pool.submit(self._ask, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for asking in self._asking:
            asking.result(120)
        self._pool.shutdown()

    def _ask(self, number: int) -> None:
        while not self._is_over.is_set():
            answer: dict[str, Any] = self._up.complete(PROMPTS[number], NUM_TOKENS)
            tokens = answer["choices"][0]["token_ids"]
            self.answers.append((number, tokens, time.monotonic()))
            self.ranged.append((number, tokens, answer["usage"]["pdcluster"]["weights"]))


def roll(up: Up, source: Path, label: str, **fields: object) -> pb.RolloutProgress:
    """Its last word."""
    with grpc.insecure_channel(up.admin) as channel:
        request = pb.LoadWeightsRequest(source=str(source), label=label, **fields)  # type: ignore[arg-type]
        return list(stubs.AdminStub(channel).LoadWeights(request, timeout=120))[-1]


def undo(up: Up) -> pb.RolloutProgress:
    with grpc.insecure_channel(up.admin) as channel:
        return list(stubs.AdminStub(channel).UndoWeights(pb.UndoWeightsRequest(), timeout=120))[-1]


def test_files_that_change_under_the_served_path_change_nothing(
    up: Up, served: Path, versions: dict[str, Path], right: dict[str, list[list[int]]]
) -> None:
    file = served / "model.safetensors"
    with Clients(up) as clients:
        time.sleep(0.5)
        with file.open("r+b") as target:
            target.write((versions["tuned"] / "model.safetensors").read_bytes())
        time.sleep(0.5)
        os.truncate(file, 1000)
        time.sleep(0.5)
    assert len(clients.answers) >= 2 * CLIENTS
    assert [tokens for number, tokens, _ in clients.answers if tokens != right["base"][number]] == []
    shutil.copy(versions["base"] / "model.safetensors", file)


def test_a_rollout_and_its_undoing_fail_no_request_and_mix_no_weights(
    up: Up, versions: dict[str, Path], right: dict[str, list[list[int]]]
) -> None:
    with Clients(up) as clients:
        time.sleep(0.5)
        done = roll(up, versions["tuned"], "tuned")
        rolled_at = time.monotonic()
        time.sleep(0.5)
        undone = undo(up)
        undone_at = time.monotonic()
        time.sleep(0.5)
    assert (done.done, done.nodes, done.label, done.epoch) == (4, 4, "tuned", 1)
    assert (undone.done, undone.label, undone.epoch) == (4, "base", 2)
    seen = {"base": 0, "tuned": 0}
    for number, tokens, came_at in clients.answers:
        label = next((label for label in seen if tokens == right[label][number]), None)
        assert label is not None, f"prompt {number}: tokens of no version: {tokens}"
        seen[label] += 1
        assert came_at < undone_at + 0.2 or label == "base"
    assert seen["base"] >= CLIENTS and seen["tuned"] >= CLIENTS and rolled_at < undone_at
    up.wait_idle()


def paused_change(up: Up, source: Path) -> list[tuple[int, list[int], list[dict[str, Any]]]]:
    """A trainer's way: pause, all nodes at once, resume. The answers of that time."""
    with grpc.insecure_channel(up.admin) as channel, Clients(up) as clients:
        admin = stubs.AdminStub(channel)
        time.sleep(0.5)
        admin.Pause(pb.PauseRequest(mode="keep", max_pause_s=60.0), timeout=60)
        assert admin.GetPause(pb.GetPauseRequest()).is_paused
        done = roll(up, source, "tuned", max_unavailable=0, finish_s=0.0)
        num_before = len(clients.answers)
        time.sleep(0.3)
        assert len(clients.answers) == num_before, "nothing is answered in a pause"
        assert admin.Resume(pb.ResumeRequest()).was_paused
        time.sleep(1.0)
    assert (done.done, done.label) == (4, "tuned")
    undo(up)
    return clients.ranged


def test_requests_that_a_pause_keeps_go_on_with_the_weights_that_come_meanwhile(
    up: Up, versions: dict[str, Path]
) -> None:
    """Each range is what its weights make of all that stands before."""
    num_changed = 0
    for _ in range(5):  # until one of the requests had tokens when the pause came
        answers = paused_change(up, versions["tuned"])
        num_changed += sum(len(ranges) == 2 for _, _, ranges in answers)
        for number, tokens, ranges in answers:
            for each in ranges:
                first, end = each["from"], each["to"]
                context = [*PROMPTS[number], *tokens[:first]]
                assert greedy(versions[each["label"]], context, end - first) == tokens[first:end]
        if num_changed:
            break
    assert num_changed, "no request went on with other weights"
    up.wait_idle()
