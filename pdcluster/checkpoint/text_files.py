"""The files of a model that make its text: names, contents, and a digest. By the digest a router knows that nodes
agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pdcluster.checkpoint.chat_templates import TEMPLATE_FILES
from pdcluster.checkpoint.gguf import is_gguf, open_gguf
from pdcluster.core.errors import ModelError

# The files of a model that a TextModel reads; only the first must exist.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *TEMPLATE_FILES,
    "chat_template.json",
    "generation_config.json",
    "config.json",
)


def read_text_files(directory: Path) -> dict[str, bytes]:
    """Contents by name, of those that exist. Raises ModelError when there is none. A GGUF file gives those that it
    stands for.
    """
    if is_gguf(directory):
        return open_gguf(directory).text_files
    files = {name: (directory / name).read_bytes() for name in TEXT_FILES if (directory / name).is_file()}
    if not files:
        raise ModelError(f"{directory} holds none of {', '.join(TEXT_FILES)}; give a Hugging Face model directory")
    return files


def files_digest(files: Mapping[str, bytes]) -> str:
    """16 hex digits over names and contents."""
    total = hashlib.blake2b(digest_size=8)
    for name, data in sorted(files.items()):
        total.update(f"{name}:{len(data)}:".encode() + data)
    return total.hexdigest()
