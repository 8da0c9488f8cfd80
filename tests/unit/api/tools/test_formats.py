"""Grammars of answers that may have calls: text as the model likes it, and no call that breaks a strict tool's schema,
whatever the format."""

import json
import re
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
from drawn_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from pdcluster.api.structured import library
from pdcluster.api.structured.forms import Form, grammar_of
from pdcluster.api.tools.calls import ToolCallDelta
from pdcluster.api.tools.formats import FORMATS
from pdcluster.api.tools.tool_choice import Function, NamedChoice, NamedFunction, Offer, ToolDefinition, offer_of
from pdcluster.core.errors import BadRequest
from pdcluster.engine.sampling.grammar import Vocabulary, tokenizer_of

STRICT = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOSE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "uniqueItems": True}
TOOLS = [
    ToolDefinition(Function("get_weather", parameters=STRICT, strict=True)),
    ToolDefinition(Function("add", parameters=LOOSE)),
]
PIECES = [bytes([code]) for code in range(32, 127)] + [b"\n"] + [
    b"<tool_call>", b"</tool_call>", b"[TOOL_CALLS]", b"[ARGS]", b"<|python_tag|>", b"<think>", b"</think>",
    b'{"name": "', b'"get_weather', b'"parameters', b'"arguments": {', "größe".encode(),
]  # fmt: skip
EOS = len(PIECES)
TOKENIZER = tokenizer_of(Vocabulary([*PIECES, b""], EOS + 1, (EOS,)))


def offer(*, parallel: bool = True, tools: list[ToolDefinition] = TOOLS) -> Offer:
    made = offer_of(tools, "auto", parallel)
    assert made is not None
    return made


COMPILED: dict[tuple[str, bool, bool], LLMatcher] = {}


def compiled(name: str, *, parallel: bool = True, reasons: bool = False) -> LLMatcher:
    key = name, parallel, reasons
    if key not in COMPILED:
        form = FORMATS[name].free_form(offer(parallel=parallel), reasons=reasons)
        COMPILED[key] = made_of(form)
    return COMPILED[key]


def made_of(form: Form) -> LLMatcher:
    matcher = library.matcher_of(TOKENIZER, grammar_of(form, "tools").source)
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.get_grammar_warnings() == []
    return matcher


def tokens_of(text: str) -> list[int]:
    return [PIECES.index(piece) for piece in spelled(text)]


def spelled(text: str) -> list[bytes]:
    """Letter by letter, what is no ASCII as it stands among the pieces."""
    found = re.findall("größe|.", text, re.DOTALL)
    return [each.encode() for each in found]


def takes(grammar: LLMatcher, text: str) -> bool:
    matcher = grammar.deep_copy()
    return matcher.try_consume_tokens(tokens := tokens_of(text)) == len(tokens) and matcher.is_accepting()


def calls_in(name: str, text: str, asked: Offer) -> list[tuple[str, str]]:
    parser = FORMATS[name].parse(asked)
    calls: dict[int, list[str]] = {}
    for part in [*parser.feed(text), *parser.flush()]:
        if isinstance(part, ToolCallDelta):
            calls.setdefault(part.index, [part.name or "", ""])[1] += part.arguments
    return [(called, arguments) for called, arguments in calls.values()]


GOOD, LOOSELY = '{"city": "Rome", "days": 3}', '{"b": [{}], "a": "x"}'
WRITTEN = {
    "hermes": ('<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>', "\n"),
    "llama": ('{"name": "NAME", "parameters": ARGS}', "; "),
    "mistral": ('[TOOL_CALLS][{"name": "NAME", "arguments": ARGS}]', ""),
    "mistral 11": ("[TOOL_CALLS]NAME[CALL_ID]aB3456789[ARGS]ARGUMENTS", ""),
    "mistral 13": ("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", ""),
}


def written(kind: str, called: str, arguments: str) -> str:
    text = WRITTEN[kind][0].replace("NAME", called)
    return text.replace("ARGUMENTS", arguments) if "ARGUMENTS" in text else text.replace("ARGS", arguments)


@pytest.mark.parametrize("kind", WRITTEN)
def test_text_and_calls_as_models_write_them_are_taken_and_no_others(kind: str) -> None:
    grammar, joint = compiled(kind.split()[0]), WRITTEN[kind][1]
    for text in ("", "hello", "größe als 3 < 4 [x] {1}", "<", "<b>", "[TOOL_", "a <tool_", "<|python", "I <think> so"):
        assert takes(grammar, text), text
    good, loose = written(kind, "get_weather", GOOD), written(kind, "add", LOOSELY)
    for text in (good, loose, good + joint + loose):
        assert takes(grammar, text), text
        assert calls_in(kind.split()[0], text, offer()) == [
            pair for pair, part in ((("get_weather", GOOD), good), (("add", LOOSELY), loose)) if part in text
        ]
    for arguments in (
        '{"city": "Paris"}',
        '{"days": 3}',
        '{"city": "Rome", "days": 10}',
        '{"city": "Rome", "x": 1}',
        "{}",
        "[]",
    ):
        assert not takes(grammar, written(kind, "get_weather", arguments)), arguments
    assert not takes(grammar, written(kind, "get_weathers", GOOD)) and not takes(grammar, written(kind, "none", "{}"))


