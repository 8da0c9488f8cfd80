"""When a process that serves looks for garbage in cycles. Everything else is freed as soon as nobody holds it, and is
no business of this module."""

from __future__ import annotations

import gc

# Containers made and not ended until the youngest are looked at, and how many such looks until the older ones are.
THRESHOLDS = (10_000, 20, 20)


def collect_seldom() -> None:
    """To be called when a process begins to serve. What is there then stays: modules, vocabularies, compiled code. The
    collector need not walk it, nor look at the young so often: requests and steps let go of what they made. A pause is
    one for all streams: tens of milliseconds in a router, a hundred in a node, whose libraries are a quarter of a
    million objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
