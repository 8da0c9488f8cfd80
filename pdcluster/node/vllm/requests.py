"""Requests on their way into vLLM: the node's own queue in front of it.

vLLM gets only what runs soon, so that the node knows how long its queue is and can tell when a request leaves it. Owned
by the node loop's thread.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pdcluster.core import errors
from pdcluster.core.messages import Pooling, Work, unpack_tokens
from pdcluster.cost.cost import num_pairs
from pdcluster.node.legs import key_of
from pdcluster.node.vllm.engine.interface import EngineRequest, ServingEngine
from pdcluster.node.vllm.events import salt_of
from pdcluster.node.vllm.step_costs import StepCosts

# Steps' worth of prompts that vLLM has at a time, beyond the one that it computes.
PROMPT_STEPS = 2
RETRY_S = 0.2
# Tokens of an answer that a row is given room for. vLLM preempts rows when answers are longer.
GROWTH_TOKENS = 256


def fence_of(work: Work) -> str:
    """What both ends of a reference know of it: request, model, adapter, and the tokens whose KV it names."""
    named = repr((work.request, work.model, work.adapter)).encode()
    digest = hashlib.blake2b(named, digest_size=16, person=b"pdcluster.fence")
    digest.update(work.token_ids)
    return digest.hexdigest()


@dataclass(slots=True)
class UnstartedRequest:
    request: EngineRequest
    on_added: Callable[[], None]


class EngineQueue:
    """Requests with a prompt to compute wait here, first come, first served, batch requests behind all others. Rows of
    a decode node pass it.

    max_waiting: requests that may wait.
    costs: told of all that vLLM gets.
    adapter_of: number of a work's adapter in the engine.
    """

    def __init__(
        self, engine: ServingEngine, max_waiting: int, clock: Callable[[], float], adapter_of: Callable[[Work], int]
    ) -> None:
        self.engine = engine
        self._adapter_of = adapter_of
        self.costs = StepCosts(engine.facts.max_batched_tokens)
        self._clock = clock
        self._facts = engine.facts
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        self._waiting: OrderedDict[str, UnstartedRequest] = OrderedDict()
        # Prompts that vLLM computes, by their tokens; those of batch requests among them; and rows that run in it.
        self._prompts: dict[str, int] = {}
        self._batch: set[str] = set()
        self._rows: dict[str, int] = {}

    def request_of(
        self, work: Work, *, parks: bool = False, reference: bytes = b"", pooling: Pooling | None = None
    ) -> EngineRequest:
        """A leg's work in the engine's words. Its key is new, since vLLM may still have an earlier one's."""
        tokens = unpack_tokens(work.token_ids)
        return EngineRequest(
            key=f"{key_of(work)}.{next(self._numbers)}",
            token_ids=tokens,
            num_emitted=len(tokens) - work.num_prompt,
            sampling=work.sampling,
            salt=salt_of(work.hash_root) if work.hash_root else "",
            adapter=self._adapter_of(work),
            parks=parks,
            fence=fence_of(work) if parks or reference else "",
            reference=reference,
            pooling=pooling,
            is_batch=work.is_batch,
        )

    def push(self, request: EngineRequest, on_added: Callable[[], None]) -> None:
        """Queue a request. Raises Overloaded and BadRequest.

        on_added: called when it goes to vLLM, perhaps before this returns.
        """
        most = self._facts.max_len - (request.pooling is None)  # one of an answer
        if len(request.token_ids) > most:
            raise errors.BadRequest(
                f"the prompt has {len(request.token_ids)} tokens; these nodes take {most} at most", "prompt"
            )
        most_waiting = max(self._max_waiting // 2, 1) if request.is_batch else self._max_waiting
        if len(self._waiting) >= most_waiting:
            raise errors.Overloaded(f"{len(self._waiting)} requests wait here; retry later", RETRY_S)
        self._waiting[request.key] = UnstartedRequest(request, on_added)

    def pump(self) -> None:
        """Give vLLM what it can compute soon."""
        most = PROMPT_STEPS * self._facts.max_batched_tokens
        while self._waiting and (not self._prompts or sum(self._prompts.values()) < most):
            if len(self._prompts) + len(self._rows) >= self._facts.max_rows:
                return
            key = next((key for key, each in self._waiting.items() if not each.request.is_batch), "")
            if not key and len(self._batch) < len(self._prompts):
                return  # another prompt is computed
            key = key or next(iter(self._waiting))
            queued = self._waiting.pop(key)
            self._prompts[key] = len(queued.request.token_ids)
            if queued.request.is_batch:
                self._batch.add(key)
            self._add(queued.request)
            queued.on_added()

    def add_row(self, request: EngineRequest) -> None:
        """A row whose prompt another node computed."""
        self._rows[request.key] = len(request.token_ids)
        self._add(request)

    def _add(self, request: EngineRequest) -> None:
        self.costs.add(request.key, len(request.token_ids), self._clock(), is_fetched=bool(request.reference))
        self.engine.add(request)

    def is_computed(self, key: str) -> None:
        """The request's first token came: it is a row now."""
        self._batch.discard(key)
        if (num_tokens := self._prompts.pop(key, None)) is not None:
            self._rows[key] = num_tokens

    def ended(self, key: str) -> None:
        """vLLM is done with it."""
        self._batch.discard(key)
        self._prompts.pop(key, None)
        self._rows.pop(key, None)

    def drop(self, key: str, *, is_parked: bool = False) -> None:
        """Nobody wants the request any more. Idempotent.

        is_parked: it ended, and its KV is kept.
        """
        if self._waiting.pop(key, None) is None and (key in self._prompts or key in self._rows):
            self.engine.abort(key)
        if is_parked:
            self.engine.release(key)

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._facts.block_tokens)

    # ------------------------------------------------------------ load

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that vLLM has."""
        return len(self._prompts) + len(self._rows)

    @property
    def waiting_tokens(self) -> int:
        """Of prompts that are not batch."""
        return sum(self._lengths(is_batch=False))

    @property
    def waiting_pairs(self) -> int:
        return int(sum(num_pairs(count, 0) for count in self._lengths(is_batch=False)))

    @property
    def batch_tokens(self) -> int:
        return sum(self._lengths(is_batch=True))

    def _lengths(self, *, is_batch: bool) -> list[int]:
        """Tokens of each prompt to compute."""
        given = [count for key, count in self._prompts.items() if (key in self._batch) is is_batch]
        queued = [each.request for each in self._waiting.values() if each.request.is_batch is is_batch]
        return [*given, *(len(request.token_ids) for request in queued)]
