"""Other routers as processes, each before workers that it knows how to speak to, in the same places as ours: workers on
core 0, the router on core 1.

Each lives in a virtual environment of its own, DIR/NAME:

    python -m venv DIR/sglang-router && DIR/sglang-router/bin/pip install sglang-router==0.3.2 python -m venv DIR/smg
    && DIR/smg/bin/pip install smg==1.13.0 python -m venv DIR/vllm-router   && DIR/vllm-router/bin/pip install
    vllm-router==0.1.17 python -m venv DIR/dynamo        && DIR/dynamo/bin/pip install --no-deps ai-dynamo==1.6.1
    ai-dynamo-runtime==1.6.1 \\ && DIR/dynamo/bin/pip install aiohttp msgspec prometheus-client pyzmq tqdm transformers
    uvloop 'pydantic<=2.13.5'

The first three route round robin over `bench.fakes.fake_worker`. Dynamo's frontend routes by its own KV rule over its
mocker, whose simulated engine is sped up a million times: nothing else speaks the mocker's protocol, so what it takes
beyond a worker of the others stays in Dynamo's figures; its streams have one event more than tokens, and some 46 ms of
its P/D are the two mockers' own hand-over. (ai-dynamo pins a package that is a stub in the index, hence --no-deps; no
CUDA is needed.)
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.cluster import ends_with_us
from bench.harness.http_load import Ask
from pdcluster.checkpoint import bundled

NAMES = ("sglang-router", "smg", "vllm-router", "dynamo")
# bench.fakes.bare_router.
BARE = "bare"
ROUTER_CORE = 1
MODEL = "m"
READY_S = 60.0
STOP_S = 10.0
DYNAMO = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_LOG": "error",
    "HF_HUB_OFFLINE": "1",
}
# Of the mocker's engine. 0 is documented as infinite and behaves like 1.
SPEEDUP = "1000000"


@dataclass(frozen=True, slots=True)
class Placed:
    """A router that serves. token_mark: what stands once in each of its stream's token events."""

    name: str
    address: str
    pid: int
    path: str
    model: str
    token_mark: bytes = b'"text":'

    def ask(self, num_prompt: int, num_output: int, *, stream: bool) -> Ask:
        ids = [10 + index % 400 for index in range(num_prompt)]
        if self.path == "/generate":
            body: dict[str, object] = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": num_output, "temperature": 0},
                "stream": stream,
            }
        else:
            body = {"model": self.model, "prompt": ids, "max_tokens": num_output, "temperature": 0, "stream": stream}
            body |= {"ignore_eos": True} if self.name in ("pdcluster", BARE) else {}
        return Ask(self.path, json.dumps(body).encode(), stream, self.token_mark)


@contextmanager
def worker() -> Iterator[Placed]:
    """A worker by itself, as a client sees it without any router."""
    running: list[subprocess.Popen[bytes]] = []
    port = _free_port()
    argv = [sys.executable, "-m", "bench.fakes.fake_worker", str(port), "plain", "0"]
    try:
        running.append(subprocess.Popen(argv, preexec_fn=ends_with_us()))
        placed = Placed("worker", f"127.0.0.1:{port}", running[-1].pid, "/v1/completions", MODEL)
        wait_ready(placed.address, placed.ask(128, 1, stream=False).request())
        yield placed
    finally:
        stop(running)


@contextmanager
def rival(name: str, folder: Path, *, disaggregated: bool, token_s: float = 0.0) -> Iterator[Placed]:
    """token_s: the pace of its workers' streams; Dynamo's mocker has its own. Raises TimeoutError when it does not
    route within READY_S."""
    running: list[subprocess.Popen[bytes]] = []
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="rival-") as scratch:
        try:
            if name == "dynamo":
                process = _start_dynamo(folder, port, Path(scratch), running, disaggregated=disaggregated)
            else:
                process = _start_over_http(name, folder, port, running, token_s, disaggregated=disaggregated)
            path = "/generate" if name in ("sglang-router", "smg") else "/v1/completions"
            placed = Placed(name, f"127.0.0.1:{port}", process.pid, path, MODEL)
            wait_ready(placed.address, placed.ask(128, 1, stream=False).request())  # healthy is not yet able to route
            yield placed
        finally:
            stop(running)


def _start_over_http(
    name: str, folder: Path, port: int, running: list[subprocess.Popen[bytes]], token_s: float, *, disaggregated: bool
) -> subprocess.Popen[bytes]:
    roles = ("prefill", "decode") if disaggregated else ("plain",)
    urls = []
    for role in roles:
        worker_port = _free_port()
        argv = [sys.executable, "-m", "bench.fakes.fake_worker", str(worker_port), role, str(token_s)]
        running.append(subprocess.Popen(argv, preexec_fn=ends_with_us()))
        urls.append(f"http://127.0.0.1:{worker_port}")
    return _on_router_core(_argv(name, folder / name / "bin", urls, port), running)


def _argv(name: str, binaries: Path, urls: Sequence[str], port: int) -> list[str]:
    common = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--policy",
        "round_robin",
        "--prometheus-port",
        str(_free_port()),
    ]
    pair = ["--prefill", urls[0], "--decode", urls[-1]]
    if name == "vllm-router":
        return [
            str(binaries / name),
            *(["--vllm-pd-disaggregation", *pair] if len(urls) > 1 else ["--worker-urls", *urls]),
            *common,
        ]
    command = (
        [str(binaries / "python"), "-m", "sglang_router.launch_router"]
        if name == "sglang-router"
        else [str(binaries / "smg"), "launch"]
    )
    return [*command, *(["--pd-disaggregation", *pair] if len(urls) > 1 else ["--worker-urls", *urls]), *common]


def _start_dynamo(
    folder: Path, port: int, scratch: Path, running: list[subprocess.Popen[bytes]], *, disaggregated: bool
) -> subprocess.Popen[bytes]:
    python = str(folder / "dynamo" / "bin" / "python")
    environment = DYNAMO | {"DYN_FILE_KV": str(scratch)}
    mocker = [
        python,
        "-m",
        "dynamo.mocker",
        "--model-path",
        str(bundled.path()),
        "--model-name",
        MODEL,
        "--speedup-ratio",
        SPEEDUP,
    ]
    legs = (
        ["--disaggregation-mode", "prefill", "--bootstrap-ports", str(_free_port())],
        ["--disaggregation-mode", "decode"],
    )
    for leg in legs if disaggregated else ([],):
        running.append(_quiet([*mocker, *leg], environment))
    frontend = [
        python,
        "-m",
        "dynamo.frontend",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(port),
        "--router-mode",
        "kv",
    ]
    return _on_router_core(frontend, running, environment)


def _on_router_core(
    argv: list[str], running: list[subprocess.Popen[bytes]], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    process = _quiet(argv, environment or {})
    running.append(process)
    os.sched_setaffinity(process.pid, {ROUTER_CORE})  # before it has threads, which inherit it
    return process


def _quiet(argv: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    whole = ["env", *(f"{name}={value}" for name, value in environment.items()), *argv]
    return subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=ends_with_us())


# ---------------------------------------------------------------- processes


def wait_ready(address: str, request: bytes, seconds: float = READY_S) -> None:
    """Until the request is answered with 200."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    answer: bytes | OSError = b""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, int(port)), timeout=1) as connection:
                connection.sendall(request)
                answer = connection.recv(512)
                if b" 200 " in answer[:64]:
                    return
        except OSError as error:
            answer = error
        time.sleep(0.1)
    raise TimeoutError(f"{address} is not ready after {seconds:g} s; last came {answer!r}")


def stop(running: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(running):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
