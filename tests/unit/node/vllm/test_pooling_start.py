"""The start of a node with a pooling model, as far as it needs no vLLM: its role, and its first prompt."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from fake_serving_engine import FACTS, FakeServingEngine, ParkedStore

from pdcluster.core.errors import ConfigError
from pdcluster.core.messages import Pooling, Role
from pdcluster.node.vllm.engine.engine import MAX_UNREAD, EngineNewsQueue
from pdcluster.node.vllm.engine.interface import AdapterLoaded, EngineOutput, EngineRequest, EngineStep
from pdcluster.node.vllm.engine_side import EngineLost
from pdcluster.node.vllm.process import check_role, warm_up
from pdcluster.settings.config import NodeConfig

POOLS = replace(FACTS, embedding_size=4)


class PromptEngine(FakeServingEngine):
    """Steps as soon as it has a request, until that has ended."""

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        while self.running:
            self.step()
        os.eventfd_write(self.news_fd, 1)


class DyingEngine(PromptEngine):
    """Dies behind its first answer."""

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.die()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pooling_model_serves_in_the_role_mixed_alone(role: Role) -> None:
    with pytest.raises(ConfigError, match=f"node.role is {role}, but a pooling model .* set it to mixed"):
        check_role(NodeConfig(role=role), POOLS)
    check_role(NodeConfig(role=role), FACTS)
    check_role(NodeConfig(role="mixed"), POOLS)


@pytest.mark.parametrize("facts", [FACTS, POOLS], ids=["generates", "pools"])
def test_the_first_prompt_is_of_the_kind_that_the_model_can_do(facts: object) -> None:
    engine = PromptEngine("e", ParkedStore(), facts)  # type: ignore[arg-type]
    warm_up(engine)
    (request,) = engine.added
    assert request.pooling == (Pooling() if facts is POOLS else None)
    engine.close()


def test_an_engine_that_dies_right_behind_its_first_answer_is_not_served() -> None:
    engine = DyingEngine("e", ParkedStore(), FACTS)
    with pytest.raises(EngineLost, match="killed by the test"):
        warm_up(engine)
    engine.close()


def test_a_full_queue_of_news_drops_steps_alone() -> None:
    queue = EngineNewsQueue()
    step = EngineStep(0.0, 0, 0, 0, 0, 0.0, 0, 0, 0)
    queue.put([step] * MAX_UNREAD)
    kept = [AdapterLoaded(1, digest="d"), EngineOutput("r", finish="stop")]
    queue.put([step, *kept, step])
    assert queue.take()[MAX_UNREAD:] == kept
    queue.close()


def test_a_first_prompt_that_fails_ends_the_start() -> None:
    engine = PromptEngine("e", ParkedStore(), POOLS)
    engine.fault = EngineOutput("", finish="error", error="no kernel for this shape")
    with pytest.raises(EngineLost, match="no kernel for this shape"):
        warm_up(engine)
    engine.close()
