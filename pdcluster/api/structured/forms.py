"""Forms of an answer, as parts of one grammar in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from pdcluster.api.structured import library
from pdcluster.api.structured.gbnf import lark_of
from pdcluster.api.structured.json_schema import for_library
from pdcluster.api.structured.patterns import rewritten
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import MAX_CHARS, MAX_DEPTH, Grammar, depth_of

# Bytes of what a client sends, before it is parsed.
MAX_SCHEMA = 256 << 10
MAX_OWN = 64 << 10
MAX_CHOICES = 1024

# The name of a client's own grammar within a larger one.
OWN = "own"


class Form(NamedTuple):
    """body: an expression, which stands for itself anywhere.
    rules: definitions that it needs, by name, so that equal ones are one.
    own: a client's own grammar that it refers to.
    """

    body: str
    rules: tuple[str, ...] = ()
    own: str | None = None


def literal(text: str) -> Form:
    return Form(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f"))


def pattern(expression: str) -> Form:
    """expression: a regular expression of ours."""
    return Form("/" + expression.replace("/", r"\/") + "/")


def sequence(*parts: Form) -> Form:
    return _joined(" ", parts)


def either(*parts: Form) -> Form:
    return _joined(" | ", parts)


def repeated(part: Form, count: str) -> Form:
    """count: an operator such as * or ?."""
    return part._replace(body=f"({part.body}){count}")


def up_to(mark: str, begin: str = "") -> Form:
    """Text up to the first mark, that included. begin: what it begins with."""
    name = "upto_" + "".join(each if each.isascii() and each.isalnum() else "_" for each in begin + mark)
    body = f"{_escaped(begin)}(?s:.*){_escaped(mark)}"
    return Form(name.lower(), (f"{name.lower()}[lazy]: /{body}/",))


def any_text(without: str | None = None) -> Form:
    """without: a mark that does not come in it."""
    if without is None:
        return pattern("(?s:.*)")
    return Form("TEXT", (f"TEXT: /(?s:.*)/ & ~/(?s:.*){_escaped(without)}(?s:.*)/",))


def json_form(schema: object, param: str) -> Form:
    """Raises BadRequest for what is no schema, or has keywords that cannot be kept."""
    if not isinstance(schema, dict | bool):
        raise BadRequest(f'{param} must be a JSON schema, an object such as {{"type": "object"}}', param)
    made = for_library(schema, param)
    try:
        text = library.json_text(made)
    except (RecursionError, ValueError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"cannot be written: {error}"
        raise BadRequest(f"{param} {what}; send a smaller one", param) from error
    _check_size("is a schema of", text, MAX_SCHEMA, param)
    return Form("%json " + text)


def any_object() -> Form:
    return json_form({"type": "object"}, "")


def regex_form(expression: str, param: str) -> Form:
    """The whole text matches, with ASCII classes."""
    _check_own(expression, param)
    form = Form("/" + library.regex_of(rewritten(expression, param)) + "/")
    fault = library.fault_of(grammar_of(form, param).source)
    if fault is not None:
        raise BadRequest(f"{param} is {shown(expression)}, which cannot be kept: {fault}; correct it", param)
    return form


def choice_form(choices: Sequence[str], param: str) -> Form:
    if not choices or not all(choices):
        raise BadRequest(f"{param} must be a list of texts, none of them empty", param)
    if len(choices) > MAX_CHOICES:
        raise BadRequest(f"{param} has {len(choices)} texts, at most {MAX_CHOICES} are allowed", param)
    return either(*(literal(choice) for choice in dict.fromkeys(choices)))


def own_form(grammar: str, param: str) -> Form:
    """A client's grammar, in Lark or GBNF."""
    _check_own(grammar, param)
    return Form(f"@{OWN}", own=lark_of(grammar, param))


def grammar_of(form: Form, param: str) -> Grammar:
    """Raises BadRequest naming param for what is too large or too deep."""
    start = "".join([library.HEAD, f"start: {form.body}\n", *(f"{rule}\n" for rule in form.rules)])
    source = start
    if form.own is not None:
        parts = [{"lark_grammar": start}, {"name": OWN, "lark_grammar": form.own}]
        source = json.dumps({"grammars": parts}, ensure_ascii=False, separators=(",", ":"))
    _check_size("makes a grammar of", source, MAX_CHARS, param)
    if depth_of(source) > MAX_DEPTH:
        raise BadRequest(
            f"{param} is nested {depth_of(source)} levels deep, at most {MAX_DEPTH} are allowed; send a flatter one",
            param,
        )
    return Grammar(source)


def check_grammar(grammar: Grammar, param: str) -> None:
    """Raises BadRequest for what the library does not take."""
    fault = library.fault_of(grammar.source)
    if fault is not None:
        raise BadRequest(f"{param} makes a grammar that cannot be kept: {fault}; correct or simplify it", param)


def _joined(by: str, parts: Sequence[Form]) -> Form:
    if len(parts) == 1:
        return parts[0]
    rules = tuple(dict.fromkeys(rule for part in parts for rule in part.rules))
    own = next((part.own for part in parts if part.own is not None), None)
    return Form("(" + by.join(part.body for part in parts) + ")", rules, own)


def _check_own(text: str, param: str) -> None:
    if not text:
        raise BadRequest(f"{param} is empty; leave it out or say what the output must look like", param)
    _check_size("has", text, MAX_OWN, param)
    if depth_of(text) > MAX_DEPTH:
        raise BadRequest(
            f"{param} is {shown(text)}, nested more than {MAX_DEPTH} levels deep; send a flatter one", param
        )


def _check_size(what: str, source: str, most: int, param: str) -> None:
    if len(source) > most:
        raise BadRequest(
            f"{param} {what} {len(source)} characters, at most {most} are allowed; send a smaller one", param
        )


def _escaped(text: str) -> str:
    """For a regular expression."""
    return "".join("\\" + each if each in "|[](){}.*+?^$\\/" else each for each in text)
