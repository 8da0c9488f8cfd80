"""Explains decisions: candidates, expected costs, the choice, and what became of it. It makes no decision.

For every decision it keeps the candidates with the policy's terms, the rule that rejected each other node, and one
estimate in seconds for all of them (wait on the node plus own prompt). So policies without a model in seconds can be
judged, too. With the first token come:

- error: actual minus predicted time to first token, from the decision on. Time in the hold queue is known, not
  predicted.
- regret: actual minus the least estimate of any other candidate, never below 0.
- hit: prompt tokens found in the cache, beside what the best candidate held (reachable) and what an ideal cache would
  have held (`prefix_index.ideal_cache`).

Memory is bounded by count and bytes; the oldest go first. Few decisions are read, so they are kept as bare numbers and
become records when someone asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import msgspec

from pdcluster.telemetry.metrics import ExplainMetrics
from pdcluster_router.core.generation import Done, TenantPriority
from pdcluster_router.explain.packed import unpack
from pdcluster_router.explain.records import (
    NO_HIT,
    Decided,
    Explanation,
    Hit,
    Judged,
    Noted,
    ShadowRecord,
    Weighed,
    outcome_of,
    worth_keeping,
)
from pdcluster_router.policy.base import RoutingDecision
from pdcluster_router.policy.decisions import Decision, PackedComparison, PackedDecision
from pdcluster_router.prefix_index.ideal_cache import IdealCache
from pdcluster_router.queueing.headroom import Headroom

# Which records keep a view of the cluster, and how many nodes those views may have. Explanations of waiting requests
# need one each, and a view has some 400 bytes per node.

# Nodes of all kept views together: 13 MiB.
MOST_ROWS = 1 << 15


class Keeper(Protocol):
    def let_go(self) -> None:
        """Keep the facts taken from the view, and drop the view."""
        ...


class KeptViews:
    """Views kept by records. The records scored last keep theirs: they are likely to be scored again soon."""

    def __init__(self) -> None:
        self._sizes: dict[Keeper, int] = {}
        self._num_rows = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def keep(self, keeper: Keeper, size: int) -> None:
        """The keeper keeps another view, of so many nodes."""
        self.drop(keeper)
        self._sizes[keeper] = size
        self._num_rows += size
        while self._num_rows > MOST_ROWS and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self.drop(oldest)
            oldest.let_go()

    def drop(self, keeper: Keeper) -> None:
        """The keeper keeps no view. Idempotent."""
        self._num_rows -= self._sizes.pop(keeper, 0)


# Bytes of a request kept as it is, beside its strings and numbers.
PACKED_BYTES = 1200

DONE_BYTES = 700

# Decisions kept of one request: the first ones and the last. A request that is refused for a minute has a thousand.
MAX_DECISIONS = 16

# Characters of an error's message.
MAX_WHY = 500

# Requests explained of those that clients named alike.
MAX_ALIKE = 100


@dataclass(frozen=True, slots=True)
class Kept:
    """Bounds on what is kept of ended requests."""

    requests: int = 10_000
    size_bytes: int = 64 * 2**20


class Record:
    """One request that runs, or ended with a single decision.

    The dispatcher sets `attempts` and `cached_tokens` (of the prompt; None: unknown).
    """

    # Set as the request goes on. Class defaults cost nothing until then.
    attempts = 0
    cached_tokens: int | None = None
    # How it ended well, after so many tokens.
    done: Done | None = None
    num_output = 0
    # Its only decision so far, with the seconds of its record.
    packed: PackedComparison | None = None
    _at_s = _held_s = 0.0
    # Id of its trace; "" for none.
    trace = ""
    _error: str | None = None
    _why = ""
    _decisions: tuple[Decided, ...] = ()
    _considered: Decision | Decided | None = None
    _considered_at = 0.0
    _first_at: float | None = None
    _last: Decided | None = None
    _last_at = 0.0
    _reachable = 0
    _ideal: int | None = None

    def __init__(
        self,
        explainer: Explainer,
        request: str,
        standing: TenantPriority,
        arrived: float,
        started: float,
        client_id: str,
    ) -> None:
        """arrived: Unix seconds."""
        self._explainer = explainer
        self.request, self._standing, self.client_id = request, standing, client_id
        self._arrived, self._started = arrived, started

    @property
    def size_bytes(self) -> int:
        """Bytes of a record whose decision is `packed`."""
        num_told = 0 if self.packed is None else len(self.packed.told)
        num_done = 0 if self.done is None else DONE_BYTES
        return PACKED_BYTES + num_done + num_told + len(self.client_id) + len(self._why)

    @property
    def tenant(self) -> str:
        return self._standing.tenant

    @property
    def prefix(self) -> tuple[int, int]:
        """Leading tokens of its prompt that an earlier prompt had, and that some node held or was about to hold, when
        it went.
        """
        return self._ideal or 0, self._reachable

    def consider(self, decision: Decision, now: float) -> None:
        """It was scored. Others say whether it may go."""
        self._write_out()
        self._considered, self._considered_at = decision, now
        self._explainer.keeps_view(self, decision.view.size)

    def let_go(self) -> None:
        """Implements Keeper."""
        self._considered = self._told_considered()

    def _told_considered(self) -> Decided | None:
        considered, at_s = self._considered, self._considered_at - self._started
        return self._explainer.record(considered, at_s, at_s) if isinstance(considered, Decision) else considered

    def failed(self, why: str) -> None:
        """The attempt of the last decision failed."""
        self._write_out()
        if self._decisions:
            *others, last = self._decisions
            self._decisions = *others, msgspec.structs.replace(last, failed=why[:MAX_WHY])

    def _unpack(self) -> Decided:
        assert self.packed is not None
        return unpack(self.packed, self._at_s, self._held_s)

    def _write_out(self) -> None:
        """Turn the packed decision into records, for what happens to few requests."""
        if self.packed is not None:
            self._last = self._unpack()
            self._decisions = *self._decisions, self._last
            self.packed = None

    def decided(self, decision: Decision | PackedDecision, asked: float, now: float) -> None:
        """Note a decision. A packed one is the first.

        asked: when the attempt began to look for nodes.
        """
        explainer = self._explainer
        if isinstance(decision, PackedDecision):
            self.packed, self._at_s, self._held_s = decision.packed, now - self._started, now - asked
            self._ideal = explainer.seen(decision.hashes, decision.choice.decode.block_tokens)
            self._reachable, self._last_at = decision.most_cached, now
            return
        self._write_out()
        decisions = self._decisions
        if self._considered is not None:
            self._considered = None
            explainer.keeps_no_view(self)
        decided = explainer.record(decision, now - self._started, now - asked)
        if decided.shadow is not None:
            explainer.count(decided.shadow)
        if len(decisions) >= MAX_DECISIONS:
            decisions = decisions[: MAX_DECISIONS // 2] + decisions[MAX_DECISIONS // 2 + 1 :]
        self._decisions = *decisions, decided
        if self._first_at is not None:
            return  # hindsight is about the decision that brought the first token
        query = decision.query
        if self._ideal is None:
            self._ideal = explainer.seen(query.hashes, decision.choice.decode.block_tokens)
        self._last, self._last_at = decided, now
        cached = query.cached
        if cached:
            there = decision.view.roster.row_of
            most = max([tokens for incarnation, tokens in cached.items() if incarnation in there], default=0)
            self._reachable = most if most < query.num_tokens else query.num_tokens
        else:
            self._reachable = 0

    def first_token(self, moment: float) -> None:
        if self._first_at is None:
            self._first_at = moment

    def so_far(self) -> Noted:
        """The explanation so far, with what a waiting request waits for."""
        self._write_out()
        return self._noted(0, None)

    def end(self, error: str | None, why: str) -> Judged | None:
        """End the record and return its hindsight. See Explainer.close."""
        if error is not None:
            self._error, self._why = error, why[:MAX_WHY]
        return self._hindsight()

    def noted(self) -> Noted:
        """The record of an ended request, as numbers."""
        noted = self._noted(self.attempts, self._hindsight())
        return noted if self.packed is None else msgspec.structs.replace(noted, decisions=(self._unpack(),))

    def _noted(self, attempts: int, judged: Judged | None) -> Noted:
        first_at, standing = self._first_at, self._standing
        return Noted(
            self.request,
            self._arrived,
            standing.tenant,
            standing.priority,
            self._decisions,
            None if first_at is None else first_at - self._started,
            attempts,
            self._error,
            judged,
            self.client_id,
            None if self._considered is None else self._told_considered(),
            self._why,
            None if self.done is None else outcome_of(self.done, self.num_output),
            self.trace,
        )

    def _hindsight(self) -> Judged | None:
        first_at, achieved, packed, last, hit = self._first_at, self.cached_tokens, self.packed, self._last, None
        if first_at is None or (packed is None and last is None):
            return None
        if achieved is not None:
            reachable, ideal = self._reachable, self._ideal or 0
            hit = achieved, reachable if reachable > achieved else achieved, ideal if ideal > achieved else achieved
        if packed is not None:
            expected_s, best, best_s = packed.ttft_s, packed.best, packed.best_s
            other = (best_s, packed.names[best]) if best >= 0 else None
        else:
            assert last is not None
            expected_s, other = expected_and_best_other(last)
        return hindsight(first_at - self._last_at, expected_s, other, hit)


class Explainer:
    """Records of open and ended requests. Owned by the router's event loop.

    wall: Unix seconds, for people.
    """

    def __init__(
        self, headroom: Headroom, metrics: ExplainMetrics, wall: Callable[[], float], kept: Kept | None = None
    ) -> None:
        self._headroom = headroom
        self._metrics = metrics
        self._wall = wall
        self._kept = kept or Kept()
        self._seen = IdealCache()
        self._open: dict[str, Record] = {}
        self._kept_views = KeptViews()
        self.keeps_view, self.keeps_no_view = self._kept_views.keep, self._kept_views.drop
        # Encoded records, or the record itself where its decision is packed.
        self._ended: OrderedDict[str, bytes | Record] = OrderedDict()
        # Requests, open or kept, by their clients' names; the oldest first.
        self._by_client: dict[str, dict[str, None]] = {}
        self._client_of: dict[str, str] = {}
        self._num_bytes = 0
        self._watched_by, self._num_agreed, self._num_watched = "", 0, 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Noted)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def open(self, request: str, standing: TenantPriority, now: float, client_id: str = "") -> Record:
        """Open a record.

        client_id: what its client calls it, "" for nothing.
        """
        record = self._open[request] = Record(self, request, standing, self._wall(), now, client_id)
        if client_id:
            self._by_client.setdefault(client_id, {})[request] = None
            self._client_of[request] = client_id
        return record

    def close(self, record: Record, error: str | None, why: str = "") -> None:
        """Close a record.

        error: code of the error that it ended with, None for a good end.
        why: its message.
        """
        del self._open[record.request]
        judged = record.end(error, why)
        if judged is not None:
            _, error_s, regret_s, _, _, hit = judged
            self._metrics.judged((error_s, regret_s, *(hit or NO_HIT)))
        if record.packed is None:
            self.keeps_no_view(record)
            told = self._encoder.encode(record.noted())
            self._keep(record.request, told, len(told))
        else:
            self._keep(record.request, record, record.size_bytes)

    # ------------------------------------------------------------ what operators ask

    def explain(self, request: str) -> Explanation | None:
        """The explanation of one choice of a request, by its id; None when unknown."""
        running = self._open.get(request)
        if running is not None:
            return running.so_far().told()
        ended = self._ended.get(request)
        return None if ended is None else self._told(ended)

    def explain_all(self, request: str, own_id: str = "") -> list[Explanation]:
        """Explanations of all known choices of a request.

        request: its id, with or without the number of a choice, or the client's name for it. Of requests with one
        client name, the last MAX_ALIKE, the latest first.
        own_id: the id, when `request` is another name that we gave it.
        """
        alike = islice(self.called(request), MAX_ALIKE)
        return (
            self._choices(request)
            or self._choices(own_id)
            or [told for name in alike if (told := self.explain(name)) is not None]
        )

    def _choices(self, request: str) -> list[Explanation]:
        exact = self.explain(request)
        if exact is not None:
            return [exact]
        found: list[Explanation] = []
        while (choice := self.explain(f"{request}-{len(found)}")) is not None:
            found.append(choice)
        return found

    def called(self, client_id: str) -> Iterator[str]:
        """Requests with this client name, the latest first. None may open or end meanwhile."""
        return reversed(self._by_client.get(client_id, {}))

    def recent(self, limit: int) -> Iterator[Explanation]:
        """Requests that ended last, the latest first."""
        for _, request in zip(range(limit), reversed(self._ended), strict=False):
            yield self._told(self._ended[request])

    def _told(self, ended: bytes | Record) -> Explanation:
        return (self._decoder.decode(ended) if isinstance(ended, bytes) else ended.noted()).told()

    # ------------------------------------------------------------ what a record needs

    def seen(self, hashes: bytes, block_tokens: int) -> int:
        """Leading tokens of a prompt that some earlier prompt had."""
        return self._seen.note(hashes) * block_tokens

    def record(self, decision: Decision, at_s: float, held_s: float) -> Decided:
        choice, query = decision.choice, decision.query
        prefill, decode, pull, predicted, candidates = (
            choice.prefill,
            choice.decode,
            choice.pull,
            choice.predicted,
            choice.record(),
        )
        first, ttft_s_of = decode if prefill is None else prefill, self._headroom.ttft_s
        estimate_s = ttft_s_of(first, query)
        found: list[Weighed] = []
        names: dict[str, tuple[str, ...]] = {}
        for each in worth_keeping(candidates, decision.view.size):
            node, leg, rejected_by, ttft_s, spread, doubt = each.node, each.leg, each.rejected_by, None, None, 0.0
            if each.names:
                names[leg] = each.names
            if leg != "decode" and not rejected_by:  # a node has one estimate for any leg, and none for decoding alone
                ttft_s, cost = estimate_s if node is first else ttft_s_of(node, query), node.cost
                if cost is not None:
                    error = cost.prefill.error
                    spread, doubt = error.spread or None, error.doubt
            found.append(
                Weighed(
                    node.endpoint.node,
                    leg,
                    each.cached_tokens,
                    each.cost,
                    each.values,
                    ttft_s,
                    rejected_by,
                    spread,
                    doubt,
                )
            )
        return Decided(
            at_s,
            held_s,
            choice.policy,
            choice.mode,
            None if prefill is None else prefill.endpoint.node,
            decode.endpoint.node,
            query.num_tokens,
            predicted.ttft_s,
            predicted.tpot_s,
            estimate_s,
            len(candidates),
            tuple(found),
            None if decision.shadow is None else _shadow(choice, decision.shadow),
            None if pull is None else pull.endpoint.node,
            choice.pull_tokens,
            names,
        )

    def agreement(self, shadow: str) -> tuple[int, int]:
        """Decisions on which the shadow of that name agreed since it watches, and all that it watched."""
        return (self._num_agreed, self._num_watched) if shadow == self._watched_by else (0, 0)

    def count(self, shadow: ShadowRecord) -> None:
        if shadow.policy != self._watched_by:
            self._watched_by, self._num_agreed, self._num_watched = shadow.policy, 0, 0
        self._num_agreed += shadow.agrees
        self._num_watched += 1
        self._metrics.shadow_decisions.labels(shadow.policy, "same" if shadow.agrees else "other").inc()

    def _keep(self, request: str, told: bytes | Record, num_bytes: int) -> None:
        ended, kept = self._ended, self._kept
        if request in ended:
            self._num_bytes -= _size_of(ended.pop(request))
        ended[request] = told
        self._num_bytes += num_bytes
        while len(ended) > kept.requests or self._num_bytes > kept.size_bytes:
            name, oldest = ended.popitem(last=False)
            self._num_bytes -= _size_of(oldest)
            if name in self._client_of:
                self._forget_client(name)

    def _forget_client(self, request: str) -> None:
        client_id = self._client_of.pop(request)
        del self._by_client[client_id][request]
        if not self._by_client[client_id]:
            del self._by_client[client_id]


def _size_of(told: bytes | Record) -> int:
    return len(told) if isinstance(told, bytes) else told.size_bytes


def expected_and_best_other(decided: Decided) -> tuple[float, tuple[float, str] | None]:
    """The expected time to first token, and the least estimate of any other candidate with its name."""
    expected_s = decided.estimated_ttft_s if decided.predicted_ttft_s is None else decided.predicted_ttft_s
    chosen = decided.prefill or decided.decode
    others = [(c.ttft_s, c.node) for c in decided.candidates if c.ttft_s is not None and c.node != chosen]
    return expected_s, min(others, default=None)


def hindsight(ttft_s: float, expected_s: float, other: tuple[float, str] | None, hit: Hit | None) -> Judged:
    """Judge a decision.

    ttft_s: actual, since the decision.
    other: the least estimate of any other candidate, with its name.
    """
    if other is None:
        return ttft_s, ttft_s - expected_s, 0.0, None, None, hit
    best_s, best = other
    regret_s = ttft_s - best_s
    return ttft_s, ttft_s - expected_s, regret_s if regret_s > 0.0 else 0.0, best, best_s, hit


def _shadow(live: RoutingDecision, shadow: RoutingDecision) -> ShadowRecord:
    prefill = shadow.prefill.name if shadow.prefill is not None else None
    same = (shadow.mode, prefill, shadow.decode.name) == (
        live.mode,
        live.prefill.name if live.prefill is not None else None,
        live.decode.name,
    )
    return ShadowRecord(shadow.policy, shadow.mode, prefill, shadow.decode.name, same)
