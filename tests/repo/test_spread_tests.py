"""What is spread over all workers (`spread`), and what stays together."""

from __future__ import annotations

from pathlib import Path

from spread import SPREAD, unit_of

ROOT = Path(__file__).parents[2]


def test_what_is_spread_is_there() -> None:
    assert [file for file in sorted(SPREAD) if not (ROOT / file).is_file()] == [], (
        "renamed? then its tests are on one worker again"
    )


def test_a_tests_file_stays_together_unless_it_is_spread() -> None:
    spread = min(SPREAD)
    assert unit_of(f"{spread}::test_it[a::b]") == f"{spread}::test_it[a::b]"
    assert unit_of("tests/unit/test_fit.py::Case::test_it[a::b]") == "tests/unit/test_fit.py"
