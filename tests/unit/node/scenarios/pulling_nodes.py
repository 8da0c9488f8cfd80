"""Nodes whose turns and letters a test takes by hand, asked to pull KV from one another. All in mode local: tokens come
from where they are asked."""

from __future__ import annotations

import random
from collections.abc import Callable

from fake_backend import FakeBackend, FakeNetwork, Fault
from oracle import VOCAB, reference
from stepped_nodes import Letter, SteppedNode, SteppedNodes

from pdcluster.core.messages import (
    AnyMessage,
    Cancel,
    Failed,
    Fetch,
    Finished,
    Prefill,
    Pull,
    Refused,
    Sampling,
    Tokens,
    Work,
    pack_tokens,
)
from pdcluster.kv.hashing import chain_root, extend
from pdcluster.transfer.backends.base import Peer, Stamp

ROUTER = Peer("router", "router-1")
BLOCK = 4
ROOT = chain_root(block_tokens=BLOCK)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Prompts of one seed are beginnings of one another."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def work_of(name: str, prompt: list[int], count: int, *, attempt: int = 0, prompt_logprobs: int | None = None) -> Work:
    packed = pack_tokens(prompt)
    sampling = Sampling(max_tokens=count, seed=1, prompt_logprobs=prompt_logprobs)
    return Work(
        name, attempt, packed, len(prompt), extend(b"", packed, root=ROOT, block_tokens=BLOCK), sampling, 20.0, ROOT
    )


class PullingNodes:
    """p0 is asked, d0 and d1 hold. lose: which letters between nodes never arrive. problems: bytes that landed where
    they must not."""

    def __init__(
        self, plan: Callable[[Stamp], Fault] = lambda _: Fault(), *, checks_permits: bool = True, num_pages: int = 24
    ) -> None:
        self.now = 1000.0
        self.plan = plan
        self.problems: list[str] = []
        self.network = FakeNetwork(
            lambda: self.now, plan=lambda stamp: self.plan(stamp), checks_permits=checks_permits, on_land=self._on_land
        )
        self.cluster = SteppedNodes(
            {"p0": "mixed", "d0": "mixed", "d1": "mixed"}, {"fake": self.network}, num_pages=num_pages
        )
        self.lose: Callable[[Letter], bool] = lambda letter: False
        self.seen: list[Letter] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finished | Failed | Refused] = {}

    def __getitem__(self, name: str) -> SteppedNode:
        return self.cluster.nodes[name]

    def say(self, node: str, message: AnyMessage) -> None:
        self.cluster.hand_over(Letter(ROUTER, self[node].me, message), "router")

    def ask(
        self,
        name: str,
        prompt: list[int],
        count: int = 3,
        *,
        pull: str = "",
        pull_tokens: int | None = None,
        at: str = "p0",
    ) -> None:
        """Compute and decode the prompt at a node, which shall first pull from another."""
        tokens = len(prompt) // BLOCK * BLOCK if pull_tokens is None else pull_tokens
        self.say(
            at,
            Prefill(
                work_of(name, prompt, count), remote=False, pull=Pull(self[pull].endpoint, tokens) if pull else None
            ),
        )

    def cancel(self, name: str, at: str = "p0") -> None:
        self.say(at, Cancel(name, 0, "client left"))

    def turn(self, seconds: float = 0.002) -> None:
        """One turn of every node, letters included."""
        self.now += seconds
        for node in self.cluster.living():
            node.turn()
        pending_messages, self.cluster.pending_messages[:] = list(self.cluster.pending_messages), []
        for letter in pending_messages:
            self._carry(letter)

    def turns(self, count: int, seconds: float = 0.002) -> None:
        for _ in range(count):
            self.turn(seconds)

    def until(self, condition: Callable[[], bool], seconds: float = 0.002, limit: int = 1500) -> None:
        for _ in range(limit):
            if condition():
                return
            self.turn(seconds)
        raise AssertionError("never")

    def finish(self, name: str, prompt: list[int]) -> Finished:
        """The request ends with the tokens of one process."""
        self.until(lambda: name in self.ends)
        end = self.ends[name]
        assert isinstance(end, Finished), end
        assert self.tokens[name] == reference(prompt, len(self.tokens[name]))
        return end

    def cache(self, node: str, prompt: list[int]) -> None:
        """Have the node compute the prompt, so that it holds its full pages."""
        name = f"cached-{len(self.ends)}"
        self.ask(name, prompt, 1, at=node)
        self.finish(name, prompt)

    def kill(self, name: str, told: str) -> None:
        node = self[name]
        node.is_alive = False
        self.network.kill(node.me)
        self[told].neighbours.news.append(node.me)

    def pulls(self, node: str = "p0") -> dict[str, int]:
        return dict(self[node].parts.fetch.counters)

    def fetches(self) -> list[Fetch]:
        return [letter.message for letter in self.seen if isinstance(letter.message, Fetch)]

    def end(self, seconds: float = 0.05) -> None:
        """Everything is given back, nothing landed where it must not."""
        try:
            self.until(lambda: all(node.is_idle() for node in self.cluster.living()), seconds)
            for node in self.cluster.living():
                for books in (
                    node.parts.scheduler,
                    node.parts.reader,
                    node.parts.writer,
                    node.parts.fetch,
                    node.parts.export,
                ):
                    books.check_integrity()
            assert not self.problems, self.problems
        finally:
            self.cluster.end()

    def _carry(self, letter: Letter) -> None:
        if letter.to == ROUTER:
            self._note(letter.message)
            return
        self.seen.append(letter)
        if not self.lose(letter):
            self.cluster.hand_over(letter)

    def _note(self, message: AnyMessage) -> None:
        if isinstance(message, Tokens):
            for row in message.rows:
                self.tokens.setdefault(row.request, []).extend(row.tokens)
        elif isinstance(message, Finished | Failed | Refused):
            self.ends[message.request] = message

    def _on_land(self, backend: FakeBackend, stamp: Stamp, spans: list[tuple[int, int]]) -> None:
        node = self.cluster.node_of(backend.me)
        for offset, nbytes in spans if node is not None else ():
            for page in range(offset // node.engine.page_bytes, -(-(offset + nbytes) // node.engine.page_bytes)):
                if node.parts.pages.writer_of(page) != stamp.nonce:
                    self.problems.append(f"a write of {stamp.nonce:x} lands in page {page} of {backend.me.node}")
