"""What a decode node does with the first token that a prefill node's Commit brings."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from oracle import VOCAB
from pulling_nodes import PullingNodes, prompt_of, work_of
from stepped_nodes import Letter

from pdcluster.messages import Commit, Deliver, Failed, Prefill, Reserve, Reserved


class TwoLegs(PullingNodes):
    """Requests that p0 computes and d0 decodes; first_token: what p0 says of theirs, instead of the truth."""

    first_token: int | None = None

    def hand_over(self, name: str, prompt: list[int]) -> None:
        self.say("p0", Prefill(work_of(name, prompt, 4), remote=True))
        self.say("d0", Reserve(work_of(name, prompt, 4, attempt=1), self["p0"].endpoint))

    def _carry(self, letter: Letter) -> None:
        if isinstance(letter.message, Reserved):
            self.say("p0", Deliver(letter.message.ticket))
        elif isinstance(letter.message, Commit) and self.first_token is not None:
            super()._carry(replace_message(letter, replace(letter.message, first_token=self.first_token)))
        else:
            super()._carry(letter)


def replace_message(letter: Letter, message: Commit) -> Letter:
    return Letter(letter.sender, letter.to, message)


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
