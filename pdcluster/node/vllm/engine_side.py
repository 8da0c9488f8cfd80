"""The vLLM engine of a node, as the node's control drives it.

Each turn takes in what the engine said, acts on clocks and gives it work. vLLM owns scheduler and pages. So the load
report comes from the node's own books, and from vLLM's statistics of its steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

import numpy as np

from pdcluster.core.errors import IntegrityError, NodeStuck, PdclusterError
from pdcluster.core.messages import (
    AnyMessage,
    Commit,
    CommitAck,
    Declined,
    Deliver,
    Fetch,
    Load,
    ManageAdapter,
    Prefill,
    RefusedLeg,
    Reserve,
    Sampling,
    Work,
)
from pdcluster.cost.fit import Step
from pdcluster.node.control import NodeLeg, NodeLinks
from pdcluster.node.parking import ParkedKV
from pdcluster.node.reports.health import NodeSnapshot
from pdcluster.node.reports.load_report import by_reason
from pdcluster.node.vllm.adapters import AdapterBook
from pdcluster.node.vllm.decode_rows import DecodeRows
from pdcluster.node.vllm.engine.interface import (
    AdapterLoaded,
    EngineDied,
    EngineOutput,
    EngineStep,
    ServingEngine,
    WeightsReplaced,
)
from pdcluster.node.vllm.event_stream import EventStream
from pdcluster.node.vllm.events import BlockHashes
from pdcluster.node.vllm.parked_prompts import ParkedPrompts
from pdcluster.node.vllm.requests import EngineQueue
from pdcluster.node.vllm.step_costs import StepCosts
from pdcluster.node.vllm.weights_change import WeightsReplacement
from pdcluster.node.work_checks import WorkChecks
from pdcluster.transfer.backends.base import Peer

logger = logging.getLogger(__name__)

# vLLM says nothing of a long chunk before its end, and compiles at a first shape.
STUCK_S = 60.0


class EngineLost(PdclusterError):
    """The engine's processes are gone, and so is the node. A supervisor restarts it."""

    code = "engine_lost"


@dataclass(frozen=True, slots=True)
class VllmParts:
    """The components of a node with vLLM.

    events: None where vLLM does not report its cache.
    check_sampling: raises BadRequest for sampling that vLLM cannot do, with so many tokens emitted before.
    """

    links: NodeLinks
    engine: ServingEngine
    queue: EngineQueue
    prompts: ParkedPrompts
    rows: DecodeRows
    parking: ParkedKV
    events: EventStream | None
    check_sampling: Callable[[Sampling, int], None]
    adapters: AdapterBook
    weights: WeightsReplacement


class StepBooks:
    """What vLLM's steps come to. vLLM tells of a step before its tokens reach the node, so a step waits for them."""

    def __init__(self, costs: StepCosts, on_step: Callable[[Step], None] | None) -> None:
        self.costs, self._on_step = costs, on_step
        self._last: EngineStep | None = None
        self._emitted: Counter[str] = Counter()
        self._finished: list[str] = []
        self.num_steps = self.num_preemptions = self.num_failed_reads = self.num_expired = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.kv_usage = 0.0

    def take_step(self, step: EngineStep) -> None:
        self._settle()
        self._last = step
        self.num_steps += 1
        self.num_preemptions += step.preemptions
        self.num_failed_reads += step.failed_transfers
        self.num_expired += step.expired_leases
        self.prompt_tokens += step.prompt_tokens + step.reused_tokens
        self.cached_tokens += step.reused_tokens
        self.kv_usage = step.kv_usage

    def take_output(self, output: EngineOutput) -> None:
        if output.cached_tokens:
            self.costs.found_cached(output.key, output.cached_tokens)
        self._emitted[output.key] += len(output.tokens) + bool(output.vector)
        if output.finish:
            self._finished.append(output.key)
        if self._last is not None and self._emitted.total() >= self._last.output_tokens:
            self._settle()

    def _settle(self) -> None:
        if self._last is not None:
            timed = self.costs.step(self._last.at_s, self._last.prompt_tokens, self._emitted.items(), self._finished)
            if timed is not None and self._on_step is not None:
                self._on_step(timed)
        else:
            for key in self._finished:
                self.costs.remove(key)
        self._last, self._emitted, self._finished = None, Counter(), []


