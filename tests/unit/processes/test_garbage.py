"""What a process that serves does about cycles: what is there when it begins is never walked again, what comes later
is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pdcluster.processes.garbage import THRESHOLDS, collect_seldom


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_kept_out_of_the_collectors_way() -> None:
    there = [Knot()]
    collect_seldom()
    assert gc.get_threshold() == THRESHOLDS
    assert gc.get_freeze_count() > 1000
    assert all(each is not there for each in gc.get_objects())


def test_cycles_that_are_made_later_go() -> None:
    collect_seldom()
    knot = weakref.ref(Knot())
    made = [Knot() for _ in range(2 * THRESHOLDS[0])]
    assert len(made) == 2 * THRESHOLDS[0]
    assert knot() is None
