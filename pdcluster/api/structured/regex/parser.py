"""Parses a request's regular expression into a tree. What cannot be enforced, or is read differently by different
engines, is refused by name.
"""

from __future__ import annotations

import re
from typing import NoReturn

from pdcluster.api.structured.regex.characters import (
    ANY,
    DIGIT,
    NOT_LINE_END,
    SPACE,
    SURROGATES,
    WORD,
    Ranges,
    complement,
    union,
    widest,
)
from pdcluster.api.structured.regex.tree import EMPTY, Anchor, Chars, Node, Repeat, choice, sequence
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import MAX_DEPTH

# In braces. Compilers keep such numbers in 32 bits and truncate larger ones.
MAX_REPEATS = 1_000_000
MAX_ANCHORS = 100

GROUPS = {
    "=": "a lookahead", "!": "a negative lookahead", "<=": "a lookbehind", "<!": "a negative lookbehind",
    ">": "an atomic group",
    "P=": "a backreference", "P>": "a subroutine call", "#": "a comment", "(": "a condition", "|": "a branch reset",
}  # fmt: skip
ESCAPES = {
    **dict.fromkeys("123456789k", "a backreference"), **dict.fromkeys("bB", "a word boundary"),
    **dict.fromkeys("AzZG", "an anchor other than ^ and $"), **dict.fromkeys("pP", "a Unicode property"),
}  # fmt: skip
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
SETS = {"d": DIGIT, "w": WORD, "s": SPACE}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
NAME = re.compile(r"P?<[A-Za-z_][A-Za-z0-9_]{0,63}>")
COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")

# Characters that every engine includes, and those that any engine includes.
Item = tuple[Ranges, Ranges]


def parse(pattern: str, param: str) -> Node:
    """Raises BadRequest naming the pattern."""
    return _Parser(pattern, param).whole()


def sure(ranges: Ranges) -> Item:
    return ranges, ranges


