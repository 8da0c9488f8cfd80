"""One simulated node: a queue of prompts computed in chunks, a batch of rows, one KV pool. Pure.

It schedules as `pdcluster.scheduler` does: prompts first come first served, rows in every step, a prompt's next chunk
beside them. A prompt starts when its KV fits. `outcomes` tells the simulation what happened. It leaves out preemption
(answers reserve their whole length), several prompts in one step, and speculation.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import Literal

from pdcluster.core.messages import CostReport, Load, Role
from pdcluster.cost.cost import NodeCost, lately, num_pairs
from pdcluster_router.replay.cache import Hold, PrefixCache
from pdcluster_router.replay.trace import Blocks, TraceRequest

# How long steps take while nothing joins or leaves: closed forms, so that simulated time jumps from change to change.
#
# A step carries all decode rows and at most one chunk of a prompt. It takes
#
# max(fixed cost of decoding, fixed cost of prefill + token_s × chunk) + pair_s × pairs of the chunk + row_s × rows +
# context_s × context
#
# because weights are read once for both, while attention adds up. From step to step the context grows by the number of
# rows, and the chunk's pairs by chunk². So the times of n steps sum to a polynomial of second degree.


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` steps. The first takes first_s, and each later one growth_s more than the one before."""

    start_s: float
    first_s: float
    growth_s: float
    count: int

    def after(self, steps: int) -> float:
        """When `steps` steps are done."""
        return self.start_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    @property
    def end_s(self) -> float:
        return self.after(self.count)

    def steps_until(self, moment: float) -> int:
        """Least number of whole steps that end at `moment` or later, at most `count`."""
        elapsed = moment - self.start_s
        if elapsed <= 0:
            return 0
        half = self.growth_s / 2
        linear = self.first_s - half
        if half * self.count < 1e-9 * linear:
            estimate = elapsed / self.first_s
        else:
            estimate = (sqrt(linear * linear + 4 * half * elapsed) - linear) / (2 * half)
        steps = min(max(ceil(estimate - 1e-9), 1), self.count)
        while steps > 1 and self.after(steps - 1) >= moment:
            steps -= 1
        while steps < self.count and self.after(steps) < moment:
            steps += 1
        return steps


def segment(
    cost: NodeCost, start_s: float, count: int, rows: int, context: int, chunk: int = 0, done: int = 0
) -> Segment:
    """A segment of `rows` rows with `context` tokens. Each step computes `chunk` more tokens of a prompt, of which
    `done` are there.
    """
    decode, prefill = cost.decode, cost.prefill
    first_s = decode.fixed_s if rows else 0.0
    growth_s = 0.0
    if chunk:
        first_s = max(first_s, prefill.fixed_s + prefill.token_s * chunk) + prefill.pair_s * num_pairs(chunk, done)
        growth_s = prefill.pair_s * chunk * chunk
    if rows:
        first_s += decode.row_s * rows + decode.context_s * context
        growth_s += decode.context_s * rows
    return Segment(start_s, first_s, growth_s, count)


# Tokens of a prompt beside any number of rows, so that no prompt starves.
LEAST_CHUNK = 16

