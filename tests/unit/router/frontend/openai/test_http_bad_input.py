"""Whatever a client sends wrong: a 4xx in OpenAI's shape that says what to change, nothing started, and the server as
well as before."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from scripted_dispatcher import MAX_LEN, MODEL, VOCAB, ScriptedDispatcher, served

from pdcluster_router.frontend.app import HttpSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
USER = {"role": "user", "content": "hi"}
LIMIT = 1 << 20


class Bed:
    def __init__(self, dispatcher: ScriptedDispatcher, client: httpx.AsyncClient) -> None:
        self.dispatcher = dispatcher
        self.client = client

    async def check(self, reply: httpx.Response, status: int, param: str | None, words: str) -> None:
        assert reply.status_code == status, reply.text
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert words in error["message"]
        assert self.dispatcher.started == []
        assert (await self.client.get("/health")).json()["status"] == "ok"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bed() -> AsyncIterator[Bed]:
    dispatcher = ScriptedDispatcher()
    async with (
        served(dispatcher, HttpSettings(max_body_bytes=LIMIT, max_choices=16)) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        yield Bed(dispatcher, client)


def chat(**changes: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [USER], **changes}


def plain(**changes: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "hi", **changes}


def part(**fields: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": [fields]}]


JSON_OBJECT = {"type": "json_object"}
TOOL = {"type": "function", "function": {"name": "f"}}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


FIELDS: list[tuple[str, dict[str, object], str | None, str]] = [
    # unknown names
    (CHAT, chat(temperatur=1), "temperatur", "unknown field temperatur; did you mean temperature?"),
    (CHAT, chat(zzz=1), "zzz", "unknown field zzz; leave it out"),
    (
        CHAT,
        chat(stream=True, stream_options={"include_usag": True}),
        "stream_options.include_usag",
        "did you mean include_usage?",
    ),
    (PLAIN, plain(messages=[USER]), "messages", "unknown field messages"),
    (CHAT, chat(prompt="x"), "prompt", "unknown field prompt"),
    # missing, wrong types
    (CHAT, {"messages": [USER]}, "model", "model is missing"),
    (CHAT, {"model": MODEL}, "messages", "messages is missing"),
    (PLAIN, {"model": MODEL}, "prompt", "prompt is missing"),
    (PLAIN, plain(prompt=None), "prompt", "prompt must be a string or a list, got null"),
    (PLAIN, plain(model=7), "model", "model must be a string, got 7"),
    (CHAT, chat(max_tokens="5.5"), "max_tokens", 'max_tokens must be a whole number, got "5.5"'),
    (CHAT, chat(n=2.0, max_tokens=1.5), "max_tokens", "max_tokens must be a whole number, got 1.5"),
    (CHAT, chat(n=2.0, temperature="x"), "temperature", "temperature must be a number"),
    (CHAT, chat(seed=1e300), "seed", "seed must be at most 9223372036854775807"),
    (CHAT, chat(n="two", max_tokens=5.0), "n", 'n must be a whole number, got "two"'),
    (PLAIN, plain(prompt=[1.0, 1.5]), "prompt[1]", "prompt[1] must be a whole number or a string or a list, got 1.5"),
    (CHAT, chat(max_tokens=1.5), "max_tokens", "max_tokens must be a whole number, got 1.5"),
    (CHAT, chat(max_tokens=[5]), "max_tokens", "max_tokens must be a whole number, got [5]"),
    (CHAT, chat(temperature="hot"), "temperature", 'temperature must be a number, got "hot"'),
    (CHAT, chat(stream="perhaps"), "stream", 'stream must be true or false, got "perhaps"'),
    (CHAT, chat(messages="hi"), "messages", 'messages must be a list, got "hi"'),
    (CHAT, chat(messages=[]), "messages", "messages must have at least 1 entries, got []"),
    (CHAT, chat(messages=["hi"]), "messages[0]", 'messages[0] must be an object, got "hi"'),
    (
        CHAT,
        chat(messages=[USER, {"role": "user", "content": 5}]),
        "messages[1].content",
        "messages[1].content must be a string or a list, got 5",
    ),
    (
        CHAT,
        chat(messages=[{"role": "king", "content": "x"}]),
        "messages[0].role",
        "must be one of system, developer, user, assistant, tool",
    ),
    (
        CHAT,
        chat(tool_choice="maybe"),
        "tool_choice",
        'tool_choice is "maybe"; it must be one of none, auto, required, an object',
    ),
    (CHAT, chat(pdcluster_mode="both"), "pdcluster_mode", "it must be one of auto, remote, local"),
    (CHAT, chat(messages=[{"content": "x"}]), "messages[0].role", "messages[0].role is missing"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content", "messages[0].content is missing"),
    (CHAT, chat(stop=[1]), "stop[0]", "stop[0] must be a string, got 1"),
    (CHAT, chat(stop_token_ids=["a"]), "stop_token_ids[0]", "stop_token_ids[0] must be a whole number"),
    (PLAIN, plain(prompt=[1.5]), "prompt[0]", "prompt[0] must be a whole number or a string or a list, got 1.5"),
    (PLAIN, plain(prompt=[[1, "x"]]), "prompt[0][1]", 'prompt[0][1] must be a whole number, got "x"'),
    (PLAIN, plain(prompt=[1, "x"]), "prompt", "prompt[1] is of another kind than prompt[0]"),
    (PLAIN, plain(logprobs="all"), "logprobs", 'logprobs must be a whole number, got "all"'),
    (CHAT, chat(logprobs=3), "logprobs", "logprobs must be true or false, got 3"),
    (CHAT, chat(chat_template_kwargs=[1]), "chat_template_kwargs", "chat_template_kwargs must be an object"),
    # out of range
    (CHAT, chat(max_tokens=0), "max_tokens", "max_tokens must be at least 1, got 0"),
    (CHAT, chat(max_tokens=-5), "max_tokens", "max_tokens must be at least 0, got -5"),
    (CHAT, chat(max_completion_tokens=-1), "max_completion_tokens", "must be at least 0"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "max_completion_tokens must be at least 1, got 0"),
    (PLAIN, plain(max_tokens=0, logprobs=1), "max_tokens", "to score a prompt without an output set echo"),
    (PLAIN, plain(max_tokens=0, echo=True, min_tokens=1), "min_tokens", "min_tokens is 1, more than the 0"),
    (PLAIN, plain(max_tokens=-1, echo=True), "max_tokens", "max_tokens must be at least 0, got -1"),
    (
        PLAIN,
        plain(prompt=[1] * MAX_LEN, max_tokens=0, echo=True),
        "prompt",
        f"maximum context length is {MAX_LEN} tokens",
    ),
    (CHAT, chat(min_tokens=-1), "min_tokens", "min_tokens must be at least 0"),
    (CHAT, chat(temperature=-0.1), "temperature", "temperature must be at least 0"),
    (CHAT, chat(temperature=2.1), "temperature", "temperature must be at most 2"),
    (CHAT, chat(top_p=0), "top_p", "top_p must be greater than 0"),
    (CHAT, chat(top_p=1.01), "top_p", "top_p must be at most 1"),
    (CHAT, chat(top_k=-2), "top_k", "top_k must be at least -1"),
    (CHAT, chat(min_p=-1), "min_p", "min_p must be at least 0"),
    (CHAT, chat(n=0), "n", "n must be at least 1"),
    (CHAT, chat(n=129), "n", "n must be at most 128"),
    (CHAT, chat(n=17), "n", "at most 16 are allowed"),
    (PLAIN, plain(prompt=["a"] * 9, n=2), "n", "9 prompts × n 2 = 18 choices, at most 16 are allowed"),
    (CHAT, chat(seed=2**63), "seed", "seed must be at most 9223372036854775807"),
    (CHAT, chat(logprobs=True, top_logprobs=1025), "top_logprobs", "top_logprobs must be at most 1024, got 1025"),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "set logprobs to true"),
    (PLAIN, plain(logprobs=-1), "logprobs", "logprobs must be at least 0"),
    (CHAT, chat(stop=["a"] * 17), "stop", "stop has 17 strings; at most 16"),
    (CHAT, chat(stop=""), "stop", "stop has an empty string"),
    (CHAT, chat(stop=["fine", "a" * 1025]), "stop", "stop has a string of 1025 characters; at most 1024"),
    (CHAT, chat(stop_token_ids=[1] * 257), "stop_token_ids", "stop_token_ids must have at most 256 entries, got [1, 1"),
    (CHAT, chat(stop_token_ids=[VOCAB]), "stop_token_ids", f"ids go from 0 to {VOCAB - 1}"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty", "repetition_penalty must be at least 0.01, got 0"),
    (
        PLAIN,
        plain(repetition_penalty=1e-30),
        "repetition_penalty",
        "repetition_penalty must be at least 0.01, got 1e-30",
    ),
    (PLAIN, plain(repetition_penalty=101), "repetition_penalty", "repetition_penalty must be at most 100"),
    (CHAT, chat(repetition_penalty="high"), "repetition_penalty", 'repetition_penalty must be a number, got "high"'),
    (CHAT, chat(presence_penalty=2.1), "presence_penalty", "presence_penalty must be at most 2.0, got 2.1"),
    (PLAIN, plain(presence_penalty=-2.1), "presence_penalty", "presence_penalty must be at least -2.0, got -2.1"),
    (CHAT, chat(frequency_penalty=3), "frequency_penalty", "frequency_penalty must be at most 2.0, got 3"),
    (PLAIN, plain(frequency_penalty=-3), "frequency_penalty", "frequency_penalty must be at least -2.0, got -3"),
    (CHAT, chat(logit_bias=[5]), "logit_bias", "logit_bias must be an object, got [5]"),
    (CHAT, chat(logit_bias={"5": "x"}), "logit_bias[...]", "must be a number"),
    (
        CHAT,
        chat(logit_bias={"5": 100.5}),
        "logit_bias",
        "logit_bias of token 5 is 100.5; it must be between -100 and 100",
    ),
    (
        PLAIN,
        plain(logit_bias={"5": -101}),
        "logit_bias",
        "logit_bias of token 5 is -101; it must be between -100 and 100",
    ),
    (
        CHAT,
        chat(logit_bias={"the": 1}),
        "logit_bias",
        f'the key "the", no token id of this model; ids go from 0 to {VOCAB - 1}',
    ),
    (CHAT, chat(logit_bias={"-1": 1}), "logit_bias", 'the key "-1", no token id'),
    (CHAT, chat(logit_bias={str(VOCAB): 1}), "logit_bias", f"ids go from 0 to {VOCAB - 1}"),
    (CHAT, chat(logit_bias={"5": 1, "05": 2}), "logit_bias", "logit_bias has token 5 twice"),
    (
        CHAT,
        chat(logit_bias={"0" * number + "1": 1 for number in range(9)} | {str(n): 1 for n in range(1024)}),
        "logit_bias",
        "at most 1024 are",
    ),
    (CHAT, chat(bad_words="damn"), "bad_words", 'bad_words must be a list, got "damn"'),
    (CHAT, chat(bad_words=[5]), "bad_words[0]", "bad_words[0] must be a string, got 5"),
    (PLAIN, plain(bad_words=["fine", " "]), "bad_words", 'bad_words[1] is " "; a word has 1 to 256 characters'),
    (CHAT, chat(bad_words=["x"] * 129), "bad_words", "bad_words must have at most 128 entries"),
    (CHAT, chat(bad_words=["x" * 257]), "bad_words", "a word has 1 to 256 characters"),
    (PLAIN, plain(prompt_logprobs=-1), "prompt_logprobs", "prompt_logprobs must be at least 0, got -1"),
    (CHAT, chat(prompt_logprobs=1025), "prompt_logprobs", "prompt_logprobs must be at most 1024, got 1025"),
    (CHAT, chat(prompt_logprobs=1, stream=True), "prompt_logprobs", "set stream to false"),
    (PLAIN, plain(logprobs=1025), "logprobs", "logprobs must be at most 1024, got 1025"),
    (CHAT, chat(cache_salt=""), "cache_salt", "cache_salt must have at least 1 characters"),
    # lengths
    (PLAIN, plain(prompt=""), "prompt", "prompt is empty"),
    (PLAIN, plain(prompt=[]), "prompt", "prompt is an empty list"),
    (PLAIN, plain(prompt=[[]]), "prompt", "prompt has no tokens"),
    (PLAIN, plain(prompt=["x", ""]), "prompt[1]", "prompt[1] is empty"),
    (PLAIN, plain(prompt=[1] * MAX_LEN), "prompt", f"However, prompt has {MAX_LEN} tokens; shorten it"),
    (PLAIN, plain(prompt=[1] * (MAX_LEN - 5), max_tokens=6), "max_tokens", "lower max_tokens to at most 5"),
    (PLAIN, plain(max_tokens=MAX_LEN), "max_tokens", "or shorten the prompt"),
    (CHAT, chat(messages=[USER | {"content": "word " * 3000}]), "messages", "shorten it"),
    (CHAT, chat(max_completion_tokens=MAX_LEN), "max_completion_tokens", "lower max_completion_tokens"),
    (CHAT, chat(max_tokens=4, max_completion_tokens=5), "max_completion_tokens", "differ; send one"),
    (CHAT, chat(max_tokens=4, min_tokens=5), "min_tokens", "min_tokens is 5, more than the 4"),
    (
        PLAIN,
        plain(prompt=[0, VOCAB]),
        "prompt",
        f"prompt[1] is {VOCAB}, which is no token id of this model; ids go from 0 to {VOCAB - 1}",
    ),
    (PLAIN, plain(prompt=[-1]), "prompt", "prompt[0] is -1"),
    (PLAIN, plain(prompt=[2**70]), "prompt", "is no token id"),
    (PLAIN, plain(prompt=[[1], [VOCAB]]), "prompt[1]", "prompt[1][0]"),
    # what we know but cannot do
    # the model here has a template that takes no tools
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools", "takes none"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "there are no tools"),
    (CHAT, chat(tool_choice="any"), "tool_choice", "tool_choice"),
    (CHAT, chat(tools=[TOOL, TOOL]), "tools[1].function.name", "names must differ"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name", "letters"),
    (CHAT, chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name", "missing"),
    (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "params": {}}}]),
        "tools[0].function.params",
        "unknown field",
    ),
    (
        CHAT,
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
        "not among the tools",
    ),
    (CHAT, chat(tools=[{**TOOL, "function": {"name": f"f{i}"}} for i in range(513)]), "tools", "at most 512"),
    (CHAT, chat(functions=[{"name": "f"}]), "functions", "not supported yet"),
    (CHAT, chat(response_format={"type": "yaml"}), "response_format.type", "text, json_object, json_schema"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema.schema", "missing"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
        "response_format.json_schema.name",
        "a name",
    ),
    (
        CHAT,
        chat(response_format={"type": "json_object", "json_schema": {"name": "a"}}),
        "response_format",
        "set the type to json_schema",
    ),
    (
        CHAT,
        chat(response_format=JSON_OBJECT, structured_outputs={"regex": "a"}),
        "structured_outputs",
        "send one of them",
    ),
    (CHAT, chat(response_format=JSON_OBJECT, ignore_eos=True), "ignore_eos", "leave ignore_eos out"),
    (PLAIN, plain(structured_outputs={}), "structured_outputs", "is empty; send exactly one of"),
    (PLAIN, plain(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs", "regex and choice"),
    (PLAIN, plain(structured_outputs={"regexp": "a"}), "structured_outputs.regexp", "did you mean regex?"),
    (PLAIN, plain(structured_outputs={"regex": ""}), "structured_outputs.regex", "is empty"),
    (PLAIN, plain(structured_outputs={"choice": []}), "structured_outputs.choice", "none of them empty"),
    (PLAIN, plain(structured_outputs={"choice": ["a", ""]}), "structured_outputs.choice", "none of them empty"),
    (PLAIN, plain(structured_outputs={"choice": ["a"] * 1025}), "structured_outputs.choice", "at most 1024"),
    (PLAIN, plain(structured_outputs={"json": "{"}), "structured_outputs.json", "no JSON"),
    (PLAIN, plain(structured_outputs={"json": [1]}), "structured_outputs.json", "must be a JSON schema"),
    (PLAIN, plain(structured_outputs={"json": False}), "structured_outputs", "is empty"),
    (
        PLAIN,
        plain(structured_outputs={"json": {"items": {"not": {"type": "null"}}}}),
        "structured_outputs.json.items",
        "uses not",
    ),
    (
        PLAIN,
        plain(structured_outputs={"json": {"properties": {"a": {"uniqueItems": True}}}}),
        "structured_outputs.json.properties.a",
        "uniqueItems",
    ),
    (PLAIN, plain(structured_outputs={"json": {"type": "strnig"}}), "structured_outputs", "Invalid type: strnig"),
    (PLAIN, plain(structured_outputs={"grammar": 'root ::= "a" root'}), "structured_outputs.grammar", "never ends"),
    (PLAIN, plain(structured_outputs={"regex": "(" * 65 + ")" * 65}), "structured_outputs.regex", "levels deep"),
    (PLAIN, plain(structured_outputs={"json": nested(70)}), "structured_outputs.json", "nested too deeply"),
    (PLAIN, plain(structured_outputs={"regex": "a" * 530_000}), "structured_outputs.regex", "send a smaller one"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities", "not supported yet"),
    (CHAT, chat(audio={"voice": "x"}), "audio", "not supported yet"),
    (CHAT, chat(reasoning_effort=3), "reasoning_effort", "reasoning_effort must be a string, got 3"),
    (CHAT, chat(reasoning_effort="x" * 65), "reasoning_effort", "at most 64 characters"),
    (CHAT, chat(echo=True), "echo", "not supported yet"),
    (CHAT, chat(documents=[{"text": "x"}]), "documents", "not supported yet"),
    (PLAIN, plain(allowed_token_ids=[1]), "allowed_token_ids", "not supported yet"),
    (PLAIN, plain(return_tokens_as_token_ids=True), "return_tokens_as_token_ids", "not supported yet"),
    (CHAT, chat(chat_template="{{ 1 }}"), "chat_template", "not supported yet"),
    (PLAIN, plain(best_of=3), "best_of", "not supported yet"),
    (PLAIN, plain(suffix="end"), "suffix", "not supported yet"),
    (
        CHAT,
        chat(messages=part(type="image_url", image_url={"url": "data:"})),
        "messages[0].content[0].type",
        "only text parts are supported",
    ),
    (CHAT, chat(messages=part(type="text")), "messages[0].content[0].text", "text is missing"),
    # that contradict each other, or the template
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "set stream to true"),
    (CHAT, chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message", "contradict"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "may not set messages"),
    (CHAT, chat(messages=[USER, {"role": "system", "content": "x"}]), "messages", "a system message must come first"),
    (
        CHAT,
        chat(
            messages=[
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}],
                }
            ]
        ),
        "messages[0].tool_calls[0]",
        "function.arguments is JSON nested too deeply",
    ),
    ("/tokenize", {}, "prompt", "send either prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt", "send either prompt"),
    ("/tokenize", {"promt": "a"}, "promt", "did you mean prompt?"),
    ("/detokenize", {"tokens": [VOCAB]}, "tokens", "is no token id"),
    (
        "/detokenize",
        {"tokens": [1] * (MAX_LEN + 1)},
        "tokens",
        f"tokens has {MAX_LEN + 1} ids, this model takes and gives {MAX_LEN} at most",
    ),
    # so large that it is not looked at again to say what is wrong with it
    (PLAIN, plain(**{"a" * 300_000: 1}), "a" * 200, f"unknown field {'a' * 200}; leave it out"),
    (PLAIN, plain(n="a" * 300_000), "n", "n must be a whole number"),
    (
        CHAT,
        chat(messages=[{"role": "a" * 300_000}]),
        "messages[0].role",
        "is of another kind; it must be one of system",
    ),
    ("/detokenize", {"tokens": "abc"}, "tokens", "tokens must be a list"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    FIELDS,
    ids=[f"{index}-{words[:40]}" for index, (_, _, _, words) in enumerate(FIELDS)],
)
async def test_a_wrong_field_is_named_with_the_way_out(
    bed: Bed, path: str, body: dict[str, object], param: str | None, words: str
) -> None:
    await bed.check(await bed.client.post(path, json=body), 400, param, words)


DEEP = b'{"model":"tiny","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

BODIES: list[tuple[bytes, str]] = [
    (b"", "the body is empty; send a JSON object"),
    (b"  \n", "the body is empty"),
    (b"{", "not valid JSON: Expecting property name enclosed in double quotes at line 1 column 2"),
    (b'{"model": "tiny",\n "prompt": x}', "at line 2 column 12"),
    (b'{"model":"tiny","prompt":"a"} trailing', "not valid JSON: Extra data at line 1 column 31"),
    (b'{"model":"tiny","temperature":NaN}', "NaN is not a JSON number"),
    (b'{"model":"tiny","temperature":Infinity}', "Infinity is not a JSON number"),
    (b'{"model":"tiny","temperature":1e999}', "temperature is out of range; send a finite number"),
    (b'{"model":"tiny","prompt":"a\xff"}', "not valid UTF-8: byte 0xff at offset 27"),
    (b'{"model":"tiny","prompt":"\xc3"}', "not valid UTF-8"),
    (b'{"mod\xffel":"tiny"}', "not valid UTF-8"),
    (b'{"model":"tiny","user":"\\ud800"}', "half a surrogate pair"),
    (b'{"model":"tiny","prompt":"a\x00"}', "not valid JSON: Invalid control character"),
    (b"[]", "the body must be an object, got []"),
    (b'"text"', "the body must be an object"),
    (b"null", "the body must be an object"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
    (DEEP, "nested too deeply"),
    (b'{"model":"' + b"a" * 300_000, "not valid JSON: Input data was truncated"),
    (b'{"model":"tiny","seed":' + b"9" * 5000 + b"}", "seed is a number with too many digits; send one"),
    (b'{"model":"tiny","metadata":{"a":[' + b"9" * 5000 + b"]}}", "is a number with too many digits"),
    (b'{"model":5,"user":' + b"9" * 5000 + b"}", "model must be a string, got 5"),
    (b'{"model":[1,' + b"9" * 5000 + b"]}", 'model must be a string, got [1, "\u2026"]'),
    (b'{"model":"tiny","metadata":' + b"[" * 150_000 + b"]" * 150_000 + b"}", "nested too deeply"),
]


@pytest.mark.parametrize(("body", "words"), BODIES, ids=[words[:40] for _, words in BODIES])
@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_a_body_that_is_not_right_json_says_where(bed: Bed, path: str, body: bytes, words: str) -> None:
    reply = await bed.client.post(path, content=body, headers={"content-type": "application/json"})
    await bed.check(reply, 400, reply.json()["error"]["param"], words)


async def test_an_unknown_model_is_404_and_names_those_served(bed: Bed) -> None:
    await bed.check(
        await bed.client.post(CHAT, json=chat(model="tinny")), 404, "model", "did you mean tiny?; served: tiny"
    )


async def test_an_unknown_path_is_404_and_names_the_nearest(bed: Bed) -> None:
    await bed.check(
        await bed.client.post("/v1/chat/completion", json=chat()), 404, None, "did you mean /v1/chat/completions?"
    )
    await bed.check(await bed.client.get("/"), 404, None, "there is no /")


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [("GET", CHAT, "use POST"), ("DELETE", PLAIN, "use POST"), ("POST", "/v1/models", "use GET")],
)
async def test_a_wrong_method_is_405_and_names_the_right_one(bed: Bed, method: str, path: str, words: str) -> None:
    await bed.check(await bed.client.request(method, path), 405, None, words)


async def test_another_content_type_is_415(bed: Bed) -> None:
    reply = await bed.client.post(PLAIN, content=json.dumps(plain()), headers={"content-type": "text/plain"})
    await bed.check(reply, 415, None, "send JSON with content-type: application/json")
    await bed.check(await bed.client.post(PLAIN, data={"model": MODEL}), 415, None, "application/x-www-form-urlencoded")


async def test_a_compressed_body_is_415(bed: Bed) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    await bed.check(await bed.client.post(PLAIN, content=b"xx", headers=headers), 415, None, "uncompressed")


async def test_a_body_over_the_limit_is_413_by_its_declared_length(bed: Bed) -> None:
    reply = await bed.client.post(PLAIN, json=plain(prompt="x" * (LIMIT + 1)))
    await bed.check(reply, 413, None, f"at most {LIMIT} are taken")


async def test_a_body_over_the_limit_is_413_while_it_is_read(bed: Bed) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * (LIMIT // 10)

    reply = await bed.client.post(PLAIN, content=pieces(), headers={"content-type": "application/json"})
    await bed.check(reply, 413, None, f"at most {LIMIT} are taken")


async def test_a_client_that_asks_first_is_told_before_it_sends_the_body(bed: Bed) -> None:
    headers = {"content-type": "application/json", "content-length": str(LIMIT * 100), "expect": "100-continue"}

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    request = bed.client.build_request("POST", PLAIN, content=nothing(), headers=headers)
    reply = await send_head_only(bed, request)
    assert reply.startswith(b"HTTP/1.1 413")


async def send_head_only(bed: Bed, request: httpx.Request) -> bytes:
    import asyncio

    reader, writer = await asyncio.open_connection(bed.client.base_url.host, bed.client.base_url.port)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items() if name != "transfer-encoding")
    writer.write(f"POST {PLAIN} HTTP/1.1\r\n{head}\r\n".encode())
    reply = await reader.readuntil(b"\r\n")
    writer.close()
    await writer.wait_closed()
    return reply


async def test_ten_megabytes_are_refused_and_the_server_is_unharmed() -> None:
    dispatcher = ScriptedDispatcher()
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        bed = Bed(dispatcher, client)
        await bed.check(
            await client.post(PLAIN, json=plain(prompt="x" * 10_000_000)), 413, None, "at most 8388608 are taken"
        )
        await bed.check(
            await client.post(PLAIN, json=plain(prompt=[1] * 2_000_000)), 400, "prompt", "prompt has 2000000 tokens"
        )
        assert (await client.post(PLAIN, json=plain())).status_code == 200
