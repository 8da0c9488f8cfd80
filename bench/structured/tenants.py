"""How long a tenant's choices take while another tenant sends grammars that are made to take long: over real processes,
bootstrap, prefill and decode node and router, in turns with and without."""

from __future__ import annotations

import http.client
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness.cluster import NodePlan, cluster
from bench.harness.report import Row
from pdcluster.checkpoint import bundled

HONEST, OTHER = "honest", "other"
GOAL = 0.5
TURNS = 6
# Of the other tenant, who asks one thing after the other.
CLIENTS = 4


def rows(num_asked: int) -> list[Row]:
    """num_asked: choices in each turn."""
    with tempfile.TemporaryDirectory() as folder, processes(Path(folder)) as (address, model):
        ask(address, model, HONEST, choice(-1))
        alone, beside = list[float](), list[float]()
        for turn in range(TURNS):
            alone += waits(address, model, num_asked, 2 * turn * num_asked)
            with bombs(address, model, turn):
                beside += waits(address, model, num_asked, (2 * turn + 1) * num_asked)
    return [
        Row(
            "time of a new choice", f"{name}, beside another tenant's bombs", share(beside, of) * 1e3, "ms",
            against="without them", against_value=share(alone, of) * 1e3, better="less", goal=GOAL,
        )
        for name, of in (("median", 0.5), ("p99", 0.99))
    ]  # fmt: skip


def share(waits_s: list[float], of: float) -> float:
    return statistics.median(waits_s) if of == 0.5 else sorted(waits_s)[math.ceil(len(waits_s) * of) - 1]


@contextmanager
def processes(folder: Path) -> Iterator[tuple[str, str]]:
    cores = sorted(os.sched_getaffinity(0))
    nodes = [NodePlan("p0", "prefill", cores[-1]), NodePlan("d0", "decode", cores[0])]
    tenants = folder / "tenants.toml"
    tenants.write_text("".join(f'[{name}]\nkeys = ["{key_of(name)}"]\n' for name in (HONEST, OTHER)))
    with cluster(bundled.path(), nodes, "auto", ("--tenants", str(tenants)), api_key=key_of(HONEST)) as client:
        yield client.address, client.model


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


def connect(address: str) -> http.client.HTTPConnection:
    host, _, port = address.rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=60)


def headers_of(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(tenant)}", "content-type": "application/json"}


def choice(number: int) -> dict[str, Any]:
    return {"choice": [f"yes {number}", f"no {number}"]}


def bomb(number: int) -> dict[str, Any]:
    """Each of three kinds in turn, none like another."""
    kind, own = number % 4, f"n{number}"
    if kind == 0:
        return {"regex": "a|" * 2_000_000 + own}
    if kind == 1:
        return {"regex": "a|" * 32_000 + own}
    if kind == 2:
        named = {f"{own}p{at}": {"type": "string"} for at in range(3000)}
        patterns = {f"^{own}x{at}[a-z]+$": {"type": "integer"} for at in range(50)}
        return {"json": {"type": "object", "properties": named, "patternProperties": patterns}}
    rules = "".join(f'r{at}: "a{at}" r{(at + 1) % 2000} | "b"\n' for at in range(2000))
    return {"grammar": f'start: r0 | "{own}"\n{rules}'}


def ask(address: str, model: str, tenant: str, structured: dict[str, Any]) -> tuple[int, float]:
    """The status, and the seconds until the whole answer."""
    body = {"model": model, "prompt": "Is it?", "max_tokens": 4, "structured_outputs": structured}
    connection = connect(address)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers_of(tenant))
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status, time.perf_counter() - began


def waits(address: str, model: str, number: int, first: int) -> list[float]:
    found = [ask(address, model, HONEST, choice(first + index)) for index in range(number)]
    if any(status != 200 for status, _ in found):
        raise RuntimeError(f"choices were refused: {sorted({status for status, _ in found})}")
    return [wait for _, wait in found]


@contextmanager
def bombs(address: str, model: str, turn: int) -> Iterator[None]:
    """Sent by another process, so that the choices' client is not slower itself."""
    argv = [sys.executable, "-m", __name__, address, model, str(turn)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.communicate()


def send_bombs(address: str, model: str, turn: int) -> None:
    """Until stdin ends."""
    ended = threading.Event()

    def send(client: int) -> None:
        number = (turn * CLIENTS + client) * 1000
        while not ended.is_set():
            ask(address, model, OTHER, bomb(number))
            number += 1

    threads = [threading.Thread(target=send, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    send_bombs(sys.argv[1], sys.argv[2], int(sys.argv[3]))
