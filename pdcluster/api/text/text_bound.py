"""Whether a text is too long, found before all of it is tokenized: 8 MB of text cost half a minute and gigabytes.

1. No token stands for more text than the longest one does. Tokenizers that may drop text (blanks, long unknown words)
   get DROPPED times as much.
2. Text that is long for its bound (LIKELY characters a token) is first tokenized in parts, only to count, until it is
   clearly too long. A cut can change a few tokens beside it; SLACK allows for them. Parts end at word ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

DROPPED = 8
LIKELY = 8
SLACK = 0.125
# Characters.
LEAST_PART = 64 * 1024

KEEPING_NORMALIZERS = {"ByteLevel", "Prepend", "Replace"}
KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "Split", "UnicodeScripts"}


class TextBound:
    """Immutable; several threads may use it. token_bytes: most UTF-8 bytes that one token stands for."""

    def __init__(self, tokenizer: Tokenizer, content: Mapping[str, Any]) -> None:
        """content: of the tokenizer.json that the tokenizer was made from."""
        self._tokenizer = tokenizer
        self.token_bytes = _longest(tokenizer, content) * (1 if _keeps_text(content) else DROPPED)

    def excess_bytes(self, text: str, num_tokens: int) -> int:
        """The text's bytes when so many tokens cannot hold them, else 0."""
        most = num_tokens * self.token_bytes
        size = len(text.encode()) if 4 * len(text) > most else 0
        return size if size > most else 0

    def is_clearly_over(self, text: str, num_tokens: int) -> bool:
        """Whether the text surely has more tokens, as far as that is faster than tokenizing all of it."""
        if len(text) <= LIKELY * num_tokens:
            return False
        found, most = 0, num_tokens + SLACK * num_tokens
        for part in _parts(text, max(LIKELY * num_tokens, LEAST_PART)):
            found += len(self._tokenizer.encode_batch_fast([part], add_special_tokens=False)[0])
            if found > most:
                return True
        return False


def _parts(text: str, size: int) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        end = begin + size
        if end < len(text):
            word = max(text.rfind(" ", begin + size // 2, end), text.rfind("\n", begin + size // 2, end))
            before = len(text[begin:word].rstrip()) if word > 0 else 0
            end = begin + before if before else end
        yield text[begin:end]
        begin = end


def _longest(tokenizer: Tokenizer, content: Mapping[str, Any]) -> int:
    """Bytes of the longest token. Byte-level BPE writes a byte as one character. Elsewhere a token has at least as many
    bytes as its text.
    """
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    is_byte_level = "ByteLevel" in _kinds(content.get("pre_tokenizer")) | _kinds(content.get("normalizer"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    plain = (len(token) if is_byte_level else len(token.encode()) for token in vocabulary)
    return max((*plain, *(len(token.encode()) for token in added)), default=1)


def _keeps_text(content: Mapping[str, Any]) -> bool:
    model = content.get("model") or {}
    return (
        _kinds(content.get("normalizer")) <= KEEPING_NORMALIZERS
        and _kinds(content.get("pre_tokenizer")) <= KEEPING_PRE_TOKENIZERS
        and model.get("type", "BPE") == "BPE"
        and not any(token.get("lstrip") or token.get("rstrip") for token in content.get("added_tokens") or ())
        and (model.get("byte_fallback") or not model.get("fuse_unk"))
    )


def _kinds(stage: Mapping[str, Any] | None) -> set[str]:
    """The kinds of a stage and of all its parts."""
    if stage is None:
        return set()
    parts = [*(stage.get("normalizers") or ()), *(stage.get("pretokenizers") or ())]
    return {str(stage.get("type"))}.union(*map(_kinds, parts)) - {"Sequence"}
