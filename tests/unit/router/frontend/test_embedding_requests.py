"""Embeddings from start to their one answer: which node gets them, what may come in a vector's place, retries, ends."""

from __future__ import annotations

import asyncio
import struct

import pytest
from dispatch_pair import collect
from embedding_nodes import (
    EMBEDS,
    GENERATES,
    SIZE,
    EmbeddingNodes,
    embedded,
    embedding_of,
    embeds,
    stays_silent,
    vector_of,
)
from msgspec.structs import replace
from scripted_cluster import row, settle

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster_router.core.generation import Done, Generation
from pdcluster_router.explain.recorder import Record

TOKENS = list(range(3, 20))


async def answer_of(nodes: EmbeddingNodes, generation: Generation | None = None) -> Done:
    async with asyncio.timeout(5.0):
        tokens, done = await collect(nodes.dispatch, generation or embedding_of(TOKENS))
    assert not tokens
    return done


def numbers_of(done: Done) -> list[float]:
    return list(struct.unpack(f"<{len(done.vector) // 4}f", done.vector))


async def test_one_node_gets_the_prompt_and_its_vector_is_the_answer() -> None:
    nodes = EmbeddingNodes("e0")
    done = await answer_of(nodes)
    assert numbers_of(done) == vector_of(TOKENS) and (done.attempts, done.cached_tokens) == (1, 2)
    assert (done.route.mode, done.route.prefill, done.route.decode) == ("local", None, "e0")
    assert done.timeline.queue_s == 0.25
    ((_, message),) = nodes.asked
    assert message.pooling == m.Pooling(0) and not message.remote and message.pull is None
    assert m.unpack_tokens(message.work.token_ids) == TOKENS and message.work.model == EMBEDS.digest
    assert not nodes.cluster.sent_to("e0", m.Cancel), "it ended"
    nodes.check_books()


async def test_a_vector_is_not_kept_for_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Done] = []

    def noted(record: Record, name: str, value: object) -> None:
        object.__setattr__(record, name, value)
        if isinstance(value, Done):
            kept.append(value)

    monkeypatch.setattr(Record, "__setattr__", noted)
    nodes = EmbeddingNodes("e0")
    done = await answer_of(nodes)
    assert done.vector and [each.vector for each in kept] == [b""]


async def test_a_vector_without_a_word_before_it_stops_the_queue_clock_too() -> None:
    nodes = EmbeddingNodes("e0")
    nodes.acts["e0"] = lambda message, answer: answer(embedded(message))
    assert numbers_of(await answer_of(nodes)) == vector_of(TOKENS)


@pytest.mark.parametrize("writer", [False, True])
async def test_embeddings_and_generations_go_to_nodes_of_their_kind_alone(writer: bool) -> None:
    nodes = EmbeddingNodes("e0", writer=writer)
    for number in range(4):
        await answer_of(nodes, embedding_of([5, 6], request=f"e{number}"))
    assert not nodes.cluster.sent_to("writer", m.Prefill)
    generation = Generation("g", GENERATES.id, embedding_of(TOKENS).token_ids, m.Sampling(max_tokens=1, seed=0), 0.3)
    with pytest.raises(errors.PdclusterError):
        await collect(nodes.dispatch, replace(generation, served=GENERATES))
    assert len(nodes.cluster.sent_to("writer", m.Prefill)) == writer
    assert len(nodes.asked) == 4
    nodes.check_books()


async def test_a_prompt_may_fill_the_whole_context_since_no_token_follows() -> None:
    nodes = EmbeddingNodes("e0")
    assert numbers_of(await answer_of(nodes, embedding_of([7] * 64))) == vector_of([7] * 64)
    with pytest.raises(errors.ContextTooLong, match="the request has 65 tokens"):
        await answer_of(nodes, embedding_of([7] * 65))
    nodes.check_books()


async def test_a_lost_node_is_replaced_by_another() -> None:
    nodes = EmbeddingNodes("e0", "e1")

    def die(message: m.Prefill, answer: object) -> None:
        nodes.acts.clear()
        nodes.kill(nodes.asked[-1][0])

    nodes.acts = {"e0": die, "e1": die}
    done = await answer_of(nodes)
    assert numbers_of(done) == vector_of(TOKENS) and done.attempts == 2
    assert {name for name, _ in nodes.asked} == {"e0", "e1"}
    assert [message.work.attempt for _, message in nodes.asked] == [0, 1]
    nodes.check_books()


