"""Regular expressions of requests: what is taken means what everybody reads in it, and anything else is refused by
name."""

import contextlib
import itertools
import re

import pytest
from examples import examples
from grammar_walk import allows, compiled, drawn, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.api.structured.constraints import StructuredOutputs, form_of
from pdcluster.api.structured.grammar_rules.written import grammar_of
from pdcluster.api.structured.patterns import ebnf, regex
from pdcluster.api.structured.regex.parser import MAX_REPEATS, parse
from pdcluster.api.structured.regex.tree import lengths, with_length, without_anchors
from pdcluster.core.errors import BadRequest


def form(**asked: object) -> dict:
    made = form_of(None, StructuredOutputs(**asked))  # type: ignore[arg-type]
    assert made is not None
    return made


ESCAPES = {
    r"\x41b": ("Ab", "Л"),
    r"\u0041b": ("Ab", "\u0041c"),
    r"\u{1F600}": ("😀", "u"),
    r"\ud83d\ude00": ("😀", "?"),
    r"\U0001F600": ("😀", "U"),
    r"\cJ\cm": ("\n\r", "cJ"),
    r"a\0b": ("a\0b", "a0b"),
    r"\t\n\r\f\v": ("\t\n\r\f\v", "tnrfv"),
    r"[\b]": ("\b", "b"),
    r"\.\*\\\/\-": (".*\\/-", "ab"),
    r"[\x41-\x43]{2}": ("AC", "D"),
    r"\d{2}": ("07", "٣٤"),
    r"[^\d]": ("x", "٣"),
    r"\w+": ("aZ_9", "ß"),
    r"\W": ("-", "ß"),
    r"\s": ("\f", "\u00a0"),
    r"\S": ("é", "\u00a0"),
    "(?<name>a)(?P<other>b)(?:c)": ("abc", "ac"),
    "a{2}b{1,}c{0,2}": ("aabbc", "aabbccc"),
    "a{,x}": ("a{,x}", "ax"),
    "x{": ("x{", "x"),
    r"[\]^-]": ("^", "a"),
    ".": ("é", "\n"),
    "(b|(b){1,2})": ("bb", "bbb"),
    "(ab{1,2})?": ("abb", "b"),
    "[^a]": ("\n", "a"),
    "é|[à-ö]": ("ä", "a"),
    "(|a)": ("", "aa"),
    "a*?b+?": ("aab", "aa"),
    r"\"": ('"', '\\"'),
    "^$": ("", "^"),
}


@pytest.mark.parametrize("pattern", ESCAPES)
def test_an_escape_means_what_python_and_javascript_read_in_it(pattern):
    """Of a regular expression of its own, and of the values of JSON, both over the whole text."""
    right, wrong = ESCAPES[pattern]
    grammar = compiled(form(regex=pattern))
    assert allows(grammar, right) and not allows(grammar, wrong)


