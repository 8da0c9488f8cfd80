"""Aborts that are repeated until they are answered (R8), and the writers' boots that were declared dead. Pure; rules in
`session`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from pdcluster.core.messages import Abort, Endpoint
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.protocol.session import Send, Settings, earliest, peer_of

# Longest pause between Aborts to a boot that was declared dead, as a multiple of `Settings.repeat_s`.
GONE_REPEATS = 16


@dataclass(slots=True)
class AbortNotice:
    """An Abort without an answer. since: when it was due first."""

    writer: Endpoint
    reason: str
    until: float
    send_at: float
    since: float


@dataclass(slots=True)
class GoneBoot:
    """A writer's boot that was declared dead, and its Aborts that wait for an answer. Each call dials it, so the pauses
    between calls double.
    """

    call_at: float
    pause_s: float

    def called(self, now: float, longest_s: float) -> None:
        self.call_at, self.pause_s = now + self.pause_s, min(2 * self.pause_s, longest_s)


class AbortNotices:
    """Of one reader. held: the nonces whose pages are not free yet."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._notices: dict[int, AbortNotice] = {}
        # Dead boots that a ticket or an Abort still names.
        self.gone: dict[Peer, GoneBoot] = {}

    def add(self, nonce: int, writer: Endpoint, reason: str, deadline: float, now: float) -> None:
        until = max(deadline, now + self._settings.commit_s)
        self._notices[nonce] = AbortNotice(writer, reason, until, now, now)

    def answered(self, nonce: int, sender: Peer) -> None:
        notice = self._notices.get(nonce)
        if notice is not None and peer_of(notice.writer) == sender:
            del self._notices[nonce]

    def declare_gone(self, boot: Peer, now: float) -> None:
        self.gone.setdefault(boot, GoneBoot(now, self._settings.repeat_s))

    def readmit(self, boot: Peer) -> None:
        """It was declared dead too early: it is reachable again."""
        self.gone.pop(boot, None)

    def is_suspected(self, writer: Peer, held: Container[int], now: float) -> bool:
        """Whether pages wait for that writer's end: it was declared dead, or left an Abort unanswered for suspect_s."""
        return any(
            peer_of(notice.writer) == writer
            and nonce in held
            and (writer in self.gone or now - notice.since >= self._settings.suspect_s)
            for nonce, notice in self._notices.items()
        )

    def take_due(self, held: Container[int], now: float) -> list[Send]:
        """The Aborts to send now. Those that hold nothing end with their time or with their writer."""
        due = []
        for nonce, notice in list(self._notices.items()):
            if nonce not in held and (now >= notice.until or peer_of(notice.writer) in self.gone):
                del self._notices[nonce]
            elif now >= self._due_at(notice):
                notice.send_at = now + self._settings.repeat_s
                due.append(Send(notice.writer, Abort(nonce, notice.reason, max(0.0, notice.until - now))))
        for boot in self.gone.values():
            if now >= boot.call_at:
                boot.called(now, GONE_REPEATS * self._settings.repeat_s)
        return due

    def next_deadline(self) -> float | None:
        return earliest(*map(self._due_at, self._notices.values()))

    def _due_at(self, notice: AbortNotice) -> float:
        boot = self.gone.get(peer_of(notice.writer))
        return notice.send_at if boot is None else boot.call_at

    def forget_gone(self, writers: Container[Peer]) -> None:
        """Forget dead boots that no ticket (writers) and no Abort names."""
        named = {peer_of(notice.writer) for notice in self._notices.values()}
        self.gone = {peer: boot for peer, boot in self.gone.items() if peer in named or peer in writers}
