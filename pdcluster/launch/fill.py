"""Downloads a model of the hub into a folder, once, as the Helm chart's Job does. It appears when it is whole.

python -m pdcluster.launch.fill ORG/NAME[@REVISION] FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pdcluster.checkpoint.hub import fill
from pdcluster.core.errors import ModelError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdcluster.launch.fill", description=__doc__)
    parser.add_argument("model", type=Path, metavar="ORG/NAME[@REVISION]")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    given = parser.parse_args(arguments)
    try:
        is_new = fill(given.model, given.folder)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.folder} {'has' if is_new else 'was there already, so nothing was downloaded for'} {given.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
