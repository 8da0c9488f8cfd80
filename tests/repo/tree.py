"""The repository's Python modules as the checks see them: name, file, syntax tree, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "pdcluster", ROOT / "router" / "pdcluster_router")


@dataclass(frozen=True)
class Import:
    # The absolute name of the module.
    name: str
    line: int
    # Only a type checker does it.
    is_for_types: bool


@dataclass(frozen=True)
class Module:
    name: str
    file: Path

    @property
    def package(self) -> str:
        """The package that it lies in: `pdcluster.kv` for pdcluster/kv/pages.py."""
        return self.name.rpartition(".")[0]

    @property
    def is_generated(self) -> bool:
        return "_pb2" in self.file.name

    @cached_property
    def text(self) -> str:
        return self.file.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.file))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def all_imports(self) -> list[Import]:
        """Those in functions and those for type checkers too."""
        for_types = {id(inner) for node in self.nodes if _is_type_checking(node) for inner in ast.walk(node)}
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [Import(alias.name, node.lineno, id(node) in for_types) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.at(node)}: imports are absolute here"
                found += [Import(_imported(node, alias), node.lineno, id(node) in for_types) for alias in node.names]
        return found

    @property
    def imports(self) -> list[Import]:
        """Those that Python does."""
        return [found for found in self.all_imports if not found.is_for_types]

    def at(self, where: ast.AST | int) -> str:
        """A place in it, as editors open it."""
        line = where if isinstance(where, int) else getattr(where, "lineno", 1)
        return f"{self.file.relative_to(ROOT)}:{line}"


def modules_below(*packages: Path) -> tuple[Module, ...]:
    """Of folders that stand in the path of imports."""
    found = []
    for package in packages:
        for file in sorted(package.rglob("*.py")):
            parts = file.relative_to(package.parent).with_suffix("").parts
            found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), file))
    return tuple(found)


@cache
def modules() -> tuple[Module, ...]:
    return modules_below(*PACKAGES)


@cache
def bench_modules() -> tuple[Module, ...]:
    return modules_below(ROOT / "bench")


@cache
def example_modules() -> tuple[Module, ...]:
    return modules_below(ROOT / "examples")


@cache
def written() -> tuple[Module, ...]:
    """Without what protoc generated and without the package markers."""
    return tuple(module for module in modules() if not module.is_generated and module.file.name != "__init__.py")


def require_none(offences: Iterable[str], advice: str) -> None:
    """Fail with all that break a rule, and with what to do about it."""
    listed = sorted(offences)
    assert not listed, f"{advice}:\n" + "\n".join(listed)


@cache
def _known() -> frozenset[str]:
    return frozenset(module.name for module in (*modules(), *bench_modules(), *example_modules()))


def _imported(node: ast.ImportFrom, alias: ast.alias) -> str:
    inner = f"{node.module}.{alias.name}"
    return inner if inner in _known() else str(node.module)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
