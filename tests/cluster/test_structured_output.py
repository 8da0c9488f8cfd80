"""Structured output and tools over real processes: what P/D says is what one node alone says, and all of it is of the
asked shape."""

from __future__ import annotations

import ipaddress
import json
import re
import threading
from collections.abc import Iterator

import grpc
import jsonschema
import openai
import pydantic
import pytest
from processes import PATIENT, Up, running

from pdcluster import client as api
from pdcluster.core.errors import BadRequest
from pdcluster.rpc import admin_pb2, admin_pb2_grpc

pytestmark = pytest.mark.timeout(300)

EXACT = ("--set", "node.dtype=float32", "--set", "node.kv.memory_bytes=64MiB", "--set", "router.tool_format=llama")
USER = [{"role": "user", "content": "What is the weather in Rome?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": PERSON}}
    for name in ("get_weather", "find_person")
]


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with running("--prefill", "1", "--decode", "2", *EXACT, *PATIENT) as up:
        yield up


@pytest.fixture(scope="module")
def client(up: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=120.0) as client:
        yield client


def both(client: openai.OpenAI, up: Up, seed: int, **fields: object) -> list[openai.types.chat.ChatCompletion]:
    """The answers of two nodes and of one."""
    extra = fields.pop("extra_body", {})
    asked = {"model": up.model, "messages": USER, "seed": seed, "max_completion_tokens": 300, **fields}
    return [
        client.chat.completions.create(**asked, extra_body={**extra, "pdcluster_mode": mode})
        for mode in ("remote", "local")
    ]


SHAPES = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    },
    "json": {"extra_body": {"structured_outputs": {"json": PERSON}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": r"[a-c]{2}-\d{3}"}}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["sunny", "raining", "it is snowing"]}}},
    "grammar": {"extra_body": {"structured_outputs": {"grammar": 'root ::= "<" [a-z]{1,5} ">"'}}},
}


@pytest.mark.parametrize("kind", SHAPES)
def test_two_nodes_say_what_one_says_and_it_has_the_asked_shape(client: openai.OpenAI, up: Up, kind: str) -> None:
    for seed in range(3):
        remote, local = both(client, up, seed, n=2, **SHAPES[kind])
        texts = [choice.message.content for choice in remote.choices]
        assert texts == [choice.message.content for choice in local.choices]
        assert [choice.finish_reason for choice in remote.choices] == ["stop", "stop"]
        for text in texts:
            if kind.startswith("json"):
                jsonschema.validate(json.loads(text), PERSON)
            elif kind == "choice":
                assert text in ("sunny", "raining", "it is snowing")
            else:
                assert re.fullmatch(r"[a-c]{2}-\d{3}" if kind == "regex" else r"<[a-z]{1,5}>", text)
    up.wait_idle()


def test_a_first_token_from_the_prefill_node_is_constrained_too(client: openai.OpenAI, up: Up) -> None:
    for seed in range(6):
        (remote, local) = both(client, up, seed, temperature=2.0, extra_body={"structured_outputs": {"regex": "[xyz]"}})
        assert (
            remote.choices[0].message.content in ("x", "y", "z")
            and remote.choices[0].message.content == local.choices[0].message.content
        )


def test_json_object_gives_an_object_or_its_beginning(client: openai.OpenAI, up: Up) -> None:
    reply = client.chat.completions.create(
        model=up.model, messages=USER, max_tokens=60, temperature=1.0, seed=4, response_format={"type": "json_object"}
    )
    text = reply.choices[0].message.content
    assert text.lstrip().startswith("{")
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert reply.choices[0].finish_reason == "length"


ODD = {
    "type": "object",
    "properties": {
        'say "it"': {"type": "string", "pattern": '^"[a-z]{1,3}"$'},
        "path": {"type": "string", "pattern": r"^\\\\[a-z]{2}\t$"},
        "id": {"const": 2**53},
        "host": {"type": "string", "format": "ipv4"},
        "again": {"$ref": "#/$defs/a~1b%22"},
    },
    "required": ['say "it"', "path", "id", "host", "again"],
    "additionalProperties": False,
    "$defs": {
        'a/b"': {
            "type": "array",
            "uniqueItems": False,
            "items": {"type": "integer", "multipleOf": 1, "minimum": 2**52},
            "maxItems": 2,
        }
    },
}


def test_what_json_escapes_and_long_numbers_come_as_the_schema_says(client: openai.OpenAI, up: Up) -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "odd", "schema": ODD, "strict": True}}}
    for seed in range(3):
        remote, local = both(client, up, seed, **asked)
        assert (
            remote.choices[0].message.content == local.choices[0].message.content
            and remote.choices[0].finish_reason == "stop"
        )
        value = json.loads(remote.choices[0].message.content)
        jsonschema.validate(value, ODD)
        assert value["id"] == 2**53 and ipaddress.IPv4Address(value["host"])


