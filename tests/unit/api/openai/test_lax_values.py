"""Values of other kinds are read as pydantic's lax mode reads them, and nothing else of a request changes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pydantic import TypeAdapter, ValidationError

from pdcluster.api import validate
from pdcluster.api.openai import requests
from pdcluster.api.tools.tool_choice import offer_of
from pdcluster.core.errors import BadRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
VALUES: list[Any] = [
    "5", "5.0", " 5 ", "+5", "1_000", "5_", "_5", "5e0", "0x5", "", " ", "true", "True", " true", "t", "yes", "on",
    "1", "0", "off", "null", "none", "nan", "inf", "-3", "1.5", "\u0665", "5.00", "5.", "5.01", ".5", "1.0e1", "9" * 30,
    "9" * 300, True, False, 0, 1, 2, -1, 0.0, 1.0, 5.0, 5.5, [], {}, ["5"],
]  # fmt: skip
# A field of each kind that takes any value of it within bounds, and what pydantic calls it.
FIELDS: dict[str, Any] = {"seed": int, "presence_penalty": float, "ignore_eos": bool}


def decoded(**fields: object) -> requests.ChatRequest:
    return requests.decode_chat(json.dumps({**CHAT, **fields}).encode())


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_a_scalar_is_what_pydantic_reads(name: str, value: object) -> None:
    try:
        wanted = TypeAdapter(FIELDS[name]).validate_python(value)
        is_taken = wanted == wanted and (name != "seed" or abs(wanted) < 2**63)
        is_taken = is_taken and (name != "presence_penalty" or abs(wanted) <= 2)
    except ValidationError:
        is_taken = False
    if not is_taken:
        with pytest.raises(BadRequest, match=name):
            decoded(**{name: value})
        return
    found = getattr(decoded(**{name: value}), name)
    assert found == wanted and type(found) is type(wanted)


def test_a_request_of_text_alone_is_read() -> None:
    request = decoded(
        stream="true", max_tokens="5", temperature="0", n="1", logprobs="True", top_logprobs="2.0", priority="-1",
        stop_token_ids=["7", 8, 9.0], logit_bias={"5": "1.5", "6": 2}, stream_options={"include_usage": "1"},
        tools=[{"type": "function", "function": {"name": "f", "strict": "false", "parameters": {"const": "5"}}}],
    )  # fmt: skip
    assert (request.stream, request.max_tokens, request.temperature, request.logprobs) == (True, 5, 0.0, True)
    assert (request.stop_token_ids, request.logit_bias) == ([7, 8, 9], {"5": 1.5, "6": 2.0})
    assert request.stream_options is not None and request.stream_options.include_usage is True
    assert request.tools is not None and request.tools[0].function.strict is False
    assert request.tools[0].function.parameters == {"const": "5"}, "what is only shown stays"


def test_text_stays_text_where_text_is_taken() -> None:
    fields = {"stop": "5", "user": "5", "tool_choice": "none", "cache_salt": "true", "max_tokens": "5"}
    request = decoded(**fields)
    assert (request.stop, request.user, request.tool_choice, request.cache_salt) == ("5", "5", "none", "true")
    plain = requests.decode_completion(b'{"model": "m", "prompt": ["5", "6"], "echo": "no", "logprobs": true}')
    assert (plain.prompt, plain.echo, plain.logprobs) == (["5", "6"], False, 1)
    body = b'{"tokens": ["5", 6], "skip_special_tokens": "false"}'
    assert requests.decode_detokenize(body).tokens == [5, 6]


def test_long_prompts_of_token_ids_are_read_beside_them() -> None:
    body = {"model": "m", "prompt": list(range(20_000)), "stream": "true"}
    request = requests.decode_completion(json.dumps(body).encode())
    assert (request.prompt, request.stream) == (list(range(20_000)), True)


@pytest.mark.parametrize("value", [None, {}, [], "", False])
def test_known_extensions_that_ask_for_nothing_pass(value: object) -> None:
    for name in requests.EXTENSIONS:
        assert decoded(**{name: value, "max_tokens": 5}).max_tokens == 5
        prompt = {"model": "m", "prompt": "x", name: value}
        assert requests.decode_completion(json.dumps(prompt).encode()).prompt == "x"


@pytest.mark.parametrize(
    ("name", "value"), [("guided_json", {"type": "object"}), ("thinking", {"type": "enabled"}), ("unheard", None)]
)
def test_what_asks_for_something_or_is_unknown_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"unknown field {name}"):
        decoded(**{name: value, "vllm_xargs": None})


def test_cache_control_of_a_tool_passes_and_is_not_shown() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    request = decoded(tools=[{"type": "function", "function": {"name": "f", **hint}, **hint}])
    offer = offer_of(request.tools, None, None)
    assert offer is not None and offer.for_template() == [{"type": "function", "function": {"name": "f"}}]


class Nested(msgspec.Struct):
    size: int | None = None
    inside: list[Nested] | None = None


NESTED = msgspec.json.Decoder(Nested)


def test_a_struct_that_has_itself_inside_is_read_to_its_depth() -> None:
    body = json.dumps({"size": "1", "inside": [{"size": "2", "inside": [{"size": "3"}]}]}).encode()
    assert validate.decode(body, NESTED, {"": Nested}) == Nested(1, [Nested(2, [Nested(3)])])


@pytest.mark.parametrize("depth", [300, 900, 5000])
def test_a_struct_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    body = b'{"inside":[' * depth + b'{"size":"many"}' + b"]}" * depth
    with pytest.raises(BadRequest):
        validate.decode(body, NESTED, {"": Nested})
