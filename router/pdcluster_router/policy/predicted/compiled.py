"""The functions of `scoring`, `room` and `node_state`, compiled by numba after `load`, otherwise as plain Python.

Both have one source and the same floats. The scan of long lists of token ids (`token_list`) is compiled with them.
`python -m pdcluster_router.policy.predicted.compiled` only compiles, into the cache that routers read.

A router loads compiled functions beside its start. Tests and tools need not. Compiled functions take arrays, plain ones
lists, which Python reads faster.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pdcluster.api.openai import token_id_scan
from pdcluster.api.openai.token_list import Scan, use_scan
from pdcluster.settings.config import cache_directory
from pdcluster_router.policy.predicted import cost_model, node_state, records, room, scoring
from pdcluster_router.policy.predicted.records import (
    MOST_CANDIDATES,
    CandidateRow,
    ChoiceRow,
    NodeRow,
    NumberRecord,
    RequestRow,
    Rows,
    array_of,
)

log = logging.getLogger(__name__)

SOURCES = (cost_model, node_state, scoring, room, token_id_scan)
NAMES = (
    "first_leg", "pair", "parked", "note_sent", "admits", "has_open", "any_open", "any_row", "least_excess_s",
)  # fmt: skip

KEPT = "choice"

R = TypeVar("R", bound=NumberRecord)


class Scoring:
    """The functions in one of both forms, and makers of their arguments.

    choice, seen: scratch for one choice, read before the next one.
    """

    first_leg: Callable[..., int]
    pair: Callable[..., None]
    parked: Callable[..., int]
    note_sent: Callable[..., None]
    admits: Callable[..., bool]
    has_open: Callable[..., bool]
    any_open: Callable[..., bool]
    any_row: Callable[..., bool]
    least_excess_s: Callable[..., float]

    def __init__(self, functions: Sequence[Callable[..., Any]], scan_ids: Scan | None, *, is_compiled: bool) -> None:
        for name, function in zip(NAMES, functions, strict=True):
            setattr(self, name, function)
        self.scan_ids, self._is_compiled = scan_ids, is_compiled
        self.choice, self.seen = self._blank(ChoiceRow, 1), self._blank(CandidateRow, 3 * MOST_CANDIDATES)

    def _blank(self, kind: type[NumberRecord], num: int) -> Any:
        return np.zeros(num, kind.dtype()) if self._is_compiled else Rows(kind.blank() for _ in range(num))

    def nodes(self, table: Any) -> Any:
        """A table of nodes as an argument."""
        return table if self._is_compiled else [NodeRow(*row) for row in table.tolist()]

    def numbers(self, array: Any) -> Any:
        return array if self._is_compiled else array.tolist()

    def request(self, values: tuple[Any, ...]) -> Any:
        return np.array([values], RequestRow.dtype()) if self._is_compiled else [RequestRow(*values)]

    def found(self) -> ChoiceRow:
        """The last choice."""
        row: ChoiceRow = ChoiceRow(*self.choice[0].tolist()) if self._is_compiled else self.choice[0]
        return row

    def packed(self, start: int, end: int) -> bytes:
        """Candidates of the last choice."""
        rows = self.seen[start:end]
        return bytes((rows if self._is_compiled else array_of(CandidateRow, rows)).tobytes())

    def write_sent(self, table: Any, row: int, in_flight: int, sent: tuple[int, ...]) -> None:
        """`note_sent` into a row of a table."""
        if self._is_compiled:
            self.note_sent(table, row, in_flight, sent)
            return
        node = NodeRow(*table[row].tolist())
        self.note_sent([node], 0, in_flight, sent)
        table[row] = node.numbers()


def _compiled() -> Scoring:
    """Raises RuntimeError where numba does not work."""
    numba, extending, errors = (
        importlib.import_module(name) for name in ("numba", "numba.extending", "numba.core.errors")
    )
    try:
        for each in _parts():
            extending.register_jitable(each)
        made = {
            name: numba.njit(signature, cache=True)(_source(name)) for name, signature in _signatures(numba).items()
        }
    except errors.NumbaError as error:
        raise RuntimeError(str(error)) from error
    return Scoring([made[name] for name in NAMES], made["scan_ids"], is_compiled=True)


def _source(name: str) -> Any:
    return next(vars(module)[name] for module in SOURCES if name in vars(module))


def _parts() -> Sequence[Any]:
    """Functions that compiled functions may call."""
    modules = {module.__name__ for module in SOURCES}
    own = [
        each
        for module in SOURCES
        for each in vars(module).values()
        if getattr(each, "__module__", "") in modules and callable(each)
    ]
    return list(dict.fromkeys(own))


def _signatures(numba: Any) -> dict[str, Any]:
    """Types to compile for, at once. A call with other types is an error, not a pause of seconds."""
    types = numba.types
    nodes, asked, choice, seen = (
        types.Array(numba.from_dtype(kind.dtype()), 1, "C") for kind in (NodeRow, RequestRow, ChoiceRow, CandidateRow)
    )
    numbers, whole, number, flag = types.float64[::1], types.int64, types.float64, types.boolean
    legs, text = types.int64[::1], types.Array(types.uint8, 1, "C", readonly=True)
    scored = nodes, legs, numbers, numbers, asked, choice, seen
    return {
        "first_leg": whole(*scored),
        "pair": types.void(*scored),
        "parked": whole(*scored),
        "note_sent": types.void(nodes, whole, whole, types.UniTuple(whole, 6)),
        "admits": flag(nodes, legs, whole, whole, asked, number, number, flag),
        "has_open": flag(nodes, legs, whole, whole, number),
        "any_open": flag(nodes, legs, whole, flag, number),
        "any_row": flag(nodes),
        "least_excess_s": number(nodes, number),
        "scan_ids": types.UniTuple(whole, 2)(text, types.int32[::1]),
    }


PLAIN = Scoring([_source(name) for name in NAMES], None, is_compiled=False)
_in_use: Scoring = PLAIN


def in_use() -> Scoring:
    """What this process uses."""
    return _in_use


def use(functions: Scoring) -> None:
    global _in_use
    _in_use = functions
    use_scan(functions.scan_ids)


def load(cache_dir: Path) -> bool:
    """Use compiled functions from now on. The first time on a machine takes seconds.

    Returns False, with a line in the log, where that fails. Choices are then the same, only slower.
    """
    from pdcluster.processes.kernel_cache import filled

    try:
        folder = _folder(cache_dir)
        folder.mkdir(exist_ok=True)
        importlib.import_module("numba").config.CACHE_DIR = str(folder)
        filled(folder, KEPT, lambda: use(_compiled()))
    except ImportError as error:
        log.info("choices of nodes are weighed in plain Python, which is slower: numba is not installed (%s)", error)
        return False
    except Exception as error:  # routing needs no compiler: whatever numba finds, the same functions run as Python
        log.warning("choices of nodes are weighed in plain Python, which is slower: they are not compiled (%r)", error)
        return False
    return True


def is_kept(cache_dir: Path) -> bool:
    """Whether loading is quick: compiled before, or impossible."""
    try:
        return (_folder(cache_dir) / f"{KEPT}.filled").exists()
    except (ImportError, OSError):
        return True


def _folder(cache_dir: Path) -> Path:
    """A cache for these sources: numba itself checks only the file of the called function."""
    from pdcluster.processes.kernel_cache import open_place  # nothing of the engine is loaded before this

    sources = (*SOURCES, records)
    digest = hashlib.blake2b(b"".join(Path(str(module.__file__)).read_bytes() for module in sources), digest_size=8)
    return open_place(cache_dir) / f"{KEPT}-{digest.hexdigest()}"


if __name__ == "__main__":
    raise SystemExit(not load(cache_directory()))
