"""The end of a process in which threads of a library still compute, which nobody can end."""

from __future__ import annotations

import logging
import os
import sys
from types import TracebackType
from typing import Protocol

logger = logging.getLogger(__name__)


class Sticky(Protocol):
    @property
    def num_stuck(self) -> int: ...


def leave_last(
    engine: Sticky, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
) -> None:
    """Log why the node broke, after everything else is closed. It may not reach whoever would log it."""
    if engine.num_stuck and error is not None:
        logger.critical("this node broke", exc_info=error)
    leave_if_stuck(engine.num_stuck, 0 if error is None else 1)


def leave_if_stuck(num_threads: int, code: int) -> None:
    """End the process while library threads still compute. An interpreter that ends around them is aborted by the C++
    runtime, and a drain would look like a crash.
    """
    if num_threads:
        logger.warning("%d threads still compute; leaving without them", num_threads)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
