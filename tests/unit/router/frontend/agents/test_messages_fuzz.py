"""Any JSON anywhere in a request of Messages: an answer that keeps the clients' rules, or a 4xx in Anthropic's shape that
names what is wrong; never a 500."""

from __future__ import annotations

from agent_streams import Json, MessageStream, check_message, check_message_error
from changed_bodies import changed_bodies
from chat_router import Router
from drawn_examples import examples
from hypothesis import given, settings
from scripted_dispatcher import MODEL

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HINT = {"cache_control": {"type": "ephemeral"}}
MESSAGES: Json = {
    "model": MODEL, "max_tokens": 8, "stream": True, "stop_sequences": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5,
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "You help.", **HINT}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", **HINT}]}, {"role": "system", "content": "Mind."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "So."}, {"type": "tool_use", "id": "t1", "name": "add", "input": {"city": "a"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}], "is_error": True},
            {"type": "text", "text": "go on"},
        ]},
    ],
    "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA, "strict": False, **HINT}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "thinking": {"type": "adaptive", "display": "summarized"},
    "output_config": {"effort": "high"}, "metadata": {"user_id": "u"}, "context_management": {"edits": [{"type": "clear"}]},
}  # fmt: skip


@settings(max_examples=examples(100, 1500))
@given(body=changed_bodies(MESSAGES))
def test_any_value_in_messages_is_answered_or_refused(router: Router, body: Json) -> None:
    for endpoint in ("/v1/messages", "/v1/messages/count_tokens"):
        told = router.answered(endpoint, body)
        if isinstance(told, str):
            assert MessageStream(told).error is None
        elif told.get("type") == "error":
            check_message_error(told)
            assert len(told["error"]["message"]) < 3000
        elif endpoint.endswith("count_tokens"):
            assert told["input_tokens"] > 0
        else:
            check_message(told)


def test_the_body_that_is_changed_is_answered(router: Router) -> None:
    assert isinstance(router.answered("/v1/messages", MESSAGES), str)
