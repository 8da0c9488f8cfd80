"""Greedy answers through router, prefill and decode node are those of one vLLM, to the last token.

One request at a time and without prefix caches: vLLM itself rounds otherwise with them.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_cluster import ARGS, ROOT, node_environment, running_cluster

from pdcluster.checkpoint.bundled import path as bundled_model

BLOCK, LONGEST, OUTPUT = 32, 3900, 16
NO_CACHE = (*ARGS, "--block-size=32", "--no-enable-prefix-caching")


def prompts(count: int) -> list[list[int]]:
    """Lengths from 1 to the longest, a third of them around the edges of blocks."""
    chance = random.Random(200)
    lengths = [1, 2, LONGEST]
    while len(lengths) < count:
        edge = BLOCK * chance.randrange(1, LONGEST // BLOCK) + chance.choice((-1, 0, 1))
        lengths.append(edge if len(lengths) % 3 == 0 else chance.randrange(1, LONGEST + 1))
    return [[chance.randrange(5, 500) for _ in range(length)] for length in lengths[:count]]


def answers_of_one_vllm(asked: list[list[int]]) -> list[list[int]]:
    script = Path(__file__).parent / "plain_vllm.py"
    command = [sys.executable, str(script), str(bundled_model()), str(OUTPUT), *NO_CACHE]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, env=node_environment(0), cwd=ROOT, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert done.returncode == 0 and found, done.stderr[-3000:]
    answers: list[list[int]] = json.loads(found[0][1:])
    return answers


# Two hundred prompts of two thousand tokens on average, twice, on a core each.
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.full)])
def test_answers_are_those_of_one_vllm(tmp_path: Path, count: int) -> None:
    asked = prompts(count)
    expected = answers_of_one_vllm(asked)
    different = []
    with running_cluster(
        tmp_path, bundled_model(), ("prefill", "decode"), "--set", "router.mode=remote", arguments=NO_CACHE
    ) as cluster:
        for prompt, right in zip(asked, expected, strict=True):
            answer = cluster.complete(prompt, max_tokens=OUTPUT, temperature=0, ignore_eos=True)
            assert answer["usage"]["pdcluster"]["mode"] == "remote"
            tokens = answer["choices"][0]["token_ids"]
            if tokens != right:
                different.append((len(prompt), tokens, right))
    assert not different, f"{len(different)} of {count}: {different[:3]}"
