"""Tools and thoughts over gRPC: by the typed client, and by a client that is made from the .proto alone."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grammar_walk import Walkable, begins, walkable
from scripted_dispatcher import SPEAKING, SpeakingDispatcher, says
from scripted_grpc import protoc, served_grpc

from pdcluster import client as api
from pdcluster.api.openai.requests import ChatRequest
from pdcluster.core.errors import BadRequest
from pdcluster.rpc import inference
from pdcluster.rpc import inference_pb2 as pb
from pdcluster.rpc.inference import request_from_proto

ROOT = Path(__file__).parents[4]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, ADD = (
    api.Tool("get_weather", "what it is like", PARAMETERS),
    api.Tool("add", parameters=json.dumps(PARAMETERS), strict=True),
)
USER = [api.Message("user", "weather?")]
SAID = (
    "<think>\nhm hm\n</think>\n\nWell.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>{"name": "add", '
    '"arguments": {}}</tool_call>'
)


@pytest.fixture
def dispatcher() -> SpeakingDispatcher:
    dispatcher = SpeakingDispatcher(max_len=4096)
    dispatcher.script = lambda _: says(SAID)
    return dispatcher


@pytest.fixture
async def client(dispatcher: SpeakingDispatcher) -> AsyncIterator[api.AsyncClient]:
    async with served_grpc(dispatcher) as address, api.AsyncClient(address) as client:
        yield client


def prompt_of(dispatcher: SpeakingDispatcher) -> str:
    return SPEAKING.decode(dispatcher.started[-1].token_ids, skip_special_tokens=False)


async def test_calls_and_thoughts_stream_apart_from_the_text(
    client: api.AsyncClient, dispatcher: SpeakingDispatcher
) -> None:
    outputs = [output async for output in client.generate(USER, tools=[WEATHER, ADD], max_tokens=900)]
    assert (
        "".join(output.text for output in outputs) == "Well."
        and "".join(output.reasoning for output in outputs) == "hm hm"
    )
    deltas = [delta for output in outputs for delta in output.tool_calls]
    assert [(delta.index, delta.name) for delta in deltas if delta.id] == [(0, "get_weather"), (1, "add")]
    assert "".join(delta.arguments for delta in deltas if delta.index == 0) == '{"city": "Rome"}'
    assert len([delta for delta in deltas if delta.index == 0]) > 3, "not kept until the end"
    assert outputs[-1].finish_reason == "tool_calls"
    assert "what it is like" in prompt_of(dispatcher) and "strict" not in prompt_of(dispatcher)


async def test_a_whole_answer_has_its_calls_put_together_for_each_choice(
    client: api.AsyncClient, dispatcher: SpeakingDispatcher
) -> None:
    dispatcher.script = lambda generation: says(SAID if generation.sampling.choice else "plain")
    whole = await client.complete(USER, tools=[WEATHER, ADD], n=2, max_tokens=900)
    assert (whole.texts, whole.reasonings, whole.finish_reasons) == (
        ("plain", "Well."),
        ("", "hm hm"),
        ("stop", "tool_calls"),
    )
    assert whole.tool_calls[0] == () and [(call.name, call.arguments) for call in whole.tool_calls[1]] == [
        ("get_weather", '{"city": "Rome"}'),
        ("add", "{}"),
    ]
    assert len({call.id for call in whole.tool_calls[1]}) == 2


async def test_choices_of_tools_mean_what_they_mean_over_http(
    client: api.AsyncClient, dispatcher: SpeakingDispatcher
) -> None:
    async def form_of(**options: object) -> Walkable | None:
        await client.complete(USER, tools=[WEATHER, ADD], **options)  # type: ignore[arg-type]
        grammar = dispatcher.started[-1].sampling.grammar
        return None if grammar is None else walkable(grammar.source)

    free, forced, named = (
        await form_of(),
        await form_of(tool_choice="required", parallel_tool_calls=False),
        await form_of(tool_choice=WEATHER),
    )
    calls = [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("get_weather", "add")]
    assert free is not None and forced is not None and named is not None
    assert begins(free, "text") and not begins(forced, "text")
    assert [begins(forced, call) for call in calls] == [True, True]
    assert [begins(named, call) for call in calls] == [True, False]
    assert await form_of(tool_choice="none") is None and "get_weather" not in prompt_of(dispatcher)


async def test_a_history_of_calls_thoughts_and_results_is_shown_to_the_template(
    client: api.AsyncClient, dispatcher: SpeakingDispatcher
) -> None:
    called = api.Message("assistant", tool_calls=[api.ToolCall("c1", "add", '{"a": 1}')], reasoning="hm")
    turns = [*USER, called, api.Message("tool", "2", tool_call_id="c1")]
    await client.complete(turns, tools=[WEATHER], template_kwargs={"open": True})
    prompt = prompt_of(dispatcher)
    assert (
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in prompt
        and "tool\n2" in prompt
        and prompt.endswith("<think>\n")
    )


def test_an_assistant_that_only_called_has_an_empty_text_and_not_none() -> None:
    """Templates that know no tools take the content of every message for text."""
    said = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c", name="f", arguments="{}")])
    request = request_from_proto(pb.GenerateRequest(chat=pb.Chat(messages=[said])), "m")
    assert isinstance(request, ChatRequest) and request.messages[0].content == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [api.Tool("f", parameters="{no")]}, r"chat\.tools\[0\]\.parameters is text, but no JSON"),
        ({"tools": [api.Tool("f", parameters="[]")]}, r"tools\[0\]\.function\.parameters"),
        ({"tools": [api.Tool("two words")]}, "a name has 1 to 128 letters"),
        (
            {"tools": [api.Tool("f", parameters={"not": {"required": ["a"]}}, strict=True)]},
            r"tools\.f\.parameters uses not",
        ),
        ({"tools": [WEATHER], "tool_choice": ADD}, "not among the tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": "perhaps"}, "must be a Tool or one of"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "structured_outputs": api.Structured(json_object=True)},
            "contradict",
        ),
        ({"template_kwargs": {"messages": 1}}, "may not set messages"),
    ],
)
async def test_a_bad_chat_says_what_to_change(
    client: api.AsyncClient, dispatcher: SpeakingDispatcher, options: dict, words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        await client.complete(USER, **options)
    assert dispatcher.started == []


# Too many levels for any Python. From 3.12 on C code counts apart, and allows more.
DEEP: dict[str, object] = {}
for _ in range(100_000):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools has a dict; it takes pdcluster.client.Tool",
        ),
        ({"tools": [api.Tool("f", parameters=DEEP)]}, "cannot be sent"),
        ({"template_kwargs": DEEP}, "cannot be sent"),
    ],
)
async def test_what_the_client_cannot_send_is_told_as_what_the_server_does_not_take(
    client: api.AsyncClient, options: dict, words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        await client.complete(USER, **options)


async def test_tools_without_a_chat_are_refused(client: api.AsyncClient) -> None:
    with pytest.raises(BadRequest, match="tools is for a chat"):
        await client.complete("hi", tools=[WEATHER])


ONE = pb.ChatMessage(role="user", content="hi")


@pytest.mark.parametrize(
    "text", ['{"a": "\\ud800"}', '{"\\ud800x": 1}', '{"a": NaN}', '{"a": 1e999}', '{"a": [' + "[]," * 200_000 + "[]]}"]
)
@pytest.mark.parametrize("field", ["parameters", "template_kwargs"])
def test_json_in_a_chat_is_taken_where_a_json_body_would_be(field: str, text: str) -> None:
    """Half a surrogate pair was an internal error, a number that is none went to the template, and 8 MiB of lists took
    seconds."""
    chat = (
        pb.Chat(messages=[ONE], template_kwargs=text)
        if field == "template_kwargs"
        else pb.Chat(messages=[ONE], tools=[pb.Tool(parameters=text)])
    )
    with pytest.raises(
        BadRequest, match=r"^chat\.(tools|template_kwargs).*(no character|no JSON|at most 200000 are taken)"
    ):
        request_from_proto(pb.GenerateRequest(chat=chat), "m")


def test_what_is_small_on_its_way_and_large_in_memory_is_counted_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four million tools without a name fit into a message, and took half a minute and two gigabytes before it was said
    that 128 are allowed."""
    small = json.dumps({"a": [[]] * 30_000})
    many: list[tuple[pb.Chat, str]] = [
        (pb.Chat(messages=[ONE], tools=[pb.Tool()] * 513), "chat.tools has 513 entries, at most 512"),
        (pb.Chat(messages=[ONE], tools=[pb.Tool(parameters=small)] * 10), "chat.tools has .* lists and objects"),
        (pb.Chat(messages=[ONE] * 25_001), "25001 messages and calls, at most 25000"),
        (
            pb.Chat(messages=[pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * 25_000)]),
            "25001 messages and calls",
        ),
    ]
    monkeypatch.setattr(inference, "_tool_fields", None)
    monkeypatch.setattr(inference, "_message_fields", None)
    for chat, words in many:
        with pytest.raises(BadRequest, match=words):
            request_from_proto(pb.GenerateRequest(chat=chat), "m")


