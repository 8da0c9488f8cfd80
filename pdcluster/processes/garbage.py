"""When a serving process looks for garbage in cycles. All else is freed as soon as nobody holds it."""

from __future__ import annotations

import gc

# Containers made and not ended until the youngest are looked at. And how many such looks until older ones are.
THRESHOLDS = (10_000, 20, 20)


def collect_seldom() -> None:
    """Call it when a process begins to serve. What is there then stays: modules, vocabularies, compiled code. The
    collector need not walk it. It looks at the young seldom, because requests and steps let go of what they made.

    A pause stops all streams: tens of milliseconds in a router, a hundred in a node.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