What = Literal["started", "prefilled", "reserved", "finished"]


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node.

    chunk_tokens: most tokens of one step, rows included.
    slots: rows that may run.
    """

    cost: NodeCost
    cache_tokens: int
    block_tokens: int
    chunk_tokens: int = 512
    slots: int = 256
    kv_bytes_per_token: int = 0


@dataclass(slots=True, eq=False)
class Task:
    """One request.

    decodes_here: the computing node goes on (mode local).
    ready_s: when copied blocks arrive.
    pulled: blocks that are cached then.
    """

    number: int
    request: TraceRequest
    decodes_here: bool = True
    cached_tokens: int = 0
    decode_cached_tokens: int = 0
    ready_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    prompt_hold: Hold | None = None
    row_hold: Hold | None = None
    to_compute: int = 0
    pulled: int = 0


@dataclass(slots=True)
class _Job:
    """The prompt being computed.

    left: tokens behind `done`.
    """

    task: Task
    done: int
    left: int


@dataclass(slots=True)
class SimNode:
    name: str
    role: Role
    spec: NodeSpec
    # What its steps take; None: what it reports.
    real_cost: NodeCost | None = None
    cache: PrefixCache = field(init=False)
    cost: NodeCost = field(init=False)
    outcomes: list[tuple[float, What, Task]] = field(default_factory=list)
    busy_s: float = 0.0
    _report: CostReport = field(init=False)
    _queue: deque[Task] = field(default_factory=deque)
    _line: deque[Task] = field(default_factory=deque)
    _job: _Job | None = None
    _rows: list[tuple[int, int, Task]] = field(default_factory=list)
    _joining: list[Task] = field(default_factory=list)
    _num_reserved: int = 0
    _reserved_context: int = 0
    _parked_blocks: int = 0
    _context: int = 0
    _step: int = 0
    _free_s: float = 0.0
    _itl_s: float = 0.0
    _chunk: int = 0
    _segment: Segment | None = None
    _promised: dict[bytes, int] = field(default_factory=dict)
    _queued_tokens: int = 0
    _queued_pairs: float = 0.0
    # The last report, while nothing happened since and no step runs.
    _still: Load | None = None

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.spec.cache_tokens // self.spec.block_tokens)
        prefill = replace(self.spec.cost.prefill, chunk_tokens=self.spec.chunk_tokens)
        self.cost = replace(self.spec.cost, prefill=prefill)
        self._report = self.cost.report()

    # ------------------------------------------------------------ what the simulation asks

    @property
    def wake_s(self) -> float | None:
        """When something happens by itself; None: never."""
        return self._segment.end_s if self._segment is not None else None

    @property
    def is_idle(self) -> bool:
        return not (
            self._queue
            or self._line
            or self._job
            or self._rows
            or self._joining
            or self._num_reserved
            or self.cache.num_busy
        )

    @property
    def num_open(self) -> int:
        """Requests that wait or run here."""
        return len(self._queue) + len(self._line) + len(self._rows) + len(self._joining) + self._num_reserved

    @property
    def num_unreserved(self) -> int:
        """Requests that wait for a slot or for pages."""
        return len(self._line)

    def enqueue(self, task: Task, now: float) -> None:
        """Compute the prompt, not before the task's ready_s."""
        self._still = None
        request = task.request
        cached = max(self._cached(task), self._known(max(task.pulled, self._promised_depth(request.blocks)), request))
        for block in request.blocks:
            self._promised[block] = self._promised.get(block, 0) + 1
        task.to_compute, task.cached_tokens = request.num_tokens - cached, cached
        self._queued_tokens += task.to_compute
        self._queued_pairs += num_pairs(task.to_compute, cached)
        self._queue.append(task)
        if self._job is None:
            self._change(now)

    def reserve(self, task: Task, now: float) -> None:
        """Reserve a slot for a prompt of another node. "reserved" follows at once, or when there is room."""
        self._still = None
        self._line.append(task)
        self._serve_line(now)

    def join(self, task: Task, now: float) -> None:
        """The KV of a reserved request is here."""
        self._still = None
        hold = task.row_hold
        assert hold is not None
        self.cache.publish(hold, task.request.blocks)
        self._unreserve(task)
        self._joining.append(task)
        self._change(now)

    def cancel(self, task: Task, now: float) -> None:
        """A reserved or waiting request needs nothing: its first token was its last."""
        self._still = None
        if task.row_hold is None:
            self._line.remove(task)
            return
        self.cache.close(task.row_hold)
        task.row_hold = None
        self._unreserve(task)
        self._serve_line(now)

    def release(self, task: Task, now: float) -> None:
        """The KV of a prompt computed here has left."""
        self._still = None
        assert task.prompt_hold is not None
        self._parked_blocks -= task.prompt_hold.num_shared + task.prompt_hold.num_private
        self.cache.close(task.prompt_hold)
        task.prompt_hold = None
        self._serve_line(now)
        if self._job is None and self._queue:
            self._change(now)

    def advance(self, now: float) -> None:
        """The time `wake_s` has come."""
        self._still = None
        assert self._segment is not None
        self._commit(self._segment.count)
        self._segment = None
        self._settle()
        self._plan()

    def wake(self, now: float) -> None:
        """A prompt that was not ready may be ready now."""
        self._still = None
        if self._job is None and self._queue:
            self._change(now)

    def load(self, now: float) -> Load:
        """What the node would report now, with progress inside a prompt."""
        if self._still is not None:
            return self._still
        spec, cache, job = self.spec, self.cache, self._job
        tokens, pairs = self._queued_tokens, self._queued_pairs
        num_rows = len(self._rows) + len(self._joining)
        context = self._context
        if self._segment is not None:
            # Steps done by now. Reading changes nothing.
            steps = max(self._segment.steps_until(now) - 1, 0)
            context += steps * len(self._rows)
            if job is not None:
                computed = min(steps * self._chunk, job.left)
                tokens += job.left - computed
                pairs += num_pairs(job.left - computed, job.done + computed)
        elif job is not None:
            tokens += job.left
            pairs += num_pairs(job.left, job.done)
        found = Load(
            waiting=len(self._queue),
            running=num_rows + (job is not None),
            waiting_tokens=tokens,
            context_tokens=context + sum(t.request.num_tokens for t in self._joining) + self._reserved_context,
            pages_total=cache.capacity,
            pages_free=cache.capacity - cache.num_busy - (cache.num_kept - cache.num_pinned),
            pages_cached=cache.num_kept - cache.num_pinned,
            pages_quarantined=0,
            pages_pinned=0,
            slots=spec.slots,
            slots_used=num_rows + self._num_reserved,
            pages_parked=self._parked_blocks,
            waiting_pairs=round(pairs),
            rows=num_rows + self._num_reserved,
            cost=self._report,
            itl_s=self._itl_s,
        )
        if self._segment is None:
            self._still = found
        return found

    # ------------------------------------------------------------ time

    def _change(self, now: float) -> None:
        """Something was added: finish the running step, then plan again."""
        current = self._segment
        if current is not None:
            steps = current.steps_until(now)
            if steps == current.count:
                return
            self._commit(steps)
        else:
            self._free_s = max(self._free_s, now)
        self._segment = None
        self._plan()

    def _commit(self, steps: int) -> None:
        current = self._segment
        assert current is not None
        end_s = current.after(steps)
        self.busy_s += end_s - current.start_s
        if steps and self._rows:
            self._itl_s = lately(self._itl_s, (end_s - current.start_s) / steps, steps)
        self._free_s = end_s
        self._step += steps
        self._context += steps * len(self._rows)
        if self._job is not None:
            computed = min(steps * self._chunk, self._job.left)
            self._job.done += computed
            self._job.left -= computed

    def _settle(self) -> None:
        """End the rows, and perhaps the prompt, of the last step."""
        now, freed = self._free_s, False
        while self._rows and self._rows[0][0] <= self._step:
            task = heapq.heappop(self._rows)[2]
            self._context -= task.request.num_tokens + task.request.num_output
            self._finish(task, now)
            freed = True
        job = self._job
        if job is not None and not job.left:
            self._job = None
            self._complete(job.task, now)
        if freed:
            self._serve_line(now)

    def _promised_depth(self, blocks: Blocks) -> int:
        promised, depth = self._promised, 0
        for block in blocks:
            if block not in promised:
                break
            depth += 1
        return depth

    def _complete(self, task: Task, now: float) -> None:
        for block in task.request.blocks:
            left = self._promised[block] = self._promised[block] - 1
            if not left:
                del self._promised[block]
        hold = task.prompt_hold
        assert hold is not None
        self.cache.publish(hold, task.request.blocks)
        task.first_token_s = now
        self.outcomes.append((now, "prefilled", task))
        if task.decodes_here:
            task.row_hold, task.prompt_hold = hold, None
            self._unreserve(task)
            if task.request.num_output > 1:
                self._joining.append(task)
            else:
                self._finish(task, now)
        else:
            self._parked_blocks += hold.num_shared + hold.num_private

    def _finish(self, task: Task, now: float) -> None:
        hold = task.row_hold
        assert hold is not None
        self.cache.publish(hold, task.request.grown)
        self.cache.close(hold)
        task.row_hold = None
        task.finished_s = now
        self.outcomes.append((now, "finished", task))

    def _plan(self) -> None:
        for task in self._joining:
            heapq.heappush(self._rows, (self._step + task.request.num_output - 1, task.number, task))
            self._context += task.request.num_tokens + 1
        self._joining.clear()
        if self._job is None and self._queue:
            self._start_next()
        rows, job = self._rows, self._job
        if not rows and job is None:
            return
        count = rows[0][0] - self._step if rows else 1 << 30
        self._chunk = 0
        done = 0
        if job is not None:
            most = max(self.spec.chunk_tokens - len(rows), LEAST_CHUNK)
            self._chunk = min(most, job.left)
            count, done = min(count, job.left // self._chunk), job.done
        self._segment = segment(
            self.real_cost or self.spec.cost, self._free_s, count, len(rows), self._context, self._chunk, done
        )

    def _start_next(self) -> None:
        now = self._free_s
        task = next((task for task in self._queue if task.ready_s <= now), None)
        if task is None:
            return
        request = task.request
        if task.decodes_here and len(self._rows) + self._num_reserved >= self.spec.slots:
            return
        length = request.num_tokens + (request.num_output if task.decodes_here else 0)
        hold = self.cache.open(request.blocks, self._blocks(length))
        if hold is None:
            return
        self._queue.remove(task)
        self._queued_tokens -= task.to_compute
        self._queued_pairs -= num_pairs(task.to_compute, task.cached_tokens)
        cached = self._known(max(hold.num_shared, task.pulled), request)
        task.prompt_hold, task.cached_tokens, task.to_compute = hold, cached, request.num_tokens - cached
        task.started_s = now
        if task.decodes_here:
            self._reserve(task)
        self._job = _Job(task, cached, task.to_compute)
        self.outcomes.append((now, "started", task))

    def _serve_line(self, now: float) -> None:
        """First come, first served: smaller requests do not pass."""
        while self._line and len(self._rows) + len(self._joining) + self._num_reserved < self.spec.slots:
            task = self._line[0]
            request = task.request
            hold = self.cache.open(request.blocks, self._blocks(request.num_tokens + request.num_output))
            if hold is None:
                return
            self._line.popleft()
            task.row_hold = hold
            task.decode_cached_tokens = min(hold.num_shared * self.spec.block_tokens, request.num_tokens)
            self._reserve(task)
            self.outcomes.append((now, "reserved", task))

    def _reserve(self, task: Task) -> None:
        self._num_reserved += 1
        self._reserved_context += task.request.num_tokens

    def _unreserve(self, task: Task) -> None:
        self._num_reserved -= 1
        self._reserved_context -= task.request.num_tokens

    def _cached(self, task: Task) -> int:
        return self._known(self.cache.depth(task.request.blocks), task.request)

    def _known(self, num_blocks: int, request: TraceRequest) -> int:
        """Cached tokens. The last one is always computed, for the logits of the first output token."""
        return min(num_blocks * self.spec.block_tokens, request.num_tokens - 1)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_tokens)
