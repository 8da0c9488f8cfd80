"""Chunks that carry only text are put together from prepared parts: the same bytes as those that are encoded as a
whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_files

from pdcluster.api.openai.replies import ChatFormat, CompletionFormat, Head
from pdcluster.api.text.choice_text import TextPiece
from pdcluster.api.text.model_text import TextModel

PIECES = TextModel(byte_level_files()).pieces
TEXTS = st.one_of(st.text(), st.sampled_from(['"text":""', '"content":""', '{"usage":null}', "\\", "\n\n"]))


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
@given(text=TEXTS, name=TEXTS, include_usage=st.booleans())
def test_a_chunk_of_the_first_choice_is_that_of_another_but_for_its_index(
    kind: type, text: str, name: str, include_usage: bool
) -> None:
    made = kind(Head("id", 7, name, PIECES, False, False, include_usage))
    first, second = (made.chunk(index, TextPiece(text=text)) for index in (0, 1))
    assert first == second.replace(b'"index":1', b'"index":0', 1)
    assert (b'"usage":null' in first.partition(b'"choices"')[2]) >= include_usage
    before, after = made.around(0)
    assert first.startswith(before) and first.endswith(after) and made.around(1) is None
