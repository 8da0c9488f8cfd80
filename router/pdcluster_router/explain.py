"""Why a request went where it went, and whether that was right: the last decisions with their candidates, what each was expected to cost, and what
became of it. Judges decisions, makes none.

For every decision: the candidates with the policy's own terms, the rule that removed each of the others, and for all of them one estimate in seconds
by the nodes' cost models (wait on the node + own prompt), so that policies without a model in seconds can be judged too. With the first token come:
  error      actual minus predicted time to first token, from the decision on (time in the hold queue is known, not predicted);
  regret     actual minus the least that any other candidate was estimated to take, never below 0;
  hit        prompt tokens found in the cache, beside those that the best candidate held (reachable), and those that a cache which never forgets
             would have held (ideal, `seen_blocks`).

Memory is bounded by count and by bytes; the oldest go first. Requests and decisions are noted in bare numbers, since few are ever read: records for
people are made of them for whoever asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from pdcluster.cost import CostError
from pdcluster.messages import HASH_BYTES
from pdcluster.metrics import ExplainMetrics
from pdcluster_router.chooser import Decision
from pdcluster_router.generation import Standing
from pdcluster_router.headroom import Headroom
from pdcluster_router.policy.base import Candidate, Choice, Query
from pdcluster_router.seen_blocks import SeenBlocks

MAX_CANDIDATES = 16
"""Kept per leg, the best first; and so many of the rejected ones. In a cluster of hundreds the others say nothing new."""


MAX_DECISIONS = 16
"""Kept of one request: the first ones and the last. A request that is refused for a minute is decided a thousand times."""

MAX_WHY = 500
"""Characters of an error's message."""

MAX_ALIKE = 100
"""Told of the requests that clients call alike."""


class CandidateRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """terms add up to cost, in the policy's own measure; ttft_s is the estimate in seconds, None for a decode leg. rejected_by: the rule that
    removed it. ttft_error_s: error bar of ttft_s by the node's own model, on usual work (9 of 10 are within); None: not known."""

    node: str
    leg: str
    cached_tokens: int = 0
    cost: float = 0.0
    terms: dict[str, float] = {}
    ttft_s: float | None = None
    rejected_by: str = ""
    ttft_error_s: float | None = None


class ShadowRecord(msgspec.Struct, frozen=True):
    policy: str
    mode: str
    prefill: str | None
    decode: str
    agrees: bool


class DecisionRecord(msgspec.Struct, frozen=True):
    """One attempt's choice. at_s: since the request came; held_s: of these, in the hold queue for this attempt; num_candidates: compared and
    rejected, kept here or not. pull: the node that the prompt's first pull_tokens are fetched from; failed: why another attempt had to follow."""

    at_s: float
    held_s: float
    policy: str
    mode: str
    prefill: str | None
    decode: str
    num_tokens: int
    predicted_ttft_s: float | None
    predicted_tpot_s: float | None
    estimated_ttft_s: float
    num_candidates: int
    candidates: list[CandidateRecord]
    shadow: ShadowRecord | None = None
    pull: str | None = None
    pull_tokens: int = 0
    failed: str = ""


class Weighed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A candidate as it is noted: the fields of its record, its terms without their names."""

    node: str
    leg: str
    cached_tokens: int
    cost: float
    values: tuple[float, ...]
    ttft_s: float | None
    rejected_by: str
    spread: float | None = None
    doubt: float = 0.0

    def told(self, names: tuple[str, ...]) -> CandidateRecord:
        terms = dict(zip(names, self.values, strict=False))  # none of one that was rejected
        error_s = None if self.ttft_s is None or self.spread is None else self.ttft_s * CostError(self.spread, self.doubt).share
        return CandidateRecord(self.node, self.leg, self.cached_tokens, self.cost, terms, self.ttft_s, self.rejected_by, error_s)


class Decided(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A decision as it is noted: the fields of its record, whose candidates are still these. names: of the terms of each leg."""

    at_s: float
    held_s: float
    policy: str
    mode: str
    prefill: str | None
    decode: str
    num_tokens: int
    predicted_ttft_s: float | None
    predicted_tpot_s: float | None
    estimated_ttft_s: float
    num_candidates: int
    candidates: tuple[Weighed, ...]
    shadow: ShadowRecord | None
    pull: str | None
    pull_tokens: int
    names: dict[str, tuple[str, ...]]
    failed: str = ""

    def told(self) -> DecisionRecord:
        fields = {name: getattr(self, name) for name in DecisionRecord.__struct_fields__}
        fields["candidates"] = [each.told(self.names.get(each.leg, ())) for each in self.candidates]
        return DecisionRecord(**fields)