class _Parser:
    def __init__(self, pattern: str, param: str) -> None:
        self._text = pattern
        self._param = param
        self._at = 0
        self._num_anchors = 0

    def whole(self) -> Node:
        node = self._alternatives(0)
        if self._at < len(self._text):
            self._wrong("a closing parenthesis too many")
        return node

    # ------------------------------------------------------------ errors

    def _not_kept(self, what: str) -> NoReturn:
        raise BadRequest(
            f"{self._param} is {shown(self._text)}, which has {what}; structured output cannot enforce it, leave it "
            "out",
            self._param,
        )

    def _wrong(self, what: str) -> NoReturn:
        raise BadRequest(
            f"{self._param} is {shown(self._text)}, which has {what} at character {self._at}; correct it", self._param
        )

    # ------------------------------------------------------------ structure

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise BadRequest(
                f"{self._param} has groups nested more than {MAX_DEPTH} levels deep; send a flatter expression",
                self._param,
            )
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return choice(options)

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._repeated(self._atom(depth)))
        return sequence(items) if items else EMPTY

    def _repeated(self, item: Node) -> Node:
        counts = self._counts()
        if counts is None:
            return item
        least, most = counts
        if not self._take("?") and self._peek() == "+":  # lazy ones match the same
            self._not_kept("a possessive repetition")
        if self._peek() in ("*", "?", "+") or COUNT.match(self._text, self._at):
            self._wrong("a repetition of a repetition")
        if not item.has_anchor:
            return Repeat(item, least, most)
        if most != 1:
            self._not_kept("^ or $ in what is repeated")
        return item if least else choice([EMPTY, item])

    def _counts(self) -> tuple[int, int | None] | None:
        """The repetition behind an atom. A brace that is no count is a literal."""
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        if self._text.startswith("{,", self._at) and re.match(r"\{,\d*\}", self._text[self._at : self._at + 16]):
            self._not_kept("a count without its least number, which not everybody reads alike (write {0,N})")
        if (found := COUNT.match(self._text, self._at)) is None:
            return None
        least, most = (self._number(found[1]), self._number(found[3]) if found[3] else None)
        if not found[2]:
            most = least
        if most is not None and most < least:
            self._wrong("a count whose bound is below its least number")
        self._at = found.end()
        return least, most

    def _number(self, digits: str) -> int:
        count = digits.lstrip("0") or "0"
        if len(count) > len(str(MAX_REPEATS)) or int(count) > MAX_REPEATS:
            what = f"which repeats more than {MAX_REPEATS} times ({shown(digits)}); send a smaller count"
            raise BadRequest(f"{self._param} is {shown(self._text)}, {what}", self._param)
        return int(count)

    # ------------------------------------------------------------ atoms

    def _atom(self, depth: int) -> Node:
        char = self._peek()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return Chars(self._class() or self._not_kept("a class of no characters"))
        if char in ("*", "+", "?") or COUNT.match(self._text, self._at):
            self._wrong("a repetition of nothing")
        self._at += 1
        if char in ("^", "$"):
            self._num_anchors += 1
            if self._num_anchors > MAX_ANCHORS:
                self._not_kept(f"more than {MAX_ANCHORS} times ^ or $")
            return Anchor(char == "^")
        if char == ".":
            return Chars(NOT_LINE_END)
        if char == "\\":
            return Chars(self._escape(in_class=False)[0])
        return Chars(self._single(ord(char)))

    def _group(self, depth: int) -> Node:
        self._at += 1
        if self._take("?"):
            self._group_kind()
        node = self._alternatives(depth + 1)
        if not self._take(")"):
            self._wrong("an unclosed parenthesis")
        return node

    def _group_kind(self) -> None:
        if self._take(":"):
            return
        if name := NAME.match(self._text, self._at):
            self._at = name.end()
            return
        rest = self._text[self._at : self._at + 2]
        what = GROUPS.get(rest) or GROUPS.get(rest[:1])
        if what is None and re.match(r"[a-zA-Z^-]", rest):
            what = "a group with a bad name" if rest[:1] == "P" else "inline flags"
        self._not_kept(what) if what else self._wrong("a group of an unknown kind")

    # ------------------------------------------------------------ characters

    def _single(self, code: int) -> Ranges:
        if SURROGATES[0] <= code <= SURROGATES[1]:
            self._not_kept("half a surrogate pair, which is no character")
        return ((code, code),)

    def _class(self) -> Ranges:
        self._at += 1
        negated = self._take("^")
        if self._peek() == "]":
            self._not_kept("an empty class, or one that begins with ], which not everybody reads alike (write \\])")
        items: list[Item] = []
        while not self._take("]"):
            items.append(self._class_item())
        if negated:
            return complement(union(*(most for _, most in items)))
        return union(*(least for least, _ in items))

    def _class_item(self) -> Item:
        low = self._class_atom()
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return low
        self._at += 1
        high = self._class_atom()
        if len(low[0]) != 1 or len(high[0]) != 1 or low[0][0][0] != low[0][0][1] or high[0][0][0] != high[0][0][1]:
            self._not_kept("a range from or to a class")
        if low[0][0][0] > high[0][0][0]:
            self._wrong("a range that ends before it begins")
        return sure(tuple(complement(complement(((low[0][0][0], high[0][0][0]),)))))

    def _class_atom(self) -> Item:
        char = self._peek()
        if not char:
            self._wrong("an unclosed class")
        if char == "[" and self._text[self._at + 1 : self._at + 2] in (":", ".", "="):
            self._not_kept("a POSIX class")
        if char in "-&~|" and self._text[self._at + 1 : self._at + 2] == char:
            self._not_kept(f"{char}{char} in a class, which not everybody reads alike (write \\{char})")
        self._at += 1
        if char == "\\":
            return self._escape(in_class=True)
        return sure(self._single(ord(char)))

    def _escape(self, *, in_class: bool) -> Item:
        """The escape behind a backslash."""
        char = self._peek()
        if not char:
            self._wrong("a backslash at its end")
        self._at += 1
        if char in SETS:
            return SETS[char], widest(char)
        if char.lower() in SETS:
            return complement(widest(char.lower())), complement(SETS[char.lower()])
        if char in CONTROLS:
            return sure(self._single(CONTROLS[char]))
        if char in HEX_DIGITS:
            return sure(self._single(self._hex(char)))
        if char == "c":
            letter = self._peek()
            if not re.match(r"[A-Za-z]", letter):
                self._not_kept("\\c without a letter")
            self._at += 1
            return sure(self._single(ord(letter) & 31))
        if in_class and char == "b":
            return sure(self._single(8))
        if char.isascii() and char.isalnum():
            self._unknown(char, in_class=in_class)
        return sure(self._single(0 if char == "0" else ord(char)))

    def _unknown(self, char: str, *, in_class: bool) -> None:
        r"""Of the letters and digits only \0 without a following digit is accepted."""
        is_octal = char.isdigit() and (in_class or char == "0")
        if char == "0" and not self._peek().isdigit():
            return
        self._not_kept("an octal escape" if is_octal else ESCAPES.get(char, f"the escape \\{char}"))

    def _hex(self, kind: str) -> int:
        if kind == "u" and (braced := re.compile(r"\{([0-9a-fA-F]{1,6})\}").match(self._text, self._at)):
            self._at, digits = braced.end(), braced[1]
        else:
            digits = self._text[self._at : self._at + HEX_DIGITS[kind]]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{HEX_DIGITS[kind]}}}", digits):
                self._not_kept(f"\\{kind} without its {HEX_DIGITS[kind]} hexadecimal digits")
            self._at += len(digits)
        code = int(digits, 16)
        pair = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._text, self._at)
        if kind == "u" and 0xD800 <= code < 0xDC00 and pair:
            self._at = pair.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(pair[1], 16) - 0xDC00
        if code > ANY[-1][1]:
            self._not_kept("an escape beyond the last character")
        return code
