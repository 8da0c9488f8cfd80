"""An engine without a model, whose tokens depend on every byte of KV it is given: a page oracle.

The KV of position i is a hash of the KV of position i-1 and the token; the next token is a hash of the KV of the whole
context, read from the pages. So one wrong, stale or misplaced byte anywhere changes all tokens after it. `reference`
computes the same without pages.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from collections import deque

from pdcluster.core.step import Row, RowError, RowResult, StepPlan, StepResult
from pdcluster.transfer.backends.base import Region

TOKEN_BYTES = 16
NUM_LAYERS = 4
LAYER_BYTES = TOKEN_BYTES // NUM_LAYERS
VOCAB = 5000


def kv_of(previous: bytes, token: int, width: int = 1) -> bytes:
    """Each layer's part is repeated `width` times, for media whose faults want larger pages."""
    kv = hashlib.blake2b(previous + token.to_bytes(4, "little"), digest_size=TOKEN_BYTES).digest()
    return b"".join(kv[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES] * width for layer in range(NUM_LAYERS))


def draw(context: bytes, choice: int = 0) -> int:
    salt = choice.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(context, digest_size=4, salt=salt).digest(), "little") % VOCAB


def reference(prompt: list[int], num_tokens: int, width: int = 1, choice: int = 0) -> list[int]:
    kv = [b""]
    output: list[int] = []
    for token in prompt:
        kv.append(kv_of(kv[-1], token, width))
    for _ in range(num_tokens):
        output.append(draw(b"".join(kv), choice))
        kv.append(kv_of(kv[-1], output[-1], width))
    return output


class OracleEngine:
    """Implements components.StepEngine. A page is [layer][token][width × LAYER_BYTES]; a step's layers are written one milestone
    at a time, at `tick`.

    A step without milestones is done when it is launched, unless `hold` is set; then when `finish` is called. One launched
    behind another starts when that is done."""

    def __init__(self, num_pages: int, page_tokens: int, width: int = 1) -> None:
        self.page_tokens = page_tokens
        self.width = width
        self.layer_bytes = LAYER_BYTES * width
        self.page_bytes = page_tokens * TOKEN_BYTES * width
        self._fd = os.memfd_create("oracle-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_pages * self.page_bytes)
        self.memory = mmap.mmap(self._fd, num_pages * self.page_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.region = Region(0, address, num_pages * self.page_bytes, self._fd)
        self.done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self.layer_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.layers_done = 0
        self.is_compiling = False
        self.hold = False
        self.num_bells = 0
        # That many of the next steps raise instead of computing.
        self.fail_steps = 0
        # By request: from which output token on its row gets none, and why.
        self.row_errors: dict[str, tuple[int, RowError]] = {}
        # Steps that were launched behind another.
        self.num_ahead = 0
        # The step that is computed.
        self._plan: StepPlan | None = None
        self._next: StepPlan | None = None
        self._outcomes: deque[StepResult | RuntimeError] = deque()
        self._drawn: dict[str, int | None] | None = None
        self._fresh: list[tuple[Row, list[bytes]]] = []

    @property
    def progress(self) -> int:
        return self.layers_done

    def launch(self, plan: StepPlan) -> None:
        in_flight = len(self._outcomes) + (self._plan is not None) + (self._next is not None)
        assert in_flight < 2, "a step was launched while two are in flight"
        assert not (in_flight and plan.milestones), "a step with milestones was launched behind another"
        self.num_ahead += in_flight
        if self._plan is not None:
            self._next = plan
        else:
            self._start(plan)

    def _start(self, plan: StepPlan) -> None:
        self._plan = plan
        self.layers_done = 0
        self._is_failing = self.fail_steps > 0 or (self._drawn is None and any(row.follows for row in plan.rows))
        self.fail_steps -= self.fail_steps > 0
        for source, target in plan.copies:
            begin = source * self.page_bytes
            self.memory[target * self.page_bytes : (target + 1) * self.page_bytes] = self.memory[
                begin : begin + self.page_bytes
            ]
        self._fresh = [] if self._is_failing else [(row, self._kv_of_row(row)) for row in plan.rows]
        if not self.hold:
            self.finish()

    def finish(self) -> None:
        if self._plan is not None and not self._plan.milestones:
            self._write(NUM_LAYERS)
            self._end()

    def tick(self) -> None:
        """A step with milestones gets on: to its next one, or to its end."""
        if self._plan is None or not self._plan.milestones or self.hold:
            return
        self._write(
            next((milestone for milestone in self._plan.milestones if milestone > self.layers_done), NUM_LAYERS)
        )
        if self.layers_done == NUM_LAYERS:
            self._end()
        else:
            self.num_bells += 1
            os.eventfd_write(self.layer_fd, 1)

    def _end(self) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None
        if self._is_failing:
            self._drawn = None
            self._outcomes.append(RuntimeError("the oracle has no answer"))
        else:
            rows = tuple(self._answer(row) for row in plan.rows)
            self._drawn = {row.request: 0 if row.error is not None else row.token for row in rows}
            self._outcomes.append(StepResult(rows, 0.0))
        os.eventfd_write(self.done_fd, 1)
        after, self._next = self._next, None
        if after is not None:
            self._start(after)

    def collect(self, timeout: float | None = None) -> StepResult:
        os.eventfd_read(self.done_fd)
        outcome = self._outcomes.popleft()
        if isinstance(outcome, RuntimeError):
            raise outcome
        return outcome

    def _kv_of_row(self, row: Row) -> list[bytes]:
        fresh = [self._read(row.pages, row.start - 1) if row.start else b""]
        for token in [self._drawn[row.request]] if row.follows else row.tokens.tolist():
            fresh.append(kv_of(fresh[-1], token, self.width))
        return fresh[1:]

    def _write(self, end_layer: int) -> None:
        nbytes = self.layer_bytes
        for row, fresh in self._fresh:
            for index, kv in enumerate(fresh):
                for layer in range(self.layers_done, end_layer):
                    offset = self._offset(row.pages, row.start + index, layer)
                    self.memory[offset : offset + nbytes] = kv[layer * nbytes : (layer + 1) * nbytes]
        self.layers_done = end_layer

    def _answer(self, row: Row) -> RowResult:
        end = row.start + len(row.tokens)
        if row.sampling is None:
            return RowResult(row.request, None)
        first, error = self.row_errors.get(row.request.partition("#")[0], (0, None))
        if error is not None and row.output_index >= first:
            return RowResult(row.request, None, error=error)
        return RowResult(
            row.request, draw(b"".join(self._read(row.pages, position) for position in range(end)), row.sampling.choice)
        )

    def _read(self, pages, position: int) -> bytes:
        offsets = (self._offset(pages, position, layer) for layer in range(NUM_LAYERS))
        return b"".join(self.memory[offset : offset + self.layer_bytes] for offset in offsets)

    def _offset(self, pages, position: int, layer: int) -> int:
        page, token = int(pages[position // self.page_tokens]), position % self.page_tokens
        return page * self.page_bytes + (layer * self.page_tokens + token) * self.layer_bytes

    def close(self) -> None:
        os.close(self.done_fd)
        os.close(self.layer_fd)
        os.close(self._fd)
