"""Regular expressions and grammars of requests, rewritten so that the compiler reads them as their authors meant.
Expressions become rules. Grammars change in the one escape that it reads differently. What cannot be enforced is
refused by name.
"""

from __future__ import annotations

import re

from pdcluster.api.structured.grammar_rules.written import grammar_of
from pdcluster.api.structured.regex.parser import MAX_REPEATS, parse
from pdcluster.api.structured.regex.tree import choice, without_anchors
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

EBNF_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|\{[\s\d,]*\}', re.DOTALL)
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|.)", re.DOTALL)
DIGITS = re.compile(r"\d+")


def regex(pattern: str, param: str) -> str:
    """A grammar of the texts that the whole expression matches. Raises BadRequest naming the pattern."""
    variants = without_anchors(parse(pattern, param))
    if not variants:
        raise BadRequest(f"{param} is {shown(pattern)}, which no text matches; correct it", param)
    return grammar_of(choice(list(variants.values())))


def ebnf(grammar: str, param: str) -> str:
    r"""The grammar with \xHH limited to two digits, as GBNF has it; the compiler would take more. Raises BadRequest for
    counts beyond the bound.
    """
    for found in EBNF_TOKENS.finditer(grammar):
        if found[0][0] == "{":
            _check_counts(found[0], grammar, param)
    return EBNF_TOKENS.sub(lambda token: ESCAPE.sub(_coded, token[0]) if token[0][0] in '"[' else token[0], grammar)


def _coded(escape: re.Match[str]) -> str:
    return f"\\u{int(escape[1][1:], 16):04x}" if escape[1][0] == "x" and len(escape[1]) > 1 else escape[0]


def _check_counts(token: str, text: str, param: str) -> None:
    for digits in DIGITS.findall(token):
        count = digits.lstrip("0") or "0"
        if len(count) > len(str(MAX_REPEATS)) or int(count) > MAX_REPEATS:
            raise BadRequest(
                f"{param} is {shown(text)}, which repeats more than {MAX_REPEATS} times ({shown(digits)}); send a "
                "smaller count",
                param,
            )
