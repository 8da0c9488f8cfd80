"""Any JSON anywhere in a request of Responses: an answer that keeps the clients' rules, or a 4xx in OpenAI's shape that
names what is wrong; never a 500."""

from __future__ import annotations

from agent_streams import Json, ResponseStream, check_response
from changed_bodies import changed_bodies
from chat_router import Router
from drawn_examples import examples
from hypothesis import given, settings
from scripted_dispatcher import MODEL

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESPONSES: Json = {
    "model": MODEL, "max_output_tokens": 8, "stream": True, "instructions": "You help.", "store": False, "metadata": {"a": "b"},
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be terse."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "42"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}, {"role": "user", "content": "go on"},
    ],
    "tools": [
        {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False, "description": "d"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}},
        {"type": "namespace", "name": "mcp__x", "description": "d", "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}]},
        {"type": "web_search"},
    ],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "high", "summary": "auto"}, "temperature": 0.5,
    "text": {"verbosity": "low", "format": {"type": "text"}}, "include": ["reasoning.encrypted_content"], "top_p": 0.9,
    "prompt_cache_key": "k", "truncation": "disabled", "service_tier": "auto",
}  # fmt: skip


@settings(max_examples=examples(100, 1500))
@given(body=changed_bodies(RESPONSES))
def test_any_value_in_responses_is_answered_or_refused(router: Router, body: Json) -> None:
    told = router.answered("/v1/responses", body)
    if isinstance(told, str):
        assert ResponseStream(told).response["status"] in ("completed", "incomplete")
    elif "object" in told:
        check_response(told, told["status"])
    else:
        assert set(told["error"]) == {"message", "type", "param", "code"} and 10 < len(told["error"]["message"]) < 3000


def test_the_body_that_is_changed_is_answered(router: Router) -> None:
    assert isinstance(router.answered("/v1/responses", RESPONSES), str)