class HitTokens(msgspec.Struct, frozen=True):
    achieved: int
    reachable: int
    ideal: int


Hit = tuple[int, int, int]
"""As HitTokens."""
NO_HIT: Hit = 0, 0, 0


class Hindsight(msgspec.Struct, frozen=True):
    """What is known once the first token came. ttft_s: since the decision; best: the candidate that was estimated to be fastest of all others, None
    when there was none; error_s: ttft_s minus what was predicted."""

    ttft_s: float
    error_s: float
    regret_s: float
    best: str | None
    best_ttft_s: float | None
    hit: HitTokens | None


Judged = tuple[float, float, float, str | None, float | None, Hit | None]
"""As Hindsight."""


class Explanation(msgspec.Struct, omit_defaults=True):
    """One request. client_id: what its client calls it; arrived: Unix seconds; error: code of the error that it ended with, why: its message.
    considered: what would have been done with one that waits for a node or never got one, when it was last scored. hindsight: of the decision that
    brought the first token."""

    request: str
    arrived: float
    tenant: str = ""
    priority: int = 0
    decisions: list[DecisionRecord] = []
    ttft_s: float | None = None
    attempts: int = 0
    error: str | None = None
    hindsight: Hindsight | None = None
    client_id: str = ""
    considered: DecisionRecord | None = None
    why: str = ""


