"""Which tokens end an answer: all that generation_config.json, config.json or the tokenizer name.

Fine-tuned models often name their new end in one of them only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdcluster.core.errors import ModelError

SOURCES = ("generation_config.json", "config.json")


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Added] = []
    model: _Model | None = None


def eos_token_ids(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """In the order of sources, each once. files: a model's text files by name. Raises ModelError for a value that is no
    id.
    """
    return tuple(dict.fromkeys(_named(files)))


def _named(files: Mapping[str, bytes]) -> Iterator[int]:
    for source in SOURCES:
        value = _json_object(files, source).get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ModelError(f"{source}: eos_token_id {token!r} is no token id; correct it")
            yield token
    found = _tokenizer_end(files)
    size = _json_object(files, "config.json").get("vocab_size")
    if found is not None and (not isinstance(size, int) or found < size):  # else the model can never say it
        yield found


def _tokenizer_end(files: Mapping[str, bytes]) -> int | None:
    """The id of the tokenizer's eos_token."""
    config = {**_json_object(files, "special_tokens_map.json"), **_json_object(files, "tokenizer_config.json")}
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or "tokenizer.json" not in files:
        return None
    decoder = config.get("added_tokens_decoder")
    for token_id, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == content and token_id.isdecimal():
            return int(token_id)
    try:
        tokenizer = msgspec.json.decode(files["tokenizer.json"], type=_Tokenizer)
        added = next((added.id for added in tokenizer.added_tokens if added.content == content), None)
        if added is not None or tokenizer.model is None:
            return added
        return msgspec.json.decode(tokenizer.model.vocab, type=dict[str, int]).get(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # whoever needs the tokenizer reports what is wrong with it; a Unigram's vocabulary is a list


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(files.get(name, b"{}"), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{name} is not a JSON object: {error}; take the model's original file") from error
