"""What becomes of a row that the engine can not go on with: one answer, and nothing of it is left, whatever its
neighbours and the step behind do."""

from __future__ import annotations

import pytest
from pulling_nodes import prompt_of
from two_legs import TwoLegs

from pdcluster.core.messages import Failed
from pdcluster.core.step import RowError

SLOW = RowError("it takes too long", retryable=False, param="grammar")
BUSY = RowError("retry later", retryable=True)
TORN = RowError("no numbers", retryable=True, spoils_kv=True)


class Counting(TwoLegs):
    """failed: every word that a request ended badly."""

    def __init__(self) -> None:
        super().__init__(num_pages=48)
        self.failed: list[Failed] = []

    def _note(self, message: object) -> None:
        if isinstance(message, Failed):
            self.failed.append(message)
        super()._note(message)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [SLOW, BUSY], ids=["refused", "retryable"])
@pytest.mark.parametrize("first", [0, 1, 2, 7])
def test_a_row_ends_alone_with_one_answer_that_says_what_is_at_fault(first: int, error: RowError) -> None:
    nodes = Counting()
    nodes["d0"].engine.row_errors["r"] = (first, error)
    nodes.ask("other", prompt_of(9, seed=5), 30, at="d0")
    nodes.ask("r", prompt_of(9), 20, at="d0")
    nodes.finish("other", prompt_of(9, seed=5))
    nodes.turns(50)
    (failed,) = nodes.failed
    assert (failed.request, failed.message, failed.retryable, failed.param) == (
        "r",
        error.reason,
        error.retryable,
        error.param,
    )
    assert failed.code == ("internal" if error.retryable else "invalid_request")
    assert len(nodes.tokens.get("r", [])) == first
    nodes.end()


@pytest.mark.parametrize(("error", "is_kept"), [(BUSY, True), (TORN, False)], ids=["busy", "spoilt"])
@pytest.mark.parametrize(("node", "first"), [("p0", 0), ("d0", 1), ("d0", 2)])
def test_kv_that_may_be_why_a_row_ended_is_nobodys_prefix_there(
    node: str, first: int, error: RowError, is_kept: bool
) -> None:
    """Nor is what was cached of the prompt before, which may have been so then."""
    nodes = Counting()
    nodes.cache(node, prompt_of(9))
    nodes[node].engine.row_errors["r"] = (first, error)
    nodes.hand_over("r", prompt_of(9))
    nodes.until(lambda: bool(nodes.failed))
    nodes.turns(50)
    assert bool(nodes[node].parts.pages.num_cached) is is_kept
    nodes.end()


@pytest.mark.parametrize(("node", "first"), [("p0", 0), ("d0", 1), ("d0", 2)])
def test_each_leg_of_a_request_may_be_the_one_that_can_not_go_on(node: str, first: int) -> None:
    nodes = Counting()
    nodes[node].engine.row_errors["r"] = (first, SLOW)
    nodes.hand_over("r", prompt_of(9))
    nodes.until(lambda: bool(nodes.failed))
    nodes.turns(50)
    failed, *others = nodes.failed
    assert (failed.request, failed.attempt, failed.retryable, failed.param) == (
        "r",
        0 if node == "p0" else 1,
        False,
        "grammar",
    )
    assert [(other.attempt, other.param) for other in others] == ([(1, "")] if node == "p0" else []), (
        "who waited for its KV is told, too"
    )
    nodes.end()
