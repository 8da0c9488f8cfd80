"""The batch-invariant mode over real processes: what a request says does not depend on what runs beside it, nor on
whether its prompt was computed where it is decoded or on another node and handed over, whole or behind what a node had
cached."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from processes import PATIENT, Up, running

pytestmark = pytest.mark.timeout(300)

EXACT = ("--set", "node.dtype=bfloat16", "--set", "node.deterministic=true", "--set", "node.kv.memory_bytes=64MiB")
AT_ONCE = 12


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    num_tokens: int
    fields: dict[str, object]

    def said(self, up: Up, mode: str) -> tuple[object, object]:
        """Token ids, and the logprobs that JSON holds bit for bit."""
        answer = up.complete(self.prompt, self.num_tokens, pdcluster_mode=mode, logprobs=2, **self.fields)
        assert answer["usage"]["completion_tokens"] == self.num_tokens
        (choice,) = answer["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with running("--prefill", "1", "--decode", "1", *EXACT, *PATIENT) as up:
        yield up


def requests(count: int, seed: int) -> list[Asked]:
    """Prompts of lengths around tiles and pages, half of them with a beginning in common; greedy and drawn."""
    die = random.Random(seed)
    common = [die.randrange(300, 1000) for _ in range(200)]
    found = []
    for index in range(count):
        length = die.choice([1, 31, 32, 33, 64, 65, die.randrange(1, 250)])
        prompt = [die.randrange(300, 1000) for _ in range(length)]
        if index % 2:
            prompt[: length * 3 // 4] = common[: length * 3 // 4]
        drawn = {"temperature": 0.9, "seed": index} if index % 3 else {}
        found.append(Asked(prompt, die.randrange(4, 12), drawn))
    return found


def burst(up: Up, asked: Sequence[Asked], modes: Sequence[str], seed: int) -> list[tuple[object, object]]:
    """All at once, in another order."""
    order = random.Random(seed).sample(range(len(asked)), len(asked))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pending = {index: pool.submit(asked[index].said, up, modes[index]) for index in order}
        return [pending[index].result(120) for index in range(len(asked))]


def test_requests_say_alone_and_in_a_burst_remote_and_local_the_same_bits(up: Up) -> None:
    asked = requests(30, seed=1)
    alone = [each.said(up, "local" if index % 2 else "remote") for index, each in enumerate(asked)]
    beside = burst(up, asked, ["remote" if index % 2 else "local" for index in range(len(asked))], seed=2)
    assert [index for index, (first, second) in enumerate(zip(alone, beside, strict=True)) if first != second] == []
    assert len({str(tokens) for tokens, _ in alone}) > len(asked) // 2  # they have something to say
    up.wait_idle()
