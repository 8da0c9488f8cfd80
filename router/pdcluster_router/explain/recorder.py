"""Explains decisions: candidates, expected costs, the choice, and what became of it. It makes no decision.

For every decision it keeps the candidates with the policy's terms, the rule that rejected each other node, and one
estimate in seconds for all of them (wait on the node plus own prompt). So policies without a model in seconds can be
judged, too. With the first token come:

- error: actual minus predicted time to first token, from the decision on. Time in the hold queue is known, not
  predicted.
- regret: actual minus the least estimate of any other candidate, never below 0.
- hit: prompt tokens found in the cache, beside what the best candidate held (reachable) and what an ideal cache would
  have held (`prefix_index.ideal_cache`).

Memory is bounded by count and bytes; the oldest go first. Few decisions are read, so their candidates are unpacked when
someone asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from pdcluster.telemetry.metrics import ExplainMetrics
from pdcluster_router.core.generation import Done, TenantPriority
from pdcluster_router.explain.records import Explanation, Hindsight, HitTokens, NotedDecision, outcome_of
from pdcluster_router.policy.base import Decision, DecisionRecord, ShadowRecord
from pdcluster_router.prefix_index.ideal_cache import IdealCache

# Bytes of a request that is kept, of its end, of a decision beside its candidates, and of a listed candidate.
RECORD_BYTES, DONE_BYTES, DECISION_BYTES, CANDIDATE_BYTES = 1000, 850, 500, 500

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
    """One request that runs or ended.

    The dispatcher sets `attempts` and `cached_tokens` (of the prompt; None: unknown).
    """

    # Set as the request goes on. Class defaults cost nothing until then.
    attempts = 0
    cached_tokens: int | None = None
    # How it ended well, after so many tokens.
    done: Done | None = None
    num_output = 0
    # Id of its trace; "" for none.
    trace = ""
    _error: str | None = None
    _why = ""
    _decisions: tuple[NotedDecision, ...] = ()
    _considered: NotedDecision | None = None
    _first_at: float | None = None
    # The decision that brought the first token, or the last one.
    _last: DecisionRecord | None = None
    _last_at = 0.0
    # Leading tokens of its prompt that an earlier prompt had; None before a decision.
    ideal: int | None = None
    # Of its decisions.
    _num_bytes = 0

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
        """About what it takes of memory, once it ended."""
        num_done = 0 if self.done is None else DONE_BYTES
        return RECORD_BYTES + num_done + self._num_bytes + len(self.client_id) + len(self._why)

    @property
    def tenant(self) -> str:
        return self._standing.tenant

    def consider(self, decision: Decision, now: float) -> None:
        """It was scored. Others say whether it may go."""
        since_s = now - self._started
        self._considered = NotedDecision(decision.record, since_s, since_s)

    def failed(self, why: str) -> None:
        """The attempt of the last decision failed."""
        if self._decisions:
            *others, last = self._decisions
            self._decisions = *others, replace(last, failed=why[:MAX_WHY])

    def decided(self, decision: Decision, asked: float, now: float) -> None:
        """Note a decision.

        asked: when the attempt began to look for nodes.
        """
        record, decisions = decision.record, self._decisions
        self._considered = None
        if record.shadow is not None:
            self._explainer.count(record.shadow)
        if len(decisions) >= MAX_DECISIONS:
            forgotten, half = decisions[MAX_DECISIONS // 2], MAX_DECISIONS // 2
            self._num_bytes -= size_of(forgotten.record)
            decisions = decisions[:half] + decisions[half + 1 :]
        self._decisions = *decisions, NotedDecision(record, now - self._started, now - asked)
        self._num_bytes += size_of(record)
        if self._first_at is not None:
            return  # hindsight is about the decision that brought the first token
        if self.ideal is None:
            self.ideal = self._explainer.seen(decision.query.hashes, decision.decode.block_tokens)
        self._last, self._last_at = record, now

    def first_token(self, moment: float) -> None:
        if self._first_at is None:
            self._first_at = moment

    def end(self, error: str | None, why: str) -> Hindsight | None:
        """End the record. See Explainer.close."""
        if self._considered is not None:
            self._num_bytes += size_of(self._considered.record)
        if error is not None:
            self._error, self._why = error, why[:MAX_WHY]
        return self.hindsight()

    def explained(self, *, has_ended: bool) -> Explanation:
        """The explanation so far, with what a waiting request waits for."""
        first_at, standing, considered = self._first_at, self._standing, self._considered
        return Explanation(
            self.request,
            self._arrived,
            standing.tenant,
            standing.priority,
            [noted.explained() for noted in self._decisions],
            None if first_at is None else first_at - self._started,
            self.attempts if has_ended else 0,
            self._error,
            self.hindsight() if has_ended else None,
            self.client_id,
            None if considered is None else considered.explained(),
            self._why,
            None if self.done is None else outcome_of(self.done, self.num_output),
            self.trace,
        )

    def hindsight(self) -> Hindsight | None:
        """The judgement of the decision that brought the first token; None before."""
        first_at, achieved, last, hit = self._first_at, self.cached_tokens, self._last, None
        if first_at is None or last is None:
            return None
        if achieved is not None:
            hit = HitTokens(achieved, max(last.most_cached, achieved), max(self.ideal or 0, achieved))
        ttft_s = first_at - self._last_at
        best_s = None if last.best is None else last.best_s
        regret_s = 0.0 if best_s is None else max(ttft_s - best_s, 0.0)
        expected_s = last.estimate_s if last.ttft_s is None else last.ttft_s
        return Hindsight(ttft_s, ttft_s - expected_s, regret_s, last.best, best_s, hit)


class Explainer:
    """Records of open and ended requests. Owned by the router's event loop.

    wall: Unix seconds, for people.
    """

    def __init__(self, metrics: ExplainMetrics, wall: Callable[[], float], kept: Kept | None = None) -> None:
        self._metrics = metrics
        self._wall = wall
        self._kept = kept or Kept()
        self._seen = IdealCache()
        self._open: dict[str, Record] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()
        # Requests, open or kept, by their clients' names; the oldest first.
        self._by_client: dict[str, dict[str, None]] = {}
        self._client_of: dict[str, str] = {}
        self._num_bytes = 0
        self._watched_by, self._num_agreed, self._num_watched = "", 0, 0

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
            hit = judged.hit
            tokens = (0, 0, 0) if hit is None else (hit.achieved, hit.reachable, hit.ideal)
            self._metrics.judged((judged.error_s, judged.regret_s, *tokens))
        self._keep(record)

    # ------------------------------------------------------------ what operators ask

    def explain(self, request: str) -> Explanation | None:
        """The explanation of one choice of a request, by its id; None when unknown."""
        running = self._open.get(request)
        if running is not None:
            return running.explained(has_ended=False)
        ended = self._ended.get(request)
        return None if ended is None else ended.explained(has_ended=True)

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
            yield self._ended[request].explained(has_ended=True)

    # ------------------------------------------------------------ what a record needs

    def seen(self, hashes: bytes, block_tokens: int) -> int:
        """Leading tokens of a prompt that some earlier prompt had."""
        return self._seen.note(hashes) * block_tokens

    def agreement(self, shadow: str) -> tuple[int, int]:
        """Decisions on which the shadow of that name agreed since it watches, and all that it watched."""
        return (self._num_agreed, self._num_watched) if shadow == self._watched_by else (0, 0)

    def count(self, shadow: ShadowRecord) -> None:
        if shadow.policy != self._watched_by:
            self._watched_by, self._num_agreed, self._num_watched = shadow.policy, 0, 0
        self._num_agreed += shadow.agrees
        self._num_watched += 1
        self._metrics.shadow_decisions.labels(shadow.policy, "same" if shadow.agrees else "other").inc()

    def _keep(self, record: Record) -> None:
        ended, kept = self._ended, self._kept
        former = ended.pop(record.request, None)
        if former is not None:
            self._num_bytes -= former.size_bytes
        ended[record.request] = record
        self._num_bytes += record.size_bytes
        while len(ended) > kept.requests or self._num_bytes > kept.size_bytes:
            name, oldest = ended.popitem(last=False)
            self._num_bytes -= oldest.size_bytes
            if name in self._client_of:
                self._forget_client(name)

    def _forget_client(self, request: str) -> None:
        client_id = self._client_of.pop(request)
        del self._by_client[client_id][request]
        if not self._by_client[client_id]:
            del self._by_client[client_id]


def size_of(record: DecisionRecord) -> int:
    return DECISION_BYTES + len(record.candidates.rows) + CANDIDATE_BYTES * len(record.candidates.listed)
