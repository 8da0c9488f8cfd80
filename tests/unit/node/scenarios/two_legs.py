"""Requests that one node computes and another decodes, on nodes whose turns and letters a test takes by hand."""

from __future__ import annotations

from msgspec.structs import replace
from pulling_nodes import PullingNodes, work_of
from stepped_nodes import Letter

from pdcluster.core.messages import Commit, Deliver, Prefill, Reserve, Reserved


class TwoLegs(PullingNodes):
    """Of p0 and d0; first_token: what p0 says of theirs, instead of the truth."""

    first_token: int | None = None

    def hand_over(self, name: str, prompt: list[int]) -> None:
        self.say("p0", Prefill(work_of(name, prompt, 4), remote=True))
        self.say("d0", Reserve(work_of(name, prompt, 4, attempt=1), self["p0"].endpoint))

    def _carry(self, letter: Letter) -> None:
        if isinstance(letter.message, Reserved):
            self.say("p0", Deliver(letter.message.ticket))
        elif isinstance(letter.message, Commit) and self.first_token is not None:
            super()._carry(Letter(letter.sender, letter.to, replace(letter.message, first_token=self.first_token)))
        else:
            super()._carry(letter)
