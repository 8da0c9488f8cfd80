"""What sleep gives back: memory of nodes before, asleep and awake, and how long both ways take.

    python -m bench.weights.sleep [--model DIR] [--kv SIZE] [--json FILE]

A prefill and a decode node. Before they sleep, a prompt has filled part of their pools, which are touched whole at the
start. The memory that a node can give back is its weights and its pool; it is to give 90 % of that. `awake` is from the
order to the first token of the same prompt, whose tokens are compared.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import time
from pathlib import Path

import grpc
import psutil  # type: ignore[import-untyped]

from bench.engine import random_checkpoint
from bench.harness.cluster import Client, NodePlan, cluster, random_prompt
from bench.harness.report import Row, add_output_flags, print_rows, row, save
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.settings.config import cache_directory
from pdcluster.settings.kinds import size

MIB = 1 << 20
GOAL = 0.9
ROUNDS = 3
CALL_S = 120.0
PLANS = (("p0", "prefill"), ("d0", "decode"))


def resident() -> dict[str, int]:
    """Bytes of each node's process."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        words = child.cmdline()
        if "--name" in words:
            found[words[words.index("--name") + 1]] = child.memory_info().rss
    return found


def measure(client: Client, admin: stubs.AdminStub, weights: int, pool: int) -> list[Row]:
    prompt = random_prompt(1024, random.Random(1))
    right = client.answer(prompt, 16)["choices"][0]["token_ids"]
    falls: dict[str, list[float]] = {name: [] for name, _ in PLANS}
    asleep_s, awake_s = [], []
    for _ in range(ROUNDS):
        before, began = resident(), time.perf_counter()
        admin.Sleep(pb.SleepRequest(), timeout=CALL_S)
        asleep_s.append(time.perf_counter() - began)
        during, began = resident(), time.perf_counter()
        for name, fallen in falls.items():
            fallen.append((before[name] - during[name]) / MIB)
        admin.Wake(pb.WakeRequest(), timeout=CALL_S)
        if client.answer(prompt, 16)["choices"][0]["token_ids"] != right:
            raise RuntimeError("the nodes answer otherwise than before they slept")
        awake_s.append(time.perf_counter() - began)
    able = (weights + pool) / MIB
    rows = [
        row(
            "weights.sleep.freed", name, fallen, "MiB", against="weights + pool", against_value=able, better="more",
            goal=GOAL,
        )
        for name, fallen in falls.items()
    ]  # fmt: skip
    return [
        *rows,
        row("weights.sleep.asleep", "both", asleep_s, "s"),
        row("weights.sleep.awake", "both", awake_s, "s"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint of float tensors; by default one of 30 M parameters")
    parser.add_argument("--kv", default="512MiB", help="each node's pool")
    add_output_flags(parser)
    arguments = parser.parse_args()
    model = arguments.model or random_checkpoint(cache_directory() / "bench-engine-30m")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    plans = [NodePlan(name, role, 0, flags=("--kv-memory-bytes", arguments.kv)) for name, role in PLANS]
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    with (
        cluster(model, plans, "auto", ("--admin", f"127.0.0.1:{port}")) as client,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        rows = measure(client, stubs.AdminStub(channel), weights, size()(arguments.kv))
    print_rows(rows)
    save(rows, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
