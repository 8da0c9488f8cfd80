"""What a request may ask of the shape of its output, and the one form that it becomes."""

import json

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.api.structured.constraints import (
    ResponseFormat,
    StructuredOutputs,
    any_object,
    asked_of,
    form_of,
    json_form,
)
from pdcluster.api.structured.json_grammar.schema import CONSTRAINTS, NOT_ENFORCED
from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import MAX_CHARS, MAX_DEPTH, depth_of


class Asked(msgspec.Struct):
    """Implements structured.Asking."""

    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


def form(**asked: object) -> dict:
    made = form_of(None, StructuredOutputs(**asked))  # type: ignore[arg-type]
    assert made is not None
    return made


def test_nothing_and_text_ask_for_nothing():
    assert asked_of(Asked()) is None and asked_of(Asked(response_format=ResponseFormat("text"))) is None


def test_each_field_becomes_its_form():
    schema = {"type": "integer"}
    assert form(json=schema) == form(json=json.dumps(schema)) == json_form(schema, "schema")
    assert form(json_object=True) == any_object() == json_form({"type": "object"}, "schema")
    assert form(regex="a+") == {"type": "grammar", "grammar": "root ::= [a]+\n"}
    assert form(grammar='root ::= "a"') == {"type": "grammar", "grammar": 'root ::= "a"'}
    assert form(choice=["a", "b", "a"])["elements"] == [{"type": "const_string", "value": value} for value in "ab"]
    assert form(json=True) == json_form({}, "schema")


@pytest.mark.parametrize("number", [2**64 - 1, 2**64, -(2**63) - 1, 10**30])
def test_a_number_of_a_schema_goes_to_the_node_as_it_came(number):
    """However it came: as a value, or as text."""
    for schema in ({"const": number}, json.dumps({"enum": [number]}), {"type": "array", "items": {"const": number}}):
        assert f'"{number}"' in form(json=schema)["grammar"]


def test_half_a_surrogate_pair_in_a_schema_that_came_as_text_is_refused():
    with pytest.raises(BadRequest, match="surrogate"):
        asked_of(Asked(structured_outputs=StructuredOutputs(json='{"const": "\\ud800"}')))


def test_a_schema_that_came_as_text_is_taken_where_a_body_would_be():
    lists = '{"enum": [' + "[]," * 200_000 + "[]]}"
    for text, words in [('{"const": NaN}', "no JSON"), ('{"const": 1e999}', "out of range"), (lists, "at most 200000")]:
        with pytest.raises(BadRequest, match=rf"structured_outputs\.json .*{words}"):
            form(json=text)


KEYWORDS = [*CONSTRAINTS, *NOT_ENFORCED, "$defs", "x"]
WORDS = ["#", "#/x", "object", "array", "string", "date"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=examples(200, 5000), deadline=None)
def test_any_value_is_a_bounded_grammar_or_a_bad_request(value):
    asked = StructuredOutputs(json=value)
    try:
        grammar = asked_of(Asked(structured_outputs=asked))
    except BadRequest:
        return
    assert grammar is not None and len(grammar.source) <= MAX_CHARS and depth_of(grammar.source) <= MAX_DEPTH
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grammar), type=type(grammar)) == grammar


@pytest.mark.parametrize(("source", "depth"), [("", 0), ("([{", 3), ("()()", 1), (")))(", 1), ("[([])]", 3)])
def test_depth_is_of_brackets_open_at_a_time(source, depth):
    assert depth_of(source) == depth
