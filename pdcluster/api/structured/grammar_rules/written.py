"""Trees of regular expressions as parts of a grammar: of plain text, or of text between the quotes of a JSON string.

They become rules, not expressions that xgrammar compiles itself: its (b|(b){1,2}) accepts bbb.
"""

from __future__ import annotations

from pdcluster.api.structured.grammar_rules.rules import EMPTY, Class, GrammarRules, Many, Part, Text, one_of, row
from pdcluster.api.structured.regex.characters import NAMED_ESCAPES, Ranges, bracketed, escaped
from pdcluster.api.structured.regex.tree import Alternation, Anchor, Chars, Concatenation, Node, Repeat


class RuleWriter:
    def __init__(self, rules: GrammarRules, *, in_json: bool) -> None:
        self._rules = rules
        self._in_json = in_json

    def part(self, node: Node) -> Part:
        assert not isinstance(node, Anchor)
        if isinstance(node, Chars):
            return one_of(self._character(node.ranges))
        if isinstance(node, Repeat):
            return self._repeat(node)
        if isinstance(node, Alternation):
            return one_of([self.part(option) for option in node.options])
        return self._sequence(node)

    def _character(self, ranges: Ranges) -> list[Part]:
        """The spellings of one character."""
        if not self._in_json:
            return [Class(bracketed(ranges))]
        plain, pending_messages, coded = escaped(ranges)
        ways: list[Part] = [Class(bracketed(plain))] if plain else []
        if pending_messages:
            ways.append(row(Text("\\"), Class(bracketed(pending_messages))))
        return ways + [row(Text(f"\\u00{high}"), Class(bracketed(low))) for high, low in coded.items()]

    def _repeat(self, node: Repeat) -> Part:
        if not isinstance(node.item, Chars):
            return Many(self.part(node.item), node.least, node.most)
        ways = self._character(node.item.ranges)
        if len(ways) == 1 and isinstance(ways[0], Class):
            return Class(ways[0].expression, node.least, node.most)
        if node.most is not None:
            return Many(self._rules.name(one_of(ways)), node.least, node.most)
        endless = self._endless(node.item.ranges, ways)
        return row(Many(self._rules.name(one_of(ways)), node.least, node.least), endless) if node.least else endless

    def _endless(self, ranges: Ranges, ways: list[Part]) -> Part:
        """Repeated spellings as a recursive rule: xgrammar precomputes the tokens of such a rule, but not of a
        repetition of choices.
        """

        def written(again: Part) -> Part:
            return one_of([EMPTY, *(row(way, again) for way in ways)])

        return self._rules.circular(("endless", ranges), written)

    def _sequence(self, node: Concatenation) -> Part:
        parts: list[Part] = []
        text = ""
        for item in node.items:
            if isinstance(item, Chars) and len(item.ranges) == 1 and item.ranges[0][0] == item.ranges[0][1]:
                text += self._text(chr(item.ranges[0][0]))
                continue
            parts += [Text(text), self.part(item)] if text else [self.part(item)]
            text = ""
        return row(*parts, *([Text(text)] if text else []))

    def _text(self, char: str) -> str:
        if not self._in_json:
            return char
        return NAMED_ESCAPES.get(ord(char)) or (f"\\u{ord(char):04x}" if ord(char) < 0x20 else char)


def grammar_of(node: Node) -> str:
    """EBNF of the texts that match a node without anchors."""
    rules = GrammarRules()
    return rules.written(RuleWriter(rules, in_json=False).part(node)) or ""
