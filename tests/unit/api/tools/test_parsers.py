"""Calls of tools found in what models write: the same whatever the pieces, and nothing of the text is lost."""

import itertools
import json

import pytest
from drawn_examples import examples
from grammar_walk import allows, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.api.tools.calls import CallRules, Part, ToolCallDelta
from pdcluster.api.tools.formats import FORMATS, detect
from pdcluster.api.tools.parsers import Parser
from pdcluster.api.tools.tool_choice import Function, Offer, ToolDefinition, offer_of

NAMES = ("get_weather", "add")
FUNCTIONS = [Function(name) for name in NAMES]
OFFER = Offer(FUNCTIONS, [ToolDefinition(function) for function in FUNCTIONS], False, True)


def parser_of(name: str) -> Parser:
    ids = itertools.count()
    return FORMATS[name].parser(CallRules(lambda: f"id{next(ids)}", OFFER.knows, NAMES))


def parse(
    name: str, pieces: list[str], *, is_cut: bool = False
) -> tuple[str, list[tuple[str | None, str | None, str]]]:
    """The text, and of each call its id, name and arguments."""
    parser = parser_of(name)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    parts += parser.flush(is_cut=is_cut)
    calls: list[list[ToolCallDelta]] = []
    for part in parts:
        if isinstance(part, ToolCallDelta):
            if part.id is not None:
                assert part.index == len(calls)
                calls.append([])
            assert part.index == len(calls) - 1
            calls[-1].append(part)
    assert len(calls) == parser.num_calls
    joined = [(first[0].id, first[0].name, "".join(delta.arguments for delta in first)) for first in calls]
    return "".join(part for part in parts if isinstance(part, str)), joined


ROME, SUM = '{"city": "Ro{}]\\"me", "days": [1, {"a": "}"}]}', '{"a": 1, "b": 2}'
WEATHER, ADD = ("id0", "get_weather", ROME), ("id1", "add", SUM)