WRONG = {
    "tokens": lambda message: row(message.work, 0, (9,)),
    "a generation's end": lambda message: m.Finished(
        message.work.request, message.work.attempt, "stop", 0, m.LegTimings()
    ),
    "another size": lambda message: embedded(message, size=5),
    "a failure": lambda message: m.Failed(message.work.request, message.work.attempt, "internal", "a bug", True),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_node_that_answers_with_something_else_is_avoided(what: str) -> None:
    nodes = EmbeddingNodes("e0", "e1")

    def err(message: m.Prefill, answer: object) -> None:
        nodes.acts.clear()
        answer(WRONG[what](message))  # type: ignore[operator]

    nodes.acts = {"e0": err, "e1": err}
    done = await answer_of(nodes, embedding_of(TOKENS, SIZE))
    assert numbers_of(done) == vector_of(TOKENS) and done.attempts == 2
    first, second = (name for name, _ in nodes.asked)
    assert first != second
    nodes.check_books()


async def test_when_every_node_errs_the_client_learns_what_the_last_one_said() -> None:
    nodes = EmbeddingNodes("e0", "e1")
    nodes.acts = dict.fromkeys(("e0", "e1"), lambda message, answer: answer(row(message.work, 0, (9,))))
    with pytest.raises(errors.Unavailable, match=r"node e\d answered with TokenRow for an embedding"):
        await answer_of(nodes)
    assert len(nodes.asked) == 3, "two retries"
    nodes.check_books()


async def test_a_vector_for_tokens_is_no_answer_either() -> None:
    nodes = EmbeddingNodes()
    vector = struct.pack("<2f", 1.0, 2.0)
    nodes.cluster.handlers["writer"] = lambda message, answer: (
        answer(m.Embedded(message.work.request, message.work.attempt, vector, m.LegTimings()))
        if isinstance(message, m.Prefill)
        else None
    )
    generation = Generation("g", GENERATES.id, embedding_of(TOKENS).token_ids, m.Sampling(max_tokens=4, seed=0), 5.0)
    with pytest.raises(errors.Unavailable, match="node writer answered with Embedded for tokens"):
        await answer_of(nodes, replace(generation, served=GENERATES))
    nodes.check_books()


async def test_a_refusal_that_no_node_would_take_back_ends_it_with_the_field_s_name() -> None:
    nodes = EmbeddingNodes("e0", "e1")
    nodes.acts = dict.fromkeys(
        ("e0", "e1"),
        lambda message, answer: answer(
            m.Failed(
                message.work.request, message.work.attempt, errors.BadRequest.code, "leave it out", False, "dimensions"
            )
        ),
    )
    with pytest.raises(errors.BadRequest, match="leave it out") as refused:
        await answer_of(nodes, embedding_of(TOKENS, 3))
    assert refused.value.param == "dimensions" and len(nodes.asked) == 1
    nodes.check_books()


async def test_a_full_node_s_refusal_sends_it_on() -> None:
    nodes = EmbeddingNodes("e0", "e1")

    def refuse(message: m.Prefill, answer: object) -> None:
        nodes.acts.clear()
        answer(m.Refused(message.work.request, message.work.attempt, "prefill", "full", 0.2))  # type: ignore[operator]

    nodes.acts = {"e0": refuse, "e1": refuse}
    done = await answer_of(nodes)
    assert numbers_of(done) == vector_of(TOKENS) and done.attempts == 1, "a refusal is no attempt"
    nodes.check_books()


async def test_a_cancelled_one_is_cancelled_on_its_node_and_a_late_vector_changes_nothing() -> None:
    nodes = EmbeddingNodes("e0")
    nodes.acts["e0"] = stays_silent
    answer = asyncio.create_task(answer_of(nodes))
    await settle()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert nodes.cancelled("e0") == ["r"]
    nodes.tell("e0", embedded(nodes.asked[0][1]))
    nodes.check_books()


async def test_a_second_vector_changes_nothing() -> None:
    nodes = EmbeddingNodes("e0")

    def twice(message: m.Prefill, answer: object) -> None:
        embeds(message, answer)  # type: ignore[arg-type]
        answer(embedded(message, size=3))  # type: ignore[operator]

    nodes.acts["e0"] = twice
    assert numbers_of(await answer_of(nodes)) == vector_of(TOKENS)
    nodes.check_books()


async def test_a_node_that_never_takes_it_up_is_given_up_and_the_deadline_ends_it() -> None:
    nodes = EmbeddingNodes("e0")
    nodes.acts["e0"] = stays_silent
    with pytest.raises(errors.DeadlineExceeded):
        await answer_of(nodes, replace(embedding_of(TOKENS), deadline_s=0.1))
    assert nodes.cancelled("e0") == ["r"]
    nodes.check_books()


async def test_embeddings_do_not_count_as_answers_of_no_tokens() -> None:
    nodes = EmbeddingNodes("e0")
    before = nodes.dispatch.shared.selector.usual_output
    for number in range(20):
        await answer_of(nodes, embedding_of(TOKENS, request=f"r{number}"))
    assert nodes.dispatch.shared.selector.usual_output == before