class VllmSide:
    def __init__(
        self, parts: VllmParts, *, clock: Callable[[], float], on_step: Callable[[Step], None] | None = None
    ) -> None:
        """on_step: called with every step that was timed."""
        facts = parts.engine.facts
        self._parts, self._facts, self._clock = parts, facts, clock
        self._checks = WorkChecks(facts.vocab_size, facts.max_len)
        self.cache = BlockHashes(facts.block_tokens, facts.num_blocks, facts.groups)
        if self.cache.fault:
            logger.warning("routing by prefix does not see this node's cache: %s", self.cache.fault)
        self._books = StepBooks(parts.queue.costs, on_step)
        self._heard_at = clock()
        self.is_stuck = False

    # ------------------------------------------------------------ one turn

    def turn(self) -> None:
        self._take_news()
        if self._parts.events is not None:
            for batch in self._parts.events.take():
                self.cache.apply(batch)
        self._parts.prompts.expire()
        self._parts.rows.expire()
        self._watch_engine()
        self._parts.queue.pump()

    def wakeups(self) -> Iterable[int]:
        yield self._parts.engine.news_fd
        if self._parts.events is not None:
            yield self._parts.events.fd

    def next_deadline(self) -> float | None:
        events = self._parts.events
        clocks = (
            self._parts.prompts.next_deadline(),
            self._parts.rows.next_deadline(),
            None if events is None else events.next_deadline(),
        )
        return min((moment for moment in clocks if moment is not None), default=None)

    def _take_news(self) -> None:
        for news in self._parts.engine.take():
            self._heard_at = self._clock()
            if isinstance(news, EngineDied):
                raise EngineLost(f"node {self._parts.links.me.node} lost its engine: {news.reason}")
            if isinstance(news, EngineStep):
                self._books.take_step(news)
            elif isinstance(news, AdapterLoaded):
                self._parts.adapters.on_loaded(news)
            elif isinstance(news, WeightsReplaced):
                self._parts.weights.on_replaced(news)
            else:
                self._on_output(news)

    def _on_output(self, output: EngineOutput) -> None:
        self._books.take_output(output)
        if output.finish:
            self._parts.queue.ended(output.key)
        if self._parts.prompts.owns(output.key):
            self._parts.prompts.on_output(output)
        elif self._parts.rows.owns(output.key):
            self._parts.rows.on_output(output)
        elif output.reference:
            self._parts.engine.release(output.key)  # nobody waits for it any more

    def _watch_engine(self) -> None:
        """A stuck engine's work moves to other nodes, and new work is refused until it gets on. While it loads an
        adapter it makes no steps, and the load has a deadline of its own.
        """
        is_busy = self._parts.queue.num_running > 0
        if not is_busy or self._parts.adapters.is_loading:
            self._heard_at = self._clock()
        stood_s = self._clock() - self._heard_at
        was_stuck, self.is_stuck = self.is_stuck, stood_s >= STUCK_S
        if self.is_stuck and not was_stuck:
            reason = f"node {self._parts.links.me.node} is stuck: vLLM made no step for {stood_s:.0f} s"
            logger.error(
                "vLLM made no step for %.0f s: %d requests move", stood_s, self.end_all(NodeStuck.code, reason)
            )
        elif was_stuck and not self.is_stuck:
            logger.warning("vLLM makes steps again: the node takes work")

    # ------------------------------------------------------------ what a router asks

    def prefill(self, router: Peer, message: Prefill) -> None:
        if not self._accepts(router, message.work, "prefill", is_pooled=message.pooling is not None):
            return
        if message.remote:
            self._parts.prompts.start(router, message)
        else:
            self._parts.rows.start_local(router, message)

    def reserve(self, router: Peer, message: Reserve) -> None:
        if self._accepts(router, message.work, "reserve"):
            num_blocks = self._facts.num_blocks - self._parts.parking.num_pages
            self._parts.rows.reserve(router, message, num_blocks=num_blocks)

    def deliver(self, router: Peer, message: Deliver) -> None:
        self._parts.prompts.deliver(router, message)

    def cancel(self, request: str, attempt: int, reason: str) -> None:
        self._parts.prompts.cancel(request, attempt, reason)
        self._parts.rows.cancel(request, attempt, reason)

    def release(self, request: str) -> None:
        self._parts.prompts.release(request)

    def manage_adapter(self, router: Peer, message: ManageAdapter) -> None:
        self._parts.adapters.manage(router, message)

    def find(self, request: str, attempt: int) -> NodeLeg | None:
        return self._parts.prompts.find(request, attempt) or self._parts.rows.find(request, attempt)

    def awaits(self, request: str, attempt: int) -> bool:
        return False

    def cancel_router(self, router: Peer) -> None:
        self._parts.prompts.cancel_router(router)
        self._parts.rows.cancel_router(router)

    def keep_only(self, router: Peer, awaited: Set[tuple[str, int]]) -> None:
        self._parts.prompts.keep_only(router, awaited)
        self._parts.rows.keep_only(router, awaited)

    def end_all(self, code: str, reason: str) -> int:
        return self._parts.prompts.end_all(code, reason) + self._parts.rows.end_all(code, reason)

    def _accepts(self, router: Peer, work: Work, leg: RefusedLeg, *, is_pooled: bool = False) -> bool:
        acceptance = self._parts.links.acceptance
        return acceptance.takes(router, work, leg, is_stuck=self.is_stuck, is_pooled=is_pooled) and acceptance.check(
            router, work, leg, self._check
        )

    def _check(self, work: Work) -> None:
        tokens = np.frombuffer(work.token_ids, np.int32)
        self._checks.check(work, tokens)
        self._parts.adapters.check(work)
        self._parts.check_sampling(work.sampling, len(tokens) - work.num_prompt)

    # ------------------------------------------------------------ what other nodes say

    def node_message(self, peer: Peer, message: AnyMessage) -> bool:
        if isinstance(message, Commit):
            self._parts.rows.on_commit(peer, message)
        elif isinstance(message, CommitAck):
            if not self._parts.prompts.on_ack(peer, message):
                logger.debug("node %s answered a Commit that is over", peer.node)
        elif isinstance(message, Fetch):
            answer = Declined(message.ticket.nonce, "nodes with vLLM give no KV to others")
            self._parts.links.outbox.message(peer, answer)
        else:
            return False
        return True

    def node_gone(self, peer: Peer) -> None:
        self._parts.prompts.node_gone(peer)
        self._parts.rows.node_gone(peer)

    # ------------------------------------------------------------ load and idleness

    @property
    def num_open(self) -> int:
        return self._parts.prompts.num_legs + self._parts.rows.num_legs

    @property
    def is_idle(self) -> bool:
        return not (self.num_open or self._parts.queue.num_running or self._parts.queue.num_waiting)

    @property
    def is_quiet(self) -> bool:
        return self.is_idle

    def check_integrity(self) -> None:
        """Raises IntegrityError when something leaked."""
        if self._parts.parking.num_pages:
            raise IntegrityError(f"the node is idle, but {self._parts.parking.num_pages} KV blocks are parked")

    def load(self) -> Load:
        queue, rows, standing = self._parts.queue, self._parts.rows, self._parts.links.standing
        parked = self._parts.parking.num_pages
        used = min(max(round(self._books.kv_usage * self._facts.num_blocks), parked), self._facts.num_blocks)
        return Load(
            waiting=queue.num_waiting,
            running=queue.num_running,
            waiting_tokens=queue.waiting_tokens,
            waiting_pairs=queue.waiting_pairs,
            rows=rows.num_rows,
            context_tokens=rows.context_tokens,
            pages_total=self._facts.num_blocks,
            pages_free=self._facts.num_blocks - used,
            pages_cached=0,
            pages_quarantined=0,
            pages_pinned=0,
            pages_parked=parked,
            slots=self._facts.max_rows,
            slots_used=min(rows.num_rows, self._facts.max_rows),
            draining=not standing.takes_work,
            role=standing.role,
            steps=self._books.num_steps,
            cost=self._books.costs.report(),
            itl_s=self._books.costs.itl_s,
            failed_writes=by_reason(self._failures()),
            stuck=self.is_stuck,
            batch_tokens=queue.batch_tokens,
        )

    def snapshot(self) -> NodeSnapshot:
        standing = self._parts.links.standing
        return NodeSnapshot(
            load=self.load(),
            stood_s=self._clock() - self._heard_at,
            is_draining=standing.is_draining,
            is_cordoned=standing.is_cordoned,
            num_preemptions=self._books.num_preemptions,
            prompt_tokens=self._books.prompt_tokens,
            cached_tokens=self._books.cached_tokens,
            paths=(),
            num_cache_gaps=self.cache.num_gaps,
        )

    def _failures(self) -> dict[str, int]:
        found = {"read": self._books.num_failed_reads, "lease": self._books.num_expired}
        return {reason: count for reason, count in found.items() if count}