UNKEPT = {
    "(?=b)a": "a lookahead",
    "^(?!b).*$": "a negative lookahead",
    "(?<=b)a": "a lookbehind",
    "x(?<!b)a": "a negative lookbehind",
    r"(a|b)\1": "a backreference",
    r"(?<n>a)\k<n>": "a backreference",
    "(?P<n>a)(?P=n)": "a backreference",
    r"\ba\b": "a word boundary",
    r"\Aa\Z": "an anchor",
    r"\p{L}": "a Unicode property",
    r"[a\P{L}]": "a Unicode property",
    r"\\(?=a)": "a lookahead",
    "(?>a)": "an atomic group",
    "(?i)a": "inline flags",
    "(?i:a)": "inline flags",
    "(?-i)a": "inline flags",
    "(?#x)a": "a comment",
    "(?(1)a|b)": "a condition",
    "a*+": "a possessive repetition",
    "a{,3}": "a count without its least number",
    r"\x4": "without its 2 hexadecimal digits",
    r"\u12": "without its 4 hexadecimal digits",
    r"\U0011": "without its 8",
    r"\u{}": "without its 4",
    r"\U00110000": "beyond the last character",
    r"\ud800": "half a surrogate pair",
    r"\01": "an octal escape",
    r"[\1b]": "an octal escape",
    r"[\07]": "an octal escape",
    r"\c1": "without a letter",
    r"\q": r"the escape \\q",
    r"\a": r"the escape \\a",
    r"\e": r"the escape \\e",
    "[]a]": "an empty class",
    "[^]": "an empty class",
    "[[:alpha:]]": "a POSIX class",
    "[a-z&&[aeiou]]": "&& in a class",
    r"[\d-z]": "a range from or to a class",
    r"[^\s\S]": "a class of no characters",
    "(^a)+": "^ or $ in what is repeated",
    "(?:a|b$){2}": "^ or $ in what is repeated",
    "^*a": "^ or $ in what is repeated",
}
WRONG = {
    "(abc": "an unclosed parenthesis",
    "a)": "a closing parenthesis",
    "[a": "an unclosed class",
    "a\\": "a backslash at its end",
    "*a": "a repetition of nothing",
    "a**": "a repetition of a repetition",
    "a{2}{3}": "a repetition of a repetition",
    "a{3,1}": "a count whose bound",
    "[b-a]": "a range that ends",
    "(?<1>a)": "a group of an unknown kind",
    "a^b": "no text matches",
    "b$a|$c": "no text matches",
}
UNKEPT |= WRONG


@pytest.mark.parametrize("pattern", UNKEPT)
@pytest.mark.parametrize("where", ["regex", "pattern", "patternProperties", "propertyNames"])
def test_what_cannot_be_kept_of_a_regular_expression_is_refused_by_its_pattern(where, pattern):
    inner = {"pattern": pattern}
    names = {"patternProperties": {pattern: {}}, "propertyNames": inner}
    schema = {"pattern": inner} | {keyword: {"type": "object", keyword: value} for keyword, value in names.items()}
    asked = (
        StructuredOutputs(regex=pattern)
        if where == "regex"
        else StructuredOutputs(json={"properties": {"a": schema[where]}})
    )
    with pytest.raises(BadRequest, match=re.escape(UNKEPT[pattern]).replace(r"\\\\", r"\\")) as caught:
        form_of(None, asked)
    assert caught.value.param is not None and caught.value.param.endswith(
        where.replace("propertyNames", "propertyNames.pattern")
    )
    assert pattern.replace("\\", "\\\\") in str(caught.value)


KEPT = (
    "^a",
    "a$",
    "^^a$$",
    "^(a|b)$",
    "(^a|b$)",
    "^a|^b$|c$",
    "(?:^(?<n>^a|b))c",
    "a((b$)|c)",
    "a(b)+$",
    "[^a]",
    "[$]a",
    r"\$a\^",
    "(^a$)",
    r"\(?=a",
    "[(?=a]",
    r"\\1",
    r"[\\p]",
    "(?:a|b)",
    "(?<name>a)+?",
    r"^\d{3}-[a-z]{2,}$|^c$",
    r"a\{9999999999\}",
    "[a{9999999999}]",
    "a{0,1000000}",
    "x*^a",
    "a(^b|c)",
)


@pytest.mark.parametrize("pattern", KEPT)
def test_what_only_looks_like_it_is_taken(pattern):
    regex(pattern, "regex")


@pytest.mark.parametrize(
    "count",
    [
        "{4294967297}",
        "{1,4294967297}",
        "{1000001,}",
        "{0,2147483648}",
        "{" + "9" * 5000 + "}",
        "{" + "0" * 5000 + "1000001}",
    ],
)
def test_a_count_beyond_the_bound_is_refused(count):
    with pytest.raises(BadRequest, match=f"repeats more than {MAX_REPEATS} times"):
        form(regex="a" + count)
    with pytest.raises(BadRequest, match=f"repeats more than {MAX_REPEATS} times"):
        form(grammar='root ::= "a"' + count.replace(",", " , "))


