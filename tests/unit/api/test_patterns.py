"""What a compiler would not keep of a regular expression or a grammar is refused before it gets there, and nothing else is."""

import itertools
import re

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.api.patterns import MAX_REPEATS, check_ebnf, check_regex
from pdcluster.api.structured import StructuredOutputs, form_of
from pdcluster.errors import BadRequest

UNKEPT = {
    "(?=b)a": "a lookahead", "^(?!b).*$": "a negative lookahead", "(?<=b)a": "a lookbehind", "x(?<!b)a": "a negative lookbehind",
    r"(a|b)\1": "a backreference", r"(?<n>a)\k<n>": "a backreference", r"\ba\b": "a word boundary", r"\Aa\Z": "an anchor",
    r"\p{L}": "a Unicode property", r"[a\P{L}]": "a Unicode property", "[a]]|[](?=x)": "a lookahead", r"\\(?=a)": "a lookahead",
}  # fmt: skip
ANCHORS = {
    pattern: re.escape(f"{anchor} where something may stand")
    for anchor, patterns in (
        ("^", ("a^b", "a|b^", "x*^a", "a(^b)", "(a^)", "(a)^", "$^", "^*a", "(^a)+", "(?:a|^b){2}", "(?:x(^a|b))", "[a]^")),
        ("$", ("a$b", "a$|b$c", "(a$)b", "(?:a$|b)c", "(a|b$)[c]", "$a", r"a$\\n", "(a$)(b)")),
    )
    for pattern in patterns
}
UNKEPT |= ANCHORS
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
    r"[\1b]",
    r"\\1",
    r"[\\p]",
    "(?:a|b)",
    "(?<name>a)+?",
    r"^\d{3}-[a-z]{2,}$|^c$",
    r"a\{9999999999\}",
    "[a{9999999999}]",
    "a{0,1000000}",
)


@pytest.mark.parametrize("pattern", UNKEPT)
@pytest.mark.parametrize("where", ["regex", "pattern", "patternProperties", "propertyNames"])
def test_what_would_be_ignored_in_a_regular_expression_is_refused_by_its_pattern(where, pattern):
    inner = {"pattern": pattern}
    names = {"patternProperties": {pattern: {}}, "propertyNames": inner}
    schema = {"pattern": inner} | {keyword: {"type": "object", keyword: value} for keyword, value in names.items()}
    asked = StructuredOutputs(regex=pattern) if where == "regex" else StructuredOutputs(json={"properties": {"a": schema[where]}})
    with pytest.raises(BadRequest, match=UNKEPT[pattern]) as caught:
        form_of(None, asked)
    assert caught.value.param is not None and caught.value.param.endswith(where.replace("propertyNames", "propertyNames.pattern"))
    assert pattern.replace("\\", "\\\\") in str(caught.value)


@pytest.mark.parametrize("pattern", KEPT)
def test_what_only_looks_like_it_is_taken(pattern):
    check_regex(pattern, "regex")


@pytest.mark.parametrize(
    "count", ["{4294967297}", "{1,4294967297}", "{1000001,}", "{0,2147483648}", "{" + "9" * 5000 + "}", "{" + "0" * 5000 + "1000001}"]
)
def test_a_count_beyond_the_bound_is_refused(count):
    with pytest.raises(BadRequest, match=f"repeats more than {MAX_REPEATS} times"):
        form_of(None, StructuredOutputs(regex="a" + count))
    with pytest.raises(BadRequest, match=f"repeats more than {MAX_REPEATS} times"):
        form_of(None, StructuredOutputs(grammar='root ::= "a"' + count.replace(",", " , ")))


def test_a_grammars_texts_classes_and_comments_have_no_counts():
    check_ebnf('root ::= "a{9999999999}\\"{9999999999}" [{9999999999}\\]{9999999999}] # {9999999999}\n  "b"{1000000} "c"{0001}', "grammar")


@pytest.mark.parametrize("piece", ["[", "{", "{1", "(?", "\\", '"', "#", "{ ", "[\\"])
def test_scans_do_not_begin_again_at_each_character(piece):
    check_regex(piece * 60_000, "regex")  # with a scan that did, each of these would take minutes
    check_ebnf(piece * 60_000, "grammar")


@given(st.text(alphabet="(?<=!)[]{}\\1bka,p|^$", max_size=12))
def test_an_expression_that_is_taken_has_no_look_outside_of_a_class(pattern):
    try:
        check_regex(pattern, "regex")
    except BadRequest:
        return
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]?", "·", pattern)
    assert not re.search(r"\(\?<?[=!]", bare)


@given(st.text(alphabet="ab^$|()*?", max_size=9))
@settings(max_examples=examples(300, 5000))
def test_anchors_that_are_taken_say_nothing(pattern):
    """What an expression stands for as a whole is the same without them."""
    try:
        check_regex(pattern, "regex")
        wanted, bare = re.compile(pattern), re.compile(re.sub(r"[\^$]", "", pattern))
    except (BadRequest, re.error):
        return
    for length in range(5):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            assert bool(wanted.fullmatch(text)) == bool(bare.fullmatch(text)), text
