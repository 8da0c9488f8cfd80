"""What tests/gpu/vllm.sh runs: a random checkpoint, one plain vLLM, then a router with one prefill and one decode node.

Not run on a GPU. A greedy answer is right when it equals the plain vLLM's, or leaves it first where the plain one's
own logprobs of both tokens are within NEAR of each other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

NAME, LISTENING_S, END_S, GONE_S = "random", 400.0, 60.0, 5.0
VOCAB, MAX_LEN, NUM_TOKENS, TOP = 1024, 4096, 32, 5
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 256, 500, 1000, 2000, 3000, 3900)
NEAR = 0.05
MODULES = {"pdcluster": "pdcluster.cli", "pdcluster-router": "pdcluster_router.cli"}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    # Of each place: logprobs of the best tokens by id. Empty unless they were asked for.
    logprobs: list[dict[int, float]]
    seconds: float


def make_checkpoint(folder: Path) -> Path:
    """Qwen3 with 8 layers of random weights and a tokenizer, in bfloat16; 0.3 GB."""
    import torch
    from checkpoints import Shape, build_model, save
    from tiny_tokenizers import byte_level_files

    shape = Shape(
        "qwen3", vocab_size=VOCAB, hidden_size=1024, intermediate_size=3072, num_layers=8, num_heads=16,
        num_kv_heads=8, head_dim=128, config={"max_position_embeddings": MAX_LEN},
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save(build_model(shape, seed=7, dtype=torch.bfloat16), folder)
    for name, content in byte_level_files().items():
        (folder / name).write_bytes(content)
    return folder


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Processes:
    """What this script started, ended with its children whatever happens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, psutil.Popen] = {}

    def start(self, name: str, *command: str) -> None:
        with open(self._folder / f"{name}.log", "wb") as log:
            self._started[name] = psutil.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)

    def family(self, name: str) -> list[psutil.Process]:
        process = self._started[name]
        return [process, *process.children(recursive=True)]

    def kill(self, name: str) -> list[psutil.Process]:
        """SIGKILL of the node's own process. Returns its children that are left after GONE_S."""
        family = self.family(name)
        self._started[name].kill()
        self._started.pop(name).wait(GONE_S)
        return psutil.wait_procs(family[1:], GONE_S)[1]

    def check(self) -> None:
        for name, process in self._started.items():
            if process.poll() is not None:
                raise SystemExit(f"{name} ended with {process.returncode}: {self.log(name)}")

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        for name in reversed(list(self._started)):
            family = self.family(name) if self._started[name].poll() is None else []
            with contextlib.suppress(psutil.NoSuchProcess):
                self._started[name].send_signal(signal.SIGTERM)
            for left in psutil.wait_procs(family, END_S)[1]:
                left.kill()
        self._started.clear()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Processes]:
    processes = Processes(folder)
    try:
        yield processes
    finally:
        processes.stop()


def wait_until_ready(processes: Processes, url: str) -> float:
    """Seconds that it took."""
    begun = time.monotonic()
    while time.monotonic() - begun < LISTENING_S:
        processes.check()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5.0).status_code == 200:
                return time.monotonic() - begun
        time.sleep(1.0)
    raise SystemExit(f"{url} is not ready after {LISTENING_S:g} s")


def prompt_of(length: int) -> list[int]:
    return [random.Random(length).randrange(5, 400) for _ in range(length)]


def ask(base: str, length: int, logprobs: int | None = None) -> Answer:
    """A greedy answer. Raises httpx.HTTPError."""
    body: dict[str, Any] = {
        "model": NAME, "prompt": prompt_of(length), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "logprobs": logprobs, "return_tokens_as_token_ids": logprobs is not None,
    }  # fmt: skip
    begun = time.monotonic()
    reply = httpx.post(f"{base}/v1/completions", json=body, timeout=120.0)
    reply.raise_for_status()
    (choice,) = reply.json()["choices"]
    found = (choice.get("logprobs") or {}).get("top_logprobs") or []
    tops = [{int(name.removeprefix("token_id:")): value for name, value in top.items()} for top in found]
    return Answer(choice["token_ids"], tops, time.monotonic() - begun)


def difference(answer: Answer, plain: Answer) -> str:
    """Why an answer is wrong; "" if it is right."""
    if len(answer.tokens) != len(plain.tokens):
        return f"{len(answer.tokens)} tokens instead of {len(plain.tokens)}"
    for place, (own, wanted) in enumerate(zip(answer.tokens, plain.tokens, strict=True)):
        if own != wanted:
            top = plain.logprobs[place]
            if own in top and top[wanted] - top[own] <= NEAR:
                return ""  # a near tie of rounding; what follows has another text before it
            return f"token {place} is {own} instead of {wanted}, whose logprobs are {top}"
    return ""


