"""Tokenizer, chat template and defaults of a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizers import byte_level_files, sentencepiece_files, with_config
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pdcluster.api.text.model_text import SamplingDefaults, TextModel
from pdcluster.api.text.segments import SHORT_CHARACTERS
from pdcluster.core.errors import BadRequest, ModelError


def oracle(files: dict[str, bytes]) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    tokenizer.no_truncation()
    return tokenizer


def test_a_prompt_gets_its_bos_and_a_rendered_chat_does_not_get_a_second_one() -> None:
    text = TextModel(byte_level_files())
    bos = oracle(byte_level_files()).token_to_id("<|bos|>")
    assert text.encode("hello", add_special_tokens=True)[0] == bos
    rendered = text.render_chat([{"role": "user", "content": "hello"}])
    assert list(text.encode(rendered, add_special_tokens=False)).count(bos) == 1


def test_truncation_in_the_file_does_not_cut_prompts() -> None:
    text = TextModel(byte_level_files())
    assert len(text.encode("the quick brown fox " * 5, add_special_tokens=True)) > 4


def test_long_text_is_tokenized_like_short_text() -> None:
    text = TextModel(byte_level_files())
    prompt = "The quick brown fox – naïve café. " * (SHORT_CHARACTERS // 30 + 1)
    assert len(prompt) > SHORT_CHARACTERS
    assert list(text.encode(prompt, add_special_tokens=True)) == oracle(byte_level_files()).encode(prompt).ids


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


@pytest.mark.parametrize("processor", ["bos", None, "bytes"])
def test_tokenizer_json_decides_what_prompts_begin_with_as_in_transformers(
    processor: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever add_bos_token and add_eos_token say; where that is something else, one line says so."""
    content = json.loads(byte_level_files()["tokenizer.json"]) | {"truncation": None}
    if processor != "bos":
        content["post_processor"] = BYTE_LEVEL if processor == "bytes" else None
    files = byte_level_files() | {"tokenizer.json": json.dumps(content).encode()}
    files = with_config(files, eos_token="<|eos|>")
    for begins, ends in ((None, None), (True, None), (False, False), (True, True)):
        caplog.clear()
        given = with_config(files, add_bos_token=begins, add_eos_token=ends)
        for name, data in given.items():
            (tmp_path / name).write_bytes(data)
        expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)("hello")["input_ids"]
        assert list(TextModel(given).encode("hello", add_special_tokens=True)) == expected
        assert len(expected) == 2 if processor == "bos" else len(expected) == 1
        told = [record.getMessage() for record in caplog.records if record.name == "pdcluster.api.text.model_text"]
        assert [text.split()[1] for text in told] == [
            name
            for name, flag, added in (("add_bos_token", begins, processor == "bos"), ("add_eos_token", ends, False))
            if flag is not None and flag != added
        ]


def test_a_padding_token_that_the_tokenizer_lacks_is_passed_over() -> None:
    """Fine-tuning tools name one that they never added."""
    text = TextModel(with_config(byte_level_files(), pad_token="[PAD]", unk_token="<nowhere>"))
    assert text.encode("[PAD]", add_special_tokens=False) == TextModel(byte_level_files()).encode(
        "[PAD]", add_special_tokens=False
    )
    assert text.vocab_size == TextModel(byte_level_files()).vocab_size


def test_special_tokens_are_left_out_of_text_unless_asked_for() -> None:
    text = TextModel(byte_level_files())
    ids = text.encode("hello<|eos|>", add_special_tokens=False)
    assert text.decode(ids) == "hello"
    assert text.decode(ids, skip_special_tokens=False) == "hello<|eos|>"


def test_sampling_defaults_come_from_the_generation_config() -> None:
    generation = json.dumps(
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1, 3], "min_p": 0.0}
    ).encode()
    text = TextModel(byte_level_files() | {"generation_config.json": generation})
    assert text.defaults == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=None)
    assert text.eos_token_ids == (1, 3)


def test_a_model_that_recommends_temperature_zero_is_sampled_at_zero() -> None:
    assert (
        TextModel(byte_level_files() | {"generation_config.json": b'{"temperature": 0.0}'}).defaults.temperature == 0.0
    )


