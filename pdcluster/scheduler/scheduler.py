"""Who computes which tokens in the next step. Pure: no torch, no I/O, no threads, no messages.

There is no prefill phase and no decode phase: a sequence has tokens, some of them have KV, and each step computes some
of the rest. Decode rows come first, one token each, so that the gap between tokens stays bounded; what is left of the
token budget goes to prompts, in order of arrival.

Rules that the code cites:
 1. A sequence gets the pages of all tokens it has when it is admitted, and one more whenever it outgrows them.
    Admission also keeps pages available for the growth of every row (its *credit*), except when there is no other row:
    alone, a sequence may take what there is.
 2. A decode row that finds no page preempts the newest row; that one gives its pages back, waits in front of the queue
    and computes its tokens again. A remote prefill is never preempted: it holds every page it will ever need, and a
    transfer may be reading them. Nor are slots and parked ones.
 3. A step in flight writes to the pages of its rows. A sequence that ends meanwhile keeps its pages until the last such
    step is over (`flight`).
 4. A page enters the prefix cache after the step that filled it, or after its commit was verified; never before.
 5. At least one token of a prompt is computed here even if all of them are cached, because the first output token is
    drawn from its logits. A slot needs no logits: its first token comes with the commit.
 6. Batch sequences give way. Other decodes, chunks and admissions come first. In a step with a chunk of another prompt
    no batch prompt is computed, and none is admitted while another sequence waits. Batch rows are the first to be
    preempted, newest first: for pages of rows, for admissions, and before the next step for slots that were refused.
    A preempted one waits in front of batch sequences only. Beside other decodes, at most `most_batch_rows` of them
    decode, the oldest; the others keep their pages and wait.
 7. Looking ahead takes nothing from anybody: where a row finds no page, a request could be admitted or a prompt's chunk
    is due, the next step waits for the results of the one in flight. What is known ahead is heeded (a row's longest
    length), what is not (a stop) costs one row for one step.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import chain, islice

from pdcluster.core.errors import IntegrityError, Overloaded, ProtocolError
from pdcluster.core.lifecycle import Residence
from pdcluster.core.messages import TokenLogprobs
from pdcluster.core.step import Row, RowResult, StepPlan, StepResult
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.backlog import backlog, blocks_by_then, decoding
from pdcluster.scheduler.credit import Credit
from pdcluster.scheduler.flight import StepsInFlight
from pdcluster.scheduler.forecast import Forecast
from pdcluster.scheduler.limits import SchedulerLimits, longest
from pdcluster.scheduler.rows import Draft, Occupancy, Update, can_be_followed, finish
from pdcluster.scheduler.sequence import Sequence
from pdcluster.scheduler.sharing import Forks, can_fork, publish

__all__ = ["Occupancy", "Scheduler", "SchedulerLimits", "Update"]

# Requests tried in one step beyond those with rows.
_LOOKAHEAD = 8
# After a slot was refused, batch sequences get no pages for so long: the slot's request comes again.
_YIELD_S = 1.0
# Refused slots for which batch rows give way at a time.
_MOST_REFUSED = 64


class Scheduler:
    """Owns the state of every sequence on the node; the pool is shared with the transfer's bookkeeping. Driven by one
    thread:

    schedule → (the engine runs the plan; any other method may be called, look_ahead for the plan of the step behind it)
    → update.
    """

    def __init__(self, pages: PagePool, limits: SchedulerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pages
        self._limits = limits
        self._clock = clock
        self._live: dict[str, Sequence] = {}
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        # Oldest first; so the newest row is the last one.
        self._running: list[Sequence] = []
        self._num_reserved = 0
        self._num_parked = 0
        self._credit = Credit(pages, limits.reserve_tokens)
        self._forks = Forks(pages)
        self._num_arrived = 0
        # Pages of slots that were refused since the last step while batch rows ran; and until when those yield.
        self._refused: list[int] = []
        self._yield_until = -math.inf
        # The most batch rows beside so many others, which attend to so many tokens; None: no bound.
        self.most_batch_rows: Callable[[int, int], int] | None = None
        self._flights = StepsInFlight(pages)
        self._forecast = Forecast(limits.token_budget, limits.retry_after_s)
        # False: remote prefills stay in the queue, because too much finished KV is parked. Others pass them.
        self.admit_remote = True
        self.num_preemptions = 0
        # Of sequences that began here, and what of it was cached.
        self.num_prompt_tokens = self.num_cached_tokens = 0

    # ------------------------------------------------------------ sequences come and go

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, local or remote prefill. Raises BadRequest when it can never run here, Overloaded when the
        queue is full.
        """
        self._accept(sequence)
        most = self._limits.max_waiting
        most = max(most // 2, 1) if sequence.is_batch else most
        if len(self._waiting) >= most:
            reason = f"{len(self._waiting)} requests are waiting, the queue takes {most}; retry later"
            raise Overloaded(reason, self._queue_moves_s())
        self._enter(sequence)
        cached = self._pool.match_length(sequence.hashes) * self._pool.page_tokens
        soon = blocks_by_then(sequence, chain(self._running, self._waiting.values())) * sequence.block_tokens
        sequence.num_cached = (
            sequence.num_tokens - 1 if sequence.parent is not None else max(cached, min(soon, sequence.num_tokens - 1))
        )
        self._waiting[sequence.key] = sequence

    def reserve(self, sequence: Sequence) -> list[int]:
        """Reserve a slot for KV that another node writes: a row, the longest cached prefix (sequence.num_cached tokens)
        and pages for the rest.

        Returns the pages of all tokens, in order. Raises BadRequest when it can never fit, Overloaded without room.
        """
        self._accept(sequence)
        if sequence.is_batch and not self._admits_batch():
            raise Overloaded("requests that are not batch wait for room; retry later", self._forecast.step_s())
        try:
            return self._reserve(sequence)
        except Overloaded as error:
            if sequence.is_batch or self._batch_row() is None:
                raise
            self._refused = [*self._refused, self._pool.pages_for(sequence.num_tokens)][-_MOST_REFUSED:]
            self._yield_until = self._clock() + _YIELD_S
            raise Overloaded(f"{error}; batch rows give way", self._forecast.step_s()) from error

    def _reserve(self, sequence: Sequence) -> list[int]:
        running, forecast = self._running, self._forecast
        if self._num_free_rows == 0:
            raise Overloaded(f"all {self._limits.max_rows} rows are taken; retry later", forecast.row_free_s(running))
        if (preempted := self._preempted) is not None:
            missing = (
                self._pool.pages_for(preempted.num_tokens)
                + self._pool.pages_for(sequence.num_tokens)
                - self.num_spare_pages
            )
            raise Overloaded(
                "a preempted request waits for KV pages; retry later", forecast.pages_free_s(running, missing)
            )
        if not self._take_pages(sequence, sequence.num_tokens // self._pool.page_tokens):
            spare = self.num_spare_pages
            num_pages = self._pool.pages_for(sequence.num_tokens)
            missing = num_pages + self._credit.growth(sequence, num_pages) - spare
            raise Overloaded(
                f"no room for {sequence.num_tokens} tokens: {spare} KV pages are spare; retry later",
                forecast.pages_free_s(running, missing),
            )
        self._enter(sequence)
        sequence.advance("reserve")
        self._num_reserved += 1
        self._stamp_start(sequence)
        pages: list[int] = sequence.pages.tolist()
        return pages

    def commit(self, key: str, first_token: int, logprobs: TokenLogprobs | None = None) -> Update:
        """The slot's KV was verified and its writer detached. The row joins the batch with its first token, or ends
        with it.
        """
        sequence = self._live.get(key)
        if sequence is None or sequence.state is not Residence.RESERVED:
            raise ProtocolError(
                f"commit for {key}, which is {'unknown' if sequence is None else sequence.state.name}, not a "
                "reserved slot"
            )
        sequence.num_computed = sequence.num_tokens
        publish(self._pool, sequence)
        if sequence.history is not None:
            sequence.history.add(first_token)
        sequence.advance("commit")
        self._num_reserved -= 1
        insort(self._running, sequence, key=_order)
        return self._append(sequence, first_token, logprobs)

    def cancel(self, key: str) -> Sequence | None:
        """End a sequence in any state (rule 3); None when it is not here. Its pages with a writer become
        quarantined.
        """
        sequence = self._live.get(key)
        if sequence is not None:
            self._end(sequence)
        return sequence

    def release(self, key: str) -> Sequence | None:
        """End a parked sequence: its KV was taken, or nobody wants it. None, without changes, when it is not parked
        here.
        """
        sequence = self._live.get(key)
        if sequence is None or sequence.state is not Residence.PARKED:
            return None
        self._end(sequence)
        return sequence

    def hold(self, sequence: Sequence) -> None:
        """Keep a waiting sequence in its position, but do not admit it before `resume`: KV of its prompt is on its
        way.
        """
        sequence.advance("hold")

    def resume(self, sequence: Sequence) -> None:
        sequence.advance("resume")

    def find(self, key: str) -> Sequence | None:
        return self._live.get(key)

    # ------------------------------------------------------------ steps

    def schedule(self, token_budget: int | None = None) -> StepPlan | None:
        """The next step; None when there is nothing to compute.

        token_budget: a smaller one for this step. Decode rows always run.
        """
        if self._flights:
            raise IntegrityError("schedule was called while a step is in flight; call update or drop_step first")
        most = self._limits.token_budget
        step = Draft(most if token_budget is None else min(token_budget, most), self._limits.logprob_tokens)
        self._give_way()
        num_before = self.num_preemptions
        self._take_decodes(step, is_batch=False)
        # Left free of chunks for the batch rows that may decode.
        num_batch = sum(row.is_batch and row.num_pending == 1 for row in self._running)
        most_rows = self._most_batch_decodes()
        num_batch = num_batch if most_rows is None else min(num_batch, most_rows)
        step.left = max(step.left - num_batch, 1)
        self._take_chunks(step, is_batch=False)
        if self.num_preemptions == num_before:
            self._admit(step, is_batch=False)
        step.left += num_batch
        has_prompt = step.has_chunk
        self._take_decodes(step, is_batch=True, most=self._most_batch_decodes())
        if not has_prompt:
            step.left = max(step.left, 1)
            self._take_chunks(step, is_batch=True)
            if self.num_preemptions == num_before and self._admits_batch():
                self._admit(step, is_batch=True)
        return self._launch(step)

    def _give_way(self) -> None:
        """Preempt batch rows for the slots that were refused since the last step (rule 6)."""
        num_rows, num_pages = len(self._refused), sum(self._refused)
        self._refused = []
        while num_rows > self._num_free_rows or num_pages > self.num_spare_pages:
            row = self._batch_row()
            if row is None:
                return
            self._preempt(row)

    def _batch_row(self) -> Sequence | None:
        """The batch row that gives way first."""
        return next((row for row in reversed(self._running) if row.is_batch and not row.remote), None)

    def _admits_batch(self) -> bool:
        """Whether no other sequence waits for room."""
        return self._clock() >= self._yield_until and not any(
            not each.is_batch and self._may_admit(each) for each in self._waiting.values()
        )

    def look_ahead(self) -> StepPlan | None:
        """The step behind the one in flight, before its tokens are known; None when it must wait for them (rule 7)."""
        flight = self._flights.followable
        if flight is None or not can_be_followed(flight.plan, flight.sequences):
            return None
        if self._refused or self._could_admit():
            return None
        step = Draft(self._limits.token_budget)
        most, num_batch = self._most_batch_decodes(), 0
        for sequence in sorted(self._running, key=_is_batch):
            if sequence.remote or sequence.num_pending > 1:
                return None
            num_batch += sequence.is_batch
            if most is not None and num_batch > most:
                break
            if sequence.num_in_flight and sequence.num_tokens + 1 >= sequence.max_total:
                continue  # it ends with the token that is on its way
            if not self._credit.grow(sequence, sequence.num_tokens + sequence.num_in_flight):
                return None
            step.take(sequence, 1)
        return self._launch(step)

    def update(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Take in the results of the oldest step in flight: one Update per row whose sequence still lives, in the
        plan's order.
        """
        self._flights.check(plan, result)
        in_flight, step_s = self._land()
        self._forecast.observe(step_s)
        return [
            self._apply(sequence, row, answer)
            for sequence, row, answer in zip(in_flight, plan.rows, result.rows, strict=True)
            if sequence.state is Residence.RUNNING
        ]

    def drop_step(self) -> None:
        """The oldest step in flight failed. Its rows stay as they were, but for forks, whose pages were not copied. The
        caller cancels rows that must not be retried, and drops a step behind it that takes its tokens.
        """
        forked = self._forks.sequences
        self._land()
        self._flights.void()
        for sequence in forked:
            if sequence.state is Residence.RUNNING:
                self._preempt(sequence)

    def _take_decodes(self, step: Draft, *, is_batch: bool, most: int | None = None) -> None:
        rows = [row for row in self._running if row.is_batch is is_batch and row.num_pending == 1]
        for sequence in rows[:most]:
            if sequence.state is Residence.RUNNING and self._has_room(sequence):
                step.take(sequence, 1)

    def _most_batch_decodes(self) -> int | None:
        """None: as many as there are."""
        others = [row for row in self._running if not row.is_batch and not row.remote and row.num_pending == 1]
        if self.most_batch_rows is None or not others or self._batch_row() is None:
            return None
        return self.most_batch_rows(len(others), sum(row.num_tokens for row in others))

    def _take_chunks(self, step: Draft, *, is_batch: bool) -> None:
        for sequence in self._running:
            if step.left == 0:
                return
            if sequence.is_batch is is_batch and sequence.num_pending > 1 and (room := step.room(sequence)):
                step.take(sequence, room)

    def _admit(self, step: Draft, *, is_batch: bool) -> None:
        """Admit waiting sequences of one class in order.

        When one finds no pages, smaller ones may pass it, at most max_overtakes times. A preempted one, whose client
        has seen tokens, is never passed. Sequences without room in this step do not count.
        """
        if step.left == 0 or not self._has_row(is_batch=is_batch):
            return
        blocked: Sequence | None = None
        waiting = (each for each in list(self._waiting.values()) if each.is_batch is is_batch and self._may_admit(each))
        for sequence in islice(filter(step.room, waiting), self._num_free_rows + _LOOKAHEAD):
            if blocked is not None and (blocked.num_preempted or blocked.num_overtaken >= self._limits.max_overtakes):
                return
            if self._try_admit(sequence) or (blocked is None and self._admit_by_preempting(sequence)):
                step.take(sequence, step.room(sequence))
                if blocked is not None:
                    blocked.num_overtaken += 1
                if step.left == 0 or not self._has_row(is_batch=is_batch):
                    return
            elif blocked is None:
                blocked = sequence

    def _has_row(self, *, is_batch: bool) -> bool:
        """Whether a sequence may have a row, perhaps that of a batch sequence."""
        return self._num_free_rows > 0 or (not is_batch and self._batch_row() is not None)

    def _may_admit(self, sequence: Sequence) -> bool:
        return sequence.state is Residence.WAITING and (self.admit_remote or not sequence.remote)

    def _admit_by_preempting(self, sequence: Sequence) -> bool:
        """Admit a sequence in the place of batch rows, where those have enough (rule 6)."""
        if sequence.is_batch:
            return False
        pages = sum(row.num_pages + row.credit for row in self._running if row.is_batch and not row.remote)
        if self._pool.pages_for(sequence.num_tokens) > self.num_spare_pages + pages:
            return False
        while (row := self._batch_row()) is not None:
            self._preempt(row)
            if self._try_admit(sequence):
                return True
        return False

    def _try_admit(self, sequence: Sequence) -> bool:
        if self._num_free_rows == 0:
            return False
        # Rule 5. Prompt logprobs need the logits of every prompt position.
        usable_tokens = 0 if sequence.wants_prompt_logprobs else sequence.num_tokens - 1
        is_fork = can_fork(sequence)
        if not (
            self._credit.take_fork(sequence, self._forks)
            if is_fork
            else self._take_pages(sequence, usable_tokens // self._pool.page_tokens)
        ):
            return False
        del self._waiting[sequence.key]
        sequence.advance("admit")
        insort(self._running, sequence, key=_order)
        if sequence.first_scheduled is None:
            self._stamp_start(sequence)
        return True

    def _could_admit(self) -> bool:
        """Whether a waiting request might be admitted to the next step."""
        return any(self._may_admit(each) and self._has_row(is_batch=each.is_batch) for each in self._waiting.values())

    def _launch(self, step: Draft) -> StepPlan | None:
        if not step.sequences:
            return None
        step.copies = tuple(self._forks.copies)
        plan = step.plan
        self._flights.launch(plan, step.sequences, self._clock())
        return plan

    def _land(self) -> tuple[list[Sequence], float]:
        flight, step_s = self._flights.land(self._clock())
        self._forks.land()
        return flight.sequences, step_s

    def _apply(self, sequence: Sequence, row: Row, answer: RowResult) -> Update:
        sequence.num_computed += len(row.tokens)
        if answer.error is None:
            self._flights.keep(publish(self._pool, sequence))
        elif answer.error.spoils_kv:  # whoever computed it: a sequence cancelled in between told nobody
            self._pool.forget(sequence.pages.tolist())
        if row.prompt_logprobs is not None:
            sequence.prompt_logprobs.extend(answer.prompt_logprobs)
        if answer.token is None:
            return Update(
                sequence.key, sequence.request, sequence.attempt, sequence.num_output, sequence, error=answer.error
            )
        return self._append(sequence, answer.token, answer.logprobs)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> Update:
        """Append the next output token, and see what becomes of the sequence."""
        position = sequence.num_output
        sequence.append(token)
        sequence.last_token_at = self._clock()
        if sequence.first_token_at is None:
            sequence.first_token_at = sequence.last_token_at
        prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
        sequence.wants_prompt_logprobs = False
        reason, stop_token = finish(sequence, token, self._limits.eos_token_ids)
        parked = reason is None and sequence.remote
        if reason is not None:
            self._end(sequence)
        elif parked:
            self._park(sequence)
        return Update(
            sequence.key, sequence.request, sequence.attempt, position, sequence, token, logprobs, prompt_logprobs,
            reason, stop_token, parked
        )  # fmt: skip

    # ------------------------------------------------------------ pages

    def _take_pages(self, sequence: Sequence, max_cached: int) -> bool:
        return self._credit.take(sequence, max_cached, is_alone=not self._running and not self._num_reserved)

    def _has_room(self, sequence: Sequence) -> bool:
        """A page for the next token of a decode row, at the cost of newer and of batch rows if need be. False when the
        row itself had to give way (rules 2 and 6).
        """
        while not self._credit.grow(sequence, sequence.num_tokens):
            newest = self._batch_row() or next(row for row in reversed(self._running) if not row.remote)
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._pool.release(sequence.take_pages())
        sequence.advance("preempt")
        sequence.num_preempted += 1
        sequence.prompt_logprobs.clear()
        self.num_preemptions += 1
        self._waiting[sequence.key] = sequence
        self._waiting.move_to_end(sequence.key, last=False)

    # ------------------------------------------------------------ inside

    @property
    def _num_free_rows(self) -> int:
        return self._limits.max_rows - len(self._running) - self._num_reserved

    def _accept(self, sequence: Sequence) -> None:
        """Refuse what can never run on this node."""
        if sequence.key in self._live:
            raise ProtocolError(f"{sequence.key} is here already; a new attempt needs a key of its own")
        sequence.max_total = longest(sequence, self._limits, self._pool)

    def _enter(self, sequence: Sequence) -> None:
        sequence.order = self._num_arrived
        self._num_arrived += 1
        self._live[sequence.key] = sequence

    def _stamp_start(self, sequence: Sequence) -> None:
        sequence.num_cached = sequence.num_computed
        self.num_prompt_tokens += sequence.num_tokens
        self.num_cached_tokens += sequence.num_computed
        sequence.first_scheduled = self._clock()

    def _park(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.advance("park")
        self._num_parked += 1

    def _end(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.advance("end")
        del self._live[sequence.key]
        if not sequence.num_in_flight:
            self._pool.release(sequence.take_pages())

    def _leave(self, sequence: Sequence) -> None:
        """Take the sequence off the list of its state."""
        match sequence.state:
            case Residence.WAITING | Residence.HELD:
                del self._waiting[sequence.key]
            case Residence.RUNNING:
                self._running.remove(sequence)
            case Residence.RESERVED:
                self._num_reserved -= 1
            case Residence.PARKED:
                self._num_parked -= 1
            case Residence.FINISHED:
                raise IntegrityError(f"{sequence!r} ended twice")
        self._credit.forgo_growth(sequence)

    def _queue_moves_s(self) -> float:
        """Seconds until some request leaves the full queue."""
        if self._num_free_rows == 0:
            return self._forecast.row_free_s(self._running)
        return self._forecast.prompts_done_s(sum(sequence.num_pending for sequence in self._running) + 1)

    # ------------------------------------------------------------ questions

    @property
    def num_spare_pages(self) -> int:
        """Pages that are not kept for the growth of rows."""
        return self._credit.num_spare

    @property
    def has_waiting_preempted(self) -> bool:
        """A preempted sequence waits, whose client has seen tokens. No other may take pages meanwhile."""
        return self._preempted is not None

    @property
    def _preempted(self) -> Sequence | None:
        """The preempted sequence whose turn it is; they stand in front of all others but batch sequences."""
        first = next((each for each in self._waiting.values() if not each.is_batch), None)
        return first if first is not None and first.num_preempted else None

    def is_idle(self) -> bool:
        """No sequence is here and no step in flight."""
        return not self._live and not self._flights

    def load(self) -> Occupancy:
        here = [*self._running, *self._waiting.values()]
        return Occupancy(
            len(self._waiting),
            len(self._running),
            *backlog([each for each in here if not each.is_batch]),
            *decoding(self._running, self._num_reserved),
            slots_used=len(self._running) + self._num_reserved,
            reserved=self._num_reserved,
            parked=self._num_parked,
            batch_tokens=backlog([each for each in here if each.is_batch])[0],
            batch_rows=sum(
                each.is_batch and not each.remote and each.state in (Residence.RUNNING, Residence.RESERVED)
                for each in self._live.values()
            ),
        )

    def check_integrity(self) -> None:
        """Recount everything, the pool's books too. Raises IntegrityError that names what does not add up."""
        self._pool.check_integrity()
        states = Counter(sequence.state for sequence in self._live.values())
        counted = {
            Residence.WAITING: len(self._waiting) - states[Residence.HELD],
            Residence.HELD: sum(sequence.state is Residence.HELD for sequence in self._waiting.values()),
            Residence.RUNNING: len(self._running),
            Residence.RESERVED: self._num_reserved,
            Residence.PARKED: self._num_parked,
            Residence.FINISHED: 0,
        }
        for state, count in counted.items():
            _require(states[state] == count, f"{states[state]} sequences are {state.name}, {count} are counted")
        self._credit.check_integrity(self._live.values())
        _require(self._running == sorted(self._running, key=_order), "the running batch is out of order")
        self._check_pages()

    def _check_pages(self) -> None:
        held: Counter[int] = Counter()
        for sequence in [*self._live.values(), *self._flights.ending()]:
            held.update(sequence.pages.tolist())
            is_queued = sequence.state in (Residence.WAITING, Residence.HELD)
            _require(bool(sequence.num_pages) != is_queued, f"{sequence!r} holds {sequence.num_pages} pages")
        for page, count in held.items():
            owners = self._pool.num_owners(page)
            _require(owners >= count, f"page {page} is held by {count} sequences, but has {owners} owners")


def _order(sequence: Sequence) -> int:
    return sequence.order


def _is_batch(sequence: Sequence) -> bool:
    return sequence.is_batch


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise IntegrityError(f"scheduler: {complaint}")
