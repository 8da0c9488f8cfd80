"""Embeddings in OpenAI's words: the body of /v1/embeddings, its checks, and the reply."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct

from pdcluster.api import validate
from pdcluster.api.openai.requests import EXTENSIONS, TokenId, prompts_in
from pdcluster.core.bounds import MAX_DIMENSIONS
from pdcluster.core.errors import BadRequest
from pdcluster.core.weights import Label

# As OpenAI's.
MAX_INPUTS = 2048

Encoding: TypeAlias = Literal["float", "base64"]


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | list[str | int | list[TokenId]]
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-10, le=10)] | None = None
    weights: Label | None = None
    weights_change: Literal["fail", "replay"] | None = None
    # without effect
    user: object = None


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(Struct):
    index: int
    embedding: str | list[float]
    object: Literal["embedding"] = "embedding"


class EmbeddingReply(Struct):
    """data: encoded items, in the order of the inputs."""

    data: Sequence[msgspec.Raw]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


_EMBEDDINGS = msgspec.json.Decoder(EmbeddingRequest)


def decode_embeddings(body: bytes) -> EmbeddingRequest:
    return validate.decode(body, _EMBEDDINGS, {"": EmbeddingRequest}, EXTENSIONS)


def inputs_of(request: EmbeddingRequest) -> list[str | Sequence[int]]:
    """One entry per input: text, or token ids."""
    inputs = prompts_in(request.input, "input")
    if len(inputs) > MAX_INPUTS:
        raise BadRequest(
            f"input has {len(inputs)} entries, at most {MAX_INPUTS} are allowed; send several requests", "input"
        )
    return inputs


def encoded_item(index: int, vector: bytes, encoding: Encoding) -> msgspec.Raw:
    """vector: packed little-endian float32, which base64 has as it is."""
    if encoding == "base64":
        return msgspec.Raw(msgspec.json.encode(EmbeddingItem(index, base64.b64encode(vector).decode())))
    return msgspec.Raw(msgspec.json.encode(EmbeddingItem(index, np.frombuffer(vector, "<f4").tolist())))
