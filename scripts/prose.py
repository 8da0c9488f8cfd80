"""Words, and mean words a sentence, of Markdown documents: `python scripts/prose.py [FILE ...]`.

Code blocks and link targets do not count. A table cell, a heading and a list item end a sentence, as a full stop does.
A cell or item of one or two words is no sentence. Without files: README, ARCHITECTURE, CONTRIBUTING and all of docs but
the generated page of figures.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST_WORDS = 3


def documents() -> list[Path]:
    """The documents that people read from top to bottom."""
    named = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    return named + sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "figures.md")


def sentences(text: str) -> list[str]:
    """The sentences of a document, without markup."""
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*\|?[-| :]+\|?\s*$", "\n", text, flags=re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s*)|\|", text)
    found = []
    for block in blocks:
        words = re.sub(r"^\s*(?:[-*#]+|\d+\.)\s+", "", " ".join(block.split()))
        found += re.split(r"(?<=[.!?])[*`\")]*\s+", words)
    return [sentence for sentence in found if len(sentence.split()) >= LEAST_WORDS]


def main(files: list[str]) -> None:
    """Print a row for each document, and one for all."""
    total = count = 0
    for path in [Path(name) for name in files] or documents():
        text = path.read_text()
        lengths = [len(sentence.split()) for sentence in sentences(text)]
        total, count = total + sum(lengths), count + len(lengths)
        name = path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path
        print(f"{name!s:45} {len(text.split()):6} words  {sum(lengths) / max(len(lengths), 1):5.1f} a sentence")
    print(f"{'all':45} {total:6} words  {total / max(count, 1):5.1f} a sentence")


if __name__ == "__main__":
    main(sys.argv[1:])
