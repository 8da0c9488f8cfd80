"""What a request asks of the shape of its answer, as plain values, and the grammar that it means. Making the grammar
may take long, so that another process does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from pdcluster.api.structured import constraints
from pdcluster.api.structured.constraints import ResponseFormat, StructuredOutputs
from pdcluster.api.structured.forms import Form, check_grammar, either, grammar_of, pattern, sequence, up_to
from pdcluster.api.tools.formats import FORMATS, arguments_form
from pdcluster.api.tools.markers import END_THINK, THINK
from pdcluster.api.tools.tool_choice import Function, Offer
from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import MAX_CHARS, Grammar

SPACE_AFTER_THOUGHT = pattern(r"[\n ]{0,4}")

# Of a shape, before its schemas are read.
MAX_BYTES = 2 * MAX_CHARS


class AnswerShape(Struct, frozen=True):
    """param: the field that errors name.
    tool_format: of the calls that must or may come; None for none.
    thought: whether the model may think first (may), or is thinking where the answer begins (open).
    """

    param: str
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    tool_format: str | None = None
    tools: Sequence[Function] = ()
    must: bool = False
    parallel: bool = True
    thought: Literal["none", "may", "open"] = "none"
    reasons: bool = False


def encoded(shape: AnswerShape) -> bytes:
    """Raises BadRequest for what is too large."""
    try:
        made = msgspec.msgpack.encode(shape)
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        what = "a whole number beyond 2^64" if isinstance(error, OverflowError) else "nesting that is too deep"
        if isinstance(error, UnicodeEncodeError):
            what = "half a surrogate pair (such as \\ud800 alone), which is no character"
        raise BadRequest(f"{shape.param} has {what}; change it", shape.param) from error
    if len(made) > MAX_BYTES:
        raise BadRequest(
            f"{shape.param} has {len(made)} bytes of schemas, at most {MAX_BYTES} are allowed; send less", shape.param
        )
    return made


def grammar_of_shape(shape: AnswerShape) -> Grammar:
    """The grammar that the library takes. Raises BadRequest naming the field."""
    grammar = grammar_of(_form(shape), shape.param)
    try:
        check_grammar(grammar, shape.param)
    except BadRequest:
        for tool in shape.tools:
            if tool.strict or shape.must:
                param = f"tools.{tool.name}.parameters"
                check_grammar(grammar_of(arguments_form(tool), param), param)
        raise
    return grammar


def _form(shape: AnswerShape) -> Form:
    form = constraints.form_of(shape.response_format, shape.structured_outputs)
    if shape.tool_format is not None:
        form = _with_calls(shape, form)
    assert form is not None, "a shape asks for something"
    if shape.thought == "none":
        return form
    is_open = shape.thought == "open"
    thought = sequence(up_to(END_THINK, "" if is_open else THINK), SPACE_AFTER_THOUGHT, form)
    return thought if is_open else either(thought, form)


def _with_calls(shape: AnswerShape, form: Form | None) -> Form:
    """form: of an answer without calls; None for any text."""
    tool_format = FORMATS[shape.tool_format or ""]
    offer = Offer(shape.tools, (), shape.must, shape.parallel)
    if form is not None:
        return either(tool_format.form(offer), form)
    return tool_format.form(offer) if offer.must else tool_format.free_form(offer, reasons=shape.reasons)
