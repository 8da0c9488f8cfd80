"""Any JSON in any field, any bytes as a body: an answer or a 4xx in OpenAI's shape, never a 500. Straight through a
connection, without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from embedding_nodes import EMBEDS, EmbeddingNodes
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_dispatcher import MODEL, ScriptedDispatcher

from pdcluster.api.openai.embeddings import EmbeddingRequest
from pdcluster.api.openai.requests import ChatRequest, CompletionRequest
from pdcluster.api.openai.responses.requests import ResponsesRequest
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.server import router_metrics
from pdcluster_router.http.connection import Connection, ConnectionLimits, Connections

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters(exclude_categories=()),
    max_size=12)
    | st.sampled_from([0, 1, -1, "text", "auto", "none", 2**31, 2**63, 2**64, -(2**63), 1e308])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
INPUT: dict[str, Any] = {"model": EMBEDS.id, "input": ["hi", "there"]}
PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


ASKED: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 4}
ITEM_KINDS = (
    "message", "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output", "reasoning",
    "item_reference", "additional_tools", "configuration_update", "web_search_call", "input_text", "output_text",
    "refusal", "function", "custom", "namespace", "allowed_tools", "grammar",
)  # fmt: skip
ITEM_FIELDS = (
    "type", "role", "content", "id", "call_id", "name", "namespace", "arguments", "input", "output", "summary",
    "encrypted_content", "text", "tools", "description", "parameters", "strict", "format", "mode",
)  # fmt: skip
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"


class Wire:
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed.set()

    def is_closing(self) -> bool:
        return self.closed.is_set()


async def call(path: str, body: bytes) -> tuple[int, bytes]:
    dispatcher = EmbeddingNodes("e0").dispatch if path == EMBEDDINGS else ScriptedDispatcher()
    app = create_app(dispatcher, HttpSettings(), router_metrics())
    connection, wire = Connection(app, ConnectionLimits(1 << 20), Connections()), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    request = (
        f"POST {path} HTTP/1.1\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "
        f"{len(body)}\r\n\r\n"
    )
    connection.data_received(request.encode() + body)
    await wire.closed.wait()
    head, _, reply = wire.written.partition(b"\r\n\r\n")
    return int(head.split()[1]), reply


def check(path: str, body: bytes) -> None:
    status, reply = asyncio.run(call(path, body))
    assert status == 200 or 400 <= status < 500, reply
    if status != 200:
        error = json.loads(reply)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) > 10


@given(st.sampled_from(ChatRequest.__struct_fields__), VALUES)
@settings(max_examples=250, deadline=None)
def test_any_value_in_any_chat_field_is_answered_or_refused(name: str, value: object) -> None:
    check("/v1/chat/completions", json.dumps(CHAT | {name: value}).encode())


@given(st.sampled_from(EmbeddingRequest.__struct_fields__), VALUES)
@settings(max_examples=250, deadline=None)
def test_any_value_in_any_field_of_embeddings_is_answered_or_refused(name: str, value: object) -> None:
    check(EMBEDDINGS, json.dumps(INPUT | {name: value}).encode())


@given(st.sampled_from(CompletionRequest.__struct_fields__), VALUES)
@settings(max_examples=250, deadline=None)
def test_any_value_in_any_completion_field_is_answered_or_refused(name: str, value: object) -> None:
    check("/v1/completions", json.dumps(PLAIN | {name: value}).encode())


@given(
    st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "audio"]),
    VALUES,
)
@settings(max_examples=150, deadline=None)
def test_any_value_in_any_message_field_is_answered_or_refused(name: str, value: object) -> None:
    check(
        "/v1/chat/completions",
        json.dumps(CHAT | {"messages": [{"role": "user", "content": "hi", name: value}]}).encode(),
    )


@given(st.sampled_from(ResponsesRequest.__struct_fields__), VALUES)
@settings(max_examples=250, deadline=None)
def test_any_value_in_any_field_of_responses_is_answered_or_refused(name: str, value: object) -> None:
    check(RESPONSES, json.dumps(ASKED | {name: value}).encode())


@given(
    st.sampled_from(("input", "tools")),
    st.sampled_from(ITEM_KINDS),
    st.sampled_from(ITEM_FIELDS),
    VALUES,
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_any_value_in_any_item_or_tool_is_answered_or_refused(
    of: str, kind: str, name: str, value: object, is_inner: bool
) -> None:
    item = {"type": kind, "role": "user", "name": "f", "call_id": "c", "content": "x", "output": "x", name: value}
    given = {**item, "content": [item], "output": [item], "summary": [item], "tools": [item]} if is_inner else item
    check(RESPONSES, json.dumps(ASKED | {of: [given], "tool_choice": {"type": kind, name: value}}).encode())


@given(
    st.sampled_from(["/v1/chat/completions", RESPONSES, "/v1/completions", "/tokenize", "/detokenize"]),
    st.binary(max_size=40),
)
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_refused(path: str, body: bytes) -> None:
    check(path, body)


@given(
    st.sampled_from(["/v1/chat/completions", "/v1/completions"]), st.integers(0, 90), st.binary(min_size=1, max_size=3)
)
@settings(max_examples=150, deadline=None)
def test_a_right_body_with_a_few_wrong_bytes_is_answered_or_refused(path: str, at: int, noise: bytes) -> None:
    body = json.dumps(CHAT if "chat" in path else PLAIN).encode()
    check(path, body[:at] + noise + body[at + len(noise) :])