def engine_arguments(share: float) -> tuple[str, ...]:
    return (
        "--dtype", "bfloat16", "--max-model-len", str(MAX_LEN), "--max-num-seqs", "16",
        "--gpu-memory-utilization", str(share), "--no-enable-prefix-caching",
    )  # fmt: skip


def plain_answers(folder: Path, model: Path, share: float) -> dict[int, Answer]:
    with running(folder) as processes:
        port = free_port()
        processes.start(
            "plain", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", NAME,
            "--host", "127.0.0.1", "--port", str(port), *engine_arguments(share),
        )  # fmt: skip
        print(f"plain vLLM ready after {wait_until_ready(processes, f'http://127.0.0.1:{port}/health'):.0f} s")
        return {length: ask(f"http://127.0.0.1:{port}", length, TOP) for length in LENGTHS}


def start_cluster(processes: Processes, model: Path, share: float) -> str:
    bootstrap, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    processes.start("bootstrap", MODULES["pdcluster"], "bootstrap", "--listen", bootstrap)
    for role in ("prefill", "decode"):
        # One after another: an engine measures the free memory of the GPU when it starts.
        health = f"127.0.0.1:{free_port()}"
        processes.start(
            role, MODULES["pdcluster"], "node", "--engine", "vllm", "--role", role, "--name", role,
            "--bootstrap", bootstrap, "--model", str(model), "--served-model-name", NAME, "--health", health,
            "--", *engine_arguments(share),
        )  # fmt: skip
        print(f"{role} node ready after {wait_until_ready(processes, f'http://{health}/readyz'):.0f} s")
    processes.start(
        "router", MODULES["pdcluster-router"], "--bootstrap", bootstrap, "--http", http, "--grpc", "none",
        "--console", "none",
    )  # fmt: skip
    wait_until_ready(processes, f"http://{http}/ready")
    return f"http://{http}"


def compare(base: str, plain: dict[int, Answer]) -> int:
    """Ask one at a time. Returns the number of wrong answers."""
    wrong, seconds = 0, []
    for length, wanted in plain.items():
        answer = ask(base, length)
        seconds.append(answer.seconds)
        if reason := difference(answer, wanted):
            wrong += 1
            print(f"WRONG: {length} prompt tokens: {reason}")
    own, other = statistics.median(seconds), statistics.median(each.seconds for each in plain.values())
    print(f"{len(plain)} prompts, {wrong} wrong; median {own * 1e3:.1f} ms, plain vLLM {other * 1e3:.1f} ms")
    return wrong


def outcome_of(base: str, length: int, wanted: Answer) -> str:
    """ "" for a wrong answer, otherwise what came."""
    try:
        answer = ask(base, length)
    except httpx.HTTPError as error:
        return f"error: {type(error).__name__}"
    return "" if difference(answer, wanted) else "right"


def kill_prefill(processes: Processes, base: str, plain: dict[int, Answer]) -> int:
    """SIGKILL of the prefill node under load. Returns the number of failures."""
    lengths = LENGTHS[-10:]
    with ThreadPoolExecutor(len(lengths)) as pool:
        asked = [pool.submit(outcome_of, base, length, plain[length]) for length in lengths]
        time.sleep(0.05)
        left = processes.kill("prefill")
        outcomes = [each.result() for each in asked]
    print(f"prefill node killed under {len(lengths)} requests: {outcomes}; {len(left)} of its processes left")
    begun = time.monotonic()
    while (after := outcome_of(base, 500, plain[500])).startswith("error") and time.monotonic() - begun < END_S:
        time.sleep(1.0)
    print(f"after it: {after or 'WRONG'}, {time.monotonic() - begun:.1f} s later")
    for process in left:
        process.kill()
    return outcomes.count("") + len(left) + (after != "right")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.4)
    given = parser.parse_args(arguments)
    model = make_checkpoint(given.folder / "model")
    os.environ["VLLM_CACHE_ROOT"] = str(given.folder / "cache")
    plain = plain_answers(given.folder, model, given.share)
    with running(given.folder) as processes:
        base = start_cluster(processes, model, given.share)
        failures = compare(base, plain) + kill_prefill(processes, base, plain)
    print("all right" if not failures else f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
