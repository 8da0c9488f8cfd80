"""What a request may ask of the shape of its output, and the one grammar that it becomes."""

import json

import msgspec
import pytest
from drawn_examples import examples
from grammar_walk import allows, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.api.openai.answer_shape import AnswerShape, encoded, grammar_of_shape
from pdcluster.api.structured.constraints import ResponseFormat, StructuredOutputs, asks, form_of
from pdcluster.api.structured.forms import MAX_OWN, any_object, choice_form, json_form, literal, own_form, regex_form
from pdcluster.api.structured.json_schema import KNOWN
from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import MAX_CHARS, MAX_DEPTH, depth_of


class Asked(msgspec.Struct):
    """Implements constraints.Asking."""

    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


def form(**asked: object):
    made = form_of(None, StructuredOutputs(**asked))  # type: ignore[arg-type]
    assert made is not None
    return made


def grammar_of(**asked: object):
    return grammar_of_shape(AnswerShape("structured_outputs", None, StructuredOutputs(**asked)))  # type: ignore[arg-type]


def test_nothing_and_text_ask_for_nothing():
    assert not asks(Asked()) and not asks(Asked(response_format=ResponseFormat("text")))
    assert asks(Asked(response_format=ResponseFormat("json_object")))


def test_each_field_becomes_its_form():
    schema = {"type": "integer"}
    assert form(json=schema) == form(json=json.dumps(schema)) == json_form(schema, "schema")
    assert form(json_object=True) == any_object() == json_form({"type": "object"}, "schema")
    assert form(regex="a+") == regex_form("a+", "regex")
    assert form(grammar='root ::= "a"') == own_form('root ::= "a"', "grammar")
    assert (
        form(choice=["a", "b", "a"]) == choice_form(["a", "b"], "choice")
        and literal("a").body in form(choice=["a", "b"]).body
    )
    assert form(json=True) == json_form({}, "schema")


def test_a_choice_is_one_of_its_texts_whatever_is_in_them():
    texts = ["a", "ab", 'quo"te', "back\\slash", "new\nline", "\x01", "größe 😀", "/x/"]
    grammar = compiled(form(choice=texts))
    assert all(allows(grammar, text) for text in texts) and not allows(grammar, "b")


@pytest.mark.parametrize(
    "asked", [{"json": '{"const": "\\ud800"}'}, {"choice": ["\ud800"]}, {"regex": "\ud800"}], ids=repr
)
def test_half_a_surrogate_pair_is_refused(asked):
    with pytest.raises(BadRequest, match="surrogate"):
        encoded(AnswerShape("structured_outputs", None, StructuredOutputs(**asked)))
        grammar_of(**asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"regex": "a|" * MAX_OWN}, "at most 65536"),
        ({"grammar": "#" * (MAX_OWN + 1)}, "at most 65536"),
        ({"json": {"enum": ["x" * 300_000]}}, "at most 262144"),
        ({"regex": "(" * 65 + ")" * 65}, "more than 64 levels"),
        ({"choice": ["a"] * 1025}, "at most 1024"),
        ({"choice": [""]}, "none of them empty"),
        ({"regex": ""}, "is empty"),
        ({"grammar": ""}, "is empty"),
    ],
)
def test_what_is_too_much_or_nothing_is_refused_before_it_is_read(asked, words):
    with pytest.raises(BadRequest, match=words):
        form(**asked)


def test_a_shape_is_bounded_as_it_is_sent():
    with pytest.raises(BadRequest, match=r"structured_outputs has .* at most 1048576"):
        encoded(AnswerShape("structured_outputs", None, StructuredOutputs(regex="a" * (2 << 20))))
    with pytest.raises(BadRequest, match=r"beyond 2\^64"):
        encoded(AnswerShape("structured_outputs", None, StructuredOutputs(json={"const": 10**30})))


def test_a_schema_that_came_as_text_is_taken_where_a_body_would_be():
    lists = '{"enum": [' + "[]," * 200_000 + "[]]}"
    for text, words in [('{"const": NaN}', "no JSON"), ('{"const": 1e999}', "out of range"), (lists, "at most 200000")]:
        with pytest.raises(BadRequest, match=rf"structured_outputs\.json .*{words}"):
            form(json=text)


KEYWORDS = [*sorted(KNOWN), "$defs", "x"]
WORDS = ["#", "#/x", "object", "array", "string", "date"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=examples(200, 5000), deadline=None)
def test_any_value_is_a_bounded_grammar_or_a_bad_request(value):
    try:
        grammar = grammar_of(json=value)
    except BadRequest:
        return
    assert len(grammar.source) <= MAX_CHARS and depth_of(grammar.source) <= MAX_DEPTH
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grammar), type=type(grammar)) == grammar


@pytest.mark.parametrize(("source", "depth"), [("", 0), ("([{", 3), ("()()", 1), (")))(", 1), ("[([])]", 3)])
def test_depth_is_of_brackets_open_at_a_time(source, depth):
    assert depth_of(source) == depth
