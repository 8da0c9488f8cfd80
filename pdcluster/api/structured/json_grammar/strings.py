"""Strings of a JSON schema as parts of a grammar: pattern, format, lengths. All concern the decoded text; the grammar
writes it escaped.

A pattern without ^ and $ is the whole text, as models and people mean it. With one of them the text is open at the
other side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster.api.structured.grammar_rules.rules import Class, GrammarRules, Part, Regex, Text, count, row
from pdcluster.api.structured.grammar_rules.written import RuleWriter
from pdcluster.api.structured.json_grammar.string_formats import KEPT, NOT_KEPT, expression_of
from pdcluster.api.structured.json_grammar.values import not_kept, whole_number
from pdcluster.api.structured.regex.characters import CONTROLS, alternatives, bracketed, complement, of_text, union
from pdcluster.api.structured.regex.overlap import ANYTHING
from pdcluster.api.structured.regex.parser import parse
from pdcluster.api.structured.regex.tree import EMPTY, Node, Sides, choice, sequence, with_length, without_anchors
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

Schema = Mapping[str, Any]

# No model's answer has a longer string.
MAX_LENGTH = 100_000
# Most characters counted with escapes. Each costs the compiler a pass over the vocabulary.
MAX_COUNTED = 64

_ITSELF = complement(union(CONTROLS, of_text('"\\')))
_CODED = (
    r"u([0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
    r"|[dD][89abAB][0-9a-fA-F]{2}\u005cu[dD][c-fC-F][0-9a-fA-F]{2})"
)
# One character of a JSON string in any spelling.
CHARACTER = rf"({alternatives(_ITSELF)}|\u005c([\u0022\u005c\u002fbfnrt]|{_CODED}))"


def plain_string(least: int = 0, most: int | None = None) -> Part:
    """A string of so many characters."""
    return Regex(rf"\u0022{CHARACTER}{count(least, most)}\u0022")


def whole_text(variants: Mapping[Sides, Node]) -> Node:
    """The texts that a pattern stands for."""
    return choice([_opened(sides, node) for sides, node in variants.items()])


def _opened(sides: Sides, node: Node) -> Node:
    starts, ends = sides
    if starts != ends:
        return sequence([node, ANYTHING] if starts else [ANYTHING, node])
    return ANYTHING if not starts and node == EMPTY else node


def anywhere(variants: Mapping[Sides, Node]) -> Node:
    """All texts that contain a match."""
    return choice(
        [
            sequence([*([] if starts else [ANYTHING]), node, *([] if ends else [ANYTHING])])
            for (starts, ends), node in variants.items()
        ]
    )


def variants_of(pattern: object, path: str) -> Mapping[Sides, Node]:
    """Raises BadRequest for what is no pattern, or matches nothing."""
    if not isinstance(pattern, str):
        raise BadRequest(f"{path} is {shown(pattern)}; a pattern is a string", path)
    variants = without_anchors(parse(pattern, path))
    if not variants:
        raise BadRequest(f"{path} is {shown(pattern)}, which no text matches; correct it", path)
    return variants


def string(rules: GrammarRules, node: Schema, path: str) -> Part:
    least, most = _bounds(node, path)
    expression = expression_in(node, path, least, most)
    if expression is not None:
        return quoted(rules, expression)
    if most == 0:
        return Text('""')
    if (least if most is None else most) <= MAX_COUNTED:
        return plain_string(least, most)
    itself = bracketed(_ITSELF)
    if most is None:
        return row(Text('"'), Class(itself, least, least), Regex(rf"{CHARACTER}*\u0022"))
    return row(Text('"'), Class(itself, least, most), Text('"'))


def quoted(rules: GrammarRules, expression: Node) -> Part:
    """A JSON string of such a text."""
    return row(Text('"'), RuleWriter(rules, in_json=True).part(expression), Text('"'))


def expression_in(node: Schema, path: str, least: int, most: int | None) -> Node | None:
    """Pattern, format and lengths combined; None without pattern and format."""
    name, pattern = node.get("format"), node.get("pattern")
    if name is not None and not isinstance(name, str):
        raise BadRequest(f"{path}.format is {shown(name)}; a format is a string", path)
    if name in NOT_KEPT:
        raise not_kept(path, f"format {name}", "leave it out")
    kept = name in KEPT
    if pattern is None and not kept:
        return None
    if pattern is not None and kept:
        raise not_kept(path, f"pattern beside format {name}", "leave one of them out")
    if kept:
        expression, what = expression_of(str(name)), f"format {name}"
        fit = with_length(expression, least, most)
    else:
        variants, what = variants_of(pattern, f"{path}.pattern"), f"pattern {shown(pattern)}"
        fit = with_length(whole_text(variants), least, most)
        fit = with_length(anywhere(variants), least, most) if fit is None else fit
    if fit is None:
        beside = "minLength" if least else "maxLength"
        raise not_kept(path, f"{beside} beside {what}", "no text that is found has both; change one of them")
    return fit


def _bounds(node: Schema, path: str) -> tuple[int, int | None]:
    least = whole_number(node, "minLength", path) or 0
    most = whole_number(node, "maxLength", path)
    if most is not None and most < least:
        raise BadRequest(
            f"{path} has a maxLength of {most} below its minLength of {least}; no string is so long, correct one of "
            "them",
            path,
        )
    if least > MAX_LENGTH:
        raise not_kept(path, f"minLength {least}", f"at most {MAX_LENGTH} are possible")
    return least, most if most is None or most <= MAX_LENGTH else MAX_LENGTH
