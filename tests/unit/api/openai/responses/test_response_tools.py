"""Tools of a request as functions of a chat, their names there and back, and which of them are chosen."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster.api.openai.responses.tools import Toolbox, ToolName, digest_name, flat_name
from pdcluster.api.tools.tool_choice import MAX_TOOLS, AllowedTool, NamedChoice, NamedFunction, Offer, offer_of
from pdcluster.core.errors import BadRequest

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": SCHEMA,
    "strict": True,
    "defer_loading": True,
}
QUERY = {"type": "function", "name": "query", "parameters": SCHEMA}
SPACE = {
    "type": "namespace",
    "name": "mcp__db",
    "description": "A database.",
    "tools": [QUERY, {**QUERY, "name": "list"}],
}
PATCH = {"type": "custom", "name": "patch", "description": "Patches."}
HOSTED = [
    {"type": kind, "name": 3, "tools": "x", "format": 1}
    for kind in (
        "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell",
        "computer", "computer_use_preview", "shell", "apply_patch", "tool_search", "programmatic_tool_calling", "a_new_one",
    )
]  # fmt: skip


def offer(tools: list[dict[str, Any]], choice: Any = None) -> Offer | None:
    toolbox = Toolbox(tools, choice)
    return offer_of(toolbox.definitions, toolbox.choice, None)


def functions(tools: list[dict[str, Any]], choice: Any = None) -> list[Any]:
    return [tool.function for tool in Toolbox(tools, choice).definitions]


def test_a_function_stays_what_it_is() -> None:
    (add,) = functions([ADD])
    assert (add.name, add.description, add.parameters, add.strict) == ("add", "Adds.", SCHEMA, True)
    assert Toolbox([ADD]).client_name("add") == ToolName("add")


def test_tools_of_a_namespace_get_names_of_their_own_and_come_back() -> None:
    toolbox = Toolbox([ADD, SPACE])
    assert [tool.function.name for tool in toolbox.definitions] == ["add", "mcp__db__query", "mcp__db__list"]
    assert toolbox.client_name("mcp__db__query") == ToolName("query", "mcp__db")
    assert toolbox.function_name("query", "mcp__db") == "mcp__db__query"
    assert [tool.function.description for tool in toolbox.definitions] == ["Adds.", "A database.", None]
    assert functions([{**SPACE, "name": "mcp__db__"}])[0].name == "mcp__db__query"


def test_names_that_would_be_equal_or_too_long_differ_by_a_digest() -> None:
    taken = {**ADD, "name": "mcp__db__query"}
    names = [function.name for function in functions([SPACE, taken])]
    assert names == [digest_name("query", "mcp__db"), "mcp__db__list", "mcp__db__query"]
    assert Toolbox([SPACE, taken]).client_name(names[0]) == ToolName("query", "mcp__db")
    long = flat_name("q" * 64, "n" * 64)
    assert len(long) == 64 and long == flat_name("q" * 64, "n" * 64) != flat_name("r" * 64, "n" * 64)
    both = [{**SPACE, "name": "a"}, {**SPACE, "name": "a__"}]
    assert len({function.name for function in functions(both)}) == 4


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    (patch,) = functions([PATCH])
    assert patch.parameters == {
        "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False,
    }  # fmt: skip
    assert patch.description.startswith("Patches.\n\n") and patch.strict is None
    assert Toolbox([PATCH]).client_name("patch") == ToolName("patch", None, is_custom=True)
    inside = Toolbox([{**SPACE, "tools": [PATCH]}])
    assert inside.client_name("mcp__db__patch") == ToolName("patch", "mcp__db", is_custom=True)


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_grammar_is_told_and_a_regular_expression_kept_where_a_call_must_come(syntax: str) -> None:
    grammar = {"type": "grammar", "syntax": syntax, "definition": "[a-z]+"}
    tools = [{**PATCH, "format": grammar}]
    for choice in (None, "auto", "required", {"type": "custom", "name": "patch"}):
        (patch,) = functions(tools, choice)
        assert f"matches this {syntax} grammar:\n[a-z]+" in patch.description
        is_kept = syntax == "regex" and choice not in (None, "auto")
        assert patch.parameters["properties"]["input"].get("pattern") == ("^(?:[a-z]+)$" if is_kept else None)
    assert functions([{**PATCH, "format": {"type": "text"}}]) == functions([PATCH])


def test_tools_that_a_server_runs_are_left_out() -> None:
    assert Toolbox(HOSTED).definitions == [] and offer(HOSTED) is None
    assert functions([*HOSTED, ADD]) == functions([ADD])


@pytest.mark.parametrize(
    ("choice", "names", "must"),
    [
        (None, ["add", "mcp__db__query", "mcp__db__list", "patch"], False),
        ("auto", ["add", "mcp__db__query", "mcp__db__list", "patch"], False),
        ("required", ["add", "mcp__db__query", "mcp__db__list", "patch"], True),
        ({"type": "function", "name": "add"}, ["add"], True),
        ({"type": "function", "name": "query", "namespace": "mcp__db"}, ["mcp__db__query"], True),
        ({"type": "function", "name": "query"}, ["mcp__db__query"], True),
        ({"type": "custom", "name": "patch"}, ["patch"], True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, ["add"], False),
        (
            {"type": "allowed_tools", "mode": "required",
             "tools": [{"type": "custom", "name": "patch"}, {"type": "mcp", "server_label": "x"}]},
            ["patch"], True,
        ),
        (
            {"type": "allowed_tools", "mode": "auto",
             "tools": [{"type": "namespace", "name": "mcp__db"}, {"type": "function", "name": "query"}]},
            ["mcp__db__query", "mcp__db__list"], False,
        ),
    ],
)  # fmt: skip
def test_a_choice_is_the_chats(choice: object, names: list[str], must: bool) -> None:
    made = offer([ADD, SPACE, PATCH], choice)
    assert made is not None
    assert ([function.name for function in made.tools], made.must) == (names, must)
    assert len(made.shown) == 4 and made.is_limited is (len(names) < 4)


def test_no_choice_offers_nothing() -> None:
    nothing = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert offer([ADD], "none") is offer([ADD], nothing) is offer([], "auto") is None


@pytest.mark.parametrize(
    ("tools", "choice", "param", "what"),
    [
        ([{"type": "function"}], None, "tools[0].name", "is missing"),
        ([ADD, {"name": "a b"}], None, "tools[1].name", "letters, digits"),
        ([ADD, ADD], None, "tools[1].name", "names must differ"),
        ([ADD, {**PATCH, "name": "add"}], None, "tools[1].name", "names must differ"),
        ([{**SPACE, "tools": [QUERY, QUERY]}], None, "tools[0].tools[1].name", "names must differ"),
        ([{**SPACE, "tools": [{"type": "function", "name": 3}]}], None, "tools[0].tools[0].name", "must be a string"),
        ([{**ADD, "parameters": "x"}], None, "tools[0].parameters", "must be an object"),
        ([{"type": 3}], None, "tools[0].type", "must be a string"),
        ([{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}], None, "tools[0].format.definition", "is missing"),
        ([{**PATCH, "format": {"type": "grammar", "definition": "x"}}], None, "tools[0].format.syntax", "is missing"),
        ([{**PATCH, "format": {"type": "x"}}], None, "tools[0].format.type", "must be one of text, grammar"),
        ([{**ADD, "name": f"f{index}"} for index in range(MAX_TOOLS + 1)], None, "tools", "send fewer"),
        ([ADD], {"type": "function", "name": "sub"}, "tool_choice", '"sub", which is not among the tools'),
        ([ADD], {"type": "custom", "name": "add"}, "tool_choice", "not among the tools"),
        ([ADD], {"type": "allowed_tools", "mode": "x", "tools": []}, "tool_choice.mode", "auto or required"),
        ([ADD], {"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools", "a list"),
        ([ADD], {"type": "allowed_tools", "mode": "required", "tools": []}, "tool_choice.tools", "name one"),
        (
            [ADD], {"type": "allowed_tools", "mode": "auto", "tools": [ADD, {"type": "function", "name": "sub"}]},
            "tool_choice.tools[1]", "not among the tools",
        ),
        (HOSTED, "required", "tool_choice", "send one"),
        ([ADD], {"type": "web_search_preview"}, "tool_choice.type", "not run here"),
        ([ADD], {"type": "mcp", "server_label": "x"}, "tool_choice.type", "not run here"),
        ([ADD], {}, "tool_choice.type", "not run here"),
    ],
)  # fmt: skip
def test_a_refused_tool_or_choice_says_why(tools: list[dict[str, Any]], choice: Any, param: str, what: str) -> None:
    with pytest.raises(BadRequest) as refused:
        Toolbox(tools, choice)
    assert refused.value.param == param and what in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("choice", "what"),
    [
        (NamedChoice(), "tool_choice.function is missing"),
        (NamedChoice(type="allowed_tools"), "must have tools"),
        (NamedChoice(NamedFunction("add"), "allowed_tools"), "must have tools"),
        (NamedChoice(NamedFunction("sub")), '"sub", which is not among'),
    ],
)
def test_a_chats_choice_is_checked(choice: NamedChoice, what: str) -> None:
    with pytest.raises(BadRequest, match=what):
        offer_of(Toolbox([ADD]).definitions, choice, None)
    assert AllowedTool(NamedFunction("add")).type == "function"
