"""What docstrings and comments refer to is there: files, modules, their members, and names in backquotes."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tree import PACKAGES, ROOT, Module, modules_below, require_none

CODE = (*PACKAGES, ROOT / "bench", ROOT / "examples", ROOT / "tests", ROOT / "scripts")
FOLDERS = (*CODE, ROOT / "docs", ROOT / "deploy", ROOT / "proto", ROOT / ".ci")
# Of other projects, or given by whoever starts a command.
FOREIGN_FILES = {
    "chat_template.json", "modeling_rope_utils.py", "backends/openai/request_handlers.py", "keda.sh", "cases.json",
    "PODS.json",
}  # fmt: skip
FOREIGN_NAMES = {
    "shmem_enabled", "pydoc", "filesystem", "layouts.BACKEND.processes", "tokenizers.decoders.DecodeStream", "least_load",
    "prefix_hash", "cache_aware",
}  # fmt: skip
# First words of settings.
SECTIONS = {"node", "router", "bootstrap", "up"}

FILE = re.compile(r"[\w./-]*\b[\w-]+\.(?:py|md|sh|toml|json|proto|yaml)\b")
DOTTED = re.compile(r"(?<![\w./])[a-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w/(])")
QUOTED = re.compile(r"`([A-Za-z_]\w*)`")
WORD = re.compile(r"[A-Za-z_]\w*")


def test_files_that_docstrings_and_comments_name_exist() -> None:
    known = {"/".join(file.parts[start:]) for file in _files() for start in range(len(file.parts))} | FOREIGN_FILES
    require_none(
        [
            f"{place}: {name}"
            for module, text in _prose()
            for place, line in _lines(module, text)
            for name in (found[0].lstrip("./") for found in FILE.finditer(line))
            if name not in known
        ],
        "name a file that is there",
    )


def test_modules_and_members_that_docstrings_and_comments_name_exist() -> None:
    require_none(
        [
            f"{place}: {name}"
            for module, text in _prose()
            for place, line in _lines(module, text)
            for name in DOTTED.findall(line)
            if not FILE.fullmatch(name) and not _is_there(name, module)
        ],
        "name a module, and what it has",
    )


def test_names_in_backquotes_exist() -> None:
    known = set[str]().union(*(_names(module) | _words(module) for module in _code())) | _other_words()
    known |= {*dir(builtins), *FOREIGN_NAMES}
    require_none(
        [
            f"{place}: {name}"
            for module, text in _prose()
            for place, line in _lines(module, text)
            for name in QUOTED.findall(line)
            if name not in known
        ],
        "name what the code has",
    )


def test_nobody_cites_a_document_of_old() -> None:
    require_none(
        [place for module, text in _prose() for place, line in _lines(module, text) if "DESIGN" in line],
        "say it, or name a page of docs",
    )


@cache
def _files() -> tuple[Path, ...]:
    found = [
        file for folder in FOLDERS for file in folder.rglob("*") if file.is_file() and "node_modules" not in file.parts
    ]
    return tuple(file.relative_to(ROOT) for file in (*found, *(file for file in ROOT.iterdir() if file.is_file())))


@cache
def _code() -> tuple[Module, ...]:
    return tuple(module for module in modules_below(*CODE) if not module.is_generated)


@cache
def _prose() -> tuple[tuple[Module, tuple[int, str]], ...]:
    """Docstrings and comments, with their first lines."""
    return tuple((module, text) for module in _code() for text in (*_docstrings(module), *_comments(module)))


def _docstrings(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def _comments(module: Module) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _lines(module: Module, text: tuple[int, str]) -> Iterator[tuple[str, str]]:
    for offset, line in enumerate(text[1].splitlines()):
        yield module.at(text[0] + offset), line


@cache
def _names(module: Module) -> frozenset[str]:
    """Identifiers that it defines, takes or uses."""
    found = set(module.name.split("."))
    for node in module.nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.update((node.asname or node.name).split("."))
        elif isinstance(node, ast.ImportFrom):
            found.update(str(node.module).split("."))
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            found.add(node.arg)
    return frozenset(found)


@cache
def _words(module: Module) -> frozenset[str]:
    """Of its strings but docstrings: keys, wire fields, names of kernels."""
    docstrings = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    values = [node.value for node in module.nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    texts = [value if isinstance(value, str) else value.decode("latin1") for value in values if _is_text(value)]
    return frozenset(word for text in texts for word in WORD.findall(text))


def _is_text(value: object) -> bool:
    return isinstance(value, str | bytes)


@cache
def _other_words() -> frozenset[str]:
    """Of files in other languages, and of paths."""
    kinds = {".proto", ".toml", ".sh", ".yaml", ".js", ".html", ""}
    texts = [(ROOT / file).read_text() for file in _files() if file.suffix in kinds and file.name != "LICENSE"]
    parts = {part for file in _files() for part in (*file.parts, file.stem)}
    return frozenset(parts.union(*(WORD.findall(text) for text in texts)))


@cache
def _by_suffix() -> dict[str, list[Module]]:
    """Modules by each end of their dotted names: `pages`, `kv.pages`, `pdcluster.kv.pages`."""
    found: dict[str, list[Module]] = {}
    for module in _code():
        parts = module.name.split(".")
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(module)
    return found


@cache
def _first_words() -> frozenset[str]:
    return frozenset(_by_suffix()) | {part for module in _code() for part in module.name.split(".")}


def _is_there(name: str, module: Module) -> bool:
    """Whether a dotted name is a module, a member of one, a setting or a value of this module, if it is ours at all."""
    parts = name.split(".")
    first, rest = parts[0], parts[1:]
    if first not in _first_words():
        return not rest[-1][0].isupper() or rest[-1] in _all_names()
    if first in SECTIONS and set(rest) <= _names(_by_suffix()["settings.config"][0]):
        return True
    if name in _by_suffix() or name in FOREIGN_NAMES or set(parts) <= _names(module) | _words(module):
        return True
    splits = [(".".join(parts[:cut]), parts[cut:]) for cut in range(1, len(parts))]
    return any(set(members) <= _names(each) for prefix, members in splits for each in _by_suffix().get(prefix, ()))


@cache
def _all_names() -> frozenset[str]:
    return frozenset().union(*(_names(module) | _words(module) for module in _code()))
