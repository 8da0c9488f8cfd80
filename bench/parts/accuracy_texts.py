"""Texts of many kinds for `bench.accuracy`: prose, programs, tables, JSON, languages, chats. All come with Python or
stand here."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

NUM_PROSE = 20
PROGRAMS = (
    "argparse.py",
    "ast.py",
    "asyncio/tasks.py",
    "calendar.py",
    "codecs.py",
    "csv.py",
    "dataclasses.py",
    "decimal.py",
    "difflib.py",
    "fractions.py",
    "heapq.py",
    "tarfile.py",
)
LANGUAGES = (
    "Bonjour, je m'appelle Claire et j'habite à Lyon depuis dix ans. Le matin, je prends le métro pour aller au "
    "travail. ",
    "Der schnelle braune Fuchs springt über den faulen Hund, und niemand wundert sich darüber. Übung macht den "
    "Meister. ",
    "Mi casa es tu casa. El tren sale a las ocho y media de la mañana desde el andén número tres. ",
    "今日はとても良い天気です。东京是日本的首都。Привет, как дела? 🌍🚀 naïve café résumé. ",
)
CHATS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    (
        "Write a haiku about the sea.",
        "Waves whisper softly,\nSalt and wind on weathered stone,\nThe tide breathes in, out.",
    ),
    (
        "How do I reverse a list in Python?",
        "Use reversed() or list.reverse():\n```python\nxs = [1, 2, 3]\nxs.reverse()\nprint(xs)\n```",
    ),
    ("Explain photosynthesis simply.", "Plants use sunlight, water and carbon dioxide to make sugar and oxygen."),
    ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare around the year 1600."),
    ("List three primary colors.", "1. Red\n2. Blue\n3. Yellow"),
)
CHAT = (
    "<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
)


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of each."""
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))
    yield from ((f"prose: {name}", topics[name]) for name in longest[:NUM_PROSE])
    library = Path(sysconfig.get_path("stdlib"))
    yield from (
        (f"program: {name}", (library / name).read_text(encoding="utf-8"))
        for name in PROGRAMS
        if (library / name).exists()
    )
    yield "table", "\n".join(f"{i:4d} {i * i:8d} {i**3:12d} {1 / i:.6f}" for i in range(1, 400))
    items = ",\n".join(
        f'{{"id": {i}, "name": "user{i}", "tags": ["a", "b"], "score": {i * 0.37 % 5:.2f}}}' for i in range(200)
    )
    yield "json", f'{{"items": [{items}]}}'
    yield "repetition", "The quick brown fox jumps over the lazy dog. " * 120
    yield from ((f"language {index}", text * 8) for index, text in enumerate(LANGUAGES))
    yield from ((f"chat: {question}", CHAT.format(question, answer)) for question, answer in CHATS)
