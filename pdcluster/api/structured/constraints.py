"""`response_format` and `structured_outputs` of a request: shapes, checks, and the grammar they mean. The node's
compiler checks a client's own grammar.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import Any, Literal, Protocol, cast

import msgspec
from msgspec import Struct

from pdcluster.api.body_bound import check_bulk
from pdcluster.api.structured.json_grammar.schema import grammar_of_schema
from pdcluster.api.structured.patterns import ebnf, regex
from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import MAX_CHARS, MAX_DEPTH, Grammar, depth_of

Form = dict[str, Any]

MAX_CHOICES = 1024
# Size limit of schemas whose grammars are cached.
KEPT_CHARS = 8 << 10


class Asking(Protocol):
    """The fields of a request that are read here."""

    ignore_eos: bool | None
    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None


class JsonSchema(Struct, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: object = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """Exactly one of them is set; vLLM's names."""

    json: object = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def grammar_of(form: dict[str, Any], param: str) -> Grammar:
    """Raises BadRequest naming param for what is too large or too deep."""
    try:
        source = json.dumps(form, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise BadRequest(f"{param} is nested too deeply; at most {MAX_DEPTH} levels are allowed", param) from error
    if not source.isascii() and not _is_text(source):
        raise BadRequest(
            f"{param} has half a surrogate pair (such as \\ud800 alone), which is no character; send whole characters",
            param,
        )
    _check_size("makes a grammar of", source, param)
    if depth_of(source) > MAX_DEPTH:
        raise BadRequest(
            f"{param} is nested {depth_of(source)} levels deep, at most {MAX_DEPTH} are allowed; send a flatter one",
            param,
        )
    return Grammar(source)


def _check_size(what: str, source: str, param: str) -> None:
    if len(source) > MAX_CHARS:
        raise BadRequest(
            f"{param} {what} {len(source)} characters, at most {MAX_CHARS} are allowed; send a smaller one", param
        )


def _is_text(source: str) -> bool:
    """Whether it can be sent: JSON within JSON may hold half a surrogate pair."""
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def asked_of(request: Asking) -> Grammar | None:
    """The constraint of a request; None for any text."""
    if request.response_format is None and request.structured_outputs is None:
        return None
    form = form_of(request.response_format, request.structured_outputs)
    if form is None:
        return None
    check_end(request)
    return grammar_of(form, param_of(request.structured_outputs))


def check_end(request: Asking) -> None:
    """A grammar decides where it ends, by an end-of-sequence token."""
    if request.ignore_eos:
        raise BadRequest(
            "ignore_eos is true, but structured output ends where its grammar does; leave ignore_eos out", "ignore_eos"
        )


def form_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Form | None:
    """None where any text will do."""
    own = None if structured is None else _structured(structured)
    wanted = None if response_format is None else _response(response_format)
    if own is not None and wanted is not None:
        raise BadRequest(
            "response_format and structured_outputs both say what the output must look like; send one of them",
            "structured_outputs",
        )
    return own or wanted


def param_of(structured: StructuredOutputs | None) -> str:
    return "response_format" if structured is None else "structured_outputs"


def json_form(schema: object, param: str) -> Form:
    """Raises BadRequest for what is no schema, or has keywords that cannot be enforced."""
    if not isinstance(schema, dict | bool):
        raise BadRequest(f'{param} must be a JSON schema, an object such as {{"type": "object"}}', param)
    return {"type": "grammar", "grammar": _rules_of(schema, param)}


def _rules_of(schema: object, param: str) -> str:
    """Cached, because requests often repeat schemas."""
    try:
        text = json.dumps(schema)
    except (RecursionError, ValueError):  # nested too deeply, or a number of more digits than Python writes
        return grammar_of_schema(schema, param)
    return _rules_of_text(text, param) if len(text) <= KEPT_CHARS else grammar_of_schema(schema, param)


@lru_cache(maxsize=1024)
def _rules_of_text(text: str, param: str) -> str:
    return grammar_of_schema(json.loads(text), param)


@cache
def any_object() -> Form:
    return json_form({"type": "object"}, "")


def _response(wanted: ResponseFormat) -> Form | None:
    if wanted.type != "json_schema" and wanted.json_schema is not None:
        raise BadRequest(
            f"response_format.json_schema is set, but its type is {wanted.type}; set the type to json_schema",
            "response_format",
        )
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return any_object()
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise BadRequest(
            "response_format.json_schema.schema is missing; type json_schema needs it",
            "response_format.json_schema.schema",
        )
    if not wanted.json_schema.name:
        raise BadRequest(
            "response_format.json_schema.name is missing; give the schema a name", "response_format.json_schema.name"
        )
    return json_form(wanted.json_schema.schema, "response_format.json_schema.schema")


def _structured(asked: StructuredOutputs) -> Form:
    given = [
        name
        for name in asked.__struct_fields__
        if getattr(asked, name) is not None and getattr(asked, name) is not False
    ]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "is empty"
        raise BadRequest(
            f"structured_outputs {what}; send exactly one of {', '.join(asked.__struct_fields__)}", "structured_outputs"
        )
    name = f"structured_outputs.{given[0]}"
    if given[0] == "json_object":
        return any_object()
    if given[0] == "json":
        return json_form(parsed(asked.json, name), name)
    if given[0] == "choice":
        return _choice(cast(list[str], asked.choice), name)
    text = asked.regex if given[0] == "regex" else asked.grammar
    if not text:
        raise BadRequest(f"{name} is empty; leave it out or say what the output must look like", name)
    _check_size("has", text, name)  # before it is parsed
    if given[0] == "regex":
        return {"type": "grammar", "grammar": regex(text, name)}
    return {"type": "grammar", "grammar": ebnf(text, name)}


def parsed(schema: object, param: str) -> object:
    """The schema as an object. A string is parsed as JSON. Raises BadRequest naming param."""
    if not isinstance(schema, str):
        return schema
    check_bulk(schema.encode(errors="replace"), param)
    try:
        return msgspec.json.decode(schema)
    except RecursionError as error:
        raise BadRequest(f"{param} is nested too deeply; send a flatter one", param) from error
    except ValueError as error:
        raise BadRequest(f"{param} is text, but no JSON: {_fault(schema, error)}; correct it", param) from error


def _fault(text: str, error: ValueError) -> str:
    """What is wrong with the text: Python knows where, msgspec reports more errors."""
    try:
        has_half = not _is_text(json.dumps(json.loads(text), ensure_ascii=False))
    except RecursionError:
        return str(error)
    except ValueError as where:
        return str(where)
    return "half a surrogate pair (such as \\ud800 alone) is no character" if has_half else str(error)


def _choice(choices: list[str], param: str) -> Form:
    if not choices or not all(choices):
        raise BadRequest(f"{param} must be a list of texts, none of them empty", param)
    if len(choices) > MAX_CHOICES:
        raise BadRequest(f"{param} has {len(choices)} texts, at most {MAX_CHOICES} are allowed", param)
    return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in dict.fromkeys(choices)]}
