"""Makes a Hugging Face tokenizer of what a GGUF file says: vocabulary, merges or scores, and the name of a
pre-tokenizer.

Byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`) only. The patterns are those of the models' own tokenizer.json
files. Their names are llama.cpp's (`llama-vocab.cpp`). A name that is not in the table is refused, since another
pattern gives other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdcluster.checkpoint.chat_templates import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from pdcluster.core.errors import ModelError

Json = dict[str, Any]

# Kinds of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MARK = "\u2581"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
TEKKEN = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

PLAIN = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NFC = {"type": "NFC"}


def _split(pattern: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, PLAIN | {"use_regex": False}]}


DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, PLAIN]}
# Of each name: pre-tokenizer, normalizer, and whether a word that is a token needs no merges.
PRE_TOKENIZERS: dict[str, tuple[Json, Json | None, bool]] = {
    "gpt-2": (PLAIN, None, False),
    "smollm": (DIGITS, None, False),
    "llama-bpe": (_split(LLAMA3), None, True),
    "llama3": (_split(LLAMA3), None, True),
    "llama-v3": (_split(LLAMA3), None, True),
    "qwen2": (_split(QWEN2), NFC, False),
    "deepseek-r1-qwen": (_split(QWEN2), None, False),
    "tekken": (_split(TEKKEN), None, True),
}
# Those whose prompts begin with the bos token, where the file does not say.
BEGINS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})


def text_files(metadata: Mapping[str, Any], config: Json, where: str) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and config.json. metadata: the file's keys; where: its name, for errors."""
    tokens, kinds = _vocabulary(metadata, where)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, begins = _byte_level(metadata, tokens, kinds, where)
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(metadata, tokens, kinds, where)
    else:
        raise ModelError(
            f"{where}: its tokenizer is {kind!r}; 'gpt2' (BPE) and 'llama' (SentencePiece) are supported: take a "
            "safetensors release"
        )
    named = {
        f"{name}_token": _token(metadata, key, tokens, where)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    settings: Json = {name: token for name, token in named.items() if token is not None}
    tokenizer["post_processor"] = _post_processor(
        tokens,
        metadata.get("tokenizer.ggml.bos_token_id") if metadata.get("tokenizer.ggml.add_bos_token", begins) else None,
        metadata.get("tokenizer.ggml.eos_token_id") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    keys = {DEFAULT_TEMPLATE: "tokenizer.chat_template", TOOL_TEMPLATE: f"tokenizer.chat_template.{TOOL_TEMPLATE}"}
    if templates := {name: metadata[key] for name, key in keys.items() if metadata.get(key) is not None}:
        settings["chat_template"] = templates if TOOL_TEMPLATE in templates else templates[DEFAULT_TEMPLATE]
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, "config.json": config}
    return {name: json.dumps(content).encode() for name, content in files.items()}


def _vocabulary(metadata: Mapping[str, Any], where: str) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{where}: it has no tokenizer (tokenizer.ggml.tokens); take a file of the whole model")
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{where}: it names {len(tokens)} tokens, but kinds of {len(kinds)}; the file is damaged")
    return list(tokens), list(kinds)


def _token(metadata: Mapping[str, Any], name: str, tokens: Sequence[str], where: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelError(
            f"{where}: tokenizer.ggml.{name}_token_id is {index}, but there are {len(tokens)} tokens; the file is "
            "damaged"
        )
    return str(tokens[index])


def _post_processor(tokens: Sequence[str], begin: int | None, end: int | None) -> Json | None:
    """What plain prompts begin and end with, by ids."""
    used = {tokens[index]: int(index) for index in (begin, end) if index is not None}
    if not used:
        return None

    def written(index: int | None) -> list[Json]:
        return [] if index is None else [{"SpecialToken": {"id": tokens[index], "type_id": 0}}]

    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*written(begin), first, *written(end)],
        "pair": [*written(begin), first, second, *written(end)],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()},
    }


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], where: str
) -> tuple[Json, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(
            f"{where}: its pre-tokenizer (tokenizer.ggml.pre) is {name!r}; known are {known}: take a safetensors "
            "release"
        )
    pre_tokenizer, normalizer, ignores_merges = PRE_TOKENIZERS[name]
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise ModelError(
            f"{where}: it has no merges of its tokens (tokenizer.ggml.merges); take a file of the whole model"
        )
    model = _bpe(tokens, kinds, merges) | {"ignore_merges": ignores_merges}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _tokenizer(model, _added(tokens, kinds), normalizer, pre_tokenizer, decoder), name in BEGINS


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], where: str
) -> tuple[Json, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelError(
            f"{where}: it has no scores of its tokens (tokenizer.ggml.scores); take a file of the whole model"
        )
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    model = _bpe(tokens, kinds, _merges_by_score(tokens, kinds, scores)) | {
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": unknown,
    }
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    prefix = [{"type": "Prepend", "prepend": MARK}] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    marks = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [marks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}
    return _tokenizer(
        model, _added(tokens, kinds), {"type": "Sequence", "normalizers": [*prefix, spaces]}, None, decoder
    ), True


def _merges_by_score(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """SentencePiece joins whichever pair gives the best piece. BPE goes by a list: a pair for each way to cut each
    piece, best pieces first.
    """
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    found = []
    for token, index in ids.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = sorted((ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids)
        found += [(-scores[index], index, left, right) for _, _, left, right in pairs]
    found.sort(key=lambda merge: merge[:2])
    return [[left, right] for _, _, left, right in found]


def _bpe(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[Sequence[str]]) -> Json:
    vocabulary = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [
            [left, right]
            for left, right in merges
            if left in vocabulary and right in vocabulary and left + right in vocabulary
        ],
    }


def _added(tokens: Sequence[str], kinds: Sequence[int]) -> list[Json]:
    """Tokens that are found in the text before anything else."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, "special": kind in (CONTROL, UNKNOWN), **flags}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _tokenizer(
    model: Json, added: list[Json], normalizer: Json | None, pre_tokenizer: Json | None, decoder: Json
) -> Json:
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer}
    return {**whole, "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model}
