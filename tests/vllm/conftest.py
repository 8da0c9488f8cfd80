"""Tests that start vLLM. They are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    reason = pytest.mark.skip(reason="vllm is not installed here; make test-vllm has an environment with it")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(reason)
