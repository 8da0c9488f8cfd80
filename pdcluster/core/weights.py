"""Which weights made something: a label for people, a digest of all tensors, and an epoch that orders them.

A cluster serves one model. Its weights may change while it serves: the model that nodes were started with has epoch 0,
and each load that an operator or a trainer asks for has the next one. Weights of one epoch are equal on all nodes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdcluster.core.bounds import BigCount
from pdcluster.core.errors import BadRequest
from pdcluster.core.reported import Value

BASE = "base"
MAX_LABEL_CHARS = 64
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
