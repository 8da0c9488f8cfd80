"""The client of bench.routing --real: what it sends, and what counts as answered."""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from bench.parts.real_turns import MEAN_OUTPUT, MEAN_PROMPT, Asked, Target, crowd, requests, turn, unseen
from bench.parts.routing_real import floors
from pdcluster.core.errors import ConfigError

OK = b"HTTP/1.1 200 OK\r\nX-PDCluster-Prefill: p\r\nX-PDCluster-Decode: d\r\n\r\ndata: {}\n\ndata: [DONE]\n\n"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\n\r\n"
BROKEN = b"HTTP/1.1 500 Internal Server Error\r\n\r\nit broke"


@dataclass
class FakeRouter:
    """Answers each request with the next of `answers`; the last goes on."""

    answers: list[bytes]
    bodies: list[dict[str, object]] = field(default_factory=list)
    most_open: int = 0
    _num_open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        await asyncio.sleep(0)
        writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
        self._num_open -= 1
        writer.close()


@asynccontextmanager
async def router(*answers: bytes) -> AsyncIterator[tuple[Target, FakeRouter]]:
    fake = FakeRouter(list(answers))
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield Target(host, port, "m"), fake


def asked(num: int) -> list[Asked]:
    return [Asked(0.0, [11, 12, 13], 5) for _ in range(num)]


async def test_answers_say_where_they_ran_and_a_refusal_is_none_of_them() -> None:
    async with router(OK, BUSY, OK) as (target, fake):
        answers = await turn(target, asked(3), "remote")
    assert [answer.path for answer in answers] == ["p+d", "p+d"]
    assert all(answer.num_tokens == 3 and answer.ttft_s > 0 for answer in answers)
    assert {(body["pdcluster_mode"], body["max_tokens"], body["ignore_eos"]) for body in fake.bodies} == {
        ("remote", 5, True)
    }


async def test_a_failure_that_is_no_refusal_ends_the_bench_with_what_was_said() -> None:
    async with router(BROKEN) as (target, _):
        with pytest.raises(RuntimeError, match="it broke"):
            await turn(target, asked(1), "auto")


async def test_an_answer_that_breaks_off_ends_the_bench_with_its_last_words() -> None:
    async with router(OK.replace(b"[DONE]", b'{"error": "its node left"}')) as (target, _):
        with pytest.raises(RuntimeError, match="its node left"):
            await turn(target, asked(1), "auto")


async def test_a_model_that_answers_nothing_alone_is_said_to_be_too_large() -> None:
    async with router(BUSY) as (target, _):
        with pytest.raises(ConfigError, match="a prompt of 50 tokens, alone, was refused"):
            await asyncio.to_thread(floors, target, 1)


async def test_a_crowd_has_so_many_open_and_counts_only_what_was_answered() -> None:
    async with router(OK, BUSY, OK) as (target, fake):
        rate = await crowd(target, asked(12), "local", 3)
    assert len(fake.bodies) == 12 and fake.most_open <= 3
    assert rate > 0


def test_each_turn_has_the_same_mix_of_lengths() -> None:
    means = [statistics.fmean(len(each.prompt) for each in requests(24, 8.0, seed)) for seed in range(40)]
    assert all(0.75 * MEAN_PROMPT < mean < 1.3 * MEAN_PROMPT for mean in means)
    outputs = [each.num_output for seed in range(40) for each in requests(24, 8.0, seed)]
    assert statistics.fmean(outputs) == pytest.approx(MEAN_OUTPUT, rel=0.1)
    assert min(outputs) >= 2


def test_moments_are_in_order_and_inside_the_turn_and_no_two_seeds_agree() -> None:
    found = requests(24, 8.0, "a")
    moments = [each.at_s for each in found]
    assert moments == sorted(moments) and moments[0] >= 0.0 and moments[-1] < 8.0
    assert requests(24, 8.0, "a") == found != requests(24, 8.0, "b")


def test_unseen_requests_differ_in_their_tokens_alone() -> None:
    found = requests(6, 8.0, 1)
    other = unseen(found, "other way")
    assert [(each.at_s, len(each.prompt), each.num_output) for each in other] == [
        (each.at_s, len(each.prompt), each.num_output) for each in found
    ]
    assert all(each.prompt[:8] != before.prompt[:8] for each, before in zip(other, found, strict=True))
