"""An attempt that was begun by another machine than `attempt`: all that it has to know to go on. Values."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster.core.messages import LegTimings, Ticket, TokenRow
from pdcluster_router.cluster.legs import RequestLeg
from pdcluster_router.core.stages import Stage


@dataclass(frozen=True, slots=True)
class Begun:
    """How far an attempt has come that was begun elsewhere. held: the first token, while no decode node has reserved;
    clocks: that run."""

    prefill: RequestLeg | None
    decode: RequestLeg | None
    clocks: dict[Stage, float]
    has_token: bool
    ticket: Ticket | None = None
    held: TokenRow | None = None
    delivered: LegTimings | None = None
    decode_spoke: bool = False
    first_token_at: float | None = None
    second_token_at: float | None = None


def backend_of(ticket: Ticket) -> str:
    """By which its KV will come, as far as one can tell before."""
    adverts = ticket.reader.adverts
    return adverts[0][0] if adverts else ""
