"""Python runs this file at its start where its folder is in PYTHONPATH. It makes vLLM share two cores.

NIXL_PROGRESS_DELAY_US: how long the thread by which a NIXL agent makes progress rests between two looks. NIXL's own
delay is 0: the thread takes a whole core.
VLLM_YIELD_SLEEP_US: how long a process of vLLM that waits for another one sleeps between two looks. vLLM's own ones
yield instead. On Linux 6.18 processes that yield in turns keep all others, and the kernel's workers, from their core
for up to a minute.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any


class ChangedModule(MetaPathFinder):
    """Finds a module once, and changes it as soon as it is loaded."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._load(load, module)  # type: ignore[method-assign]
        return spec

    def _load(self, load: Any, module: Any) -> None:
        load(module)
        self._change(module)


def _pace_nixl(bindings: Any) -> None:
    make = bindings.nixlAgent

    def make_paced(name: str, config: Any) -> Any:
        config.pthrDelay = _delay_us
        return make(name, config)

    bindings.nixlAgent = make_paced


def _pace_yield(utils: Any) -> None:
    utils.sched_yield = lambda: time.sleep(_sleep_us / 1e6)


if _delay_us := int(os.environ.get("NIXL_PROGRESS_DELAY_US", "0")):
    sys.meta_path.insert(0, ChangedModule("nixl_cu12._bindings", _pace_nixl))
if _sleep_us := int(os.environ.get("VLLM_YIELD_SLEEP_US", "0")):
    sys.meta_path.insert(0, ChangedModule("vllm.distributed.utils", _pace_yield))
