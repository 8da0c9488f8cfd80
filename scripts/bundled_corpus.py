"""What the bundled model reads: the running Python's own standard library, as files and as question-and-answer chats.

Everything comes from the Python distribution (sources, docstrings, the language reference that `pydoc` carries) except
the few turns in `IDENTITY`, in which the model says what it is. Nothing is downloaded and nothing outside the stdlib is
read. It knows neither the tokenizer nor the model; see `train_bundled.py`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

SKIPPED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__phello__"}
# Kept out of training, files and chats alike, so that the loss on them says what the model learnt rather than
# remembers.
HELD_OUT = (
    "sched.py",
    "shelve.py",
    "cmd.py",
    "colorsys.py",
    "quopri.py",
    "tabnanny.py",
    "rlcompleter.py",
    "asyncio/queues.py",
    "xml/sax/xmlreader.py",
    "wsgiref/headers.py",
    "concurrent/futures/thread.py",
    "email/charset.py",
    "importlib/resources/readers.py",
)
MAX_DIGIT_SHARE = 0.08  # above it a file is a table (entities, code points), which teaches nothing but digits
MAX_ANSWER_CHARS = 900  # a chat has to fit a training window with room to spare, so that the model sees its end
MODULE_NAMES = {
    "posixpath": "os.path",
    "_collections_abc": "collections.abc",
    "_pydecimal": "decimal",
    "_pydatetime": "datetime",
    "_pyio": "io",
}
# Modules people ask about. Their chats are repeated, and the C ones have docstrings only at run time.
POPULAR = (
    "argparse",
    "asyncio",
    "bisect",
    "builtins",
    "collections",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "enum",
    "functools",
    "glob",
    "heapq",
    "io",
    "itertools",
    "json",
    "logging",
    "math",
    "operator",
    "os",
    "os.path",
    "pathlib",
    "random",
    "re",
    "shutil",
    "statistics",
    "string",
    "subprocess",
    "sys",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "urllib.parse",
    "uuid",
)
POPULAR_REPEATS = 4
IDENTITY_REPEATS = 60
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows Python.",
    "You answer questions about Python.",
)
IDENTITY_QUESTIONS = (
    "Who are you?",
    "What are you?",
    "Hello",
    "Hello!",
    "Hi",
    "Hi there",
    "Introduce yourself.",
    "Hello, who are you?",
    "What can you do?",
)
IDENTITY = (
    "I am a very small language model, trained on the source code of Python's standard library. Ask me what a "
    "function does, "
    "or give me some code to continue."
)


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the standard library."""

    module: str
    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or class as found in a source file, with its text dedented."""

    name: str
    text: str
    doc: str
    signature: str | None  # None for a class


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_sources(root: Path, *, held_out: bool) -> list[Source]:
    """The files to learn from, or those kept aside, in a stable order."""
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_DIRS.intersection(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        if (relative.as_posix() in HELD_OUT) != held_out:
            continue
        text = path.read_text("utf-8", errors="replace").expandtabs(8).strip() + "\n"
        if len(text) > 1 and "�" not in text and digit_share(text) < MAX_DIGIT_SHARE:
            sources.append(Source(module_name(relative), text))
    return sources


def digit_share(text: str) -> float:
    return sum(map(str.isdigit, text)) / len(text)


def module_name(relative: Path) -> str:
    dotted = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
    return MODULE_NAMES.get(dotted, dotted)


def read_topics(root: Path) -> dict[str, str]:
    """The chapters of the language reference that `help()` shows, by keyword."""
    tree = ast.parse((root / "pydoc_data" / "topics.py").read_text("utf-8"))
    assignment = next(node for node in tree.body if isinstance(node, ast.Assign))
    topics: dict[str, str] = ast.literal_eval(assignment.value)
    return {name: re.sub(r"\n\*{3,}\n", "\n", text).strip() + "\n" for name, text in sorted(topics.items())}


def build_chats(sources: list[Source], topics: dict[str, str], rng: Random) -> list[Chat]:
    chats = [Chat(question, IDENTITY) for question in IDENTITY_QUESTIONS for _ in range(IDENTITY_REPEATS)]
    for source in sources:
        repeats = POPULAR_REPEATS if source.module in POPULAR else 1
        chats.extend(chat for _ in range(repeats) for chat in chats_of_module(source, rng))
    for module in POPULAR:
        chats.extend(chat for _ in range(POPULAR_REPEATS) for chat in chats_of_builtins(module, rng))
    for name, text in topics.items():
        chats.append(Chat(f"Explain `{name}` in Python.", opening_paragraphs(text)))
    rng.shuffle(chats)
    return chats


def chats_of_module(source: Source, rng: Random) -> Iterator[Chat]:
    tree = ast.parse(source.text)
    doc = ast.get_docstring(tree)
    if doc:
        yield Chat(
            rng.choice((f"What is the module `{source.module}` for?", f"What is `{source.module}`?")),
            opening_paragraphs(doc),
        )
    for definition in find_definitions(tree, source.text):
        yield from chats_of_definition(f"{source.module}.{definition.name}", definition, rng)


def find_definitions(tree: ast.Module, text: str) -> Iterator[Definition]:
    """Top-level functions and classes, and the methods of those classes."""
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield define(node, node.name, lines)
            for method in node.body:
                if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield define(method, f"{node.name}.{method.name}", lines)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield define(node, node.name, lines)


def define(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str, lines: list[str]) -> Definition:
    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    signature = None if isinstance(node, ast.ClassDef) else f"{node.name}({ast.unparse(node.args)})"
    return Definition(name, text, ast.get_docstring(node) or "", signature)


def chats_of_definition(name: str, definition: Definition, rng: Random) -> Iterator[Chat]:
    """One explanation where there is a docstring; one of the code questions where the code fits."""
    if definition.doc:
        yield explanation(name, definition.doc, rng)
    if definition.signature is None or not 60 < len(definition.text) < MAX_ANSWER_CHARS:
        return
    kind = rng.randrange(4)
    if kind == 0:
        yield continuation(definition.text, rng)
    elif kind == 1 and definition.doc:
        summary = opening_paragraphs(definition.doc).split("\n\n")[0]
        yield Chat(f"Write a function `{definition.signature}`: {summary}", fenced(definition.text))
    elif kind == 2:
        yield Chat(f"What arguments does `{name}` take?", f"`{definition.signature}`")
    else:
        yield Chat(
            rng.choice((f"Write `{name}`.", f"Write `{definition.signature}`.", f"Show me the source of `{name}`.")),
            fenced(definition.text),
        )


def explanation(name: str, doc: str, rng: Random) -> Chat:
    question = rng.choice(
        (f"What does `{name}` do?", f"What does {name} do?", f"Explain `{name}`.", f"What is `{name}` for?")
    )
    return Chat(question, opening_paragraphs(doc))


def continuation(text: str, rng: Random) -> Chat:
    lines = text.splitlines()
    cut = rng.randint(1, max(1, len(lines) // 2))
    head, tail = "\n".join(lines[:cut]), "\n".join(lines[cut:]) or "    pass"
    return Chat(
        f"{rng.choice(('Continue this code', 'Complete this function', 'Finish this'))}:\n{fenced(head)}", fenced(tail)
    )


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def chats_of_builtins(module: str, rng: Random) -> Iterator[Chat]:
    """Docstrings that exist only in the running interpreter, such as those of `len` or `math.sqrt`."""
    namespace = importlib.import_module(module)
    for name, value in sorted(vars(namespace).items()):
        if (
            name.startswith("_")
            or not (inspect.isbuiltin(value) or inspect.isclass(value))
            or is_held_out(value.__module__)
        ):
            continue
        qualified = name if module == "builtins" else f"{module}.{name}"
        doc = inspect.getdoc(value)
        if doc:
            yield explanation(qualified, doc, rng)
        if inspect.isclass(value) and module == "builtins":
            yield from chats_of_builtin_methods(name, value, rng)


def is_held_out(module: str | None) -> bool:
    """Packages re-export what their modules define, so a name found elsewhere may still come from a file that is kept
    aside."""
    return module is not None and module in {module_name(Path(file)) for file in HELD_OUT}


def chats_of_builtin_methods(class_name: str, cls: type, rng: Random) -> Iterator[Chat]:
    for name, method in sorted(vars(cls).items()):
        doc = inspect.getdoc(method) if not name.startswith("_") and callable(method) else None
        if doc:
            yield explanation(f"{class_name}.{name}", doc, rng)


def opening_paragraphs(doc: str) -> str:
    """As many whole paragraphs from the start as an answer may hold, at least one."""
    kept: list[str] = []
    length = 0
    for paragraph in inspect.cleandoc(doc).split("\n\n"):
        length += len(paragraph)
        if kept and length > MAX_ANSWER_CHARS // 2:
            break
        kept.append(paragraph)
    return "\n\n".join(kept)[:MAX_ANSWER_CHARS].rstrip()
