"""Compiles the kernels of a first node and a first router, into the place where they look: `python -m
pdcluster.launch.warm`. `make setup` runs it beside its downloads.

It starts nothing that stays. Kernels of the batch-invariant mode are left to the first node that has it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pdcluster.engine.kernels.loader import load_kernels, load_pair_kernels
from pdcluster.settings.config import cache_directory
from pdcluster.transfer.copying.copy import native


def warm(cache_dir: Path) -> str:
    """What became of it, as a sentence."""
    began = time.monotonic()
    if load_kernels(cache_dir, "bfloat16") is None:
        return "skipped: the CPU kernels do not compile here; nodes run on plain torch, which is slower"
    has_pairs = load_pair_kernels() is not None
    native()
    subprocess.run([sys.executable, "-m", "pdcluster_router.warmup", str(cache_dir)], check=True)
    load_kernels(cache_dir, "float32")
    missing = "" if has_pairs else ", but for those of bfloat16 pairs, which do not compile here"
    return f"CPU kernels are compiled in {cache_dir}{missing} ({time.monotonic() - began:.0f} s)"


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m pdcluster.launch.warm", description=__doc__).parse_args(arguments)
    print(warm(cache_directory()))


if __name__ == "__main__":
    main()
