"""Whether every rule of a grammar in EBNF can come to an end. A rule that needs itself never does: an output that enters it goes on until its tokens
run out."""

from __future__ import annotations

import json

RULE, SEQUENCE, CHOICES, REPEAT = 4, 5, 6, 8
"""Kinds of expressions that have others in them, as xgrammar numbers them in its own JSON of a grammar (version 16)."""


def endless_rule(serialized: str) -> str | None:
    """The name of a rule that never ends, None when all do. serialized: by `xgrammar.Grammar.serialize_json`."""
    grammar = json.loads(serialized)
    data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
    expressions = [data[start : start + 2 + data[start + 1]] for start in starts]
    bodies = [rule[1] for rule in grammar["rules"]]
    users: list[list[int]] = [[] for _ in bodies]
    for rule, body in enumerate(bodies):
        for used in _rules_in(body, expressions):
            users[used].append(rule)
    ending, waiting = set[int](), list(range(len(bodies)))
    while waiting:
        rule = waiting.pop()
        if rule not in ending and _ends(bodies[rule], expressions, ending):
            ending.add(rule)
            waiting += users[rule]
    endless = next((rule for rule in range(len(bodies)) if rule not in ending), None)
    return None if endless is None else str(grammar["rules"][endless][0])


def _rules_in(index: int, expressions: list[list[int]]) -> list[int]:
    kind, _, *parts = expressions[index]
    if kind in (SEQUENCE, CHOICES):
        return [rule for part in parts for rule in _rules_in(part, expressions)]
    return parts[:1] if kind in (RULE, REPEAT) else []


def _ends(index: int, expressions: list[list[int]], ending: set[int]) -> bool:
    """By the rules that are known to end."""
    kind, _, *parts = expressions[index]
    if kind == RULE:
        return parts[0] in ending
    if kind == SEQUENCE:
        return all(_ends(part, expressions, ending) for part in parts)
    if kind == CHOICES:
        return any(_ends(part, expressions, ending) for part in parts)
    return kind != REPEAT or parts[1] == 0 or parts[0] in ending
