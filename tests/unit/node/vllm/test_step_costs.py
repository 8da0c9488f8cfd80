"""The cost model is fitted to vLLM's steps, though vLLM says little of them."""

from __future__ import annotations

import random

import pytest

from pdcluster.cost.cost import NodeCost, num_pairs
from pdcluster.node.vllm.step_costs import StepCosts

CHUNK = 512


class Vllm:
    """An engine of known costs: one prompt chunk beside all decode rows, first come first served."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.now = 100.0
        self.prompts: list[list[int]] = []  # request, length, computed
        self.rows: dict[str, list[int]] = {}  # context, tokens left
        self.timed = 0

    def add(self, number: int, length: int) -> None:
        self.costs.add(str(number), length, self.now)
        self.prompts.append([number, length, 0])

    def step(self) -> None:
        seconds, tokens, outputs = 0.001, 0, []
        for context, _ in self.rows.values():
            seconds += 0.0005 + 2e-6 * context
        if self.prompts:
            number, length, known = self.prompts[0]
            tokens = min(CHUNK, length - known)
            seconds += 0.003 + 5e-5 * tokens + 1e-8 * num_pairs(tokens, known)
        finished = []
        for key, row in self.rows.items():
            outputs.append((key, 1))
            row[0], row[1] = row[0] + 1, row[1] - 1
            if not row[1]:
                finished.append(key)
        for key in finished:
            del self.rows[key]
        if tokens:
            self.prompts[0][2] += tokens
            if self.prompts[0][2] == length:
                outputs.append((str(number), 1))
                self.rows[str(number)] = [length + 1, 20]
                del self.prompts[0]
        self.now += seconds
        self.timed += self.costs.step(self.now, tokens, outputs, finished) is not None


def test_known_costs_are_found_again_and_idle_time_is_none() -> None:
    rng, costs = random.Random(4), StepCosts(CHUNK)
    engine, number = Vllm(costs), 0
    assert costs.report() is None
    for _ in range(120):
        engine.now += rng.choice([0.5, 30.0, 600.0])  # idle
        for _ in range(rng.randint(1, 4)):
            number += 1
            engine.add(number, rng.choice([5, 100, 400, 900, 1700]))
        while engine.prompts or engine.rows:
            engine.step()
    report = costs.report()
    assert report is not None
    cost = NodeCost.of(report)
    assert cost.decode.seconds(1, 300) == pytest.approx(0.001 + 0.0005 + 2e-6 * 300, rel=0.03)
    assert cost.decode.seconds(4, 4000) == pytest.approx(0.001 + 4 * 0.0005 + 2e-6 * 4000, rel=0.03)
    assert cost.prefill.seconds(400) == pytest.approx(0.004 + 5e-5 * 400 + 1e-8 * num_pairs(400, 0), rel=0.05)
    assert 0.001 < costs.itl_s < 0.05
    assert report.chunk_tokens == CHUNK and report.prefill_samples + report.decode_samples == engine.timed


def test_a_step_is_taken_apart() -> None:
    costs = StepCosts(CHUNK)
    costs.add("a", 100, 10.0, num_cached=64)
    step = costs.step(10.5, 36, [("a", 1)])
    assert step is not None and (step.tokens, step.rows, step.seconds) == (36, 0, 0.5)
    assert step.pairs == num_pairs(36, 64)
    costs.add("b", 600, 10.6)
    step = costs.step(11.0, 500, [("a", 1)])
    assert step is not None and (step.tokens, step.rows, step.context_tokens) == (500, 1, 101)
    step = costs.step(11.4, 100, [("a", 2), ("b", 1)], ["a"])
    assert step is not None and (step.tokens, step.pairs) == (100, num_pairs(100, 500))
    step = costs.step(11.5, 0, [("b", 1)], ["b"])
    assert step is not None and (step.tokens, step.rows, step.context_tokens) == (0, 1, 601)
    costs.add("c", 10, 99.0)
    step = costs.step(99.25, 10, [("c", 1)], ["c"])
    assert step is not None and step.seconds == 0.25


def test_a_request_that_waits_for_kv_does_not_make_a_step_long() -> None:
    costs = StepCosts(CHUNK)
    costs.add("d", 300, 1.0, is_fetched=True)
    assert costs.step(9.0, 1, [("d", 1)]) is None
    step = costs.step(9.01, 0, [("d", 1)])
    assert step is not None and step.seconds == pytest.approx(0.01) and (step.rows, step.context_tokens) == (1, 301)
    costs.add("e", 50, 9.011, is_fetched=True)
    step = costs.step(9.03, 1, [("d", 1), ("e", 1)])
    assert step is not None and (step.tokens, step.rows, step.context_tokens) == (0, 2, 302 + 50)


def test_what_the_books_do_not_explain_is_not_timed() -> None:
    costs = StepCosts(CHUNK)
    costs.add("a", 10, 0.0)
    assert costs.step(1.0, 10, [("a", 1), ("stranger", 1)]) is None
    assert costs.step(1.1, 7, [("a", 1)]) is None  # prompt tokens of nobody
    costs.remove("stranger")
    costs.add("b", 100, 1.1)
    assert costs.step(1.2, 30, [("a", 1), ("b", 1)]) is None  # a first token after part of a prompt: a cache hit
    step = costs.step(1.3, 0, [("a", 1), ("b", 1)])
    assert step is not None and (step.rows, step.context_tokens) == (2, 13 + 101)


def test_a_step_without_work_teaches_nothing() -> None:
    costs = StepCosts(CHUNK)
    assert costs.step(5.0, 0, []) is None and costs.report() is None


def test_what_vllm_had_cached_is_no_work() -> None:
    costs = StepCosts(CHUNK)
    costs.add("a", 100, 1.0)
    costs.found_cached("a", 96)
    step = costs.step(1.5, 4, [("a", 1)])
    assert step is not None and (step.tokens, step.pairs) == (4, num_pairs(4, 96))
    costs.found_cached("gone", 5)
