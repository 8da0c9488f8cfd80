"""A process with one engine, as a node is: it ends when its engine dies. Prints the engine's mark when it is ready."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from engine_kit import start_engine

from pdcluster.node.vllm.engine.interface import EngineDied


def main(model: Path) -> None:
    engine = start_engine(model)
    engine.wait_ready(400.0, report=lambda text: print(text, file=sys.stderr))
    print(f"mark {engine._mark}", flush=True)
    while True:
        select.select([engine.news_fd], [], [])
        if any(isinstance(item, EngineDied) for item in engine.take()):
            engine.close()
            # An interpreter that has loaded vLLM takes about four seconds to end by itself.
            os._exit(3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
