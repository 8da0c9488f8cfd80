"""Compiles the router's numbers into the place where routers look: `python -m pdcluster_router.warmup DIRECTORY`.

`pdcluster.launch.warm` starts it, so that nothing of pdcluster imports the router.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pdcluster_router.policy.predicted import compiled


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdcluster_router.warmup", description=__doc__)
    parser.add_argument("directory", type=Path, help="the cache directory of the process that will look there")
    compiled.load(parser.parse_args().directory)


if __name__ == "__main__":
    main()
