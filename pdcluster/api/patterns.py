"""What regular expressions and grammars of a request ask that the compiler would pass over, take for a letter, or count wrongly. Not their syntax:
what is plainly wrong is told by the compiler, on the node.

Each scan reads its text once, whatever is in it.
"""

from __future__ import annotations

import re

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
REGEX_TOKENS = re.compile(rf"\\.|{CLASS}|\(\?<?[=!]|\{{[\d,]*\}}", re.DOTALL)
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
            raise BadRequest(f"{param} is {shown(pattern)}, which has {what}; structured output cannot enforce it, leave it out", param)
        _check_counts(token, pattern, param)


def check_ebnf(grammar: str, param: str) -> None:
    """Raises BadRequest for repetitions beyond the bound."""
    for found in EBNF_TOKENS.finditer(grammar):
        _check_counts(found[0], grammar, param)


def _check_counts(token: str, text: str, param: str) -> None:
    for digits in DIGITS.findall(token) if token[0] == "{" else ():
        count = digits.lstrip("0") or "0"
        if len(count) > len(str(MAX_REPEATS)) or int(count) > MAX_REPEATS:
            raise BadRequest(f"{param} is {shown(text)}, which repeats more than {MAX_REPEATS} times ({shown(digits)}); send a smaller count", param)
