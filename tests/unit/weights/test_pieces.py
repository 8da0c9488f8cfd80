"""What is checked before any byte of pushed weights is taken."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster.checkpoint.bundled import path as bundled
from pdcluster.checkpoint.held_files import weight_files
from pdcluster.checkpoint.weight_image import open_image
from pdcluster.core.errors import ModelError
from pdcluster.core.weights import WeightTensor
from pdcluster.engine.model.config import read_config
from pdcluster.engine.model.weights import expected_tensors
from pdcluster.weights.pieces import PIECE_BYTES, check_tensors, pieces_of

EXPECTED, OPTIONAL = {"a": (2, 3), "b": (4,)}, {"head": (2, 3)}


def tensors(*shapes: tuple[str, tuple[int, ...]]) -> list[WeightTensor]:
    return [WeightTensor(name, "BF16", shape) for name, shape in shapes]


def test_the_tensors_of_the_model_are_taken_with_and_without_what_is_optional() -> None:
    check_tensors(tensors(("b", (4,)), ("a", (2, 3))), EXPECTED, OPTIONAL)
    check_tensors(tensors(("b", (4,)), ("a", (2, 3)), ("head", (2, 3))), EXPECTED, OPTIONAL)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([("a", (2, 3))], r"tensor b .* is missing \(1 such"),
        ([("a", (2, 3)), ("b", (4,)), ("x", (1,))], r"tensor x is none of the model .* \(1 such"),
        ([("a", (3, 2)), ("b", (4,))], r"tensor a has shape \(3, 2\), .* \(2, 3\)"),
        ([("a", (2, 3)), ("b", (1 << 30,))], r"tensor b has shape \(1073741824,\)"),
        ([("a", (2, 3)), ("b", (4,)), ("b", (4,))], "1 tensors are named twice"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused_by_name(given: list[tuple[str, tuple[int, ...]]], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_tensors(tensors(*given), EXPECTED, OPTIONAL)


@pytest.mark.parametrize("kind", ["I8", "F64", "F8_E4M3"])
def test_a_type_that_is_not_served_is_no_tensor(kind: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(("a", kind, (1,)), WeightTensor)


def test_pieces_hold_every_byte_once() -> None:
    found = tensors(("a", (PIECE_BYTES + 1,)), ("none", (0,)), ("b", (3,)))
    assert [(piece.tensor, piece.offset, piece.nbytes) for piece in pieces_of(found)] == [
        (0, 0, PIECE_BYTES), (0, PIECE_BYTES, PIECE_BYTES), (0, 2 * PIECE_BYTES, 2), (2, 0, 6),
    ]  # fmt: skip


def test_a_checkpoint_has_the_tensors_that_its_config_asks_for() -> None:
    image = open_image(weight_files(bundled()))
    check_tensors([each.tensor for each in image.tensors], *expected_tensors(read_config(bundled())))
    image.close()
