"""Finds names that are left in the books of objects, wherever they stand: as keys, elements, fields, or bound in
callbacks. So a book that nobody thought of is looked through, too."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

CONTAINERS = (list, tuple, set, frozenset, deque)
# A whole walk; a bound, because a walk into a library would have no end.
MOST = 500_000


def find_names(
    roots: dict[str, object], names: Collection[str], package: str, leave_out: tuple[type, ...]
) -> list[str]:
    """Where the names stand, as paths of fields. Only containers and objects of the package's classes are entered."""
    found: list[str] = []
    seen: set[int] = set()
    todo: deque[tuple[str, object]] = deque(roots.items())
    for _ in range(MOST):
        if not todo:
            return found
        path, value = todo.popleft()
        if isinstance(value, str):
            if value in names:
                found.append(f"{path} = {value}")
            continue
        if id(value) in seen or isinstance(value, leave_out):
            continue
        seen.add(id(value))
        todo.extend(_parts(path, value, package))
    raise AssertionError(f"more than {MOST} objects are reached from {', '.join(roots)}")


def _parts(path: str, value: Any, package: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield f"{path} key", key
            yield f"{path}[{key if isinstance(key, str) else type(key).__name__}]", each
    elif isinstance(value, CONTAINERS):
        for each in value:
            yield f"{path}[]", each
    elif isinstance(value, functools.partial):
        yield from ((f"{path}()", each) for each in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from ((f"{path} closure", cell.cell_contents) for cell in value.__closure__ or () if _is_full(cell))
    elif type(value).__module__.startswith(package):
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield f"{path}.{name}", getattr(value, name)
        yield from ((f"{path}.{name}", each) for name, each in getattr(value, "__dict__", {}).items())
        for name in getattr(value, "__struct_fields__", ()):
            yield f"{path}.{name}", getattr(value, name)


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that was never set
        return False
