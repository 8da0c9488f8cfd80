"""The states of a request at the router and of its running attempt, and the tables of their transitions."""

from __future__ import annotations

from enum import Enum, auto

from pdcluster.core.lifecycle import Table


class RequestState(Enum):
    # A fork, whose parent has no decode node yet.
    FORKING = auto()
    # It has no nodes: it waits at the gate, is parked, or pauses before the next attempt.
    WAITING = auto()
    # An attempt runs.
    RUNNING = auto()
    # Terminal: answered or cancelled.
    ENDED = auto()


class AttemptState(Enum):
    # Its nodes are chosen and know nothing yet.
    CHOSEN = auto()
    # One node computes the prompt and will decode.
    COMPUTING = auto()
    # A prefill node has the prompt. No decode node has reserved, or was asked.
    PREFILLING = auto()
    # The same, and a decode node was asked to reserve.
    RESERVING = auto()
    # The prefill node has the ticket of a decode node's pages.
    CARRYING = auto()
    # The decode node has the KV and has said nothing yet.
    DELIVERED = auto()
    # The node that decodes has said a token.
    DECODING = auto()
    # Every token was sent; the prefill node's report is to come, which only the timeline needs.
    REPORTING = auto()
    # Terminal: nothing of it runs on a node.
    OVER = auto()


R = RequestState
S = AttemptState

_of_requests: dict[tuple[RequestState, str], RequestState] = {
    (R.FORKING, "parent placed"): R.WAITING,
    (R.WAITING, "begin"): R.RUNNING,
    (R.RUNNING, "retry"): R.WAITING,
    **{(state, "end"): R.ENDED for state in R if state is not R.ENDED},
}
REQUEST = Table(_of_requests)

_of_attempts: dict[tuple[AttemptState, str], AttemptState] = {
    (S.CHOSEN, "compute"): S.COMPUTING,
    (S.CHOSEN, "prefill"): S.PREFILLING,
    (S.COMPUTING, "row"): S.DECODING,
    (S.PREFILLING, "reserve"): S.RESERVING,
    (S.RESERVING, "ticket"): S.CARRYING,
    (S.RESERVING, "row"): S.DECODING,
    (S.CARRYING, "delivered"): S.DELIVERED,
    (S.CARRYING, "row"): S.DECODING,
    (S.DELIVERED, "row"): S.DECODING,
    (S.DECODING, "row"): S.DECODING,
    **{(state, "slot lost"): S.PREFILLING for state in (S.RESERVING, S.CARRYING, S.DELIVERED, S.DECODING)},
    **{(state, "report"): S.REPORTING for state in (S.PREFILLING, S.RESERVING, S.CARRYING, S.DELIVERED, S.DECODING)},
    **{(state, "stop"): S.OVER for state in S if state is not S.OVER},
}
ATTEMPT = Table(_of_attempts)

# Whether a node has a row, or pages and a row, for it.
HAS_SLOT = frozenset((S.COMPUTING, S.CARRYING, S.DELIVERED, S.DECODING))
