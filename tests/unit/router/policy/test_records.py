"""Records of numbers: one definition for arrays of compiled code and for lists of plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from policy_cases import COST, batch, make_node

from pdcluster_router.core.node_row import NodeRow, NumberRecord, Rows, array_of
from pdcluster_router.policy.predicted import records
from pdcluster_router.policy.predicted.records import (
    LOCAL_LEG,
    PREFILL_LEG,
    PREFILL_TERMS,
    TERMS,
    CandidateRow,
    ChoiceRow,
    RequestRow,
)

KINDS: list[type[NumberRecord]] = [NodeRow, RequestRow, ChoiceRow, CandidateRow]
EVERY = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
# Fields that count, name a row or a bit. All others are measures.
WHOLE = {
    NodeRow: {"media"},
    RequestRow: {"previous", "source", "wants_local"},
    ChoiceRow: {
        "mode", "prefill", "decode", "is_fetched", "skipped", "is_calm", "num_prefill", "num_decode", "num_local", "best",
    },
    CandidateRow: {"leg", "row", "is_fetched"},
}  # fmt: skip


@EVERY
def test_the_columns_of_an_array_are_the_fields_of_a_record_in_their_order(kind: type[NumberRecord]) -> None:
    dtype = kind.dtype
    assert dtype.names == kind.__struct_fields__
    assert {name for name in kind.__struct_fields__ if dtype[name] == np.int64} == WHOLE[kind]
    assert all(dtype[name] in (np.int64, np.float64) for name in kind.__struct_fields__)
    assert dtype.itemsize == 8 * len(kind.__struct_fields__), "an array of words may be copied instead"
    assert kind.dtype is dtype, "numba knows an array by this object"


def test_every_record_has_a_numpy_type_of_its_own() -> None:
    defined = {each for each in vars(records).values() if isinstance(each, type) and issubclass(each, NumberRecord)}
    assert defined - {NumberRecord} == set(KINDS) - {NodeRow}
    assert len({id(kind.dtype) for kind in KINDS}) == len(KINDS)


@EVERY
def test_a_record_comes_back_from_an_array_as_it_was(kind: type[NumberRecord]) -> None:
    first, second = kind.blank(), kind(*range(len(kind.__struct_fields__)))
    array = array_of(kind, [first, second])
    assert array.dtype is kind.dtype or array.dtype == kind.dtype
    assert [kind(*row) for row in array.tolist()] == [first, second]
    assert second.numbers() == tuple(range(len(kind.__struct_fields__)))


@EVERY
def test_rows_assign_by_value_as_arrays_do(kind: type[NumberRecord]) -> None:
    """Candidates are moved in place as better ones come: two places must never be one object."""
    name = kind.__struct_fields__[-1]
    rows, array = Rows([kind.blank(), kind.blank()]), np.zeros(2, kind.dtype)
    for table in (rows, array):
        setattr(table[0], name, 7) if table is rows else table[name].__setitem__(0, 7)
        table[1] = table[0]
        setattr(table[0], name, 9) if table is rows else table[name].__setitem__(0, 9)
    assert [getattr(row, name) for row in rows] == array[name].tolist() == [9, 7]
    assert rows[0] is not rows[1]


def test_the_terms_of_each_leg_are_fields_of_a_candidate_that_are_zero_in_other_legs() -> None:
    blank = CandidateRow(*[0] * 8)
    assert set().union(*TERMS) <= set(CandidateRow.__struct_fields__)
    assert {getattr(blank, name) for names in TERMS for name in names} == {0.0}
    assert TERMS[PREFILL_LEG] == PREFILL_TERMS == TERMS[LOCAL_LEG][: len(PREFILL_TERMS)]
    assert all(len(set(names)) == len(names) for names in TERMS)


def test_a_node_has_its_report_in_the_fields_of_that_name() -> None:
    row = make_node("d0", "decode", batch(4, context=320), in_flight=2).row(COST)
    assert (row.has_load, row.reported_rows, row.reported_context, row.slots, row.slots_used) == (1, 4, 1280, 32, 4)
    assert (row.is_server, row.decodes, row.most_tokens, row.in_flight) == (0, 1, 32768, 2)
    assert (row.decode_fixed_s, row.each_row_s, row.context_s) == (0.008, 2e-4, 1e-8)
    assert (row.prompt_fixed_s, row.token_s, row.pair_s, row.chunk_tokens) == (0.005, 1e-4, 1e-9, 512)
    assert make_node("d0", "decode", is_cordoned=True).row(COST).most_tokens == -1
