"""Nodes of a chaos cluster that run vLLM on a machine without a GPU: their arguments, their faults, what is right."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import jsonschema
import psutil

from pdcluster.checkpoint.bundled import path as bundled_model
from tests.chaos.cluster import ROOT, ChaosCluster, ChildProcess, NodeKind
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.load import PERSON, ChaosRequest, answer_texts, answer_tokens, requests_of

ARGS = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=4096",
    "--max-num-seqs=16",
    # A transfer has one descriptor a block and layer, and each costs two looks of threads that share a core.
    "--block-size=128",
)
# Libraries that make vLLM's CPU kernels fast, where they are installed.
PRELOAD = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", f"{sys.prefix}/lib/libiomp5.so")
START_S = 500.0
# Of parked KV: two thirds are left for a decode node, which may share its core with others.
LEASE_S = 15
# A greedy token is right when its logit is that close to the best one.
NEAR = 1e-3
# Greedy, since vLLM draws other tokens after a retry.
KINDS = ("completion", "stream", "choices", "long", "chat", "grammar", "tools", "grpc")

Part = Literal["node", "core", "worker"]


def environment(number: int) -> dict[str, str]:
    """Of the node of that number: a core of its own, and what vLLM wants without a GPU. More nodes than cores share
    them, so none may have a thread that takes a whole one.
    """
    return {
        "NIXL_PROGRESS_DELAY_US": "100",
        "VLLM_YIELD_SLEEP_US": "100",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "router", ROOT / "tests/harness/paced_vllm"))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(number % (os.cpu_count() or 1)),
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,self,shm,cma",
        "LD_PRELOAD": os.pathsep.join(path for path in PRELOAD if Path(path).exists()),
    }


# ---------------------------------------------------------------- what is right


def greedy_requests_of(seed: int, count: int, *, num_output: int = 60) -> list[ChaosRequest]:
    """Requests whose tokens follow from the prompt alone."""
    most = 4 * count
    requests = [each for each in requests_of(seed, most, num_output=num_output) if each.kind in KINDS][:count]
    for each in requests:
        each.body["temperature"] = 0
    return requests


class GreedyOracle:
    """Computes logits by transformers in float32. For the bundled model."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)

    def wrong_tokens(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Places of tokens that are not the best or near it, after the tokens before them."""
        import torch

        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]
        return [place for place, gap in enumerate((logits.max(dim=1).values - chosen).tolist()) if gap > NEAR]

    def is_right(self, request: ChaosRequest, answer: object, undisturbed: object) -> bool:
        """The undisturbed answer, or one that differs by rounding."""
        if answer == undisturbed:
            return True
        if request.kind in ("grammar", "tools"):
            return all(map(_is_person, answer_texts(answer)))
        if request.kind == "chat":
            return len(answer_texts(answer)) == len(answer_texts(undisturbed))
        prompt = request.body["prompt"] if "prompt" in request.body else request.body["token_ids"]["ids"]
        rows = answer_tokens(answer)
        return len(rows) == request.body.get("n", 1) and all(
            len(tokens) == request.body["max_tokens"] and not self.wrong_tokens(prompt, tokens) for tokens in rows
        )


def _is_person(text: str) -> bool:
    text = text.removeprefix("find_person")
    try:
        jsonschema.validate(json.loads(text), PERSON)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


# ---------------------------------------------------------------- its processes and faults


def parts_of(child: ChildProcess) -> dict[Part, psutil.Process]:
    """The node's own process, that of vLLM's scheduler, and that of its one worker."""
    node = psutil.Process(child.pid)
    core = next(each for each in node.children() if each.children())
    worker = max(core.children(), key=lambda each: each.memory_info().rss)
    return {"node": node, "core": core, "worker": worker}


def family_of(child: ChildProcess) -> list[psutil.Process]:
    node = psutil.Process(child.pid)
    return [node, *node.children(recursive=True)]


def alive(processes: Sequence[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.NoSuchProcess:
            continue


async def kill_part(child: ChildProcess, part: Part) -> list[psutil.Process]:
    """Kill one process of a node. Returns what was its family."""
    family = family_of(child)
    child.num_kills += 1
    child.is_ready = False
    os.kill(parts_of(child)[part].pid, signal.SIGKILL)
    return family


async def engine_kill(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    """One process of the node. The others have to end by themselves."""
    part: Part = draw.choice(("node", "core", "worker"))
    family = await kill_part(victim, part)
    await asyncio.sleep(5.0)
    left = list(alive(family))
    assert not left, f"5 s after the {part} of {victim.name} was killed there run {left}"
    await victim.wait(1.0)
    await cluster.restart(victim)


async def engine_stop(cluster: ChaosCluster, victim: ChildProcess, draw: random.Random) -> None:
    """Its worker stands still, for less and for more than a lease of parked KV."""
    worker = parts_of(victim)["worker"]
    worker.suspend()
    await asyncio.sleep(draw.choice((1.0, 5.0, 20.0)))
    worker.resume()


# Those of any cluster, but for the one that looks for a thread of our own engine.
VLLM_FAULTS: dict[str, Fault] = {
    **{name: make for name, make in FAULTS.items() if name != "freeze"},
    "engine-kill": engine_kill,
    "engine-stop": engine_stop,
}
VLLM = NodeKind(
    ("--engine", "vllm", "--model", str(bundled_model()), f"--set=node.vllm.lease_s={LEASE_S}"),
    last=("--", *ARGS),
    start_s=START_S,
    environment=environment,
)
