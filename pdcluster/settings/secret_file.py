"""Files that hold secrets: cluster keys, tokens and the keys of tenants."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pdcluster.core.errors import ConfigError

# No secret is that long; a wrong path may name anything.
MAX_BYTES = 8 << 20


def read_private_file(name: str, file: Path) -> bytes:
    """As `read_secret_file`, for what this user alone, or its group, may read."""
    return _read(name, file, stat.S_IROTH | stat.S_IWOTH, "read or written", "o-rw")


def read_secret_file(name: str, file: Path) -> bytes:
    """Its bytes. name: of the setting, for errors, which never contain the bytes.

    Raises ConfigError where it cannot be read, or where anybody may write it.
    """
    return _read(name, file, stat.S_IWOTH, "written", "o-w")


def _read(name: str, file: Path, denied: int, doing: str, mending: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            found = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name} {file} cannot be read: {error.strerror}; check the path and its mode") from error
    if stat.S_ISREG(mode) and mode & denied:
        raise ConfigError(
            f"{name} {file} may be {doing} by everybody, so it is no secret of yours; chmod {mending} {file}"
        )
    if len(found) > MAX_BYTES:
        raise ConfigError(f"{name} {file} has more than {MAX_BYTES} bytes; check the path")
    return found
