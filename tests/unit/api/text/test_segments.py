"""Ids of segments, one after the other, are the ids of the whole text: for tokenizers of many kinds, and texts that try
to confuse them."""

from __future__ import annotations

import json
import re
import threading
from array import array
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHAT_TEMPLATE, CORPUS, byte_level_files, sentencepiece_files
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from pdcluster.api.text.model_text import TextModel
from pdcluster.api.text.segments import SegmentedEncoder, is_piecewise, longest_of

# <|start|>x is longer than <|start|>; <mask> takes blanks, <word> stands alone, " <pad>" begins with a blank, <N> is
# normalized, <raw> is none.
SPECIAL = ("<s>", "</s>", "<|start|>", "<|end|>", "<|start|>x", "<mask>", "<word>", " <pad>", "<N>", "<raw>")

NORMALIZERS: dict[str, Any] = {
    "none": None,
    "nfc": normalizers.NFC(),
    "strip": normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()]),
    "prepend": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}
PRE_TOKENIZERS: dict[str, Any] = {
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "bytes-prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace-first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace-always": pre_tokenizers.Metaspace(prepend_scheme="always"),
    "metaspace-never": pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "none": None,
}

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(SPECIAL),
        st.sampled_from(
            [
                " ",
                "  ",
                "\n",
                "\t",
                "x",
                "<",
                "<|",
                "<|star",
                "|>",
                "<s",
                "The dog",
                "é",
                "e\u0301",
                "日本",
                "7",
                "12",
                "WORD",
                "<n>",
            ]
        ),
        st.text(max_size=6),
    ),
    max_size=25,
).map("".join)


@cache
def tokenizer_of(normalizer: str, pre_tokenizer: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if NORMALIZERS[normalizer] is not None:
        tokenizer.normalizer = NORMALIZERS[normalizer]
    if PRE_TOKENIZERS[pre_tokenizer] is not None:
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<s>", "</s>", "<|start|>", "<|end|>", "<|start|>x", " <pad>")]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken("<mask>", special=True, lstrip=True, rstrip=True),
            AddedToken("<word>", special=True, single_word=True),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<N>", special=True, normalized=True)])
    tokenizer.add_tokens([AddedToken("<raw>", normalized=False)])
    return tokenizer


def encoder_of(tokenizer: Tokenizer, **settings: int) -> SegmentedEncoder:
    return SegmentedEncoder(tokenizer, json.loads(tokenizer.to_str()), **settings)


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), data=st.data())
def test_segments_make_the_ids_of_the_whole(
    normalizer: str, pre_tokenizer: str, texts: list[str], data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(normalizer, pre_tokenizer)
    encoder = encoder_of(tokenizer, max_bytes=data.draw(st.sampled_from([0, 2000, 1 << 20])))
    assert encoder.is_cutting
    for text in [*texts, "".join(texts), *texts]:
        assert encoder.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXTS), min_size=1, max_size=8))
@pytest.mark.parametrize("files", [byte_level_files, sentencepiece_files], ids=lambda make: make.__name__)
def test_chats_are_encoded_as_a_whole_would_be(files: Any, turns: list[tuple[str, str]]) -> None:
    model = TextModel(files())
    text = "<s>" + "".join(f"<|start|>{role}\n{words}<|end|>\n" for role, words in turns)
    for end in (text, text + "<|start|>assistant\n"):
        assert model.encode_chat(end) == model.encode(end, add_special_tokens=False)


def test_the_next_turn_costs_its_new_text_only() -> None:
    encoder = encoder_of(tokenizer_of("none", "bytes"))
    talk = "<s>"
    for turn in range(10):
        talk += f"<|start|>user\nquestion {turn}: The dog sleeps.<|end|>\n<|start|>assistant\nanswer {turn}<|end|>\n"
        before = encoder.num_misses
        encoder.encode(talk)
        assert turn == 0 or encoder.num_misses - before == 2  # <|end|> and its line end were known


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    encoder = encoder_of(tokenizer_of("none", "bytes"), max_bytes=4000)
    for number in range(100):
        encoder.encode(f"<|start|>{number} The dog sleeps.")
        assert encoder.num_bytes <= 4000
    hits = encoder.num_hits
    encoder.encode("<|start|>99 The dog sleeps.")
    encoder.encode("<|start|>0 The dog sleeps.")
    assert encoder.num_hits == hits + 1


def test_threads_share_one_encoder() -> None:
    tokenizer = tokenizer_of("nfc", "bytes")
    encoder = encoder_of(tokenizer, max_bytes=3000)
    texts = [f"<|start|>{number % 7} The lazy dog.<|end|>" * 3 for number in range(60)]
    wrong: list[str] = []

    def encode_all() -> None:
        wrong.extend(
            text
            for text in texts
            if encoder.encode(text).tolist() != tokenizer.encode(text, add_special_tokens=False).ids
        )

    threads = [threading.Thread(target=encode_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and encoder.num_bytes <= 3000


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Sees Everything"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "New"}]}},
        {"model": {"type": "BPE", "dropout": 0.1}},
    ],
    ids=["normalizer", "pre-tokenizer", "dropout"],
)
def test_a_tokenizer_that_may_look_further_is_never_cut(change: dict[str, Any]) -> None:
    tokenizer = tokenizer_of("none", "bytes")
    content = json.loads(tokenizer.to_str())
    assert is_piecewise(content) and not is_piecewise(content | change)
    encoder = SegmentedEncoder(tokenizer, content | change)
    assert not encoder.is_cutting
    text = "<|start|>user\nThe dog<|end|>"
    assert (
        encoder.encode(text) == array("i", tokenizer.encode(text, add_special_tokens=False).ids)
        and not encoder.num_bytes
    )


def test_a_tokenizer_without_special_tokens_is_never_cut() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    assert not encoder_of(tokenizer).is_cutting


@given(contents=st.sets(st.text("ab<|. ", min_size=1, max_size=6), min_size=1), text=st.text("ab<|. ", max_size=60))
def test_the_leftmost_then_longest_token_is_found(contents: set[str], text: str) -> None:
    by_length = "|".join(re.escape(content) for content in sorted(contents, key=len, reverse=True))
    assert [found.span() for found in re.finditer(longest_of(contents), text)] == [
        found.span() for found in re.finditer(by_length, text)
    ]


def test_tokens_that_begin_alike_are_looked_for_once() -> None:
    """A text full of such beginnings would hold up all threads for as often as they are compared."""
    assert longest_of({f"<|reserved_{number}|>" for number in range(250)}).count("reserved") == 1
    blanks = re.compile(longest_of({" " * number for number in range(2, 300)}))
    assert [found.end() - found.start() for found in blanks.finditer("a" + " " * 400 + "b")] == [299, 101]


def test_segments_of_one_owner_are_no_others() -> None:
    model = TextModel({**byte_level_files(), "chat_template.jinja": CHAT_TEMPLATE.encode()})
    text = model.render_chat([{"role": "user", "content": "a secret that somebody said"}])
    ids = model.encode_chat(text, b"a")
    assert model.segments.is_cutting
    misses = model.segments.num_misses
    assert model.encode_chat(text, b"b") == ids
    assert model.segments.num_misses == 2 * misses
    assert model.encode_chat(text, b"a") == ids
    assert model.segments.num_misses == 2 * misses