class Noted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request as it is noted: the fields of its explanation, some of which are still these."""

    request: str
    arrived: float
    tenant: str
    priority: int
    decisions: list[Decided]
    ttft_s: float | None
    attempts: int
    error: str | None
    hindsight: Judged | None
    client_id: str
    considered: Decided | None
    why: str

    def told(self) -> Explanation:
        fields = {name: getattr(self, name) for name in Explanation.__struct_fields__}
        fields["decisions"] = [decided.told() for decided in self.decisions]
        fields["considered"] = None if self.considered is None else self.considered.told()
        if self.hindsight is not None:
            ttft_s, error_s, regret_s, best, best_ttft_s, hit = self.hindsight
            fields["hindsight"] = Hindsight(ttft_s, error_s, regret_s, best, best_ttft_s, None if hit is None else HitTokens(*hit))
        return Explanation(**fields)


@dataclass(frozen=True, slots=True)
class Kept:
    """How much is kept of requests that ended."""

    requests: int = 10_000
    size_bytes: int = 64 * 2**20


class Record:
    """One request that runs. attempts and cached_tokens (of the prompt, as the nodes found them; None: not known) are the dispatcher's to set."""

    # What is set as it goes on; until then nothing of it is made.
    attempts = 0
    cached_tokens: int | None = None
    _considered: Decision | None = None
    _considered_at = 0.0
    _first_at: float | None = None
    _last: Decided | None = None
    _last_at = 0.0
    _reachable = 0
    _ideal: int | None = None

    def __init__(self, explainer: Explainer, request: str, standing: Standing, arrived: float, started: float, client_id: str) -> None:
        """arrived: Unix seconds."""
        self._explainer = explainer
        self.request, self._standing, self._client_id = request, standing, client_id
        self._arrived, self._started = arrived, started
        self._decisions: list[Decided] = []

    def consider(self, decision: Decision, now: float) -> None:
        """It was scored; whether it may go is for others to say."""
        self._considered, self._considered_at = decision, now

    def failed(self, why: str) -> None:
        """The attempt of the last decision came to nothing."""
        if self._decisions:
            self._decisions[-1] = msgspec.structs.replace(self._decisions[-1], failed=why[:MAX_WHY])

    def decided(self, decision: Decision, asked: float, now: float) -> None:
        """asked: when the attempt began to look for a place."""
        self._considered = None
        explainer, decisions = self._explainer, self._decisions
        decided = explainer.record(decision, now - self._started, now - asked)
        if decided.shadow is not None:
            explainer.count(decided.shadow)
        if len(decisions) >= MAX_DECISIONS:
            del decisions[MAX_DECISIONS // 2]
        decisions.append(decided)
        if self._first_at is not None:
            return  # hindsight is about the decision that brought the first token
        query = decision.query
        if self._ideal is None:
            self._ideal = explainer.seen(query)
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
        """With what it waits for, if it waits."""
        return self._noted(0, None, "", None)

    def end(self, error: str | None, why: str = "") -> Noted:
        first_at, last = self._first_at, self._last
        judged = None if first_at is None or last is None else hindsight(last, first_at - self._last_at, self._hit())
        return self._noted(self.attempts, error, "" if error is None else why[:MAX_WHY], judged)

    def _noted(self, attempts: int, error: str | None, why: str, judged: Judged | None) -> Noted:
        first_at, standing, considered = self._first_at, self._standing, None
        if self._considered is not None:
            at_s = self._considered_at - self._started
            considered = self._explainer.record(self._considered, at_s, at_s)
        return Noted(
            self.request,
            self._arrived,
            standing.tenant,
            standing.priority,
            self._decisions,
            None if first_at is None else first_at - self._started,
            attempts,
            error,
            judged,
            self._client_id,
            considered,
            why,
        )

    def _hit(self) -> Hit | None:
        achieved, reachable, ideal = self.cached_tokens, self._reachable, self._ideal or 0
        if achieved is None:
            return None
        return achieved, reachable if reachable > achieved else achieved, ideal if ideal > achieved else achieved


class Explainer:
    """Owned by the router's event loop. wall: Unix seconds, for people."""

    def __init__(self, headroom: Headroom, metrics: ExplainMetrics, wall: Callable[[], float], kept: Kept | None = None) -> None:
        self._headroom = headroom
        self._metrics = metrics
        self._wall = wall
        self._kept = kept or Kept()
        self._seen = SeenBlocks()
        self._open: dict[str, Record] = {}
        self._ended: OrderedDict[str, bytes] = OrderedDict()
        self._by_client: dict[str, dict[str, None]] = {}
        """Requests that are open or kept, by what their clients call them; the oldest first."""
        self._client_of: dict[str, str] = {}
        self._num_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Noted)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def open(self, request: str, standing: Standing, now: float, client_id: str = "") -> Record:
        """A record, until `close`. client_id: what its client calls it, "" for nothing."""
        record = self._open[request] = Record(self, request, standing, self._wall(), now, client_id)
        if client_id:
            self._by_client.setdefault(client_id, {})[request] = None
            self._client_of[request] = client_id
        return record

    def close(self, record: Record, error: str | None, why: str = "") -> None:
        """error: the code of the error that it ended with, None for a good end; why: its message."""
        request, noted = record.request, record.end(error, why)
        del self._open[request]
        judged = noted.hindsight
        if judged is not None:
            _, error_s, regret_s, _, _, hit = judged
            self._metrics.judged((error_s, regret_s, *(hit or NO_HIT)))
        self._keep(request, self._encoder.encode(noted))

    # ------------------------------------------------------------ what operators ask

    def explain(self, request: str) -> Explanation | None:
        """By the id of one choice of a request; None when it is not (any longer) known."""
        running = self._open.get(request)
        if running is not None:
            return running.so_far().told()
        ended = self._ended.get(request)
        return None if ended is None else self._decoder.decode(ended).told()

    def explain_all(self, request: str) -> list[Explanation]:
        """By a request's id with or without the number of a choice: all of its choices that are known. Or by what its client calls it: clients may
        call several requests alike, and of these the last MAX_ALIKE are told, the latest first."""
        exact = self.explain(request)
        if exact is not None:
            return [exact]
        found: list[Explanation] = []
        while (choice := self.explain(f"{request}-{len(found)}")) is not None:
            found.append(choice)
        alike = islice(reversed(self._by_client.get(request, {})), MAX_ALIKE)
        return found or [told for name in alike if (told := self.explain(name)) is not None]

    def recent(self, limit: int) -> Iterator[Explanation]:
        """Those that ended last, the latest first."""
        for _, request in zip(range(limit), reversed(self._ended), strict=False):
            yield self._decoder.decode(self._ended[request]).told()

    # ------------------------------------------------------------ what a record needs

    def seen(self, query: Query) -> int:
        blocks = len(query.hashes) // HASH_BYTES
        return self._seen.note(query.hashes) * (query.num_tokens // blocks if blocks else 0)

    def record(self, decision: Decision, at_s: float, held_s: float) -> Decided:
        choice, query = decision.choice, decision.query
        prefill, decode, pull, predicted, candidates = choice.prefill, choice.decode, choice.pull, choice.predicted, choice.record()
        first, ttft_s_of = decode if prefill is None else prefill, self._headroom.ttft_s
        estimate_s = ttft_s_of(first, query)
        found: list[Weighed] = []
        names: dict[str, tuple[str, ...]] = {}
        for each in candidates if decision.view.size <= MAX_CANDIDATES else _worth_keeping(candidates):
            node, leg, rejected_by, ttft_s, spread, doubt = each.node, each.leg, each.rejected_by, None, None, 0.0
            if each.names:
                names[leg] = each.names
            if leg != "decode" and not rejected_by:  # a node has one estimate, whatever the leg, and none for decoding alone
                ttft_s, cost = estimate_s if node is first else ttft_s_of(node, query), node.cost
                if cost is not None:
                    error = cost.prefill.error
                    spread, doubt = error.spread or None, error.doubt
            found.append(Weighed(node.endpoint.node, leg, each.cached_tokens, each.cost, each.values, ttft_s, rejected_by, spread, doubt))
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

    def count(self, shadow: ShadowRecord) -> None:
        self._metrics.shadow_decisions.labels(shadow.policy, "same" if shadow.agrees else "other").inc()

    def _keep(self, request: str, encoded: bytes) -> None:
        ended, kept = self._ended, self._kept
        if request in ended:
            self._num_bytes -= len(ended.pop(request))
        ended[request] = encoded
        self._num_bytes += len(encoded)
        while len(ended) > kept.requests or self._num_bytes > kept.size_bytes:
            name, oldest = ended.popitem(last=False)
            self._num_bytes -= len(oldest)
            if name in self._client_of:
                self._forget_client(name)

    def _forget_client(self, request: str) -> None:
        client_id = self._client_of.pop(request)
        del self._by_client[client_id][request]
        if not self._by_client[client_id]:
            del self._by_client[client_id]


def hindsight(decided: Decided, ttft_s: float, hit: Hit | None) -> Judged:
    """ttft_s: actual, since the decision."""
    expected_s = decided.estimated_ttft_s if decided.predicted_ttft_s is None else decided.predicted_ttft_s
    candidates, chosen = decided.candidates, decided.prefill or decided.decode
    if len(candidates) == 1 and candidates[0].node == chosen:
        return ttft_s, ttft_s - expected_s, 0.0, None, None, hit
    others = [(c.ttft_s, c.node) for c in candidates if c.ttft_s is not None and c.node != chosen]
    if not others:
        return ttft_s, ttft_s - expected_s, 0.0, None, None, hit
    best_ttft_s, best = min(others)
    regret_s = ttft_s - best_ttft_s
    return ttft_s, ttft_s - expected_s, regret_s if regret_s > 0.0 else 0.0, best, best_ttft_s, hit


def _shadow(live: Choice, shadow: Choice) -> ShadowRecord:
    prefill = shadow.prefill.name if shadow.prefill is not None else None
    same = (shadow.mode, prefill, shadow.decode.name) == (live.mode, live.prefill.name if live.prefill is not None else None, live.decode.name)
    return ShadowRecord(shadow.policy, shadow.mode, prefill, shadow.decode.name, same)


def _worth_keeping(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The best of each leg and some of those that were rejected, in the policy's order."""
    if len(candidates) <= MAX_CANDIDATES:
        return candidates
    counts: dict[tuple[str, bool], int] = {}
    kept = []
    for candidate in sorted(candidates, key=lambda c: (bool(c.rejected_by), c.cost)):
        group = candidate.leg, bool(candidate.rejected_by)
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= MAX_CANDIDATES:
            kept.append(candidate)
    return kept