def test_a_grammars_texts_classes_and_comments_have_no_counts():
    ebnf(
        'root ::= "a{9999999999}\\"{9999999999}" [{9999999999}\\]{9999999999}] # {9999999999}\n  "b"{1000000} '
        '"c"{0001}',
        "grammar",
    )


@pytest.mark.parametrize(
    ("grammar", "right"),
    [
        ('root ::= "\\x41b"', "Ab"),
        ("root ::= [\\x41-\\x42c]", "c"),
        ('root ::= "\\\\x41" # "\\x41b', "\\x41"),
        ('root ::= "\\"\\x0af"', '"\nf'),
    ],
)
def test_a_grammars_hexadecimal_escapes_have_two_digits(grammar, right):
    assert allows(compiled(form(grammar=grammar)), right)


@pytest.mark.parametrize("piece", ["[", "{", "{1", "(?", "\\", '"', "#", "{ ", "[\\", "(", "a|", "^a", "[a]", "()"])
def test_no_expression_takes_long_to_read(piece):
    with contextlib.suppress(BadRequest):
        regex(piece * 30_000, "regex")  # with a scan that began again at each character, each would take minutes
    ebnf(piece * 30_000, "grammar")


# ---------------------------------------------------------------- against Python

LETTERS = [
    "".join(pending_messages) for length in range(6) for pending_messages in itertools.product("ab", repeat=length)
]
ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", "^", "$", ""])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["?", "*", "+", "{1,2}", "{2}", "{0,2}", "{2,}"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        )
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
@settings(max_examples=examples(60, 5000), deadline=None)
def test_an_expression_fits_as_a_whole_what_python_says(pattern):
    try:
        grammar = compiled({"type": "grammar", "grammar": regex(pattern, "regex")})
    except BadRequest:
        return
    wanted = re.compile(pattern)
    assert sorted(texts(grammar, "ab", 5)) == sorted(text for text in LETTERS if wanted.fullmatch(text))


@given(EXPRESSIONS, st.integers(0, 5), st.none() | st.integers(0, 5))
@settings(max_examples=examples(60, 5000), deadline=None)
def test_with_a_length_fit_some_of_the_texts_that_fitted_and_are_so_long(pattern, least, most):
    """All of them where at most one part of the expression can be of several lengths."""
    try:
        variants = without_anchors(parse(pattern, "regex"))
    except BadRequest:
        return
    for node in variants.values():
        fit = with_length(node, least, most)
        whole = texts(compiled({"type": "grammar", "grammar": grammar_of(node)}), "ab", 5)
        wanted = {text for text in whole if least <= len(text) <= (5 if most is None else most)}
        got = set() if fit is None else set(texts(compiled({"type": "grammar", "grammar": grammar_of(fit)}), "ab", 5))
        assert got <= wanted
        if fit is not None:
            low, high = lengths(fit)
            assert low >= least and (most is None or (high is not None and high <= most))


COUNTED = {("[a-z]+", 2, 4), ("[A-Z][a-z]*", 1, 30), ("a{3}(bc)*", 5, 9), ("(ab|c)", 2, 2), ("x[0-9]{0,9}y", 3, 5)}


@pytest.mark.parametrize(("pattern", "least", "most"), sorted(COUNTED))
def test_lengths_beside_one_part_that_varies_are_kept_exactly(pattern, least, most):
    fit = with_length(parse(pattern, "regex"), least, most)
    assert fit is not None
    grammar, seen = compiled({"type": "grammar", "grammar": grammar_of(fit)}), set()
    for seed in range(80):
        text = drawn(grammar, seed)
        assert text is not None and re.fullmatch(pattern, text.decode()) and least <= len(text) <= most
        seen.add(len(text))
    possible = {
        len(text)
        for text in ("x" * size for size in range(least, most + 1))
        if with_length(parse(pattern, "regex"), len(text), len(text))
    }
    assert {min(possible), max(possible)} & seen and seen <= possible