@pytest.mark.parametrize("kind", WRITTEN)
def test_text_goes_before_and_behind_calls_where_a_mark_tells_them_apart(kind: str) -> None:
    good = written(kind, "get_weather", GOOD)
    assert takes(compiled(kind.split()[0]), f"{good} So.") is (kind != "llama")
    assert takes(compiled(kind.split()[0]), f"Let me see. {good}")
    assert len(calls_in(kind.split()[0], f"Let me see. {good}", offer())) == (kind != "llama")


@pytest.mark.parametrize("kind", WRITTEN)
def test_one_call_ends_the_answer_where_there_may_not_be_several(kind: str) -> None:
    grammar, good = compiled(kind.split()[0], parallel=False), written(kind, "get_weather", GOOD)
    assert takes(grammar, good) and not takes(grammar, good + WRITTEN[kind][1] + good)
    if kind == "mistral":
        assert not takes(grammar, good[:-1] + ", " + good[len("[TOOL_CALLS][") :])


def test_an_answer_in_llamas_format_that_begins_like_a_call_is_one() -> None:
    grammar = compiled("llama")
    late = '\n\n\n\n\n{"name": "add", "parameters": {}}'
    for text in ("{", '{"x": 1}', " \n{}", late, "<|python_tag|>", '<|python_tag|>print("hi")', '{ "name": "add"'):
        assert not takes(grammar, text), text
    assert takes(grammar, '\n<|python_tag|>{"name": "add", "parameters": {}}') and takes(grammar, 'say {"x": 1}')


def test_a_text_that_thinks_is_no_text_of_a_model_that_marks_its_thoughts() -> None:
    """Where thoughts are marked the text behind them could be a call."""
    bad = '<think>hm</think>{"name": "get_weather", "parameters": {}}'
    assert takes(compiled("llama"), bad) and not takes(compiled("llama", reasons=True), bad)
    assert takes(compiled("llama", reasons=True), "<thinking> aloud")


def begun(name: str) -> str:
    """How a call begins."""
    return (FORMATS[name].opening + FORMATS[name].begin).replace("{name}", "get_weather")


def drawn(grammar: LLMatcher, seed: int, length: int, begins: str) -> Iterator[str]:
    """Pieces of an answer, marks often among them."""
    matcher, generator, weights = grammar.deep_copy(), np.random.default_rng(seed), np.ones(EOS + 1)
    weights[95:] = 12
    assert matcher.consume_tokens(tokens_of(begins))
    yield begins
    for _ in range(length):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.unpackbits(bits, bitorder="little")[: EOS + 1] * weights
        token = int(generator.choice(EOS + 1, p=allowed / allowed.sum()))
        if token == EOS:
            return
        assert matcher.consume_token(token)
        yield PIECES[token].decode()


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(3, 300), deadline=None)
@given(seed=st.integers(0, 2**32), calls_first=st.booleans())
def test_whatever_is_drawn_calls_are_of_offered_tools_and_strict_ones_keep_their_schema(
    name: str, parallel: bool, reasons: bool, seed: int, calls_first: bool
) -> None:
    asked = offer(parallel=parallel)
    text = "".join(
        drawn(compiled(name, parallel=parallel, reasons=reasons), seed, 300, begun(name) if calls_first else "")
    )
    calls = calls_in(name, text, asked)
    assert parallel or len(calls) <= 1
    for called, arguments in calls:
        try:
            value = json.loads(arguments)
        except ValueError:
            assert text.endswith(arguments), "only the last may be cut off, by its length"
            continue
        jsonschema.validate(value, STRICT if called == "get_weather" else {"type": "object"})


@pytest.mark.parametrize("name", FORMATS)
def test_there_are_calls_in_what_is_drawn(name: str) -> None:
    said = [calls_in(name, "".join(drawn(compiled(name), seed, 300, begun(name))), offer()) for seed in range(3)]
    assert any(called == "get_weather" and arguments.endswith("}") for calls in said for called, arguments in calls)


def test_a_strict_schema_that_can_not_be_kept_is_refused_by_its_tools_name_and_one_that_is_not_strict_is_not() -> None:
    bad = Function(
        "find", parameters={"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}, strict=True
    )
    for name in FORMATS:
        with pytest.raises(BadRequest, match=r"tools\.find\.parameters\.properties\.x uses uniqueItems"):
            FORMATS[name].free_form(offer(tools=[*TOOLS, ToolDefinition(bad)]), reasons=False)


REQUIRED = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ARGS}\n</tool_call>',
    "llama": '{"name": "get_weather", "parameters": ARGS}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": ARGS}]',
}


@pytest.mark.parametrize("name", REQUIRED)
def test_required_calls_are_calls_and_nothing_else(name: str) -> None:
    tools = [TOOLS[0], ToolDefinition(Function("add", parameters={"type": "object"}))]
    made = made_of(FORMATS[name].form(offer(tools=tools)))
    call = REQUIRED[name].replace("ARGS", GOOD)
    assert takes(made, call) and calls_in(name, call, offer()) == [("get_weather", GOOD)]
    for text in ("", "hello", f"so {call}", f"{call} so", REQUIRED[name].replace("ARGS", "{}")):
        assert not takes(made, text), text


def test_an_offer_is_strict_when_a_tool_that_may_be_called_is() -> None:
    assert offer().is_strict and not offer(tools=TOOLS[1:]).is_strict
    named = offer_of(TOOLS, NamedChoice(NamedFunction("add")), None)
    assert named is not None and not named.is_strict
