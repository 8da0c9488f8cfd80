"""What a decode node does with the first token that a prefill node's Commit brings."""

from __future__ import annotations

import pytest
from oracle import VOCAB
from pulling_nodes import prompt_of
from two_legs import TwoLegs

from pdcluster.core.messages import Failed


@pytest.mark.parametrize("token", [VOCAB, 2**31 - 1])
def test_a_token_that_the_model_does_not_have_ends_its_own_request_only(token: int) -> None:
    nodes, prompt = TwoLegs(num_pages=48), prompt_of(9)
    nodes.ask("other", prompt_of(9, seed=5), 30, at="d0")
    nodes.until(lambda: bool(nodes.tokens.get("other")))
    nodes.first_token = token
    nodes.hand_over("r", prompt)
    nodes.until(lambda: "r" in nodes.ends)
    end = nodes.ends["r"]
    assert isinstance(end, Failed) and end.retryable and f"sent token {token}" in end.message
    nodes.finish("other", prompt_of(9, seed=5))
    nodes.first_token = None
    nodes.end()