def test_biases_are_counted_before_they_are_unpacked() -> None:
    request = pb.GenerateRequest(text="hi", logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(BadRequest, match="logit_bias has 1025 entries; at most"):
        request_from_proto(request, "m")


def test_a_mode_of_tools_that_is_not_known_is_no_other_one() -> None:
    chat = pb.Chat(messages=[ONE], tools=[pb.Tool(name="f")], tool_choice=pb.ToolChoice(mode=9))  # type: ignore[arg-type]
    with pytest.raises(
        BadRequest, match="mode is 9; it must be one of TOOL_MODE_AUTO, TOOL_MODE_NONE, TOOL_MODE_REQUIRED"
    ):
        request_from_proto(pb.GenerateRequest(chat=chat), "m")
    chat.tool_choice.mode = pb.TOOL_MODE_UNSPECIFIED
    request = request_from_proto(pb.GenerateRequest(chat=chat), "m")
    assert isinstance(request, ChatRequest) and request.tool_choice is None


SCRIPT = """
import sys, grpc
import elsewhere_pb2 as pb, elsewhere_pb2_grpc as stubs
tool = pb.Tool(name="get_weather", parameters='{"type": "object"}', strict=True)
asked = pb.ToolChoice(mode=pb.TOOL_MODE_AUTO)
chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="weather?")], tools=[tool, pb.Tool(name="add")], tool_choice=asked)
with grpc.insecure_channel(sys.argv[1]) as channel:
    replies = list(stubs.InferenceStub(channel).Generate(pb.GenerateRequest(chat=chat, max_tokens=900)))
deltas = [delta for reply in replies for delta in reply.tool_calls]
print([delta.name for delta in deltas if delta.id], "".join(delta.arguments for delta in deltas if delta.index == 0))
print("".join(reply.reasoning for reply in replies), "".join(reply.text for reply in replies))
print(pb.FinishReason.Name(replies[-1].finish_reason))
"""


def test_a_client_made_from_the_proto_alone_calls_tools(dispatcher: SpeakingDispatcher, tmp_path: Path) -> None:
    source = tmp_path / "src" / "elsewhere.proto"
    source.parent.mkdir()
    source.write_text((ROOT / "proto/pdcluster/rpc/inference.proto").read_text())
    protoc(f"-I{source.parent}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", str(source))

    async def ask() -> list[str]:
        async with served_grpc(dispatcher) as address:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                SCRIPT,
                address,
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                env={"PYTHONPATH": str(tmp_path)},
            )
            out, _ = await asyncio.wait_for(process.communicate(), 30)
            return out.decode().splitlines()

    assert asyncio.run(ask()) == [
        "['get_weather', 'add'] {\"city\": \"Rome\"}",
        "hm hm Well.",
        "FINISH_REASON_TOOL_CALLS",
    ]
