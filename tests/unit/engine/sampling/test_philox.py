"""The generator: published vectors, independence of the batch, even spread."""

from __future__ import annotations

import numpy as np
import pytest

from pdcluster.engine.sampling.sampler import philox4x32, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_philox4x32_10(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(tuple(np.array([c], np.uint64) for c in counter), tuple(np.array([k], np.uint64) for k in key))
    assert tuple(int(word[0]) for word in words) == expected


def test_a_number_does_not_depend_on_what_else_is_drawn() -> None:
    many = uniforms(list(range(50)), [3] * 50, list(range(100, 150)))
    assert [uniforms([i], [3], [100 + i])[0] for i in range(50)] == many.tolist()


def test_seed_choice_and_position_each_change_the_number() -> None:
    base = uniforms([1], [0], [5])[0]
    others = [
        uniforms([2], [0], [5])[0],
        uniforms([1], [1], [5])[0],
        uniforms([1], [0], [6])[0],
        uniforms([1 + (1 << 32)], [0], [5])[0],
    ]
    assert len({base, *others}) == 5


def test_negative_seeds_count_modulo_two_to_the_64() -> None:
    assert uniforms([-1], [0], [0])[0] == uniforms([2**64 - 1], [0], [0])[0]


def test_numbers_are_spread_evenly_below_one() -> None:
    numbers = uniforms([7] * 100_000, [0] * 100_000, range(100_000))
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=20, range=(0.0, 1.0))
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 43.8, "19 degrees of freedom, 0.1 %"
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
