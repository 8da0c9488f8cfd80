"""Clients' own grammars: Lark as llguidance takes it, or GBNF, which becomes Lark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

MAX_REPEATS = 1_000_000
TOKENS = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|\{[\s\d,]*\}', re.DOTALL)
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def lark_of(grammar: str, param: str) -> str:
    """Raises BadRequest for GBNF that is none, or has a rule that never ends. Lark is checked by the library alone."""
    from llguidance.gbnf_to_lark import GrammarParser, gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(grammar):
        return grammar
    try:
        plain = TOKENS.sub(lambda token: _plain(token[0], param), grammar)
        endless = endless_rule(GrammarParser().parse(plain))
        lark = gbnf_to_lark(plain)
    except BadRequest:
        raise
    except Exception as error:  # the converter raises Exception itself
        raise BadRequest(f"{param} is {shown(grammar)}, no GBNF and no Lark: {error}; correct it", param) from error
    if endless is not None:
        what = f"the grammar's rule {endless} never ends, as it always needs itself"
        raise BadRequest(f"{param}: {what}; give it a way out", param)
    return lark


def _plain(token: str, param: str) -> str:
    if token[0] == "{":
        for digits in re.findall(r"\d+", token):
            count = digits.lstrip("0") or "0"
            if len(count) > len(str(MAX_REPEATS)) or int(count) > MAX_REPEATS:
                raise BadRequest(
                    f"{param} repeats more than {MAX_REPEATS} times ({shown(digits)}); send a smaller count", param
                )
    return ESCAPE.sub(_character, token) if token[0] in '"[' else token


def _character(escape: re.Match[str]) -> str:
    """The character itself where that is no part of the syntax, as the converter spoils some escapes."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else escape[0]


def endless_rule(rules: dict[str, Any]) -> str | None:
    """The name of a rule that never ends, None when all do. rules: as the library's parser of GBNF makes them."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for used in _names_in(rule.alternatives):
            users.get(used, []).append(name)
    ending, waiting = set[str](), list(rules)
    while waiting:
        name = waiting.pop()
        if name not in ending and _ends(rules[name].alternatives, ending):
            ending.add(name)
            waiting += users[name]
    return next((name for name in rules if name not in ending), None)


def _names_in(node: Any) -> Iterator[str]:
    left = [node]
    while left:
        each = left.pop()
        if hasattr(each, "target"):
            yield each.name
        left += each.children()


def _ends(node: Any, ending: set[str]) -> bool:
    """By the rules that are known to end. A rule that is missing the converter refuses."""
    if hasattr(node, "target"):
        return node.name in ending
    if hasattr(node, "min_times"):
        return node.min_times == 0 or _ends(node.node, ending)
    if hasattr(node, "alternatives"):
        return any(_ends(each, ending) for each in node.alternatives)
    return all(_ends(each, ending) for each in node.children())