def called(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


CASES = {
    "hermes one": ("hermes", f"<tool_call>\n{called('get_weather', ROME)}\n</tool_call>", "", [WEATHER]),
    "hermes text before": (
        "hermes",
        f"Let me see. \n<tool_call>{called('get_weather', ROME)}</tool_call>",
        "Let me see.",
        [WEATHER],
    ),
    "hermes two": (
        "hermes",
        f"<tool_call>{called('get_weather', ROME)}</tool_call>\n <tool_call>\n{called('add', SUM)}</tool_call>\n",
        "",
        [WEATHER, ADD],
    ),
    "hermes text behind": ("hermes", f"<tool_call>{called('get_weather', ROME)}</tool_call> done", " done", [WEATHER]),
    "hermes arguments first": (
        "hermes",
        f'<tool_call>{{"arguments": {ROME}, "name": "get_weather"}}</tool_call>',
        "",
        [WEATHER],
    ),
    "hermes arguments as text": (
        "hermes",
        f"<tool_call>{called('get_weather', json.dumps(ROME))}</tool_call>",
        "",
        [WEATHER],
    ),
    "hermes no arguments": ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("id0", "add", "{}")]),
    "hermes null arguments": ("hermes", f"<tool_call>{called('add', 'null')}</tool_call>", "", [("id0", "add", "{}")]),
    "hermes other keys": (
        "hermes",
        f'<tool_call>{{"id": 7, "name": "get_weather", "x": [{{}}], "arguments": {ROME}, "y": null}}</tool_call>',
        "",
        [WEATHER],
    ),
    "hermes arguments twice": (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {SUM}, "parameters": {ROME}}}</tool_call>',
        "",
        [("id0", "add", SUM)],
    ),
    "hermes unknown tool": ("hermes", "a <tool_call>" + called("nobody", "{}") + "</tool_call>", None, []),
    "hermes no JSON": ("hermes", "a <tool_call>what?</tool_call> b", "a <tool_call>what?</tool_call> b", []),
    "hermes end missing": (
        "hermes",
        f"<tool_call>{called('get_weather', ROME)}<tool_call>{called('add', SUM)}",
        "",
        [WEATHER, ADD],
    ),
    "hermes broken off": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"ci',
        "",
        [("id0", "get_weather", '{"ci')],
    ),
    "hermes broken off in the name": ("hermes", 'x <tool_call>{"name": "get', 'x <tool_call>{"name": "get', []),
    "hermes second broken off": (
        "hermes",
        f'<tool_call>{called("get_weather", ROME)}</tool_call>\n<tool_call>\n{{"name": "ad',
        "",
        [WEATHER],
    ),
    "hermes second broken off at its mark": (
        "hermes",
        f"<tool_call>{called('get_weather', ROME)}</tool_call><tool_call>",
        "",
        [WEATHER],
    ),
    "hermes second is none": (
        "hermes",
        f"<tool_call>{called('get_weather', ROME)}</tool_call><tool_call>so",
        "<tool_call>so",
        [WEATHER],
    ),
    "llama second broken off": (
        "llama",
        called("get_weather", ROME, "parameters") + '; {"name": "add", "param',
        "",
        [WEATHER],
    ),
    "mistral second broken off": ("mistral", f'[TOOL_CALLS][{called("get_weather", ROME)}, {{"name"', "", [WEATHER]),
    "mistral second broken off in its name": (
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]ad",
        "",
        [WEATHER],
    ),
    "hermes literal tags": (
        "hermes",
        " \n<tool_call>\n </tool_call> \n<tool_call>",
        " \n<tool_call>\n </tool_call> \n<tool_call>",
        [],
    ),
    "hermes literal, then a call": (
        "hermes",
        f"a  <tool_call> b \n<tool_call>{called('add', SUM)}</tool_call>",
        "a  <tool_call> b",
        [("id0", "add", SUM)],
    ),
    "hermes a space in a call that is none": (
        "hermes",
        "a\t<tool_call> {\n7}</tool_call>",
        "a\t<tool_call> {\n7}</tool_call>",
        [],
    ),
    "mistral literal": ("mistral", "a  [TOOL_CALLS]  [ 7, b ", "a  [TOOL_CALLS]  [ 7, b ", []),
    "mistral spaces": ("mistral", "a \n[TOOL_CALLS] \n", "a \n[TOOL_CALLS] \n", []),
    "llama literal": ("llama", " \n<|python_tag|> print(1) ", " \n<|python_tag|> print(1) ", []),
    "hermes nearly a mark": ("hermes", "a <tool_cal> b <", "a <tool_cal> b <", []),
    "hermes list for arguments": ("hermes", f"<tool_call>{called('add', '[1]')}</tool_call>", None, []),
    "llama one": ("llama", called("get_weather", ROME, "parameters"), "", [WEATHER]),
    "llama tag": ("llama", " <|python_tag|>" + called("get_weather", ROME, "parameters"), "", [WEATHER]),
    "llama two": (
        "llama",
        called("get_weather", ROME, "parameters") + "; " + called("add", SUM, "parameters"),
        "",
        [WEATHER, ADD],
    ),
    "llama text": ("llama", 'Use {"name": "add", "parameters": {}}', 'Use {"name": "add", "parameters": {}}', []),
    "llama JSON answer": (
        "llama",
        '{"name": "Bob", "parameters": {"a": 1}}',
        '{"name": "Bob", "parameters": {"a": 1}}',
        [],
    ),
    "llama other JSON": ("llama", '{"city": "Rome"}', '{"city": "Rome"}', []),
    "llama list": ("llama", "[1, 2]", "[1, 2]", []),
    "mistral list": (
        "mistral",
        f"[TOOL_CALLS][{called('get_weather', ROME)}, {called('add', SUM)}]",
        "",
        [WEATHER, ADD],
    ),
    "mistral space": ("mistral", f"ok [TOOL_CALLS] [ {called('get_weather', ROME)} ]", "ok", [WEATHER]),
    "mistral names": ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]add{SUM}", "", [WEATHER, ADD]),
    "mistral call id": ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ROME}", "", [WEATHER]),
    "mistral unknown": ("mistral", "[TOOL_CALLS]nobody{}", "[TOOL_CALLS]nobody{}", []),
    "mistral no name": ("mistral", f"[TOOL_CALLS]{'so ' * 100}{{}}", f"[TOOL_CALLS]{'so ' * 100}{{}}", []),
    "mistral text": ("mistral", "[TOOL] is [TOOL_CALLS", "[TOOL] is [TOOL_CALLS", []),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found_in_the_whole_text_and_in_any_two_pieces_of_it(case):
    name, text, content, calls = CASES[case]
    whole = parse(name, [text])
    assert whole[1] == calls
    if content is not None:
        assert whole[0] == content
    for cut in range(len(text) + 1):
        assert parse(name, [text[:cut], text[cut:]]) == whole, f"cut at {cut}"
    assert parse(name, list(text)) == whole


