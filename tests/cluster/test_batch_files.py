"""pdctl batch run with real processes: SIGKILL of itself and of a router, and every line is answered once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fake_cluster import RouterProcess, fake_cluster, until

from bench.fakes.fake_node import Speed

NUM_LINES, NUM_TOKENS = 240, 12
ROOT = Path(__file__).parents[2]
SPEED = Speed(prefill_s=0.0005, prefill_token_s=1e-6, token_s=0.01)


def write_lines(file: Path) -> None:
    body = {"model": "fake", "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    lines = [
        {
            "custom_id": f"line {number}", "method": "POST", "url": "/v1/completions",
            "body": {**body, "prompt": [1 + number % 50, 2 + number // 50, *range(3, 40)]},
        }
        for number in range(NUM_LINES)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def start(folder: Path, routers: list[RouterProcess]) -> subprocess.Popen[bytes]:
    api = ",".join(router.url.removeprefix("http://") for router in routers)
    words = ["batch", "run", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--api", api]
    argv = [sys.executable, "-m", "pdcluster_router.pdctl", *words, "--concurrency", "16"]
    return subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE)


def num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait(run: subprocess.Popen[bytes]) -> str:
    _, said = run.communicate(timeout=60)
    assert run.returncode == 0, said
    return said.decode()


@pytest.mark.parametrize("victim", ["router", "pdctl"])
def test_every_line_is_answered_once_whatever_is_killed(tmp_path: Path, victim: str) -> None:
    out = tmp_path / "out.jsonl"
    write_lines(tmp_path / "in.jsonl")
    with fake_cluster(["prefill", "decode", "decode"], SPEED) as (bootstrap, nodes):
        routers = [RouterProcess(bootstrap, "--mode", "remote") for _ in range(2 if victim == "router" else 1)]
        try:
            until(lambda: all(router.get("/ready").status_code == 200 for router in routers))
            run = start(tmp_path, routers)
            until(lambda: num_lines(out) >= NUM_LINES // 4)
            killed = routers[0].process if victim == "router" else run
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            assert num_lines(out) < NUM_LINES
            if victim == "pdctl":
                run.communicate()
                run = start(tmp_path, routers)
            said = wait(run)
            until(lambda: not any(node.pages.num_used for node in nodes.nodes))
        finally:
            for router in routers:
                router.stop()
    assert f"{NUM_LINES} of {NUM_LINES} lines, 0 failed" in said
    answers = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert Counter(answer["custom_id"] for answer in answers) == Counter(f"line {n}" for n in range(NUM_LINES))
    expected = [100 + position for position in range(NUM_TOKENS)]
    assert all(answer["response"]["body"]["choices"][0]["token_ids"] == expected for answer in answers)
    assert not (tmp_path / "out.errors.jsonl").exists()
