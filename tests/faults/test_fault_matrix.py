"""Each fault at each step of the protocol on the scripted medium: right tokens or a clear error, nothing leaked, nobody
waits for ever."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from unittest import mock

import fault_matrix
import pytest
from fault_matrix import Cell, Outcome, Sums, cells, joined, run_cell, run_cells, summed, table, table_of
from fault_script import FAULTS, STEPS, control_step
from oracle import reference
from simulated_cluster import SimulatedCluster
from virtual_time import VirtualLoop, run_virtually
from virtual_wire import Connection, Delivery

from pdcluster.transfer.protocol.reader import Reader
from pdcluster.wire import codec

Show = Callable[[str, str], None]
Add = Callable[[str, Sums], None]
RUNS, PARTS = 10_000, 20


def check(outcomes: list[Outcome]) -> None:
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    assert not bad, "\n".join(map(str, bad[:5]))
    fired = Counter((outcome.cell.fault, outcome.cell.step) for outcome in outcomes if outcome.fired)
    assert not [cell for cell in ((fault, step) for fault in FAULTS for step in STEPS) if not fired[cell]], (
        "a cell whose fault never happened"
    )


def part_of_the_matrix(part: int) -> list[Cell]:
    return cells(RUNS, first_seed=2)[part * RUNS // PARTS : (part + 1) * RUNS // PARTS]


@pytest.mark.timeout(600)
def test_a_sample_of_the_fault_matrix(show_table: Show) -> None:
    outcomes: list[Outcome] = []
    for seed in range(4):  # not every seed comes to its fault
        fired = {(outcome.cell.fault, outcome.cell.step) for outcome in outcomes if outcome.fired}
        outcomes += run_cells(
            [cell for cell in cells(len(FAULTS) * len(STEPS), seed) if (cell.fault, cell.step) not in fired]
        )
    show_table("fault matrix, scripted medium, sample", table(outcomes))
    check(outcomes)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_part_of_the_ten_thousand_runs_of_the_fault_matrix(
    part: int, add_to_table: Add, pytestconfig: pytest.Config
) -> None:
    """Each with a limit of its own, so that a slow machine loses one part's evidence and not all; on whichever worker
    is free (`spread`), or, without workers, in as many processes as there are cores. What a part's few runs of a cell
    did not come to, the total's last line names."""
    is_worker = hasattr(pytestconfig, "workerinput")
    outcomes = list(run_cells(part_of_the_matrix(part), processes=1 if is_worker else os.cpu_count() or 1))
    add_to_table("fault matrix, scripted medium", summed(outcomes))
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    assert not bad, "\n".join(map(str, bad[:5]))


@pytest.mark.parametrize(
    ("fault", "step"),
    [("half open", "commit"), ("writer dies", "middle chunk"), ("late", "ack"), ("bit flip", "deliver")],
)
def test_a_run_with_the_same_seed_is_the_same_run(fault: str, step: str) -> None:
    assert run_cell(Cell(fault, step, 7)) == run_cell(Cell(fault, step, 7))


def test_an_abort_of_a_ticket_that_its_writer_never_saw_frees_the_pages_without_a_fence() -> None:
    """The writer has no link of its own to that reader: the answer goes back on the reader's."""

    async def play(loop: VirtualLoop) -> None:
        async with SimulatedCluster(loop, {"p0": "prefill", "d0": "decode"}, checks_permits=False) as cluster:
            dropped = 0

            def tap(connection: Connection, sender: str, data: bytes) -> list[Delivery]:
                nonlocal dropped
                if "deliver" not in map(control_step, codec.decode(data).messages) or dropped:
                    return [Delivery(data)]
                dropped += 1
                return []

            cluster.zmq.tap = tap
            prompt = list(range(40))
            tokens, _ = await cluster.run(prompt, 4, deadline_s=60.0)
            assert tokens == reference(prompt, 4) and dropped == 1
            await asyncio.sleep(1)
            assert cluster.nodes["d0"].parts.pages.num_quarantined == 0
            await cluster.until_idle()

    run_virtually(play)


# ---------------------------------------------------------------- the matrix sees what it should see


class TakesAnyBytes(Reader):
    """No digests."""

    def _is_intact(self, *_: object) -> bool:
        return True


class FreesAtOnce(Reader):
    """Pages of a dead ticket are free without proof."""

    def _seek_proof(self) -> None:
        for incoming in [each for each in self._tickets.values() if each.state.name == "ABORTING"]:
            self._reclaim(incoming)


class NeverFrees(Reader):
    """Proof is not looked at."""

    def _reclaim(self, incoming: object) -> None:
        return


@pytest.mark.parametrize(
    ("broken", "cell_fault", "seen", "first_seed"),
    [(TakesAnyBytes, "bit flip", "wrong", 0), (FreesAtOnce, "late", "broken", 0), (NeverFrees, "late", "leaked", 2)],
)
def test_a_rule_broken_on_purpose_is_seen(broken: type[Reader], cell_fault: str, seen: str, first_seed: int) -> None:
    """first_seed: near to one that shows it, since a run in which nothing frees takes long."""
    tried = [
        Cell(cell_fault, step, seed)
        for seed in range(first_seed, first_seed + 40)
        for step in ("first chunk", "middle chunk", "last chunk")
    ]
    with mock.patch("pdcluster.node.native.assembly.Reader", broken):
        assert any(getattr(run_cell(cell), seen) for cell in tried), f"no run saw that {broken.__doc__}"


def test_the_table_names_every_cell_and_sums_up() -> None:
    outcome = Outcome(Cell("late", "ack", 0), fired=1, right=2, errors=1, wrong=["x"])
    text = fault_matrix.table([outcome])
    assert all(fault in text for fault in FAULTS) and all(step in text for step in STEPS)
    assert "1 2/1/0" in text and "wrong tokens 1" in text and "leaks 0" in text


def test_the_parts_of_a_matrix_add_up_to_its_table() -> None:
    outcomes = [
        Outcome(Cell("late", step, seed), fired=seed, right=1, leaked=["x"] * seed)
        for step in ("ack", "commit")
        for seed in range(2)
    ]
    parts = [{cell: dict(counts) for cell, counts in summed(outcomes[part::3]).items()} for part in range(3)]
    assert table_of(joined(parts)) == table(outcomes) and "leaks 2" in table(outcomes)


def test_the_table_names_a_cell_whose_fault_never_happened() -> None:
    assert "never happened in: late, ack" in table([Outcome(Cell("late", "ack", 0), right=1)])
    assert "never happened" not in table([Outcome(Cell("late", "ack", 0), fired=1, right=1)])


def test_the_parts_are_all_of_the_ten_thousand_runs() -> None:
    whole = cells(RUNS, first_seed=2)
    assert [cell for part in range(PARTS) for cell in part_of_the_matrix(part)] == whole and len(set(whole)) == RUNS
