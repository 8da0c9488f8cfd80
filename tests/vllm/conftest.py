"""Tests that start vLLM. They are skipped where it is not installed."""

from __future__ import annotations

import gc
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# What vLLM needs on a machine without a GPU that runs two of its engines.
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "UCX_TLS": "tcp,self,shm,cma", "HF_HUB_OFFLINE": "1"}


def has_vllm() -> bool:
    """This folder itself looks like a package of that name, without a file that is its origin."""
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None


# vLLM reads them when it is imported. Tests of other folders, which run without vLLM, do not see them.
if has_vllm():
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if HERE in item.path.parents]
    for item in own:
        # vLLM's own deprecations, and its start of a minute or more.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.timeout(600))
        if not has_vllm():
            item.add_marker(pytest.mark.skip(reason="vllm is not installed here; see docs on the extra `vllm`"))


@pytest.fixture(scope="session", autouse=True)
def _collected_contexts() -> Iterator[None]:
    """vLLM leaves contexts of ZMQ to the garbage collector, which would warn when pytest ends."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
