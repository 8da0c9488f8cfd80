"""Ids that a model's text files use and the model lacks: refused by name where they are needed, else told once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level_files, sentencepiece_files, with_config

from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint.token_ids import tokens_beyond
from pdcluster.core.errors import ModelError
from pdcluster.node.reports.load_report import ModelFiles

# The tiny tokenizer's next id, with which the model's vocabulary ends.
SIZE = TextModel(byte_level_files()).vocab_size


def files(token: str = "<new>", config: dict[str, Any] | None = None, **settings: Any) -> dict[str, bytes]:
    """The tiny tokenizer with one token more than the model has."""
    content = json.loads(byte_level_files()["tokenizer.json"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"].append({"id": SIZE, "content": token, **flags})
    given = byte_level_files() | {"tokenizer.json": json.dumps(content).encode()}
    given["config.json"] = json.dumps({"vocab_size": SIZE, **(config or {})}).encode()
    return with_config(given, **settings)


def processed(token: str) -> dict[str, bytes]:
    given = files(token)
    content = json.loads(given["tokenizer.json"])
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [SIZE], "tokens": [token]}},
    }
    return given | {"tokenizer.json": json.dumps(content).encode()}


ADDED = {str(SIZE): {"content": "<new>"}}
JOINED = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
CALLS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ '<' ~ 'tools>' }}{% endif %}"
NEEDED: dict[str, tuple[dict[str, bytes], str]] = {
    "end": (files(eos_token="<new>"), f"tokenizer_config.json: the eos_token '<new>' has the id {SIZE}"),
    "end of config.json": (files(config={"eos_token_id": [1, SIZE]}), f"config.json: eos_token_id has the id {SIZE}"),
    "end of generation_config.json": (
        files() | {"generation_config.json": json.dumps({"eos_token_id": SIZE + 7}).encode()},
        f"generation_config.json: eos_token_id has the id {SIZE + 7}",
    ),
    "begin": (files(bos_token={"content": "<new>"}), "tokenizer_config.json: the bos_token '<new>'"),
    "begin of config.json": (files(config={"bos_token_id": SIZE}), f"config.json: bos_token_id has the id {SIZE}"),
    "begin of tokenizer.json": (processed("<new>"), "tokenizer.json: the post_processor's token '<new>'"),
    "template": (files(chat_template="<new>{{ messages[0].content }}"), "the chat template's token '<new>'"),
    "template that joins": (files("<|user|>", chat_template=JOINED), r"the chat template's token '<\\|user\\|>'"),
    "template with tools": (files("<tools>", chat_template=CALLS), "the chat template's token '<tools>'"),
    "named by the template": (
        files(pad_token="<new>", chat_template="{{ pad_token }}{{ messages[0].content }}"),
        "the chat template's token '<new>'",
    ),
    "marker": (files("</tool_call>"), "the marker of tool calls or thoughts '</tool_call>'"),
    "thought": (files("<think>"), "the marker of tool calls or thoughts '<think>'"),
    "named in the config only": (
        with_config(byte_level_files(), added_tokens_decoder=ADDED, eos_token="<new>")
        | {"config.json": json.dumps({"vocab_size": SIZE}).encode()},
        f"the eos_token '<new>' has the id {SIZE}",
    ),
}


def save(given: dict[str, bytes], directory: Path) -> Path:
    for name, content in given.items():
        (directory / name).write_bytes(content)
    return directory


@pytest.mark.parametrize("name", list(NEEDED))
def test_an_id_that_is_needed_is_refused_by_name_by_nodes_and_routers(name: str, tmp_path: Path) -> None:
    given, error = NEEDED[name]
    with pytest.raises(ModelError, match=rf"{error}.*only has 0 to {SIZE - 1} \(config.json: vocab_size\); take"):
        TextModel(given)
    with pytest.raises(ModelError, match=error):
        ModelFiles(save(given, tmp_path))


def test_other_ids_are_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = files(pad_token="<new>", config={"pad_token_id": SIZE})
    for read in (TextModel, lambda files: ModelFiles(save(files, tmp_path))):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            read(given)
        (record,) = caplog.records
        assert f"ids from {SIZE} on" in record.getMessage() and "have 2: '<new>'" in record.getMessage()


def test_many_other_ids_are_one_line_too(caplog: pytest.LogCaptureFixture) -> None:
    """A vocabulary that was cut."""
    for given in (with_config(sentencepiece_files(), add_bos_token=None), byte_level_files()):
        caplog.clear()
        size = TextModel(given).vocab_size - 50
        TextModel(given | {"config.json": json.dumps({"vocab_size": size}).encode()})
        (record,) = caplog.records
        assert "have 50: " in record.getMessage() and record.getMessage().count("'") == 10


def test_pieces_of_a_unigram_tokenizer_are_counted_too() -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]}
    content = {"added_tokens": [{"id": 3, "content": "<new>"}], "model": model}
    assert tokens_beyond({"tokenizer.json": json.dumps(content).encode()}, 2) == ({"<new>": 3}, {"b": 2})


def test_a_model_with_an_embedding_for_every_id_is_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    TextModel(files("<think>", config={"vocab_size": SIZE + 1, "eos_token_id": SIZE}, eos_token="<think>"))
    TextModel(byte_level_files())
    assert not caplog.records
