"""The official client, unchanged, against the application over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from scripted_dispatcher import EOS, MAX_LEN, MODEL, TEXT, ScriptedDispatcher, Step, Tokens, Wait, says, served

from pdcluster.core.errors import Overloaded, Unavailable
from pdcluster_router.core.generation import Generation, RequestRoute

pytestmark = pytest.mark.asyncio(loop_scope="module")

_DISPATCHER = ScriptedDispatcher()


@pytest.fixture
def dispatcher() -> ScriptedDispatcher:
    """One server for all tests, as starting one takes longer than most of them; its dispatcher forgets everything in
    between."""
    vars(_DISPATCHER).update(vars(ScriptedDispatcher()))
    return _DISPATCHER


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[AsyncOpenAI]:
    async with served(_DISPATCHER) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(server: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> AsyncOpenAI:
    return server


USER = [{"role": "user", "content": "hi there"}]


async def test_chat_answers_with_text_usage_and_route(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=USER, seed=7, temperature=0.5)
    reply = raw.parse()
    assert reply.choices[0].message.content == "hello world"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    prompt = TEXT.encode(TEXT.render_chat(USER), add_special_tokens=False)
    assert dispatcher.started[0].token_ids == prompt
    assert (dispatcher.started[0].sampling.seed, dispatcher.started[0].sampling.temperature) == (7, 0.5)
    output = len(says("hello world"))
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (
        len(prompt),
        output,
        len(prompt) + output,
    )
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert reply.usage.model_extra is not None
    report = reply.usage.model_extra["pdcluster"]
    assert (report["mode"], report["prefill"], report["decode"], report["transfer"], report["attempts"]) == (
        "remote",
        "p-1",
        "d-1",
        "shm",
        1,
    )
    assert report["timeline"]["queue_s"] == 0.25
    assert report["timeline"]["ttft_s"] > 0
    names = ("mode", "prefill", "decode", "transfer")
    assert [raw.headers[f"x-pdcluster-{name}"] for name in names] == ["remote", "p-1", "d-1", "shm"]
    assert reply.id == f"chatcmpl-{raw.headers['x-request-id']}"


async def test_max_tokens_defaults_to_what_is_left_for_chat_and_to_16_for_completions(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    await client.chat.completions.create(model=MODEL, messages=USER)
    await client.completions.create(model=MODEL, prompt="hi")
    await client.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=5)
    chat, plain, limited = dispatcher.started
    assert chat.sampling.max_tokens == MAX_LEN - len(chat.token_ids)
    assert plain.sampling.max_tokens == 16
    assert limited.sampling.max_tokens == 5


async def test_a_chat_stream_is_opened_by_a_role_and_closed_by_a_reason(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(delta.delta.content or "" for delta in deltas) == "hello world"
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(says("hello world"))
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_a_completion_stream_has_the_text_of_the_whole_reply(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = lambda _: says("Grüße, 日本 🙂 done", "length")
    stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=100, stream=True)
    chunks = [chunk async for chunk in stream]
    whole = await client.completions.create(model=MODEL, prompt="x", max_tokens=100)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == "Grüße, 日本 🙂 done"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert all("\ufffd" not in chunk.choices[0].text for chunk in chunks)


async def test_a_stop_string_cuts_the_text_and_cancels_the_generation(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    never = asyncio.Event()
    dispatcher.script = lambda _: [*says("one two three four", "length"), Wait(never)]
    reply = await client.completions.create(model=MODEL, prompt="x", max_tokens=100, stop=["absent", "o th"])
    assert reply.choices[0].text == "one tw"
    assert reply.choices[0].finish_reason == "stop"
    assert dispatcher.cancelled == [dispatcher.started[0].request]
    assert reply.usage is not None
    assert reply.usage.completion_tokens < len(says("one two three four", "length"))
    assert reply.usage.prompt_tokens_details is not None and reply.usage.prompt_tokens_details.cached_tokens == 3


async def test_an_answer_that_a_stop_string_ended_reports_what_was_cached_and_how_often_it_was_tried(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.route, dispatcher.cached_tokens = msgspec.structs.replace(dispatcher.route, attempts=2), 7
    dispatcher.script = lambda _: says("one two three four", "length")
    reply = await client.completions.create(model=MODEL, prompt="x", max_tokens=100, stop="three")
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 7
    assert reply.usage.model_extra is not None and reply.usage.model_extra["pdcluster"]["attempts"] == 2


async def test_a_stop_string_in_a_stream_is_never_shown_in_part(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = lambda _: says("one two three four", "length")
    stream = await client.chat.completions.create(model=MODEL, messages=USER, stop="three", stream=True)
    seen = ""
    async for chunk in stream:
        seen += chunk.choices[0].delta.content or ""
        assert "one two ".startswith(seen)
        reason = chunk.choices[0].finish_reason
    assert (seen, reason) == ("one two ", "stop")


async def test_the_text_of_a_stop_token_is_not_part_of_the_answer(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    (dot,) = TEXT.encode(".", add_special_tokens=False)
    dispatcher.script = lambda _: says("one.", "length")
    reply = await client.completions.create(model=MODEL, prompt="x", extra_body={"stop_token_ids": [dot]})
    assert reply.choices[0].text == "one"
    assert reply.choices[0].finish_reason == "stop"
    assert dispatcher.started[0].sampling.stop_token_ids == (dot,)


async def test_n_choices_differ_by_their_choice_number_and_come_in_order(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = lambda generation: says(f"choice {generation.sampling.choice}")
    reply = await client.chat.completions.create(model=MODEL, messages=USER, n=3, seed=1)
    assert [choice.message.content for choice in reply.choices] == ["choice 0", "choice 1", "choice 2"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({generation.request for generation in dispatcher.started}) == 3
    assert {generation.sampling.seed for generation in dispatcher.started} == {1}
    assert reply.usage is not None and reply.usage.model_extra is not None
    assert reply.usage.prompt_tokens == len(dispatcher.started[0].token_ids)
    assert reply.usage.completion_tokens == 3 * len(says("choice 0"))
    assert len(reply.usage.model_extra["pdcluster"]["choices"]) == 3


async def test_choices_of_one_stream_interleave(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = lambda generation: says("a b c d e f g h" if generation.sampling.choice else "1 2 3 4 5 6 7 8")
    stream = await client.completions.create(model=MODEL, prompt="x", n=2, max_tokens=50, stream=True)
    order, texts = [], ["", ""]
    async for chunk in stream:
        order.append(chunk.choices[0].index)
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["1 2 3 4 5 6 7 8", "a b c d e f g h"]
    assert sum(before != after for before, after in pairwise(order)) > 4


async def test_when_one_choice_fails_all_are_cancelled_and_one_error_answers(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    never = asyncio.Event()

    def script(generation: Generation) -> list[Step]:
        return (
            [*says("some"), Unavailable("all decode nodes are gone")]
            if generation.sampling.choice == 1
            else [*says("a"), Wait(never)]
        )

    dispatcher.script = script
    with pytest.raises(openai.InternalServerError, match="all decode nodes are gone") as caught:
        await client.chat.completions.create(model=MODEL, messages=USER, n=3)
    assert caught.value.status_code == 503
    assert sorted(dispatcher.cancelled) == sorted(generation.request for generation in dispatcher.started)


async def test_two_streams_interleave(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    gates = {"first": asyncio.Event(), "second": asyncio.Event()}

    def script(generation: Generation) -> list[Step]:
        name = "first" if "first" in TEXT.decode(generation.token_ids) else "second"
        tokens = says("one two three")
        return [*tokens[:1], Wait(gates[name]), *tokens[1:]]

    dispatcher.script = script
    streams = {name: await client.completions.create(model=MODEL, prompt=name, stream=True) for name in gates}
    for name in ("second", "first"):  # both are open at once, and end in the other order
        gates[name].set()
        assert "".join([chunk.choices[0].text async for chunk in streams[name]]) == "one two three"


async def test_chat_logprobs_have_openai_s_shape(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = lambda _: says("né €")
    reply = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2)
    assert dispatcher.started[0].sampling.logprobs == 2
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    raw = b"".join(bytes(entry.bytes or []) for entry in logprobs.content[:-1])
    assert raw.decode() == reply.choices[0].message.content == "né €"
    assert logprobs.content[-1].token == "<|eos|>"
    assert all(entry.logprob == -0.5 for entry in logprobs.content)
    assert all([top.logprob for top in entry.top_logprobs] == [-0.5, -1.5] for entry in logprobs.content)


async def test_streamed_chat_logprobs_join_to_those_of_the_whole_reply(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True)
    stream = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, stream=True)
    joined = [
        entry
        async for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert whole.choices[0].logprobs is not None
    assert joined == whole.choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in joined)


async def test_completion_logprobs_have_offsets_into_the_text(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    reply = await client.completions.create(model=MODEL, prompt="x", logprobs=3)
    logprobs, text = reply.choices[0].logprobs, reply.choices[0].text
    assert (
        logprobs is not None
        and logprobs.tokens
        and logprobs.text_offset
        and logprobs.top_logprobs
        and logprobs.token_logprobs
    )
    for token, offset in zip(logprobs.tokens[:-1], logprobs.text_offset[:-1], strict=True):
        assert text[offset : offset + len(token)] == token
    assert logprobs.text_offset[-1] == len(text)
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens)


async def test_parts_of_a_character_are_named_by_their_bytes(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = lambda _: says("🙂", "length")
    reply = await client.completions.create(model=MODEL, prompt="x", logprobs=0)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "bytes:\\xf0bytes:\\x9fbytes:\\x99bytes:\\x82"
    assert reply.choices[0].text == "🙂"


async def test_echo_repeats_the_prompt_and_its_logprobs(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    reply = await client.completions.create(model=MODEL, prompt="quick brown", echo=True, logprobs=1, max_tokens=4)
    assert reply.choices[0].text == "quick brown" + TEXT.decode(
        [step.ids[0] for step in says("hello world")[:4] if isinstance(step, Tokens)]
    )
    prompt = dispatcher.started[0].token_ids
    assert dispatcher.started[0].sampling.prompt_logprobs == 1
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
    assert len(logprobs.tokens) == len(prompt) + 4
    assert logprobs.token_logprobs[0] is None and None not in logprobs.token_logprobs[1:]
    assert "".join(logprobs.tokens[1 : len(prompt)]) == "quick brown"
    assert logprobs.text_offset[len(prompt)] == len("quick brown")


async def test_echo_in_a_stream_comes_before_the_text(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT.decode([5, 6, 7]) + "hello world"


async def test_several_prompts_make_choices_in_their_order(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = lambda generation: says(f"{TEXT.decode(generation.token_ids)}-{generation.sampling.choice}")
    reply = await client.completions.create(model=MODEL, prompt=["aa", "bb"], n=2)
    assert [choice.text for choice in reply.choices] == ["aa-0", "aa-1", "bb-0", "bb-1"]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(dispatcher.started[0].token_ids) + len(dispatcher.started[2].token_ids)


@pytest.mark.parametrize("prompt", [[10, 11, 12], [[10, 11, 12]]])
async def test_token_ids_are_taken_as_they_are(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher, prompt: list[int]
) -> None:
    await client.completions.create(model=MODEL, prompt=prompt)
    assert list(dispatcher.started[0].token_ids) == [10, 11, 12]


@pytest.mark.parametrize("stream", [False, True])
async def test_return_token_ids_gives_the_prompt_s_and_the_output_s(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher, stream: bool
) -> None:
    reply = await client.chat.completions.create(
        model=MODEL, messages=USER, stream=stream, extra_body={"return_token_ids": True}
    )
    choices = [chunk.choices[0] async for chunk in reply] if stream else [reply.choices[0]]
    extras = [choice.model_extra or {} for choice in choices]
    sent = [step.ids[0] for step in says("hello world") if isinstance(step, Tokens)]
    assert [token for extra in extras for token in extra.get("token_ids", [])] == sent
    prompts = [extra["prompt_token_ids"] for extra in extras if "prompt_token_ids" in extra]
    assert prompts == [list(dispatcher.started[0].token_ids)]


async def test_an_error_before_the_first_byte_has_its_status_and_says_when_to_retry(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = lambda _: [Overloaded("every node is full", retry_after_s=2.5)]
    with pytest.raises(openai.RateLimitError, match="every node is full") as caught:
        await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.code == "overloaded"


async def test_an_error_after_the_first_byte_is_raised_by_the_client(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = lambda _: [*says("some text", "length"), Unavailable("no decode node is left")]
    stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    seen = ""
    with pytest.raises(openai.APIError, match="no decode node is left"):
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
    assert seen == "some text"


async def test_models_are_listed_and_found(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        await client.models.retrieve("large")


async def test_a_local_route_has_no_prefill_header(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.route = RequestRoute("local", None, "d-2", "")
    raw = await client.completions.with_raw_response.create(model=MODEL, prompt="x")
    assert raw.headers["x-pdcluster-mode"] == "local"
    assert raw.headers["x-pdcluster-decode"] == "d-2"
    assert "x-pdcluster-prefill" not in raw.headers and "x-pdcluster-transfer" not in raw.headers


async def test_fields_without_effect_are_accepted(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    reply = await client.chat.completions.create(
        model=MODEL, messages=USER, user="u", metadata={"k": "v"}, store=True, service_tier="auto",
        frequency_penalty=0, logit_bias={},
        tools=[], response_format={"type": "text"}, modalities=["text"], parallel_tool_calls=True, top_p=1,
        presence_penalty=0.0,
    )  # fmt: skip
    assert reply.choices[0].message.content == "hello world"
    assert dispatcher.started[0].sampling.top_p is None


async def test_a_history_with_parts_and_tool_calls_reaches_the_template(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": "calling",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    await client.chat.completions.create(model=MODEL, messages=messages)
    rendered = TEXT.decode(dispatcher.started[0].token_ids, skip_special_tokens=False)
    assert "<|start|>system\none\ntwo<|end|>" in rendered
    assert "<|start|>tool\n42<|end|>" in rendered


@pytest.mark.parametrize("min_tokens", [None, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_wait_for_min_tokens(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher, min_tokens: int | None, stream: bool
) -> None:
    letters = "aXbXc"
    dispatcher.script = lambda _: [Tokens((TEXT.encode(letter, add_special_tokens=False)[0],)) for letter in letters]
    given: dict[str, Any] = {"model": MODEL, "prompt": "p", "max_tokens": 6, "stop": ["X"]}
    extra = {"min_tokens": min_tokens}
    if stream:
        chunks = await client.completions.create(
            **given, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
        replies = [chunk async for chunk in chunks]
        text = "".join(reply.choices[0].text for reply in replies[:-1])
    else:
        replies = [await client.completions.create(**given, extra_body=extra)]
        text = replies[0].choices[0].text
    # The first X is the second token, the other one the fourth.
    told = "a" if (min_tokens or 0) < 2 else "aXb" if min_tokens < 4 else "aXbXc"
    assert text == told and replies[-1].usage.completion_tokens == min(len(told) + 1, 5)


async def test_ignore_eos_and_min_tokens_reach_the_nodes(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = lambda _: [Tokens((EOS,)), *says("on", "length")]
    body = {"ignore_eos": True, "min_tokens": 2, "top_k": 5, "min_p": 0.1, "skip_special_tokens": False}
    reply = await client.completions.create(model=MODEL, prompt="x", max_tokens=20, top_p=0.9, extra_body=body)
    sampling = dispatcher.started[0].sampling
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.top_k, sampling.min_p, sampling.top_p) == (
        True,
        2,
        5,
        0.1,
        0.9,
    )
    assert reply.choices[0].text == "<|eos|>on"


async def test_sampling_fields_reach_the_nodes_beyond_openai_s_in_extra_body(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    extra = {
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "top_k": 30,
        "min_p": 0.05,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "bad_words": ["it"],
    }
    fields = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"7": 5, "8": -100}, "seed": 3}
    await client.chat.completions.create(model=MODEL, messages=USER, **fields, extra_body=extra)
    await client.completions.create(model=MODEL, prompt="hi", **fields, extra_body=extra)
    for generation in dispatcher.started:
        sampling = generation.sampling
        assert (sampling.seed, sampling.min_tokens, sampling.top_k, sampling.min_p, sampling.stop_token_ids) == (
            3,
            2,
            30,
            0.05,
            (9,),
        )
        assert sampling.ignore_eos and sampling.shaping is not None
        assert (sampling.shaping.repetition, sampling.shaping.presence, sampling.shaping.frequency) == (1.2, 0.5, -0.5)
        assert sampling.shaping.biases == ((7, 5.0), (8, -100.0))
        assert tuple(TEXT.encode("it", add_special_tokens=False)) in sampling.shaping.bad_words


async def test_prompt_logprobs_come_by_token_id_once_for_all_choices(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    prompt = TEXT.encode("hi there", add_special_tokens=False)
    reply = await client.completions.create(model=MODEL, prompt=list(prompt), n=2, extra_body={"prompt_logprobs": 2})
    for choice in reply.choices:
        assert choice.model_extra is not None
        first, *others = choice.model_extra["prompt_logprobs"]
        assert first is None and len(others) == len(prompt) - 1
        for token_id, entry in zip(prompt[1:], others, strict=True):
            assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"} and len(entry) in (2, 3)
    chat = await client.chat.completions.create(model=MODEL, messages=USER, extra_body={"prompt_logprobs": 0})
    assert chat.model_extra is not None and len(chat.model_extra["prompt_logprobs"]) == len(
        dispatcher.started[-1].token_ids
    )
    assert [generation.sampling.prompt_logprobs for generation in dispatcher.started] == [2, None, 0]


async def test_more_than_twenty_alternatives_may_be_asked_for(
    client: AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    reply = await client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=100)
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content is not None
    assert all(len(entry.top_logprobs) == 100 for entry in reply.choices[0].logprobs.content)


async def test_choices_after_the_first_follow_it(client: AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    await client.completions.create(model=MODEL, prompt=["hi", "you"], n=2, max_tokens=4)
    first, second, third, fourth = dispatcher.started
    assert [generation.leads for generation in dispatcher.started] == [True, False, True, False]
    assert [generation.parent for generation in dispatcher.started] == [None, first.request, None, third.request]
    assert [generation.sampling.choice for generation in dispatcher.started] == [0, 1, 0, 1]
    assert second.token_ids == first.token_ids and fourth.token_ids == third.token_ids
