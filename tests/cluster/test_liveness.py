"""/livez of real processes where it is hard to tell: a loop that stands, a prompt of a minute, kernels that compile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import checkpoints
import httpx
import pytest
import torch
from checkpoints import Shape
from processes import PATIENT, Up, running
from tiny_tokenizers import byte_level_files

from pdcluster.telemetry.health import LATE_S
from tests.chaos.freeze import frozen_loop

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

MARGIN = 3.0
LONG_S = 60.0
# A model that computes some thousand tokens in a second, so that a prompt of a minute fits.
SHAPE = Shape("llama", vocab_size=512, hidden_size=512, num_layers=8, num_heads=8, head_dim=64, intermediate_size=1536,
              config={"max_position_embeddings": 1 << 17})  # fmt: skip
LENGTHS = (8_000, 16_000, 32_000, 64_000, 96_000)


def livez(address: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        return client.get(f"http://{address}/livez")


def addresses(targets: Path) -> dict[str, str]:
    return {each["labels"]["process"]: each["targets"][0] for each in json.loads(targets.read_text())}


@contextmanager
def watched(address: str) -> Iterator[list[str]]:
    """/livez is asked again and again; gives what it said whenever that was not 200."""
    is_over, complaints, num_asked = threading.Event(), [], [0]

    def watch() -> None:
        while not is_over.wait(0.1):
            try:
                answer = livez(address)
            except httpx.ConnectError:  # it does not listen yet
                continue
            num_asked[0] += 1
            if answer.status_code != 200:
                complaints.append(answer.text)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield complaints
    finally:
        is_over.set()
        thread.join()
        assert num_asked[0] > 10


def test_a_loop_that_stands_is_not_alive_and_returns(tmp_path: Path) -> None:
    targets = tmp_path / "targets.json"
    with running("--targets", str(targets), *PATIENT) as up:
        up.complete("hello", 8)
        found = addresses(targets)
        pids = {"decode-0": up.pid_of("decode-0"), "router": process_of(up, "pdcluster_router.cli"),
                "bootstrap": process_of(up, "bootstrap")}  # fmt: skip
        for name, pid in pids.items():
            with frozen_loop(pid):
                deadline = time.monotonic() + MARGIN * LATE_S
                while (answer := livez(found[name])).status_code == 200:
                    assert time.monotonic() < deadline, f"the loop of {name} stands, and it says that it is alive"
                    time.sleep(0.2)
                assert "the main loop made no turn" in answer.text
            deadline = time.monotonic() + MARGIN * LATE_S
            while livez(found[name]).status_code != 200:
                assert time.monotonic() < deadline, f"{name} goes on, and says that it is not alive"
                time.sleep(0.2)
        up.complete("hello", 8)


def process_of(up: Up, word: str) -> int:
    (pid,) = [child.pid for child in up.children() if word in child.cmdline() and "--listen-fd" not in child.cmdline()]
    return pid


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    directory = checkpoints.save(checkpoints.build_model(SHAPE, seed=1, dtype=torch.bfloat16), folder / "long")
    for name, content in byte_level_files().items():
        (directory / name).write_bytes(content)
    return directory


@pytest.mark.parametrize("token_budget", [512, 1 << 17])
def test_a_prompt_of_a_minute_is_no_reason_to_be_restarted(token_budget: int, model: Path, tmp_path: Path) -> None:
    """In many steps, and in one. Meanwhile the router does not give the node up either."""
    targets = tmp_path / "targets.json"
    with running(
        "--prefill=0", "--decode=0", "--mixed=1", f"--model={model}", "--targets", str(targets),
        f"--set=node.scheduler.token_budget={token_budget}", "--set=node.kv.memory_bytes=3GiB", *PATIENT,
    ) as up:  # fmt: skip
        up.client.timeout = httpx.Timeout(600.0)
        with watched(addresses(targets)["mixed-0"]) as complaints:
            for length in LENGTHS:
                began = time.monotonic()
                answer = up.complete([10 + (7 * place + length) % 400 for place in range(length)], 2)
                assert answer["usage"]["pdcluster"]["attempts"] == 1  # type: ignore[index]
                if (took_s := time.monotonic() - began) >= LONG_S:
                    break
        assert took_s >= LONG_S, "no prompt took long enough; use longer ones"
        assert complaints == []


def test_a_node_that_compiles_everything_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCLUSTER_CACHE_DIR", str(tmp_path / "cold"))
    ready, announced = os.pipe()
    with socket_port() as port:
        health = f"127.0.0.1:{port}"
    command = (sys.executable, "-m", "pdcluster.cli", "node", "--health", health, "--ready-fd", str(announced),
               "--bootstrap", "127.0.0.1:9", "--listen", "127.0.0.1:0", "--role", "mixed")  # fmt: skip
    with watched(health) as complaints:
        node = subprocess.Popen(command, pass_fds=(announced,), stderr=subprocess.DEVNULL)
        os.close(announced)
        try:
            deadline, began = time.monotonic() + 600.0, time.monotonic()
            while stage(health) != "registering":  # it never does: nobody is at that bootstrap
                assert time.monotonic() < deadline
                assert node.poll() is None
                time.sleep(0.2)
            assert time.monotonic() - began > 10.0, "nothing was compiled"
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(60.0)
            os.close(ready)
    assert complaints == []


@contextmanager
def socket_port() -> Iterator[int]:
    """A port that is free now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def stage(address: str) -> str:
    """What the node does before it is ready."""
    try:
        with httpx.Client(trust_env=False, timeout=10.0) as client:
            reasons = client.get(f"http://{address}/readyz").json()["reasons"]
    except httpx.ConnectError:
        return ""
    return "registering" if any("registering" in reason or "bootstrap" in reason for reason in reasons) else ""
