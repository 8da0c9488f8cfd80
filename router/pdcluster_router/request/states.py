"""The states of a request at the router, and the table of its transitions.

A request has one state over all its attempts. An attempt ends with `retry`, and then the request waits for nodes again.
"""

from __future__ import annotations

from enum import Enum, auto

from pdcluster.core.lifecycle import Table


class RequestState(Enum):
    # Its prompt's first choice has no decode node yet, which it is to share.
    FOLLOWING = auto()
    # It has no nodes: it waits at the gate, is parked, or pauses before the next attempt.
    WAITING = auto()
    # One node computes its prompt and will decode.
    COMPUTING = auto()
    # A prefill node has its prompt. No decode node has reserved, or was asked.
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
    # Terminal: answered or cancelled.
    ENDED = auto()


S = RequestState

REQUEST: Table[RequestState] = {
    (S.FOLLOWING, "lead"): S.WAITING,
    (S.WAITING, "compute"): S.COMPUTING,
    (S.WAITING, "prefill"): S.PREFILLING,
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
    **{
        (state, "retry"): S.WAITING
        for state in (S.COMPUTING, S.PREFILLING, S.RESERVING, S.CARRYING, S.DELIVERED, S.DECODING)
    },
    **{(state, "end"): S.ENDED for state in S if state is not S.ENDED},
}

# Whether a node has a row, or pages and a row, for it.
HAS_SLOT = frozenset((S.COMPUTING, S.CARRYING, S.DELIVERED, S.DECODING))
