"""A property that is worked out once."""

from __future__ import annotations

import msgspec

from pdcluster_router.cluster.view import lazy_property


class Rows(msgspec.Struct, frozen=True, dict=True):
    numbers: tuple[int, ...]

    @lazy_property
    def total(self) -> int:
        """Of all."""
        asked.append(self.numbers)
        return sum(self.numbers)


asked: list[tuple[int, ...]] = []


def test_it_is_worked_out_when_asked_for_and_only_then() -> None:
    asked.clear()
    rows = Rows((1, 2))
    assert asked == []
    assert (rows.total, rows.total) == (3, 3) and asked == [(1, 2)]


def test_a_changed_copy_works_it_out_anew() -> None:
    rows = Rows((1, 2))
    assert rows.total == 3 and msgspec.structs.replace(rows, numbers=(4,)).total == 4


def test_of_the_class_it_tells_itself() -> None:
    assert isinstance(Rows.total, lazy_property) and Rows.total.__doc__ == "Of all."
