"""How many examples a costly property draws: few in `make test`, many in `make test-full`."""

from __future__ import annotations

# Set before tests are collected.
is_full = True


def examples(few: int, many: int) -> int:
    return many if is_full else few
