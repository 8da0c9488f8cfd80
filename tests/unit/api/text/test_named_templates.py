"""Which of several chat templates a prompt gets, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizers import byte_level_files
from transformers import AutoTokenizer

from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint.text_files import files_digest, read_text_files
from pdcluster.core.errors import BadRequest, ModelError

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "find", "description": "it", "parameters": {"type": "object"}}}]
# Of a name: says which one it is, and shows the tools.
NAMED = "{name}:{{{{ messages[0].content }}}}{{{{ tools | tojson if tools else '' }}}}"
EXTRA = "additional_chat_templates"


def template(name: str) -> str:
    return NAMED.format(name=name)


def listed(*names: str) -> object:
    return [{"name": name, "template": template(name)} for name in names]


# chat_template of tokenizer_config.json, and files.
CASES: dict[str, tuple[object, tuple[str, ...]]] = {
    "one": (template("config"), ()),
    "a list": (listed("default", "tool_use", "rag"), ()),
    "a list without tool_use": (listed("rag", "default"), ()),
    "a list without a default": (listed("tool_use", "rag"), ()),
    "a table": ({"default": template("default"), "tool_use": template("tool_use")}, ()),
    "a file": (listed("default", "tool_use"), ("chat_template.jinja",)),
    "a file and tool_use": (None, ("chat_template.jinja", f"{EXTRA}/tool_use.jinja")),
    "a file and others": (template("config"), ("chat_template.jinja", f"{EXTRA}/tool_use.jinja", f"{EXTRA}/rag.jinja")),
    "two defaults": (None, ("chat_template.jinja", f"{EXTRA}/default.jinja")),
    "tool_use beside a list": (listed("default", "tool_use"), (f"{EXTRA}/tool_use.jinja",)),
    "another one beside it": (None, ("chat_template.jinja", f"{EXTRA}/rag.jinja")),
    "none": (None, ()),
}


def written(directory: Path, of_config: object, names: tuple[str, ...]) -> Path:
    files = byte_level_files()
    config = {**json.loads(files["tokenizer_config.json"]), "eos_token": "<|eos|>", "chat_template": of_config}
    (directory / "tokenizer.json").write_bytes(files["tokenizer.json"])
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / EXTRA).mkdir()
    for name in names:
        (directory / name).write_text(template(name))
    return directory


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("case", CASES)
def test_the_template_is_that_of_transformers(case: str, tools: list[object] | None, tmp_path: Path) -> None:
    directory = written(tmp_path, *CASES[case])
    text = TextModel.from_dir(directory)
    try:
        wanted = AutoTokenizer.from_pretrained(directory).apply_chat_template(CHAT, tools=tools, tokenize=False)
    except ValueError:  # it has none for this
        with pytest.raises(BadRequest, match="chat template"):
            text.render_chat(CHAT, tools=tools)
    else:
        assert text.render_chat(CHAT, tools=tools) == wanted


def test_a_model_without_a_default_says_what_its_templates_are_for() -> None:
    files = byte_level_files() | {f"{EXTRA}/tool_use.jinja": template("tool_use").encode()}
    with pytest.raises(BadRequest, match="only for prompts with tools"):
        TextModel(files).render_chat(CHAT)


def test_marks_of_tools_and_thoughts_are_those_of_either() -> None:
    named = [
        {"name": "default", "template": "{{ messages[0].content }}</think>"},
        {"name": "tool_use", "template": "{{ tools }}<tool_call>"},
    ]
    files = byte_level_files()
    config = {**json.loads(files["tokenizer_config.json"]), "chat_template": named}
    text = TextModel(files | {"tokenizer_config.json": json.dumps(config).encode()})
    assert (text.tool_format, text.reasons) == ("hermes", True)
    assert text.info["chat_template"] == named[0]["template"]


@pytest.mark.parametrize("broken", ["default", "tool_use"])
def test_each_of_them_is_checked_when_the_model_is_read(broken: str) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        TextModel(byte_level_files() | {f"{EXTRA}/{broken}.jinja": b"{% for m in messages %}"})


def test_they_are_among_the_models_text_files(tmp_path: Path) -> None:
    directory = written(tmp_path, None, ("chat_template.jinja", f"{EXTRA}/tool_use.jinja", f"{EXTRA}/rag.jinja"))
    files = read_text_files(directory)
    assert files[f"{EXTRA}/tool_use.jinja"] == template(f"{EXTRA}/tool_use.jinja").encode()
    (directory / EXTRA / "tool_use.jinja").write_text("another")
    assert files_digest(read_text_files(directory)) != files_digest(files)
