"""Grammars are made in other processes: once each, in turns of tenants, and none of them can hold up the router."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

import pytest

from pdcluster.api.openai.answer_shape import AnswerShape
from pdcluster.api.structured.constraints import StructuredOutputs
from pdcluster.core.errors import BadRequest, Overloaded, Unavailable
from pdcluster.core.grammar import Grammar
from pdcluster_router.frontend import grammar_pool, grammar_process
from pdcluster_router.frontend.grammar_pool import GrammarPool

# Waits for a file that "wait" names, ends by "signal", takes CPU for ever for "spin", and answers others at once.
FAKE = """
import msgspec, os, signal, time
from pdcluster.api.openai.answer_shape import AnswerShape
from pdcluster_router.frontend import grammar_process

def answer_of(payload):
    asked = msgspec.msgpack.decode(payload, type=AnswerShape).structured_outputs.regex
    word, _, rest = asked.partition(" ")
    while word == "wait" and not os.path.exists(rest.split()[0]):
        time.sleep(0.005)
    while word == "spin":
        pass
    if word == "parent":
        os.kill(os.getppid(), signal.SIGKILL)
    if word == "signal":
        os.kill(os.getpid(), getattr(signal, rest))
    return grammar_process.Answer(f"start: {os.getpid()}")

grammar_process.answer_of = answer_of
grammar_process.main()
"""


def shape(**asked: object) -> AnswerShape:
    return AnswerShape("structured_outputs", None, StructuredOutputs(**asked))  # type: ignore[arg-type]


@pytest.fixture
def fakes() -> Iterator[GrammarPool]:
    pool = GrammarPool(argv=(sys.executable, "-c", FAKE))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[GrammarPool]:
    made = GrammarPool()
    yield made
    made.close()


async def test_a_shape_becomes_a_grammar_once(pool: GrammarPool) -> None:
    asked = shape(json={"type": "integer"})
    assert pool.known(asked) is None
    made = await asyncio.gather(*(pool.make(asked, tenant) for tenant in ("a", "b", "a")))
    assert isinstance(made[0], Grammar) and made.count(made[0]) == 3 and pool.known(asked) == made[0]


async def test_a_refusal_names_the_field_and_is_remembered(pool: GrammarPool) -> None:
    asked = shape(json={"type": "array", "uniqueItems": True})
    with pytest.raises(BadRequest, match="uniqueItems") as refused:
        await pool.make(asked, "a")
    assert refused.value.param == "structured_outputs.json"
    with pytest.raises(BadRequest, match="uniqueItems"):
        pool.known(asked)


BOMBS = {
    "a chain of rules": {
        "grammar": "start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(3000)) + 'r3000: "b"'
    },
    "many properties and patterns": {
        "json": {
            "type": "object",
            "properties": {f"p{n}": {"type": "string"} for n in range(3000)},
            "patternProperties": {f"^x{n}[a-z]+$": {"type": "integer"} for n in range(50)},
        }
    },
    "a long choice in a pattern": {"regex": "a|" * 32_000},
    "many digits": {"json": {"type": "array", "minItems": 10**9, "items": {"type": "array", "maxItems": 10**9}}},
}


@pytest.mark.parametrize("name", BOMBS)
async def test_what_is_made_to_take_long_is_made_or_refused_by_name(pool: GrammarPool, name: str) -> None:
    try:
        made = await pool.make(shape(**BOMBS[name]), "a")
    except BadRequest as error:
        assert "structured_outputs" in str(error)
    else:
        assert isinstance(made, Grammar)


@pytest.mark.parametrize(
    ("asked_for", "words"),
    [("spin", "takes more than 2 s"), ("signal SIGSEGV", "too deep or too large"), ("signal SIGABRT", "too deep")],
)
async def test_what_ends_its_process_is_refused_and_remembered(fakes: GrammarPool, asked_for: str, words: str) -> None:
    asked = shape(regex=asked_for)
    for _ in range(2):
        with pytest.raises(BadRequest, match=f"structured_outputs .*{words}"):
            await fakes.make(asked, "a")
    assert await fakes.make(shape(regex="x"), "a"), "another process takes its place"


async def test_a_process_that_is_ended_from_outside_says_nothing_of_the_shape(fakes: GrammarPool) -> None:
    asked = shape(regex="parent")
    for _ in range(2):
        with pytest.raises(Unavailable, match="retry"):
            await fakes.make(asked, "a")


async def test_a_tenant_leaves_a_process_to_the_others(fakes: GrammarPool, tmp_path: object) -> None:
    gate = f"{tmp_path}/open"
    held = [asyncio.ensure_future(fakes.make(shape(regex=f"wait {gate} {number}"), "a")) for number in range(3)]
    await asyncio.sleep(0.05)
    assert await fakes.make(shape(regex="x"), "b")
    assert not any(each.done() for each in held)
    open(gate, "w").close()
    assert all(await asyncio.gather(*held))


async def test_what_was_late_is_replaced_at_once(tmp_path: object) -> None:
    pool, gate = GrammarPool(1, (sys.executable, "-c", FAKE)), f"{tmp_path}/open"
    try:
        first = await pool.make(shape(regex="first"), "a")  # its process is there
        late = asyncio.ensure_future(pool.make(shape(regex=f"wait {gate}"), "a"))
        await asyncio.sleep(grammar_process.LATE_S * 3)
        open(gate, "w").close()
        assert await late == first != await pool.make(shape(regex="x"), "a")
    finally:
        await asyncio.to_thread(pool.close)


async def test_too_many_of_a_tenant_are_refused_and_others_are_not(
    fakes: GrammarPool, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_pool, "MAX_WAITING", 2)
    gate = f"{tmp_path}/open"
    held = [asyncio.ensure_future(fakes.make(shape(regex=f"wait {gate} 0"), "a"))]
    until = time.monotonic() + 20
    await asyncio.sleep(0)
    while fakes.num_waiting("a"):
        await asyncio.sleep(0.01)
        assert time.monotonic() < until
    held += [asyncio.ensure_future(fakes.make(shape(regex=f"wait {gate} {number}"), "a")) for number in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="retry later"):
        await fakes.make(shape(regex="one more"), "a")
    assert await fakes.make(shape(regex="x"), "b")
    open(gate, "w").close()
    assert all(await asyncio.gather(*held))


async def test_who_waits_when_the_router_stops_is_told(tmp_path: object) -> None:
    pool = GrammarPool(argv=(sys.executable, "-c", FAKE))
    held = [
        asyncio.ensure_future(pool.make(shape(regex=f"wait {tmp_path}/never {number}"), "a")) for number in range(2)
    ]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await asyncio.to_thread(pool.close)
    assert time.monotonic() - began < 10
    for answer in await asyncio.gather(*held, return_exceptions=True):
        assert isinstance(answer, Unavailable)
    with pytest.raises(Unavailable, match="stops"):
        await pool.make(shape(regex="x"), "a")
    pool.close()


async def test_one_that_no_longer_waits_takes_nothing_from_others(fakes: GrammarPool, tmp_path: object) -> None:
    asked = shape(regex=f"wait {tmp_path}/open")
    gone, stays = (asyncio.ensure_future(fakes.make(asked, "a")) for _ in range(2))
    await asyncio.sleep(0.05)
    gone.cancel()
    open(f"{tmp_path}/open", "w").close()
    assert await stays and gone.cancelled()
