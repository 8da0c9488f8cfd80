"""Requests through prefill and decode apart beside the same on one node, for `bench.accuracy`: tokens and logprobs of
greedy answers.

Both run in a real cluster of one prefill and one decode node, in float32 and bfloat16. Each request
computes its whole prompt: one that finds it cached has another step, whose sums are in another order.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from bench.accuracy.models import CHATS
from bench.harness.cluster import ends_with_us
from bench.harness.report import Row as Figure

READY_S, REQUEST_S, STOP_S = 300.0, 120.0, 30.0
TOKENS = 24
READY = re.compile(r"ready in [\d.]+ s: (http://\S+)/v1 ")


def compare_modes(model: Path, num_prompts: int) -> list[Figure]:
    rows = []
    for dtype in ("float32", "bfloat16"):
        with serving(model, dtype) as url:
            rows += _compare(url, dtype, num_prompts)
    return rows


@contextmanager
def serving(model: Path, dtype: str) -> Iterator[str]:
    """The URL of `pdcluster up` with one prefill and one decode node."""
    flags = [
        "--model",
        str(model),
        "--set",
        f"node.dtype={dtype}",
        "--http",
        "127.0.0.1:0",
        "--grpc",
        "none",
        "--prefill",
        "1",
        "--decode",
        "1",
    ]
    command = [sys.executable, "-m", "pdcluster.cli", "up", *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=ends_with_us()
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if found := READY.search(line):
                yield found[1]
                return
        raise RuntimeError(f"pdcluster up ended before it was ready: {''.join(said)}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


def _compare(url: str, dtype: str, num_prompts: int) -> list[Figure]:
    questions = [
        CHATS[index % len(CHATS)][0] + (" Answer briefly." if index >= len(CHATS) else "")
        for index in range(num_prompts)
    ]
    apart = [ask(url, question, "remote") for question in questions]
    together = [ask(url, question, "local") for question in questions]
    pairs = [pair for one, other in zip(apart, together, strict=True) for pair in zip(one, other, strict=False)]
    off = max(abs(one["logprob"] - other["logprob"]) for one, other in pairs if one["token"] == other["token"])
    same = sum(
        [each["token"] for each in one] == [each["token"] for each in other]
        for one, other in zip(apart, together, strict=True)
    )
    says = "Paris" in "".join(each["token"] for each in apart[0])
    case = f"{dtype}, {num_prompts} greedy answers of {TOKENS} tokens"
    return [
        _of_all("P/D beside one node: same answers", case, same / num_prompts, "share"),
        Figure("P/D beside one node: logprob off by, largest", case, off, "nat"),
        _of_all("the capital of France is Paris", dtype, float(says), ""),
    ]


def _of_all(metric: str, case: str, share: float, unit: str) -> Figure:
    return Figure(metric, case, share, unit, against="all", against_value=1.0, goal=1.0)


def ask(url: str, question: str, mode: str) -> list[dict[str, Any]]:
    """The answer's tokens and their logprobs."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "logprobs": True,
        "pdcluster_mode": mode,
        "cache_salt": mode,  # so that neither finds the prompt that the other one computed
    }
    with urlopen(f"{url}/v1/models", timeout=REQUEST_S) as reply:
        model = json.load(reply)["data"][0]["id"]
    request = Request(
        f"{url}/v1/chat/completions", json.dumps(body | {"model": model}).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=REQUEST_S) as reply:
        answer = json.load(reply)
    content: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
    return content
