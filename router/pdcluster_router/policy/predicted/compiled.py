"""The functions of `scoring`, compiled by numba after `load`, otherwise as plain Python.

Both have one source and the same floats. The scan of long lists of token ids (`token_list`) is compiled with them.
`python -m pdcluster_router.policy.predicted.compiled` only compiles, into the cache that routers read.

A router loads compiled functions beside its start. Tests and tools need not. Compiled functions take arrays, plain ones
lists, which Python reads faster.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pdcluster.api.openai import token_id_scan
from pdcluster.api.openai.token_list import Scan, use_scan
from pdcluster.settings.config import cache_directory
from pdcluster_router.policy.predicted import cost_model, node_state, passing, placing, scoring
from pdcluster_router.policy.predicted.cost_model import NUM_ASKED, Numbers, bears
from pdcluster_router.policy.predicted.node_rows import Pool
from pdcluster_router.policy.predicted.node_rows import Table as Array
from pdcluster_router.policy.predicted.placing import MOST_TOLD, Told
from pdcluster_router.policy.predicted.scoring import NUM_FOUND, Found, Rows, Table

if TYPE_CHECKING:
    from pdcluster_router.cluster.view import ClusterView, Roster

log = logging.getLogger(__name__)

SOURCES = (cost_model, node_state, scoring, passing, placing, token_id_scan)

KEPT = "choice"


class Scoring(Protocol):
    """The functions, and makers of their arguments. Arrays are read-only, but for those of `blank` and `zeros`."""

    first_leg: Callable[..., int]
    pair: Callable[..., None]
    place: Callable[..., int]
    place_pair: Callable[..., int]
    parked: Callable[..., int]
    bears: Callable[..., bool]
    note_sent: Callable[..., None]
    goes: Callable[..., bool]
    any_open: Callable[..., int]
    any_row: Callable[..., bool]
    least_excess_s: Callable[..., float]
    # Scratch for `place` and `place_pair`, read before they are called again.
    scratch: tuple[Found, Told]
    scan_ids: Scan | None

    def table(self, view: ClusterView) -> Table: ...

    def rows(self, pool: Pool) -> Rows: ...

    def nothing(self, roster: Roster) -> Numbers:
        """A zero for each node."""
        ...

    def paths(self, roster: Roster, row: int, bandwidth: Mapping[str, float]) -> Numbers: ...

    def groups(self, roster: Roster) -> tuple[Rows, Table]: ...

    def zeros(self, size: int) -> Found: ...

    def blank(self) -> Found: ...

    def part(self, found: Numbers, start: int, end: int) -> list[float]: ...

    def packed(self, told: Numbers, num: int) -> bytes:
        """The first `num` numbers as doubles."""
        ...


def _note_sent(table: Array, row: int, *counts: int) -> None:
    """Work on a list, because numbers of arrays are slow."""
    numbers = table[row].tolist()
    node_state.note_sent((numbers,), 0, *counts)
    table[row] = numbers


class PythonScoring:
    """Implements Scoring."""

    first_leg = staticmethod(scoring.first_leg)
    pair = staticmethod(scoring.pair)
    place = staticmethod(placing.place)
    place_pair = staticmethod(placing.place_pair)
    parked = staticmethod(scoring.parked)
    bears = staticmethod(bears)
    note_sent = staticmethod(_note_sent)
    goes = staticmethod(passing.goes)
    any_open = staticmethod(passing.any_open)
    any_row = staticmethod(passing.any_row)
    least_excess_s = staticmethod(passing.least_excess_s)
    scratch: tuple[Found, Told] = [0.0] * NUM_FOUND, [0.0] * MOST_TOLD
    scan_ids: Scan | None = None

    def table(self, view: ClusterView) -> Table:
        return view.rows

    def rows(self, pool: Pool) -> Rows:
        return pool.rows

    def nothing(self, roster: Roster) -> Numbers:
        return [0.0] * len(roster.names)

    def paths(self, roster: Roster, row: int, bandwidth: Mapping[str, float]) -> Numbers:
        found: list[float] = roster.paths(row, bandwidth).tolist()
        return found

    def groups(self, roster: Roster) -> tuple[Rows, Table]:
        return roster.groups.of.tolist(), roster.groups.exchange.tolist()

    def zeros(self, size: int) -> Found:
        return [0.0] * size

    def blank(self) -> Found:
        return [0.0] * NUM_FOUND

    def part(self, found: Numbers, start: int, end: int) -> list[float]:
        return list(found[start:end])

    def packed(self, told: Numbers, num: int) -> bytes:
        return array("d", told[:num]).tobytes()


class CompiledScoring:
    """Implements Scoring. Raises RuntimeError where numba does not work."""

    def __init__(self) -> None:
        numba, extending, errors = (
            importlib.import_module(name) for name in ("numba", "numba.extending", "numba.core.errors")
        )
        try:
            for each in _parts():
                extending.register_jitable(each)
            made = {
                name: numba.njit(signature, cache=True)(_source(name))
                for name, signature in _signatures(numba.types).items()
            }
        except errors.NumbaError as error:
            raise RuntimeError(str(error)) from error
        self.first_leg: Callable[..., int] = made["first_leg"]
        self.pair: Callable[..., None] = made["pair"]
        self.place: Callable[..., int] = made["place"]
        self.place_pair: Callable[..., int] = made["place_pair"]
        self.parked: Callable[..., int] = made["parked"]
        self.bears: Callable[..., bool] = made["bears"]
        self.note_sent: Callable[..., None] = made["note_sent"]
        self.goes: Callable[..., bool] = made["goes"]
        self.any_open: Callable[..., int] = made["any_open"]
        self.any_row: Callable[..., bool] = made["any_row"]
        self.least_excess_s: Callable[..., float] = made["least_excess_s"]
        self.scan_ids: Scan | None = made["scan_ids"]
        self.scratch: tuple[Found, Told] = np.zeros(NUM_FOUND), np.zeros(MOST_TOLD)  # type: ignore[assignment]

    def table(self, view: ClusterView) -> Any:
        return view.table

    def rows(self, pool: Pool) -> Any:
        return pool.index

    def nothing(self, roster: Roster) -> Any:
        return roster.nothing

    def paths(self, roster: Roster, row: int, bandwidth: Mapping[str, float]) -> Any:
        return roster.paths(row, bandwidth)

    def groups(self, roster: Roster) -> Any:
        groups = roster.groups
        return groups.of, groups.exchange

    def zeros(self, size: int) -> Any:
        return np.zeros(size)

    def blank(self) -> Any:
        return np.empty(NUM_FOUND)

    def part(self, found: Any, start: int, end: int) -> list[float]:
        numbers: list[float] = found[start:end].tolist()
        return numbers

    def packed(self, told: Any, num: int) -> bytes:
        packed: bytes = told[:num].tobytes()
        return packed


def _source(name: str) -> Any:
    return next(vars(module)[name] for module in SOURCES if name in vars(module))


def _parts() -> Sequence[Any]:
    """Functions that compiled functions may call."""
    modules = {module.__name__: module for module in SOURCES}
    own = [
        each
        for module in SOURCES
        for each in vars(module).values()
        if getattr(each, "__module__", "") in modules and callable(each)
    ]
    return list(dict.fromkeys(own))


def _signatures(types: Any) -> dict[str, Any]:
    """Types to compile for, at once. A call with other types is an error, not a pause of seconds."""
    row, rows, table = types.float64[::1], types.int64[::1], types.float64[:, ::1]
    asked, number, whole = types.UniTuple(types.float64, NUM_ASKED), types.float64, types.int64
    pools, text = (rows,) * 5, types.Array(types.uint8, 1, "C", readonly=True)
    return {
        "first_leg": whole(table, row, number, whole, row, *pools, rows, table, types.boolean, asked, row),
        "pair": types.void(table, row, row, rows, rows, table, asked, row),
        "place": whole(
            table, row, number, whole, row, *pools, rows, table, types.boolean, asked, whole, number, row, row
        ),
        "place_pair": whole(table, row, row, rows, rows, table, types.boolean, asked, whole, number, row, row),
        "parked": whole(table, row, row, rows, rows, rows, rows, table, number, asked, row),
        "bears": types.boolean(row, number, asked, number),
        "goes": types.boolean(
            table, whole, whole, types.boolean, types.boolean, whole, whole, whole, number, number, number, number
        ),
        "any_open": whole(table, rows, types.boolean, types.boolean, number),
        "any_row": types.boolean(table, rows),
        "least_excess_s": number(table, number),
        "scan_ids": types.UniTuple(whole, 2)(text, types.int32[::1]),
        "note_sent": types.void(table, whole, *(whole,) * 7),
    }


PLAIN = PythonScoring()
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
        filled(folder, KEPT, lambda: use(CompiledScoring()))
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

    digest = hashlib.blake2b(b"".join(Path(str(module.__file__)).read_bytes() for module in SOURCES), digest_size=8)
    return open_place(cache_dir) / f"{KEPT}-{digest.hexdigest()}"


if __name__ == "__main__":
    raise SystemExit(not load(cache_directory()))
