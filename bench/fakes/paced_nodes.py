"""Nodes without an engine, in the router's own process: prompts take the time that a cost model says, tokens come at a
fixed pace. Their load is always known at once. For measuring what the router decides, not what it costs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint.bundled import path as bundled_path
from pdcluster.checkpoint.text_files import read_text_files
from pdcluster.core import messages as m
from pdcluster.core.errors import UnknownModel
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost, num_pairs
from pdcluster.kv.hashing import chain_root
from pdcluster_router.cluster.legs import Body, Ledger
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import Force, ModelInfo
from pdcluster_router.core.job import HashChain

BLOCK_TOKENS = 32
MAX_LEN = 8192


@dataclass(frozen=True, slots=True)
class Pace:
    """token_s: of a prompt; step_s: of one output token; slots: rows that decode at a time."""

    token_s: float = 100e-6
    step_s: float = 0.01
    slots: int = 64

    @property
    def cost(self) -> NodeCost:
        return NodeCost(PrefillCost(0.0, self.token_s, samples=1), DecodeCost(self.step_s, 0.0, samples=1))


class PacedNode:
    """A mixed node: one prompt at a time, in the order they came, when a row is free; decoding costs the prompts
    nothing."""

    def __init__(self, name: str, pace: Pace, ledger: Ledger) -> None:
        self.endpoint = m.Endpoint(name, f"{name}-boot", f"{name}:1")
        self._pace = pace
        self._ledger = ledger
        self._waiting: deque[m.Work] = deque()
        self._computing: m.Work | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._rows: set[str] = set()

    def view(self) -> NodeView:
        waiting = [*self._waiting, *([self._computing] if self._computing is not None else [])]
        tokens = sum(work.num_prompt for work in waiting)
        pairs = round(sum(num_pairs(work.num_prompt, 0) for work in waiting))
        rows = len(self._rows) + len(waiting)
        load = m.Load(
            len(self._waiting),
            len(self._rows),
            tokens,
            0,
            1000,
            1000,
            0,
            0,
            0,
            self._pace.slots,
            rows,
            waiting_pairs=pairs,
        )
        return NodeView(self.endpoint, "mixed", rows, load, BLOCK_TOKENS, MAX_LEN, cost=self._pace.cost)

    def on_message(self, message: m.AnyMessage) -> None:
        if isinstance(message, m.Prefill):
            self._waiting.append(message.work)
            self._next()
        elif isinstance(message, m.Cancel):
            self._cancel(message.request)

    def _cancel(self, request: str) -> None:
        self._waiting = deque(work for work in self._waiting if work.request != request)
        timer = self._timers.pop(request, None)
        if timer is not None:
            timer.cancel()
        self._rows.discard(request)
        if self._computing is not None and self._computing.request == request:
            self._computing = None
        self._next()

    def _next(self) -> None:
        if self._computing is not None or not self._waiting or len(self._rows) >= self._pace.slots:
            return
        work = self._computing = self._waiting.popleft()
        self._answer(work, m.Scheduled(work.request, work.attempt))
        self._later(work, self._pace.token_s * work.num_prompt, 0)

    def _later(self, work: m.Work, seconds: float, position: int) -> None:
        self._timers[work.request] = asyncio.get_running_loop().call_later(seconds, self._token, work, position)

    def _token(self, work: m.Work, position: int) -> None:
        if position == 0:
            self._computing = None
            self._rows.add(work.request)
        last = position + 1 >= work.sampling.max_tokens
        self._answer(work, m.TokenRow(work.request, work.attempt, position, (100,)))
        if last:
            self._timers.pop(work.request)
            self._rows.remove(work.request)
            self._answer(work, m.Finished(work.request, work.attempt, "length", position + 1, m.LegTimings()))
        else:
            self._later(work, self._pace.step_s, position + 1)
        if last or position == 0:
            self._next()

    def _answer(self, work: m.Work, body: Body) -> None:
        self._ledger.deliver(work.request, self.endpoint.incarnation, body)


class PacedCluster:
    """Implements legs.ClusterLinks and serving.ServedModels."""

    def __init__(self, num_nodes: int, pace: Pace) -> None:
        self.ledger = Ledger()
        self._nodes = {f"m{number}-boot": PacedNode(f"m{number}", pace, self.ledger) for number in range(num_nodes)}
        self._text = TextModel(read_text_files(bundled_path()))

    def refusal(self) -> str | None:
        return None

    def view(self) -> ClusterView:
        return ClusterView(tuple(node.view() for node in self._nodes.values()))

    def send(self, to: m.Endpoint, message: m.AnyMessage) -> None:
        self._nodes[to.incarnation].on_message(message)

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("paced", 0, MAX_LEN, self._text.vocab_size, ())]

    def text(self, model: str) -> TextModel:
        if model != "paced":
            raise UnknownModel(f"no model {model}", "model")
        return self._text

    async def first(self) -> None:
        return

    def versions(self, model: str) -> Sequence[ModelInfo]:
        return self.models() if model == "paced" else ()

    def choose_version(self, model: str, request: str, mode: Force | None) -> ModelInfo:
        return self.models()[0]

    def successor(self, model: str, digest: str, mode: Force | None) -> ModelInfo | None:
        return None

    def chain(self, model: str, salt: bytes, weights: str | None = None) -> HashChain:
        return HashChain(chain_root(block_tokens=BLOCK_TOKENS, salt=salt), BLOCK_TOKENS)
