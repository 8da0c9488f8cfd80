"""The model card's text files, which a router may ask for in pieces. Weights are not among them.

Read once at start and kept, so that a file that changes on disk cannot give a router half of each.
"""

from __future__ import annotations

from pathlib import Path

from pdcluster.checkpoint.text_files import files_digest, read_text_files
from pdcluster.core.messages import FetchFile, FileChunk

CHUNK_BYTES = 1 << 20


class ModelFiles:
    def __init__(self, directory: Path) -> None:
        self._files = read_text_files(directory)
        self.digest = files_digest(self._files)

    def chunk(self, message: FetchFile) -> FileChunk:
        """The piece at message.offset; total_bytes 0 for a file that the model does not have."""
        data = self._files.get(message.name, b"")
        return FileChunk(message.name, message.offset, len(data), data[message.offset : message.offset + CHUNK_BYTES])
