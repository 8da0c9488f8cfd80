"""Which weights made something: a label for people, a digest of all tensors, and an epoch that orders them.

A cluster serves one model. Its weights may change while it serves: the model that nodes were started with has epoch 0,
and each load that an operator or a trainer asks for has the next one. Weights of one epoch are equal on all nodes.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from pdcluster.core.bounds import BigCount, Count
from pdcluster.core.errors import BadRequest
from pdcluster.core.reported import Value

BASE = "base"
MAX_LABEL_CHARS = 64
MAX_SOURCE_CHARS = 1024
MAX_DIGEST_CHARS = 128

Label = Annotated[
    str, msgspec.Meta(min_length=1, max_length=MAX_LABEL_CHARS, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+:-]*$")
]
Digest = Annotated[str, msgspec.Meta(max_length=MAX_DIGEST_CHARS)]


class WeightsVersion(Value, frozen=True, array_like=True):
    """label: unique among the versions that nodes have. epoch: grows with each load. digest: "" where it is not known
    yet.
    """

    label: Label = BASE
    epoch: BigCount = 0
    digest: Digest = ""

    def __str__(self) -> str:
        return f"{self.label} (epoch {self.epoch})"


class FormerWeights(Value, frozen=True, array_like=True):
    """What a node served before its weights, so that they can be undone. source: as for a load; "": the model that the
    node was started with.
    """

    label: Label
    digest: Digest
    source: str = ""


# What tensors may be stored as, in the words of safetensors.
Kind = Literal["F32", "BF16", "F16"]
KIND_BYTES: dict[str, int] = {"F32": 4, "BF16": 2, "F16": 2}
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
# Where a source begins with this, the weights come from the memory of a node that has them: node:NAME. Without a name,
# from whichever has them.
NODE_SOURCE = "node:"


class WeightTensor(Value, frozen=True, array_like=True):
    """One tensor of a version, without its bytes. name: that of Hugging Face."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    kind: Kind
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]

    @property
    def nbytes(self) -> int:
        return KIND_BYTES[self.kind] * math.prod(self.shape)


WeightTensors = Annotated[tuple[WeightTensor, ...], msgspec.Meta(max_length=MAX_TENSORS)]


def holder_of(source: str) -> str | None:
    """The node that a source names, "" for any; None for a source that is no node."""
    return source.removeprefix(NODE_SOURCE) if source.startswith(NODE_SOURCE) else None


def check_source(source: str) -> str:
    """Raises BadRequest for what cannot stand in a card."""
    if len(source) > MAX_SOURCE_CHARS or not source.isprintable():
        raise BadRequest(
            f"the source {source[:100]!r} of weights must have at most {MAX_SOURCE_CHARS} printable characters",
            "source",
        )
    return source


def check_label(label: str) -> str:
    """Raises BadRequest for what is no label."""
    try:
        return msgspec.convert(label, Label)
    except msgspec.ValidationError:
        raise BadRequest(
            f"the label {label[:100]!r} of weights must have 1 to {MAX_LABEL_CHARS} letters, digits or ._+:- and begin "
            "with a letter or digit",
            "label",
        ) from None
