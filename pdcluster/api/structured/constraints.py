"""`response_format` and `structured_outputs` of a request: shapes, checks, and the form of answer that they mean."""

from __future__ import annotations

import json
from typing import Literal, Protocol, cast

import msgspec
from msgspec import Struct

from pdcluster.api.body_bound import check_bulk
from pdcluster.api.structured.forms import Form, any_object, choice_form, json_form, own_form, regex_form
from pdcluster.core.errors import BadRequest


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


def check_end(request: Asking) -> None:
    """A grammar decides where it ends, by an end-of-sequence token."""
    if request.ignore_eos:
        raise BadRequest(
            "ignore_eos is true, but structured output ends where its grammar does; leave ignore_eos out", "ignore_eos"
        )


def asks(request: Asking) -> bool:
    """Whether the answer's text must have a form."""
    return request.structured_outputs is not None or (
        request.response_format is not None and request.response_format != ResponseFormat("text")
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
        return choice_form(cast(list[str], asked.choice), name)
    if given[0] == "regex":
        return regex_form(cast(str, asked.regex), name)
    return own_form(cast(str, asked.grammar), name)


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
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half a surrogate pair (such as \\ud800 alone) is no character"
    except RecursionError:
        return str(error)
    except ValueError as where:
        return str(where)
    return str(error)
