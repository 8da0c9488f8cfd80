"""Regular expressions of requests: what is taken means what everybody reads in it, and anything else is refused by
name."""

import contextlib
import itertools
import json
import re

import pytest
from drawn_examples import examples
from grammar_walk import allows, compiled, drawn, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.api.structured.forms import Form, json_form, own_form, regex_form
from pdcluster.api.structured.gbnf import MAX_REPEATS, lark_of
from pdcluster.core.errors import BadRequest

ESCAPES = {
    r"\x41b": ("Ab", "Л"),
    r"\u0041b": ("Ab", "\u0041c"),
    r"\u{1F600}": ("😀", "u"),
    r"\ud83d\ude00": ("😀", "?"),
    r"\U0001F600": ("😀", "U"),
    r"\t\n\r\f\v": ("\t\n\r\f\v", "tnrfv"),
    r"\.\*\\\/\-": (".*\\/-", "ab"),
    r"[\x41-\x43]{2}": ("AC", "D"),
    r"\d{2}": ("07", "٣٤"),
    r"[^\d]": ("x", "٣"),
    r"\w+": ("aZ_9", "ß"),
    r"\W": ("-", "ß"),
    r"\D": ("-", "٣"),
    r"[\W\d]": ("-", "ß"),
    "(?i)ab": ("aB", "c"),
    r"\p{L}": ("ß", "1"),
    r"[^\s\d]": ("x", "1"),
    r"\s": ("\f", "\u00a0"),
    r"\S": ("é", "\u00a0"),
    "(?<name>a)(?P<other>b)(?:c)": ("abc", "ac"),
    "a{2}b{1,}c{0,2}": ("aabbc", "aabbccc"),
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
    own, value = compiled(regex_form(pattern, "regex")), compiled(json_form({"pattern": f"^(?:{pattern})$"}, "schema"))
    assert allows(own, right) and not allows(own, wrong)
    assert allows(value, json.dumps(right, ensure_ascii=False))
    assert not allows(value, json.dumps(wrong, ensure_ascii=False))


REFUSED = {
    "(?=b)a": "look-around",
    "^(?!b).*$": "look-around",
    "(?<=b)a": "look-around",
    "x(?<!b)a": "look-around",
    r"(a|b)\1": "backreferences",
    r"(?P<n>a)(?P=n)": "unrecognized flag",
    r"\ba\b": "lookarounds not supported",
    r"\Aa": r"the escape \\A",
    r"a\Z": r"the escape \\Z",
    r"\q": r"the escape \\q",
    r"\a": r"the escape \\a",
    r"\cJ": "unrecognized escape",
    r"[\b]": "invalid escape",
    r"\01": "backreferences|octal",
    "(?>a)": "unrecognized flag",
    "(?(1)a|b)": "unrecognized flag",
    "a{,3}": "repetition quantifier",
    r"\x4": "incomplete escape",
    r"\u12": "incomplete escape",
    r"\ud800": "hexadecimal|not a Unicode scalar",
    "[]a]": r"\[\], which dialects read differently",
    "[^]": r"\[\^\], which dialects read differently",
    "[[:alpha:]]": r"\[ in a class",
    "[a[b]]": r"\[ in a class",
    "[a-z&&[aeiou]]": "&& in a class",
    "[a-z--b]": "-- in a class",
    "(abc": "unclosed group",
    "a)": "unopened group",
    "[a": "unclosed character class",
    "a\\": "a backslash at its end",
    "*a": "missing expression",
    "a{3,1}": "invalid repetition count",
    "[b-a]": "invalid character class range",
    "(?<1>a)": "invalid capture group",
    "a^b": "lookarounds not supported",
    "x{": "unclosed counted repetition",
    "a{4294967297}": "decimal literal invalid",
}


@pytest.mark.parametrize("pattern", REFUSED)
@pytest.mark.parametrize("where", ["regex", "pattern", "patternProperties", "propertyNames"])
def test_what_cannot_be_kept_of_a_regular_expression_is_refused_by_its_pattern(where, pattern):
    inner = {"pattern": pattern}
    names = {"patternProperties": {pattern: {}}, "propertyNames": inner}
    schema = {"pattern": inner} | {keyword: {"type": "object", keyword: value} for keyword, value in names.items()}
    with pytest.raises(BadRequest, match=f"(?i){REFUSED[pattern]}"):
        if where == "regex":
            compiled(regex_form(pattern, where), where)
        else:
            compiled(json_form({"properties": {"a": schema[where]}}, "schema"))


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
)


@pytest.mark.parametrize("pattern", KEPT)
def test_what_only_looks_like_it_is_taken(pattern):
    compiled(regex_form(pattern, "regex"))


@pytest.mark.parametrize(
    "count", ["{1000001,}", "{0,2147483648}", "{" + "9" * 5000 + "}", "{" + "0" * 5000 + "1000001}"]
)
def test_a_count_beyond_the_bound_is_refused(count):
    with pytest.raises(BadRequest, match=f"repeats more than {MAX_REPEATS} times"):
        own_form('root ::= "a"' + count.replace(",", " , "), "grammar")