def test_text_behind_a_mark_is_not_held_to_the_end():
    parser = parser_of("mistral")
    parts = [part for _ in range(300) for part in parser.feed("word ")] if not parser.feed("[TOOL_CALLS]") else []
    assert sum(len(part) for part in parts if isinstance(part, str)) > 1000


CUT = {
    "hermes": {
        "a <tool_cal": "a", "<tool_call>": "", 'a\n<tool_call>\n{"name": "ad': "a", "a <b": "a <b", "a < b": "a < b",
        "a \n": "a \n", "a <": "a",
    },
    "mistral": {
        "a [TOOL_CALLS": "a", "[TOOL_CALLS]ad": "", '[TOOL_CALLS] [{"na': "", "a [TOOLS": "a [TOOLS", "a [1": "a [1",
    },
    "llama": {
        "<|python_tag": "", '<|python_tag|>{"x': "", '{"name": "ad': "", '{ "na': "", '{"name": "add", "param': "",
        '{"name": "adam': '{"name": "adam', '{"city": "Ro': '{"city": "Ro', " x <|py": " x <|py", "a {": "a {",
        "<|p x": "<|p x",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CUT))
def test_what_begins_like_a_call_when_the_tokens_run_out_is_no_text(name):
    for text, expected in CUT[name].items():
        for pieces in ([text], list(text)):
            assert parse(name, pieces, is_cut=True) == (expected, []), text


@given(st.data())
@settings(max_examples=examples(60, 5000), deadline=None)
def test_text_without_calls_comes_out_as_it_was(data):
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
    words = [*marks, "{", "}", '"name"', '"add"', ": ", "[", "]", " ", "\n", "x", "<", "{}"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=15)))
    for name in FORMATS:
        content, calls = parse(name, list(text))
        if not calls:
            assert content == text
            cut, calls = parse(name, list(text), is_cut=True)
            assert text.startswith(cut) and not calls


@given(st.data())
@settings(max_examples=examples(150, 5000), deadline=None)
def test_any_text_is_the_same_in_any_pieces(data):
    words = ["<tool_call>", "</tool_call>", "{", "}", '"name"', '"add"', '"arguments"', ": ", ",", "[TOOL_CALLS]",
    "[ARGS]", "[", "]", "; ", " ",
             "<|python_tag|>", "x", "\\", '"', "\n", "é", "1", "<", "{}", called("add", SUM)]  # fmt: skip
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=25)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(name, pieces) == parse(name, [text]) == parse(name, list(text))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_a_forced_grammar_writes_is_what_the_parser_reads(name):
    tool_format, offer = FORMATS[name], offer_of([ToolDefinition(function) for function in FUNCTIONS], "required", True)
    begin, end = tool_format.begin.replace("{name}", "get_weather"), tool_format.end
    one = f"{begin}{ROME}{end}"
    two = tool_format.begin.replace("{name}", "add") + SUM + end
    text = tool_format.opening + one + tool_format.separator + two + tool_format.closing
    assert parse(name, list(text)) == ("", [WEATHER, ADD])
    assert allows(compiled(tool_format.form(offer), "tools"), text)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% for tool in tools %}<tool_call>{% endfor %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama"),
        ("{{ messages }}", None),
        ("{{ tools }}", None),
    ],
)
def test_a_format_is_known_by_the_template(template, name):
    assert detect(template) == name


def test_ids_are_unique_and_of_the_kind_that_a_template_takes():
    ids = {FORMATS[name].new_id() for name in ("hermes", "mistral") for _ in range(50)}
    assert len(ids) == 100
    assert all(len(each) == 9 and each.isalnum() for each in ids if not each.startswith("call_"))


@pytest.mark.parametrize("mark", ["<", "</tool_cal", "</tool_call"])
def test_the_beginning_of_a_mark_behind_a_call_is_no_text_where_tokens_run_out(mark: str) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}' + mark
    for pieces in ([text], list(text)):
        assert parse("hermes", pieces, is_cut=True)[0] == "", text
