"""What both ends of a transfer of weights know of it: pieces, bounds and clocks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pdcluster.core.errors import ModelError
from pdcluster.core.weights import WeightTensor
from pdcluster.transfer.backends.base import Backend, Peer

# One write, and how many of them are on their way.
PIECE_BYTES = 8 << 20
WINDOW = 4
# For the first byte, which a busy sender may need time for; between two pieces; and for the commit behind the last one.
START_S, PROGRESS_S, COMMIT_S = 30.0, 10.0, 30.0

# Opens media for one transfer, best first, with this name and boot.
OpenMedia = Callable[[Peer], dict[str, Backend]]


class Piece(NamedTuple):
    """Bytes of one tensor. tensor: its place among those that were named."""

    tensor: int
    offset: int
    nbytes: int


def pieces_of(tensors: Sequence[WeightTensor]) -> list[Piece]:
    """Every byte once, tensor by tensor."""
    return [
        Piece(number, offset, min(PIECE_BYTES, tensor.nbytes - offset))
        for number, tensor in enumerate(tensors)
        for offset in range(0, tensor.nbytes, PIECE_BYTES)
    ]


def check_tensors(
    tensors: Sequence[WeightTensor], expected: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ModelError where these are not the tensors of the model that serves, each once. Their types are checked
    where messages are decoded, so names and shapes bound their bytes.
    """
    given = {tensor.name: tensor.shape for tensor in tensors}
    if len(given) != len(tensors):
        raise ModelError(f"{len(tensors) - len(given)} tensors are named twice; send each once")
    known = {**optional, **expected}
    extra = sorted(given.keys() - known.keys())
    if extra:
        raise ModelError(f"tensor {extra[0]} is none of the model that serves ({len(extra)} such tensors)")
    missing = sorted(expected.keys() - given.keys())
    if missing:
        raise ModelError(f"tensor {missing[0]} of the model that serves is missing ({len(missing)} such tensors)")
    for name, shape in given.items():
        if shape != known[name]:
            raise ModelError(f"tensor {name} has shape {shape}, the model that serves {known[name]}")
