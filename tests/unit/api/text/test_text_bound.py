"""Text that is too long is told so before all of it is tokenized, and no text that fits is."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_files, sentencepiece_files
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from pdcluster.api.openai.limits import check_text
from pdcluster.api.text.model_text import TextModel
from pdcluster.api.text.text_bound import TextBound
from pdcluster.core.errors import ContextTooLong


def word_pieces() -> Tokenizer:
    """Drops blanks, and makes one token of a long word that it does not know."""
    tokenizer = Tokenizer(
        models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "cat": 3}, unk_token="[UNK]", max_input_chars_per_word=20)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def loaded(files: dict[str, bytes]) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    tokenizer.no_truncation()
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: loaded(byte_level_files()),
    "SentencePiece": lambda: loaded(sentencepiece_files()),
    "WordPiece": word_pieces,
}
TEXTS = st.lists(
    st.sampled_from(
        [
            "the quick brown fox ",
            "a",
            "    ",
            "\n\n",
            "n\u00e9 e",
            "<tool>",
            "\u65e5\u672c\u8a9e",
            "<|eos|>",
            "\U0001f642",
            "cat",
            "zz" * 15,
            "print",
        ]
    ),
    min_size=1,
    max_size=60,
).map("".join)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS, times=st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_no_text_that_fits_is_over_the_bound(kind: str, text: str, times: int) -> None:
    tokenizer = TOKENIZERS[kind]()
    bound, whole = TextBound(tokenizer, json.loads(tokenizer.to_str())), text * times
    num_tokens = len(tokenizer.encode(whole, add_special_tokens=False))
    if num_tokens:
        assert not bound.is_clearly_over(whole, num_tokens)
        if kind != "WordPiece":  # of which half a text may be one token
            assert not bound.excess_bytes(whole, num_tokens)


class Counting:
    """A tokenizer that says how much it was asked to do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.num_characters = tokenizer, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> list[object]:
        self.num_characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **options)


class Model:
    max_len, vocab_size = 100, 500


LONG = {
    "words": "the quick brown fox jumps over it, ",
    "no words": "abcdefgh",
    "blanks": " \n",
    "characters": "\u65e5\u672c",
}


@pytest.mark.parametrize("max_len", [100, 100_000])
@pytest.mark.parametrize("what", LONG)
def test_8_mb_of_text_are_refused_after_little_work(what: str, max_len: int) -> None:
    counting = Counting(loaded(byte_level_files()))
    bound = TextBound(counting, json.loads(byte_level_files()["tokenizer.json"]))  # type: ignore[arg-type]
    model, text = Model(), LONG[what] * (8 * 2**20 // len(LONG[what].encode()))
    model.max_len = max_len
    with pytest.raises(
        ContextTooLong, match=f"^This model's maximum context length is {max_len} tokens.*However, prompt has [0-9]+ "
    ) as refused:
        check_text(text, bound, model, "prompt")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    assert counting.num_characters <= max(20 * max_len, 2**17)


def test_a_model_has_the_bound_of_its_tokenizer() -> None:
    assert TextModel(byte_level_files()).bound.token_bytes == max(map(len, TextModel(byte_level_files()).pieces.table))
