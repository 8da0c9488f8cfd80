"""What the text files of a model say of ids, without the tokenizer: which tokens have one that the model lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdcluster.core.errors import ModelError


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Added] = []
    model: _Model | None = None
    post_processor: dict[str, Any] | None = None


def json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A file's content, {} without the file. Raises ModelError."""
    try:
        return msgspec.json.decode(files.get(name, b"{}"), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{name} is not a JSON object: {error}; take the model's original file") from error


def special_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """tokenizer_config.json, over the special tokens of old models."""
    return {**json_object(files, "special_tokens_map.json"), **json_object(files, "tokenizer_config.json")}


def content_of(token: object) -> str | None:
    """A special token is written as text or as {"content": text, …}."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def token_id(files: Mapping[str, bytes], content: str) -> int | None:
    """The id of a token; None where the files have none."""
    added = dict(_added_tokens(files))
    return added[content] if content in added else _vocabulary(files).get(content)


def vocab_size(files: Mapping[str, bytes]) -> int | None:
    """How many ids the model has. None where no config.json says it."""
    found = json_object(files, "config.json").get("vocab_size")
    return found if isinstance(found, int) and found > 0 else None


def tokens_beyond(files: Mapping[str, bytes], size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens whose ids are not below `size`: those that are looked for in text as they are, and all others."""
    added = dict(_added_tokens(files))
    return {content: index for content, index in added.items() if index >= size}, {
        content: index for content, index in _vocabulary(files).items() if index >= size and content not in added
    }


def processed_tokens(files: Mapping[str, bytes]) -> Iterator[tuple[str, int]]:
    """What tokenizer.json puts around plain prompts, with ids."""
    processor = _tokenizer(files).post_processor or {}
    for each in (processor, *(processor.get("processors") or ())):
        for token in (each.get("special_tokens") or {}).values():
            yield from zip(token.get("tokens", ()), token.get("ids", ()), strict=False)


def _added_tokens(files: Mapping[str, bytes]) -> Iterator[tuple[str, int]]:
    for added in _tokenizer(files).added_tokens:
        yield added.content, added.id
    decoder = special_config(files).get("added_tokens_decoder")
    for index, entry in decoder.items() if isinstance(decoder, dict) else ():
        if index.isdecimal() and (content := content_of(entry)) is not None:
            yield content, int(index)


def _vocabulary(files: Mapping[str, bytes]) -> dict[str, int]:
    model = _tokenizer(files).model
    try:
        found = msgspec.json.decode(model.vocab, type=dict[str, int] | list[tuple[str, float]]) if model else {}
    except msgspec.MsgspecError:
        return {}  # as below
    return found if isinstance(found, dict) else {content: index for index, (content, _) in enumerate(found)}


def _tokenizer(files: Mapping[str, bytes]) -> _Tokenizer:
    try:
        return msgspec.json.decode(files.get("tokenizer.json", b"{}"), type=_Tokenizer)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Tokenizer()  # whoever needs the tokenizer reports what is wrong with it
