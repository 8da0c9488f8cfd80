"""The functions of `scoring`, `room` and `node_row`, compiled by numba after `load`, otherwise as plain Python.

Both have one source and the same floats. The scan of long lists of token ids (`token_list`) is compiled with them.
`python -m pdcluster_router.policy.predicted.compiled` only compiles, into the cache that routers read.

A router loads compiled functions beside its start. Tests and tools need not.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pdcluster.api.openai import token_id_scan
from pdcluster.api.openai.token_list import Scan, use_scan
from pdcluster.settings.config import cache_directory
from pdcluster_router.core import node_row, room
from pdcluster_router.core.node_row import NodeRow, NumberRecord, Rows, array_of
from pdcluster_router.policy.predicted import cost_model, records, scoring
from pdcluster_router.policy.predicted.records import MOST_CANDIDATES, CandidateRow, ChoiceRow, RequestRow

log = logging.getLogger(__name__)

SOURCES = (cost_model, node_row, scoring, room, token_id_scan)
NAMES = (
    "first_leg", "pair", "parked", "note_sent", "has_open", "keeps_rows_fast", "has_batch_room",
    "any_open", "any_row", "least_excess_s",
)  # fmt: skip

KEPT = "choice"

R = TypeVar("R", bound=NumberRecord)


class Scoring:
    """The functions in one of both forms. They take arrays.

    choice, seen: scratch for one choice, which the next one overwrites.
    """

    first_leg: Callable[..., int]
    pair: Callable[..., None]
    parked: Callable[..., int]
    note_sent: Callable[..., None]
    has_open: Callable[..., bool]
    keeps_rows_fast: Callable[..., bool]
    has_batch_room: Callable[..., bool]
    any_open: Callable[..., bool]
    any_row: Callable[..., bool]
    least_excess_s: Callable[..., float]

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], scan_ids: Scan | None, *, is_compiled: bool
    ) -> None:
        for name in NAMES:
            setattr(self, name, functions[name])
        self.scan_ids, self._is_compiled = scan_ids, is_compiled
        self.choice, self.seen = self._blank(ChoiceRow, 1), self._blank(CandidateRow, 3 * MOST_CANDIDATES)

    def _blank(self, kind: type[NumberRecord], num: int) -> Any:
        return np.zeros(num, kind.dtype) if self._is_compiled else Rows(kind.blank() for _ in range(num))

    def found(self) -> ChoiceRow:
        """The last choice."""
        row: ChoiceRow = ChoiceRow(*self.choice[0].tolist()) if self._is_compiled else self.choice[0]
        return row

    def packed(self, num_prefill: int, num_decode: int, num_local: int, skipped: int) -> bytes:
        """Candidates of the last choice: of the prefill leg without the first ones, of the decode leg, of both."""
        seen, most = self.seen, MOST_CANDIDATES
        legs = seen[skipped:num_prefill], seen[most : most + num_decode], seen[2 * most : 2 * most + num_local]
        if self._is_compiled:
            return bytes(legs[0].tobytes() + legs[1].tobytes() + legs[2].tobytes())
        return b"".join([array_of(CandidateRow, leg).tobytes() for leg in legs])


def _on_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in plain Python. Arrays become lists, records objects: Python reads them faster.

    What it changes is written back: legs, and a node by `note_sent`.
    """

    def plain(*arguments: Any) -> Any:
        lists = [_listed(each) for each in arguments]
        result = function(*lists)
        for array, changed in zip(arguments, lists, strict=True):
            if isinstance(array, np.ndarray) and array.dtype == np.int64:
                array[:] = changed
            elif function is node_row.note_sent and isinstance(array, np.ndarray):
                array[0] = changed[0].numbers()
        return result

    return plain


def _listed(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    kind = next((kind for kind in (NodeRow, RequestRow) if kind.dtype is value.dtype), None)
    return value.tolist() if kind is None else [kind(*row) for row in value.tolist()]


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
    return Scoring(made, made["scan_ids"], is_compiled=True)


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
        types.Array(numba.from_dtype(kind.dtype), 1, "C") for kind in (NodeRow, RequestRow, ChoiceRow, CandidateRow)
    )
    numbers, whole, number, flag = types.float64[::1], types.int64, types.float64, types.boolean
    legs, text = types.int64[::1], types.Array(types.uint8, 1, "C", readonly=True)
    scored = nodes, legs, numbers, numbers, asked, choice, seen
    return {
        "first_leg": whole(*scored),
        "pair": types.void(*scored),
        "parked": whole(*scored),
        "note_sent": types.void(nodes, whole, types.UniTuple(whole, 8)),
        "has_open": flag(nodes, legs, whole, whole, number),
        "keeps_rows_fast": flag(nodes, whole, whole, number, number, number, number),
        "has_batch_room": flag(nodes, whole, whole, number, number, number, number),
        "any_open": flag(nodes, legs, whole, flag, number),
        "any_row": flag(nodes),
        "least_excess_s": number(nodes, number),
        "scan_ids": types.UniTuple(whole, 2)(text, types.int32[::1]),
    }


PLAIN = Scoring({name: _on_lists(_source(name)) for name in NAMES}, None, is_compiled=False)
# What this process uses.
active: Scoring = PLAIN


def use(functions: Scoring) -> None:
    global active
    active = functions
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