def test_the_clients_own_parse_takes_a_class(client: openai.OpenAI, up: Up) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=0, le=99)

    parsed = client.chat.completions.parse(
        model=up.model, messages=USER, max_tokens=200, seed=3, response_format=Person
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find_person"}}])
def test_calls_are_forced_parsed_and_the_same_streamed_whole_remote_and_local(
    client: openai.OpenAI, up: Up, choice: object
) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    remote, local = both(client, up, 11, **fields)
    (call,), (other,) = remote.choices[0].message.tool_calls, local.choices[0].message.tool_calls
    assert call.function == other.function
    assert (
        call.function.name in ("get_weather", "find_person")
        if choice == "required"
        else call.function.name == "find_person"
    )
    jsonschema.validate(json.loads(call.function.arguments), PERSON)
    assert remote.choices[0].finish_reason == "tool_calls" and not remote.choices[0].message.content

    stream = client.chat.completions.create(
        model=up.model,
        messages=USER,
        seed=11,
        max_tokens=300,
        stream=True,
        extra_body={"pdcluster_mode": "remote"},
        **fields,
    )
    deltas = [chunk.choices[0] for chunk in stream]
    pieces = [piece for delta in deltas for piece in delta.delta.tool_calls or ()]
    assert pieces[0].id and pieces[0].function.name == call.function.name and all(piece.index == 0 for piece in pieces)
    assert len(pieces) > 2 and all(piece.id is None for piece in pieces[1:])
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    assert deltas[-1].finish_reason == "tool_calls"
    up.wait_idle()


STRICT_TOOLS = [
    {"type": "function", "function": {"name": "find_person", "parameters": PERSON, "strict": True}},
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
]
# The bundled model likes to say {, with which a call begins in this format.
A_CALL = {"93": 40}


def test_a_strict_tool_that_may_be_called_keeps_its_schema_remote_and_local(client: openai.OpenAI, up: Up) -> None:
    for seed in range(3):
        remote, local = both(client, up, seed, tools=STRICT_TOOLS[:1], parallel_tool_calls=False, logit_bias=A_CALL)
        (call,), (other,) = remote.choices[0].message.tool_calls, local.choices[0].message.tool_calls
        assert call.function == other.function and call.function.name == "find_person"
        jsonschema.validate(json.loads(call.function.arguments), PERSON)
        assert (remote.choices[0].finish_reason, remote.choices[0].message.content or "") == ("tool_calls", "")
    up.wait_idle()


def test_a_strict_tool_leaves_text_as_it_is(client: openai.OpenAI, up: Up) -> None:
    plain, strict = (
        client.chat.completions.create(
            model=up.model, messages=USER, seed=3, max_tokens=60, tools=STRICT_TOOLS[:1], tool_choice="none"
        ),
        client.chat.completions.create(model=up.model, messages=USER, seed=3, max_tokens=60, tools=STRICT_TOOLS[:1]),
    )
    assert strict.choices[0].message.content == plain.choices[0].message.content


def test_a_strict_schema_that_does_not_compile_is_a_400_that_names_its_tool(client: openai.OpenAI, up: Up) -> None:
    bad = {
        "type": "function",
        "function": {"name": "misspelt", "strict": True, "parameters": {"properties": {"a": {"type": "strnig"}}}},
    }
    with pytest.raises(openai.BadRequestError, match=r"misspelt.*strnig") as refused:
        client.chat.completions.create(model=up.model, messages=USER, max_tokens=5, tools=[*STRICT_TOOLS, bad])
    assert refused.value.param == "tools.misspelt.parameters"


def test_a_history_with_calls_and_their_results_is_taken(client: openai.OpenAI, up: Up) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"name": "Rome", "age": 1}'},
    }
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    reply = client.chat.completions.create(model=up.model, messages=messages, tools=TOOLS, max_tokens=5)
    assert reply.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"regex": "(abc"}, "unclosed group"),
        ({"grammar": "root ::= missing"}, "not found"),
        ({"json": {"type": "strnig"}}, "strnig"),
        ({"json": {"$ref": "#"}}, "no value that ends"),
        ({"grammar": 'root ::= "a" root'}, "never ends"),
    ],
)
def test_what_does_not_compile_is_a_400_that_says_why(client: openai.OpenAI, up: Up, asked: dict, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        client.chat.completions.create(
            model=up.model, messages=USER, max_tokens=5, extra_body={"structured_outputs": asked}
        )
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(
            model=up.model, messages=USER, max_tokens=5, stream=True, extra_body={"structured_outputs": asked}
        )
    assert refused.value.param.startswith("structured_outputs")
    up.wait_idle()


def test_grpc_and_the_typed_client_ask_the_same(up: Up) -> None:
    with api.Client(up.grpc) as client:
        output = client.complete(
            "Weather: ", max_tokens=40, seed=1, structured_outputs=api.Structured(choice=("sunny", "raining"))
        )
        assert output.texts[0] in ("sunny", "raining")
        output = client.complete("Weather: ", max_tokens=200, seed=1, structured_outputs=api.Structured(json=PERSON))
        jsonschema.validate(json.loads(output.texts[0]), PERSON)
        with pytest.raises(BadRequest, match="unclosed group"):
            client.complete("x", max_tokens=4, structured_outputs=api.Structured(regex="(a"))


LINES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"word": {"type": "string", "pattern": "^[a-z]{3,5}$"}},
        "required": ["word"],
    },
    "minItems": 12,
    "maxItems": 12,
}


