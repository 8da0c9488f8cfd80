"""The spare process of a router's supervisor. It imports all that a worker imports, and then waits to become one.

`python -m pdcluster_router.spare --ready-fd N`, started by the supervisor only. It costs the memory of an idle Python
process (`router.spare` turns it off).
"""

from __future__ import annotations

import importlib
import sys

# Imports that bring all that a worker imports, now or later.
LOADED = ("pdcluster_router.cli", "pdcluster_router.process", "pdcluster_router.frontend.grpc")


def main() -> None:
    for name in LOADED:
        importlib.import_module(name)
    from pdcluster.processes.spare import awaited_argv
    from pdcluster_router import cli
    from pdcluster_router.workers.supervisor import PROGRAM

    argv = awaited_argv()
    if argv is not None:
        sys.argv = argv[argv.index(PROGRAM) :]
        cli.main()


if __name__ == "__main__":
    main()
