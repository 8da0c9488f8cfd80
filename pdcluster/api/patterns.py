"""What regular expressions and grammars of a request ask that the compiler would pass over, take for a letter, or count wrongly. Not their syntax:
what is plainly wrong is told by the compiler, on the node.

A compiled pattern is the whole of what it stands for, and ^ and $ say nothing in it: they are right where nothing can stand before or behind them.
Each scan reads its text once, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pdcluster.api.validate import shown
from pdcluster.errors import BadRequest

MAX_REPEATS = 1_000_000
"""In braces. Compilers keep such numbers in 32 bits and go on with what is left of larger ones."""

LOOKS = {"(?=": "a lookahead", "(?!": "a negative lookahead", "(?<=": "a lookbehind", "(?<!": "a negative lookbehind"}
ESCAPES = {
    **dict.fromkeys("123456789k", "a backreference"),
    **dict.fromkeys("bB", "a word boundary"),
    **dict.fromkeys("AzZG", "an anchor other than ^ and $"),
    **dict.fromkeys("pP", "a Unicode property"),
}

CLASS = r"\[(?:\\.|[^\]\\])*\]?"
GROUP = r"\((?:\?<?[=!]|\?:|\?P?<[^>]{0,64}>)?"
REGEX_TOKENS = re.compile(rf"\\.|{CLASS}|{GROUP}|\{{[\d,]*\}}|.", re.DOTALL)
ESCAPED = re.compile(r"\\(.)", re.DOTALL)
EBNF_TOKENS = re.compile(rf'"(?:\\.|[^"\\])*"?|{CLASS}|#[^\n]*|\{{[\s\d,]*\}}', re.DOTALL)
DIGITS = re.compile(r"\d+")


def check_regex(pattern: str, param: str) -> None:
    """Raises BadRequest naming the pattern for what would not be enforced."""
    for found in REGEX_TOKENS.finditer(pattern):
        token = found[0]
        what = LOOKS.get(token) or (ESCAPES.get(token[1:]) if token[0] == "\\" else None)
        if token[0] == "[" and not {"p", "P"}.isdisjoint(ESCAPED.findall(token)):
            what = ESCAPES["p"]
        if what is not None:
            raise _not_kept(pattern, what, param)
        _check_counts(token, pattern, param)
    if what := _misplaced_anchor(found[0] for found in REGEX_TOKENS.finditer(pattern)):
        raise _not_kept(pattern, f"{what} where something may stand {'before' if what == '^' else 'behind'} it", param)


def _not_kept(pattern: str, what: str, param: str) -> BadRequest:
    return BadRequest(f"{param} is {shown(pattern)}, which has {what}; structured output cannot enforce it, leave it out", param)


@dataclass(slots=True)
class _Group:
    """A group that is being read, or the whole. begins: nothing stands before it; is_first: nor before the next token of this alternative;
    is_ended, some_ended: a $ came in this alternative, in any; has_anchor: ^ or $ did, so that it can not be repeated."""

    begins: bool
    is_first: bool
    is_ended: bool = False
    some_ended: bool = False
    has_anchor: bool = False


def _misplaced_anchor(tokens: Iterable[str]) -> str | None:
    """The first anchor that is not at an end of all that the pattern stands for, or is repeated."""
    groups = [_Group(True, True)]
    repeatable = True
    for token in tokens:
        group = groups[-1]
        if token == "^":
            if not group.is_first or group.is_ended:
                return "^"
            group.has_anchor, repeatable = True, False
        elif token == "$":
            group.is_ended = group.has_anchor = True
            repeatable = False
        elif token == "|":
            group.some_ended |= group.is_ended
            group.is_first, group.is_ended = group.begins, False
        elif token == ")" and len(groups) > 1:
            _close(groups)
            repeatable = not group.has_anchor
        elif token[0] in "*+?{" and not (token[0] == "{" and len(token) == 1):
            if not repeatable:
                return "$" if group.is_ended else "^"
        elif group.is_ended:
            return "$"
        elif token[0] == "(":
            groups.append(_Group(group.is_first, group.is_first))
        else:
            group.is_first, repeatable = False, True
    return None


def _close(groups: list[_Group]) -> None:
    inner, outer = groups.pop(), groups[-1]
    outer.is_first = False
    outer.is_ended = inner.is_ended or inner.some_ended
    outer.has_anchor |= inner.has_anchor


def check_ebnf(grammar: str, param: str) -> None:
    """Raises BadRequest for repetitions beyond the bound."""
    for found in EBNF_TOKENS.finditer(grammar):
        _check_counts(found[0], grammar, param)


def _check_counts(token: str, text: str, param: str) -> None:
    for digits in DIGITS.findall(token) if token[0] == "{" else ():
        count = digits.lstrip("0") or "0"
        if len(count) > len(str(MAX_REPEATS)) or int(count) > MAX_REPEATS:
            raise BadRequest(f"{param} is {shown(text)}, which repeats more than {MAX_REPEATS} times ({shown(digits)}); send a smaller count", param)