def drain_a_decode_node(up: Up) -> None:
    """One that a request decodes on, at once. It takes work again then."""
    with grpc.insecure_channel(up.admin) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        requests = admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=30.0).requests
        node = next(request.decode for request in requests if request.decode)
        list(admin.Drain(admin_pb2.DrainRequest(node=node, deadline_s=0.0), timeout=60.0))
        admin.Cordon(admin_pb2.CordonRequest(node=node, cordoned=False), timeout=60.0)


def test_a_drain_within_three_answers_changes_nothing_of_what_is_said(client: openai.OpenAI, up: Up) -> None:
    asked = {"model": up.model, "messages": USER, "seed": 9, "max_tokens": 600, "temperature": 1.0, "n": 3}
    shape = {"structured_outputs": {"json": LINES}, "pdcluster_mode": "remote"}
    undisturbed = [each.message.content for each in client.chat.completions.create(**asked, extra_body=shape).choices]
    said, drains = ["", "", ""], list[threading.Thread]()
    for number, chunk in enumerate(client.chat.completions.create(**asked, extra_body=shape, stream=True)):
        if number == 30:
            drains.append(threading.Thread(target=drain_a_decode_node, args=(up,)))
            drains[0].start()
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    drains[0].join(60.0)
    assert said == undisturbed
    for text in said:
        jsonschema.validate(json.loads(text), LINES)
    up.wait_nodes(3)


def test_a_killed_decode_node_changes_nothing_of_what_is_said(client: openai.OpenAI, up: Up) -> None:
    """The last of this file: the node is back only after its lease."""
    asked = {"model": up.model, "messages": USER, "seed": 5, "max_tokens": 400, "temperature": 1.0}
    shape = {"structured_outputs": {"regex": "[a-z]{3}(, [a-z]{3}){60}"}, "pdcluster_mode": "remote"}
    undisturbed = client.chat.completions.create(**asked, extra_body=shape).choices[0].message.content
    raw = client.chat.completions.with_raw_response.create(**asked, extra_body=shape, stream=True)
    pieces = []
    for number, chunk in enumerate(raw.parse()):
        if number == 20:
            up.kill(raw.headers["x-pdcluster-decode"])
        pieces.append(chunk.choices[0].delta.content or "")
    assert "".join(pieces) == undisturbed
    assert re.fullmatch("[a-z]{3}(, [a-z]{3}){60}", undisturbed)