def test_a_grammars_texts_classes_and_comments_have_no_counts():
    lark_of(
        'root ::= "a{9999999999}\\"{9999999999}" [{9999999999}\\]{9999999999}] "b"{1000000} "c"{0001} # {9999999999}',
        "grammar",
    )


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= "\\x41b"', "Ab", "A"),
        ("root ::= [\\x41-\\x42c]", "c", "C"),
        ("root ::= [\\u00e0-\\u00f6]+", "äö", "a"),
        ('root ::= "\\\\x41" # "\\x41b', "\\x41", "A"),
        ('root ::= "\\"\\x0af"', '"\nf', "f"),
        ('root ::= "(" root ")" | [a-z]+', "((ab))", "((ab)"),
        ('root ::= item ("," item)*\nitem ::= [^,]{1,3}', "a,bcd", "a,,b"),
        ('start: "a" item*\nitem: /[0-9]/', "a12", "ab"),
        ('%llguidance {}\nstart: %json {"type":"integer"}', "12", "a"),
        ("start: A & B\nA: /[a-c]+/\nB: /[b-d]+/", None, None),
    ],
)
def test_a_grammar_of_ones_own_is_gbnf_or_lark(grammar, right, wrong):
    if right is None:
        with pytest.raises(BadRequest, match="grammar that cannot be kept"):
            compiled(own_form(grammar, "grammar"))
        return
    made = compiled(own_form(grammar, "grammar"))
    assert allows(made, right) and not allows(made, wrong)


ENDLESS = {
    'root ::= "a" root': "rule root never ends",
    "root ::= a\na ::= b\nb ::= a": "rule (root|a|b) never ends",
    'root ::= "a" | b\nb ::= b "c"': "rule b never ends",
    "root ::= missing": "missing.* not found",
    "nothing": "no GBNF and no Lark",
    'root ::= "a': "no GBNF and no Lark",
}


@pytest.mark.parametrize("grammar", ENDLESS)
def test_a_grammar_that_is_none_or_has_a_rule_that_never_ends_is_refused(grammar):
    with pytest.raises(BadRequest, match=ENDLESS[grammar]):
        own_form(grammar, "grammar")


@pytest.mark.parametrize("grammar", ['root ::= "a" root | "b"', 'root ::= (root "a")? "b"', 'root ::= "a"* root{0,2}'])
def test_a_grammar_that_may_end_is_taken(grammar):
    compiled(own_form(grammar, "grammar"))


@pytest.mark.parametrize("piece", ["[", "{", "{1", "(?", "\\", '"', "#", "{ ", "[\\", "a|", "^a", "[a]", "()"])
def test_no_expression_takes_long_to_read(piece):
    with contextlib.suppress(BadRequest):
        regex_form(piece * 15_000, "regex")  # with a scan that began again at each character, each would take minutes
    with contextlib.suppress(BadRequest):
        own_form(piece * 15_000, "grammar")


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
@settings(max_examples=examples(12, 5000), deadline=None)
def test_an_expression_fits_as_a_whole_what_python_says(pattern):
    try:
        grammar = compiled(regex_form(pattern or "()", "regex"))
    except BadRequest:
        return
    wanted = re.compile(pattern)
    assert sorted(texts(grammar, "ab", 5)) == sorted(text for text in LETTERS if wanted.fullmatch(text))


@given(EXPRESSIONS, st.integers(0, 5), st.none() | st.integers(0, 5))
@settings(max_examples=examples(12, 5000), deadline=None)
def test_a_pattern_of_a_value_fits_what_python_finds_and_that_is_so_long(pattern, least, most):
    schema = {"pattern": pattern, "minLength": least} | ({} if most is None else {"maxLength": most})
    try:
        grammar = compiled(json_form(schema, "schema"))
    except BadRequest:
        return
    wanted = re.compile(pattern)
    for text in LETTERS:
        is_right = wanted.search(text) is not None and least <= len(text) <= (5 if most is None else most)
        assert allows(grammar, json.dumps(text)) is is_right, text


COUNTED = {("[a-z]+", 2, 4), ("[A-Z][a-z]*", 1, 30), ("a{3}(bc)*", 5, 9), ("(ab|c)", 2, 2), ("x[0-9]{0,9}y", 3, 5)}


@pytest.mark.parametrize(("pattern", "least", "most"), sorted(COUNTED))
def test_lengths_beside_a_pattern_are_kept(pattern, least, most):
    form: Form = json_form({"pattern": f"^{pattern}$", "minLength": least, "maxLength": most}, "schema")
    for seed in range(20):
        text = drawn(compiled(form), seed)
        assert text is not None
        value = json.loads(text)
        assert re.fullmatch(pattern, value) and least <= len(value) <= most
