"""Whether a request may come in. Pure; a refusal carries the predicted wait.

A request that can never fit gets a 400. One that waited too long for any node gets a 503. A full hold queue, or a
prediction past the service level, gets a 429. Without a service level (`Slo.ttft_s` None) only bounds refuse. With one,
the gate refuses a request whose predicted time to first token, with the margin, is too long. Long prompts have a floor.
Without it, short ones, which fit in a little longer, would keep them out for ever:

1. A prompt counts as at least EVEN_SHARE of the level. So up to there all are refused at the same queue length. A
   tenant with nothing waiting is exempt while others wait.
2. A prompt so long that it could hardly meet the level alone is measured by LONG_FACTOR times its own time on an empty
   cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdcluster.core import errors
from pdcluster_router.cluster.view import ClusterView
from pdcluster_router.policy.base import Query
from pdcluster_router.policy.eligibility import no_node

EVEN_SHARE = 0.25
LONG_FACTOR = 2.0
MIN_RETRY_S = 0.1
# The least rate, for a queue that nothing leaves: a predicted wait stays finite.
LEAST_RATE = 1e-6


@dataclass(frozen=True, slots=True)
class Slo:
    """The service level."""

    # The longest time to first token; None for none.
    ttft_s: float | None = None
    # Share by which predictions are raised.
    margin: float = 0.1


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a request must expect, in seconds."""

    # In the hold queue.
    wait_s: float
    # On a node, before its turn.
    backlog_s: float
    # For its own prompt.
    prefill_s: float
    # Others wait, but none of its tenant.
    is_modest: bool = False

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.backlog_s + self.prefill_s


def check_service(outlook: Outlook, slo: Slo) -> None:
    """Raises Overloaded when the request would be too late."""
    if slo.ttft_s is None:
        return
    limit_s = max(slo.ttft_s, LONG_FACTOR * outlook.prefill_s)
    least_s = 0.0 if outlook.is_modest else EVEN_SHARE * slo.ttft_s
    judged_s = outlook.wait_s + outlook.backlog_s + max(outlook.prefill_s, least_s)
    if judged_s * (1.0 + slo.margin) > limit_s:
        message = (
            f"the first token is predicted after {outlook.ttft_s:.2f} s, too near to the {limit_s:.2f} s that are "
            "promised"
        )
        raise refusal("slo", message, outlook.wait_s)


def refusal(reason: str, message: str, wait_s: float) -> errors.Overloaded:
    """An Overloaded error.

    reason: the word under which it is counted.
    """
    return errors.Overloaded(f"{message}; predicted wait {wait_s:.2f} s, retry then", max(wait_s, MIN_RETRY_S), reason)


def check_fits(query: Query, view: ClusterView, longest: int) -> None:
    """Raises NoNodeTakesWork without nodes, and BadRequest when no node could ever take so many tokens.

    longest: tokens that the largest known node of its model takes. A request that needs two nodes must fit each role.
    """
    if not view.size:
        raise no_node(0)
    if view.roster.takes_all(query.row_tokens, query.model):
        return
    if query.row_tokens > longest:
        raise _too_long(query, longest, "shorten it or start a larger node")
    if query.force != "remote" and not (query.force == "auto" and query.fallback == "deny"):
        return
    nodes = [node for node in view.nodes if node.serves(query.model)]
    for role, other, num_tokens in (
        ("prefill", "decode", query.least_tokens),
        ("decode", "prefill", query.row_tokens),
    ):
        most = max((node.max_len for node in nodes if node.role != other), default=num_tokens)
        if num_tokens > most:
            way_out = f"no {role} node takes more; shorten it, start a larger one or use mode auto"
            raise _too_long(query, most, f"its mode needs two nodes, and {way_out}")


def _too_long(query: Query, most: int, way_out: str) -> errors.ContextTooLong:
    output = f", {query.most_tokens} with its output" if query.most_tokens else ""
    num_prompt = query.num_tokens if query.num_tokens >= most else None
    return errors.ContextTooLong(
        most, f"the request has {query.num_tokens} tokens{output}; {way_out}", num_prompt=num_prompt
    )


class DrainRate:
    """Work per second that leaves the hold queue while requests wait. A mean that forgets with `memory_s`. Owned by the
    queue's owner.

    It begins as if the default had been seen for `prior_s`, which is forgotten like the rest. One prompt may take a
    second, so a second without progress says little.
    """

    def __init__(self, memory_s: float = 10.0, prior_s: float = 3.0) -> None:
        self._memory_s = memory_s
        self._prior_s = prior_s
        self._work = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def is_held(self, held: bool, now: float) -> None:
        """Note whether requests wait from now on. Call it after whatever may have changed that."""
        self._advance(now)
        self._since = now if held else None

    def released(self, work: float, now: float) -> None:
        self._advance(now)
        self._work += work

    def rate(self, default: float) -> float:
        """The rate.

        default: the value while little was seen.
        """
        return max((self._work + default * self._prior_s) / (self._seconds + self._prior_s), LEAST_RATE)

    def _advance(self, now: float) -> None:
        if self._since is None:
            return
        passed = max(now - self._since, 0.0)
        kept = math.exp(-passed / self._memory_s)
        self._seconds = self._seconds * kept + passed
        self._prior_s *= kept
        self._work *= kept
        self._since = now