def test_without_a_generation_config_the_defaults_are_openai_s() -> None:
    text = TextModel(byte_level_files())
    assert text.defaults == SamplingDefaults(temperature=1.0, top_p=None, top_k=None, min_p=None)
    assert text.eos_token_ids == (oracle(byte_level_files()).token_to_id("<|eos|>"),)


def test_a_recommended_repetition_penalty_is_the_default_of_requests() -> None:
    text = TextModel(byte_level_files() | {"generation_config.json": b'{"repetition_penalty": 1.05}'})
    assert text.defaults.repetition_penalty == 1.05


@pytest.mark.parametrize("value", [b"0", b"-1", b"1e9", b"1e-30", b'"a"'])
def test_a_recommended_repetition_penalty_that_is_none_is_refused(value: bytes) -> None:
    with pytest.raises(ModelError, match="repetition_penalty"):
        TextModel(byte_level_files() | {"generation_config.json": b'{"repetition_penalty": ' + value + b"}"})


def test_from_dir_reads_what_from_files_reads(tmp_path: Path) -> None:
    for name, content in byte_level_files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    text = TextModel.from_dir(tmp_path)
    assert text.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    assert text.vocab_size == TextModel(byte_level_files()).vocab_size


def test_the_default_of_several_named_templates_is_taken() -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert (
        TextModel(with_config(byte_level_files(), chat_template=templates)).render_chat(
            [{"role": "user", "content": "x"}]
        )
        == "plain"
    )


def test_a_model_without_template_says_what_to_do() -> None:
    text = TextModel(sentencepiece_files())
    with pytest.raises(BadRequest, match="no chat template; use /v1/completions"):
        text.render_chat([{"role": "user", "content": "x"}])


def test_tokens_named_only_in_the_config_are_added_under_their_ids() -> None:
    size = TextModel(byte_level_files()).vocab_size
    decoder = {str(size): {"content": "<|think|>", "special": True}}
    text = TextModel(with_config(byte_level_files(), added_tokens_decoder=decoder))
    assert list(text.encode("<|think|>", add_special_tokens=False)) == [size]
    assert text.decode([size]) == ""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json; make one"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json cannot be read"),
        (byte_level_files() | {"tokenizer_config.json": b"[]"}, "tokenizer_config.json is not a JSON object"),
        (byte_level_files() | {"tokenizer_config.json": b"\xff"}, "tokenizer_config.json is not a JSON object"),
        (with_config(byte_level_files(), bos_token="<nowhere>"), "<nowhere>.*which tokenizer.json does not hold"),
        (with_config(byte_level_files(), added_tokens_decoder={"99999": {"content": "<x>"}}), "'<x>' the id 99999"),
        (with_config(byte_level_files(), chat_template="{% if %}"), "chat template does not compile: line 1"),
        (with_config(byte_level_files(), chat_template=7), "chat_template is a int"),
        (with_config(byte_level_files(), chat_template=["x"]), "not as expected: TypeError"),
        (with_config(byte_level_files(), added_tokens_decoder={"x": {"content": "a"}}), "not as expected: ValueError"),
        (with_config(byte_level_files(), added_tokens_decoder=["x"]), "not as expected: AttributeError"),
        (byte_level_files() | {"chat_template.jinja": b"\xff\xfe"}, "not as expected: UnicodeDecodeError"),
        (
            byte_level_files() | {"generation_config.json": b'{"eos_token_id": "</s>"}'},
            "eos_token_id .* is no token id",
        ),
        (
            byte_level_files() | {"generation_config.json": b'{"eos_token_id": ["</s>"]}'},
            "eos_token_id .* is no token id",
        ),
        (byte_level_files() | {"generation_config.json": b'{"temperature": "0.7x"}'}, "temperature is '0.7x'"),
        (byte_level_files() | {"generation_config.json": b'{"temperature": -1}'}, "temperature is -1"),
        (
            byte_level_files() | {"generation_config.json": b'{"top_p": 1.5}'},
            "top_p is 1.5; it must be a number from 1e-06 to 1",
        ),
        (byte_level_files() | {"generation_config.json": b'{"top_k": true}'}, "top_k is True"),
        (byte_level_files() | {"generation_config.json": b'{"repetition_penalty": 0}'}, "repetition_penalty is 0"),
    ],
)
def test_broken_files_are_refused_by_name(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TextModel(files)
