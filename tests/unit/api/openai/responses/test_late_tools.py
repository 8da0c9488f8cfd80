"""Tools that items of a history bring, and names that meet."""

from __future__ import annotations

import json

import pytest

from pdcluster.api.openai.responses.requests import decode_responses
from pdcluster.api.openai.responses.tools import Toolbox, digest_name
from pdcluster.core.errors import BadRequest

A, B = {"type": "function", "name": "a"}, {"type": "function", "name": "b"}


def test_a_tool_that_comes_again_is_offered_once() -> None:
    toolbox = Toolbox([A], None, [A, B, B])
    assert [tool.function.name for tool in toolbox.definitions] == ["a", "b"]
    with pytest.raises(BadRequest, match="names must differ"):
        Toolbox([A, A])


def test_names_that_meet_are_refused() -> None:
    digest = {"type": "function", "name": digest_name("f", "ns")}
    namespace = {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}]}
    with pytest.raises(BadRequest, match="rename one"):
        Toolbox([{"type": "function", "name": "ns__f"}, digest, namespace])


def test_a_tool_that_comes_later_is_shown_where_it_came() -> None:
    namespace = {
        "type": "namespace",
        "name": "ns",
        "tools": [{"type": "function", "name": "f", "description": "does f"}],
    }
    history = [
        {"role": "developer", "content": "Code."},
        {"role": "user", "content": "q"},
        {"type": "tool_search_call", "id": "t", "arguments": {}},
        {"type": "tool_search_output", "tools": [A, namespace]},
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "ns", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    chat = decode_responses(json.dumps({"model": "m", "input": history, "tools": [A]}).encode()).chat
    assert [message.role for message in chat.messages] == ["developer", "user", "developer", "assistant", "tool"]
    assert '"does f"' in str(chat.messages[2].content) and '"ns__f"' in str(chat.messages[2].content)
    assert '"a"' not in str(chat.messages[2].content), "it was offered before"
    assert chat.tools is not None
    assert [(tool.function.name, bool(tool.defer_loading)) for tool in chat.tools] == [("a", False), ("ns__f", True)]
