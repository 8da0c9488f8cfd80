"""The cluster key that `up --secure` makes for one run."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from pathlib import Path


class RunKey:
    """A file that only this user reads, in a folder of its own. `close` removes both, and so does the process's end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pdcluster-up-")
        # Whatever cleans old files out of /tmp passes over a folder that is locked (tmpfiles.d(5)). Processes that are
        # started again after days read the file.
        self._lock = os.open(self._folder.name, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self.file = Path(self._folder.name) / "cluster-key"
        with open(os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_hex(32) + "\n")

    def close(self) -> None:
        """More than once does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._folder.cleanup()
