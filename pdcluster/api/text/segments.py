"""A cache of token ids for each stretch of text between special tokens, so that a long conversation costs only its new
text.

A tokenizer first finds its added tokens in the raw text, then treats each piece between them alone. So text may be cut
before any token that is always found, and the parts' ids joined are those of the whole. Requirements for a cut, checked
when the model is loaded:

1. The token is special and found in the raw text (not normalized). It takes no blanks with it (lstrip, rstrip) and may
   stand anywhere (not single_word). It neither begins nor ends with a blank.
2. It is found where the tokenizer finds it: leftmost, then longest, among *all* tokens found in raw text.
3. A part begins with its token, so its text is not at the very beginning, which some pre-tokenizers treat differently.
4. Normalizer, pre-tokenizer and model look at one piece at a time, and nothing is random. Otherwise text is encoded
   whole.

Each owner has segments of its own: how long tokenizing takes would tell others that a text was there before.

Thread-safe: routers tokenize long prompts in threads.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

MAX_CACHE_BYTES = 64 << 20
# Cost of an entry beside its text and ids: two objects and a dict entry, rounded up.
ENTRY_BYTES = 256

# Text up to here is tokenized directly; longer text by a call that releases the GIL.
SHORT_CHARACTERS = 4096

NORMALIZERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
    "Replace", "Sequence", "Strip",
    "StripAccents",
}  # fmt: skip
PRE_TOKENIZERS = {
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Sequence", "Split",
    "UnicodeScripts", "Whitespace",
    "WhitespaceSplit",
}  # fmt: skip
MODELS = {"BPE", "Unigram", "WordLevel", "WordPiece"}


class SegmentedEncoder:
    """Text with written special tokens → ids; none are added.
    num_hits, num_misses: segments found and not found.
    num_bytes: of the cache.
    """

    def __init__(self, tokenizer: Tokenizer, content: Mapping[str, Any], *, max_bytes: int = MAX_CACHE_BYTES) -> None:
        """content: of the tokenizer.json that the tokenizer was made from."""
        self.num_hits = self.num_misses = self.num_bytes = 0
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._known: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()
        self._lock = Lock()
        self._boundaries = _boundaries(tokenizer) if is_piecewise(content) else frozenset()
        self._added = _raw_pattern(tokenizer) if self._boundaries else None

    @property
    def is_cutting(self) -> bool:
        """Whether the tokenizer allows cuts."""
        return self._added is not None

    def encode(self, text: str, owner: bytes = b"") -> array[int]:
        parts = list(self._segments(text))
        found = self._look_up(parts, owner)
        missing = list(dict.fromkeys(part for part, ids in zip(parts, found, strict=True) if ids is None))
        fresh = dict(zip(missing, self._encode_all(missing), strict=True))
        if self.is_cutting:
            self._keep(fresh, owner)
        result: array[int] = array("i")
        for part, ids in zip(parts, found, strict=True):
            result.extend(fresh[part] if ids is None else ids)
        return result

    def _segments(self, text: str) -> Iterator[str]:
        start = 0
        for match in self._added.finditer(text) if self._added is not None else ():
            if match.start() > start and match.group() in self._boundaries:
                yield text[start : match.start()]
                start = match.start()
        if start < len(text):
            yield text[start:]

    def _encode_all(self, texts: list[str]) -> list[array[int]]:
        if sum(map(len, texts)) <= SHORT_CHARACTERS:
            return [array("i", self._tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        return [
            array("i", encoding.ids) for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    # ------------------------------------------------------------ what is kept

    def _look_up(self, parts: list[str], owner: bytes) -> list[array[int] | None]:
        if not self.is_cutting:
            return [None] * len(parts)
        with self._lock:
            found = [self._known.get((owner, part)) for part in parts]
            for part, ids in zip(parts, found, strict=True):
                if ids is not None:
                    self._known.move_to_end((owner, part))
            num_missing = found.count(None)
            self.num_misses += num_missing
            self.num_hits += len(parts) - num_missing
            return found

    def _keep(self, fresh: Mapping[str, array[int]], owner: bytes) -> None:
        with self._lock:
            for part, ids in fresh.items():
                if (owner, part) not in self._known:  # another thread may have been faster
                    self._known[owner, part] = ids
                    self.num_bytes += _num_bytes(part, ids)
            while self.num_bytes > self._max_bytes:
                (_, part), ids = self._known.popitem(last=False)
                self.num_bytes -= _num_bytes(part, ids)


def is_piecewise(content: Mapping[str, Any]) -> bool:
    """Whether every stage of a tokenizer.json looks at one piece of text at a time (requirement 4)."""
    model = content.get("model") or {}
    return (
        _kinds(content.get("normalizer")) <= NORMALIZERS
        and _kinds(content.get("pre_tokenizer")) <= PRE_TOKENIZERS
        and model.get("type", "BPE") in MODELS
        and not model.get("dropout")
    )


def _kinds(stage: Mapping[str, Any] | None) -> set[str]:
    """The kinds of a stage and of all its parts."""
    if stage is None:
        return set()
    parts = [*(stage.get("normalizers") or ()), *(stage.get("pretokenizers") or ())]
    return {str(stage.get("type"))}.union(*map(_kinds, parts))


def _boundaries(tokenizer: Tokenizer) -> frozenset[str]:
    """Tokens that satisfy requirement 1."""
    return frozenset(
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.special and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        if token.content and token.content == token.content.strip()
    )


def _raw_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return re.compile(longest_of({token.content for token in added if not token.normalized and token.content}))


def longest_of(contents: Iterable[str]) -> str:
    """A pattern for the leftmost, then longest of them (requirement 2). It is a tree of characters: a text that begins
    hundreds of tokens and ends none stays cheap, because a search holds the GIL.
    """
    tree: dict[str, Any] = {}
    for content in contents:
        node = tree
        for character in content:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: Mapping[str, Any]) -> str:
    branches = [re.escape(character) + _branches(child) for character, child in node.items() if character]
    if len(branches) == 1 and "" not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + "?" * ("" in node) if branches else ""


def _num_bytes(part: str, ids: array[int]) -> int:
    return part.__sizeof__() + ids.itemsize * len(ids) + ENTRY_BYTES
