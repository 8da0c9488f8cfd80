"""A client of the request fuzz: asks for one choice, checks every token as it comes, and perhaps leaves."""

from __future__ import annotations

from typing import Protocol

from fuzz_plan import VOCAB, Ask, Plan
from fuzz_tokens import EOS, prompt_of, said

from pdcluster.core.errors import PdclusterError
from pdcluster.core.messages import Sampling
from pdcluster_router.core.generation import (
    Dispatcher,
    Done,
    Generation,
    ModelInfo,
    Running,
    TakeTokens,
    TenantPriority,
    TokenChunk,
)

MODEL = "m"


class Watcher(Protocol):
    """Who looks after clients."""

    plan: Plan

    @property
    def now(self) -> float: ...

    def note(self, text: str) -> None: ...

    def problem(self, kind: str, text: str) -> None: ...

    @property
    def token_keys(self) -> list[str]:
        """What an answer may be made with, the newest last."""
        ...

    def is_limit(self, client: Client, num_tokens: int) -> bool:
        """Whether an answer may end because prompt and output have so many tokens."""
        ...

    def on_error(self, client: Client, error: PdclusterError) -> None:
        """Judge an error that a client got."""
        ...


class Client:
    """Implements generation.Sink. arrived: None before it asked."""

    def __init__(self, watcher: Watcher, ask: Ask) -> None:
        self.ask = ask
        self.prompt = prompt_of(watcher.plan.seed, ask)
        self.arrived: float | None = None
        self.tokens: list[int] = []
        self.done: Done | None = None
        self.error: Exception | None = None
        self.has_left = self.has_stopped = False
        self.served: ModelInfo | None = None
        self.running: Running | None = None
        # When the last token came.
        self.heard_at = 0.0
        self._watcher = watcher
        self._packed = self.prompt.tobytes()
        self._weights: str | None = None

    @property
    def is_over(self) -> bool:
        return self.done is not None or self.error is not None or self.has_left

    @property
    def num_tokens(self) -> int:
        """That a node must take to serve it to its end, or, where it named no end, to go on."""
        left = 1 if self.ask.is_open_ended else self.ask.max_tokens - len(self.tokens)
        return len(self.prompt) + len(self.tokens) + max(left, 1)

    @property
    def is_open(self) -> bool:
        return self.arrived is not None and not self.is_over

    def start(self, dispatcher: Dispatcher) -> None:
        ask, self.arrived = self.ask, self._watcher.now
        self.served = served = dispatcher.choose_version(MODEL, ask.parent or ask.name, ask.mode)
        sampling = Sampling(
            ask.max_tokens,
            ask.seed,
            ignore_eos=ask.ignores_eos,
            prompt_logprobs=0 if ask.wants_prompt_logprobs else None,
        )
        standing = TenantPriority(ask.tenant, ask.weight, ask.priority)
        generation = Generation(
            ask.name, MODEL, self.prompt, sampling, ask.deadline_s, ask.tenant.encode(), standing, ask.mode,
            ask.session, leads=ask.leads, parent=ask.parent, served=served, is_open_ended=ask.is_open_ended,
            weights_change="replay" if ask.replays else None,
        )  # fmt: skip
        self._watcher.note(f"{ask.name} asks: {ask.num_prompt} + {ask.max_tokens} tokens, mode {ask.mode}")
        running = dispatcher.start(generation, self)
        if not self.is_over:
            self.running = running
            self._leave_if_enough()

    def leave(self, why: str) -> None:
        """Of its own accord."""
        if self.is_open:
            self.has_left = True
            self._watcher.note(f"{self.ask.name} leaves: {why}")
            running, self.running = self.running, None
            if running is not None:
                running.cancel(why)

    # ------------------------------------------------------------ the sink

    def on_chunk(self, chunk: TokenChunk) -> None:
        if not self._may_hear("a chunk") or self.has_stopped:
            return
        lacks_logprobs = not self.tokens and self.ask.wants_prompt_logprobs and not chunk.prompt_logprobs
        if lacks_logprobs and len(self.prompt) > 1:
            self._problem("wrong answer", "its first chunk lacks the prompt's logprobs")
        self._read(chunk.position, chunk.token_ids)

    def fast_token_path(self) -> TakeTokens | None:
        """As the real ones: none where the text decides whether it goes on."""
        ask = self.ask
        is_plain = ask.stop_at is None and ask.leave_at is None and not ask.wants_prompt_logprobs
        return self._take if ask.takes_rows and is_plain else None

    def _take(self, position: int, token_ids: tuple[int, ...]) -> bool:
        """Like the real ones: only single tokens, and none while the client must read first."""
        if len(token_ids) != 1 or position % 7 == 6:
            return False
        if self._may_hear("a row"):
            self._read(position, token_ids)
        return True

    def on_done(self, done: Done) -> None:
        if not self._may_hear("its end"):
            return
        self.done, self.running = done, None
        num, last = len(self.tokens), self.tokens[-1] if self.tokens else None
        self._watcher.note(f"{self.ask.name} is done: {done.reason} after {num} tokens, {done.attempts} attempts")
        if self.has_stopped:
            is_right = done.reason == "stop"
        elif done.reason == "eos":
            is_right = last == EOS and not self.ask.ignores_eos
        else:
            is_right = num == self.ask.max_tokens or self._watcher.is_limit(self, len(self.prompt) + num)
            is_right = is_right and done.reason == "length"
        self._check_weights(done)
        if not is_right:
            self._problem("wrong answer", f"it ends with {done.reason} after {num} of {self.ask.max_tokens} tokens")

    def on_error(self, error: Exception) -> None:
        if not self._may_hear(f"{type(error).__name__}: {error}"):
            return
        if self.has_stopped:
            self._problem("wrong answer", f"a stop string ended it, and then it fails: {error}")
        self.error, self.running = error, None
        self._watcher.note(f"{self.ask.name} fails: {type(error).__name__}: {error}")
        if not isinstance(error, PdclusterError):
            self._problem("internal error", repr(error))
        else:
            self._watcher.on_error(self, error)

    # ------------------------------------------------------------ checks

    def _read(self, position: int, token_ids: tuple[int, ...]) -> None:
        ask = self.ask
        if position != len(self.tokens) or not token_ids:
            self._problem("wrong answer", f"{len(token_ids)} tokens at {position} come after {len(self.tokens)}")
        for token in token_ids:
            if self.tokens and self.tokens[-1] == EOS and not ask.ignores_eos:
                self._problem("wrong answer", "it goes on behind its end token")
            self._check(token)
            self.tokens.append(token)
        self.heard_at = self._watcher.now
        if len(self.tokens) > ask.max_tokens:
            self._problem("wrong answer", f"{len(self.tokens)} tokens, asked for {ask.max_tokens}")
        self._leave_if_enough()

    def _check(self, token: int) -> None:
        """The first token tells whose answer it is. All others must be of the same, unless it may be replayed."""
        ask, position, keys = self.ask, len(self.tokens), self._watcher.token_keys
        if self._weights is None or (ask.replays and said(self._packed, ask.seed, 0, position, self._weights) != token):
            alike = [key for key in keys if said(self._packed, ask.seed, 0, position, key) == token]
            self._weights = (alike or keys)[-1]
        expected = said(self._packed, ask.seed, 0, position, self._weights)
        if token != expected or not 0 <= token < VOCAB:
            self._problem("wrong answer", f"token {token} instead of {expected} at {position}")

    def _check_weights(self, done: Done) -> None:
        """The weights that the answer names made its tokens, each token once."""
        made = [each.digest for each in done.weights for _ in range(each.first, each.to)]
        expected = [said(self._packed, self.ask.seed, 0, position, key) for position, key in enumerate(made)]
        starts = [each.first for each in done.weights]
        follows = starts == [0, *(each.to for each in done.weights[:-1])][: len(starts)]
        if expected[: len(self.tokens)] != self.tokens or not follows or (len(starts) > 1 and not self.ask.replays):
            self._problem("wrong answer", f"its tokens are not of the weights {done.weights}")

    def _leave_if_enough(self) -> None:
        """A stop string matched, or the client hung up in the middle of a chunk."""
        ask, running = self.ask, self.running
        if running is None or not self.is_open:
            return
        if ask.stop_at is not None and len(self.tokens) >= ask.stop_at:
            if not self.has_stopped:
                self.has_stopped = True
                self._watcher.note(f"{ask.name} has a stop string")
                running.finish(len(self.tokens))
        elif ask.leave_at is not None and len(self.tokens) >= ask.leave_at:
            self.leave("client left")

    def _may_hear(self, what: str) -> bool:
        if self.is_over:
            self._problem("two answers", f"hears {what} after its end")
        return not self.is_over

    def _problem(self, kind: str, text: str) -> None:
        self._watcher.problem(kind, f"{self.ask.name}: {text}")
