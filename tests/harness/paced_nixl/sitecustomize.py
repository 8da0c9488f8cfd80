"""Python runs this file at its start where its folder is in PYTHONPATH. With NIXL_PROGRESS_DELAY_US set, the thread by
which a NIXL agent makes progress rests that long between two looks. NIXL's own delay is 0: the thread takes a whole
core, which a machine of two cores cannot spare.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any

BINDINGS = "nixl_cu12._bindings"


class PacedBindings(MetaPathFinder):
    """Finds the compiled half of NIXL once, and sets the delay of each agent that is made by it."""

    def __init__(self, delay_us: int) -> None:
        self._delay_us = delay_us

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != BINDINGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._load(load, module)  # type: ignore[method-assign]
        return spec

    def _load(self, load: Any, module: Any) -> None:
        load(module)
        make = module.nixlAgent

        def make_paced(name: str, config: Any) -> Any:
            config.pthrDelay = self._delay_us
            return make(name, config)

        module.nixlAgent = make_paced


if _delay_us := int(os.environ.get("NIXL_PROGRESS_DELAY_US", "0")):
    sys.meta_path.insert(0, PacedBindings(_delay_us))
