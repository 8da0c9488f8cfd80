"""What strangers and other tenants try, with real processes: whole in `make test-secure`; in `make test` only the sample
on one cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SAMPLE = "test_sample.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.path.name != SAMPLE:
            item.add_marker(pytest.mark.full)
