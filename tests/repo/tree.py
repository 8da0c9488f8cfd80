"""The repository's Python modules as the checks see them: name, file, syntax tree, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "pdcluster", ROOT / "router" / "pdcluster_router")


@dataclass(frozen=True)
class Module:
    name: str
    file: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package that it lies in: `pdcluster.kv` for pdcluster/kv/pages.py."""
        return self.name.rpartition(".")[0]

    @property
    def is_generated(self) -> bool:
        return "_pb2" in self.file.name


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            parts = file.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, file, ast.parse(file.read_text(), str(file))))
    return tuple(found)


def written() -> list[Module]:
    """Without what protoc generated and without the package markers."""
    return [module for module in modules() if not module.is_generated and module.file.name != "__init__.py"]


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """Absolute names of the modules that are imported anywhere in a module, with their lines; imports for type checkers
    alone are left out."""
    known = {found.name for found in modules()}
    skipped = {id(inner) for node in ast.walk(module.tree) if _is_type_checking(node) for inner in ast.walk(node)}
    for node in ast.walk(module.tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.file}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in known else str(node.module)), node.lineno


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
