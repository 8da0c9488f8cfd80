"""Rank 0's end of another rank's transfer endpoint (`rank_endpoint`): its backends and its pool as if they were here,
but that answers come later.

What the loop's thread asks is sent at once, or, while the rank is busy, by a thread of the link, which also takes in
what the rank says: the loop waits for no rank. A fence is told only once the rank has proved it: until then the answer
is that there is none yet, which whoever wants it asks for again. A rank that does nothing any more, although it is
asked, ends its node.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from pdcluster.core.errors import IntegrityError, PeerUnreachable
from pdcluster.node.tensor_parallel.channel import RankChannel, frame
from pdcluster.node.tensor_parallel.messages import (
    Arrived,
    Close,
    Digest,
    DigestResult,
    Fenced,
    FromRank,
    Mark,
    Revoke,
    Settled,
    ToRank,
    WriteRequest,
    allow,
    name_of,
    pack_runs,
    words_of,
)
from pdcluster.transfer.backends.base import Arrival, Fence, Handle, Peer, Permit, Region, Stamp, WriteStatus
from pdcluster.transfer.backends.ledger import Arrivals, Doorbell, Writes
from pdcluster.transfer.layout.runs import SpanTable, run_table
from pdcluster.transfer.layout.spans import CopyRuns
from pdcluster.transfer.protocol.rank_memory import Answers, OwnMemories, PendingAnswer

# Fences that are remembered until somebody asks for them; one that was forgotten is asked for anew.
MAX_PROOFS = 4096
JOIN_S = 5.0
# A rank whose process hangs is noticed by its pulse, long before. This is for an endpoint that hangs in one that lives:
# the fence of a connection may take it seconds, and so may a digest on a busy machine.
PATIENCE_S = 30.0
LOOK_S = 1.0
MAX_UNSENT_BYTES = 256 << 20


class RankSilent:
    """How long a rank has said nothing, counted at every look. A pause of this very process (it was stopped) says
    nothing about the rank."""

    def __init__(self, look_s: float) -> None:
        self.look_s = look_s
        self.seconds = 0.0
        self._last = time.monotonic()

    def count(self) -> None:
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * self.look_s)
        self._last = now


class RankLink:
    """Used by the loop's thread, and by its own. adverts: the rank's, by medium; on_lost: told once, from any thread,
    why it is over; patience_s: how long the rank may say nothing."""

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        adverts: Mapping[str, bytes],
        on_lost: Callable[[str], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._channel = RankChannel(sock, send_s=patience_s)
        self._rank = rank
        self._on_lost = on_lost
        self._patience_s = patience_s
        self._is_over = False
        self._lock = threading.Lock()
        # Frames that the rank did not take yet; under the lock.
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._doorbell = Doorbell()
        self._questions = itertools.count(1)
        self._answers: dict[int, PendingAnswer] = {}
        # Messages of the rank so far.
        self.num_heard = 0
        self.ends = {name: RankEnd(self, name, advert) for name, advert in adverts.items()}
        self._thread = threading.Thread(target=self._run, name=f"rank-{rank}", daemon=True)
        self._thread.start()

    def send(self, message: ToRank) -> None:
        """Never blocks."""
        data = memoryview(frame(message))
        try:
            with self._lock:
                rest = data if self._unsent else self._channel.offer(data)
                if not rest:
                    return
                self._unsent.append(rest)
                self._unsent_bytes += len(rest)
        except OSError as error:
            self._lose(f"takes no transfers: {error}")
            return
        self._doorbell.ring()
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self._lose(f"takes no transfers: {self._unsent_bytes} bytes wait for it")

    def question(self) -> int:
        return next(self._questions)

    def digest(self, spans: SpanTable) -> PendingAnswer:
        number, answer = self._ask()
        self.send(Digest(number, spans.pack()))
        return answer

    def mark(self) -> PendingAnswer:
        number, answer = self._ask()
        self.send(Mark(number))
        return answer

    def close(self) -> None:
        """End the rank's endpoint, by which it ends. Idempotent."""
        self._is_over = True
        self._channel.shutdown()
        self._thread.join(JOIN_S)
        self._channel.close()
        self._doorbell.close()

    def _ask(self) -> tuple[int, PendingAnswer]:
        number, answer = self.question(), PendingAnswer()
        self._answers[number] = answer
        return number, answer

    def _lose(self, reason: str) -> None:
        with self._lock:
            is_news, self._is_over = not self._is_over, True
        if is_news:
            self._on_lost(f"rank {self._rank} {reason}")

    # ------------------------------------------------------------ on the link's own thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # the top of this thread, without which the node would wait for ever
            self._lose(f"says nothing about transfers any more: {error!r}")

    def _serve(self) -> None:
        """Until the channel ends, or the rank is silent for too long. One that lives answers a Mark, so silence is
        looked into by one."""
        silence = RankSilent(min(LOOK_S, self._patience_s / 4))
        while silence.seconds < self._patience_s:
            events = self._wait(silence.look_s)
            silence.count()
            if events & select.POLLOUT:
                self._send_rest()
            if events & ~select.POLLOUT:
                silence.seconds = 0.0
                if not self._hear():
                    self._lose("ended its transfers")
                    return
            elif not self._answers:
                self.mark()
        self._lose(f"has done nothing about transfers for {silence.seconds:.1f} s")

    def _wait(self, timeout_s: float) -> int:
        """For the channel, or for more to be sent; returns the channel's events."""
        poller = select.poll()
        poller.register(self._doorbell.fd, select.POLLIN)
        poller.register(self._channel.sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        ready = dict(poller.poll(timeout_s * 1000))
        self._doorbell.clear()
        return ready.get(self._channel.fileno(), 0)

    def _send_rest(self) -> None:
        with self._lock:
            while self._unsent:
                rest = self._channel.offer(self._unsent[0])
                self._unsent_bytes -= len(self._unsent[0]) - len(rest)
                self._unsent[0] = rest
                if rest:
                    return
                self._unsent.popleft()

    def _hear(self) -> bool:
        """Take in the next message; False at the end of the channel."""
        message = self._channel.receive()
        if message is None:
            return False
        assert isinstance(message, FromRank)
        self.num_heard += 1
        self._take(message)
        return True

    def _take(self, message: FromRank) -> None:
        if isinstance(message, DigestResult):
            self._answers.pop(message.question).value = message.value
            for end in self.ends.values():
                end.doorbell.ring()
        else:
            self.ends[message.medium].take(message)


class RankEnd:
    """A backend of the rank. Implements base.Backend, public methods for one thread; `take` is the link's."""

    def __init__(self, link: RankLink, name: str, advert: bytes) -> None:
        self.name = name
        self._link = link
        self._advert = advert
        self.doorbell = Doorbell()
        self.wakeup_fd = self.doorbell.fd
        # Of what this end drops: nothing.
        self.counters: Mapping[str, int] = Counter()
        self._writes = Writes(self.doorbell)
        self._arrivals = Arrivals(self.doorbell)
        self._lock = threading.Lock()
        # Of whom we write to.
        self._adverts: dict[Peer, bytes] = {}
        # Of which nonce or boot the rank is asked to prove that nothing more can land.
        self._questions: dict[int, int | Peer] = {}
        # The open question about it, if nothing of it was permitted or written since. Never two: a fence is asked for
        # again and again.
        self._asked: dict[int | Peer, int] = {}
        self._proved: OrderedDict[int | Peer, None] = OrderedDict()

    def register(self, region: Region) -> None:
        raise IntegrityError(f"region {region.id} is of another rank's process, which registers it itself")

    def advert(self) -> bytes:
        return self._advert

    def connect(self, peer: Peer, advert: bytes) -> None:
        """With every write the rank is told; where it cannot connect, the write fails."""
        self._adverts[peer] = advert

    def permit(self, permit: Permit) -> None:
        self._reopen(permit.nonce, permit.writer)
        self._link.send(allow(self.name, permit))

    def revoke(self, nonce: int) -> Fence:
        return self._fence(nonce, lambda question: Revoke(self.name, nonce, question))

    def close(self, peer: Peer) -> Fence:
        self._adverts.pop(peer, None)
        return self._fence(peer, lambda question: Close(self.name, name_of(peer), question))

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, digests: bool = False
    ) -> Handle:
        advert = self._adverts.get(peer)
        if advert is None:
            raise PeerUnreachable(f"{peer.node} is not connected; call connect first")
        with self._lock:
            self._asked.pop(peer, None)  # the next close ends this write too
        handle, table = self._writes.new(), pack_runs(run_table(runs))
        self._link.send(
            WriteRequest(
                self.name, handle, name_of(peer), advert, source_region, target_region, words_of(stamp), table, digests
            )
        )
        return handle

    def poll(self, handle: Handle) -> WriteStatus:
        return self._writes.poll(handle)

    def take_digest(self, handle: Handle) -> int | None:
        return self._writes.take_digest(handle)

    def take_duration(self, handle: Handle) -> float | None:
        return self._writes.take_duration(handle)

    def arrivals(self) -> list[Arrival]:
        return self._arrivals.take()

    def shutdown(self) -> None:
        """The rank shuts its own down when its channel ends."""
        self.doorbell.close()

    def take(self, message: Settled | Arrived | Fenced) -> None:
        """What the rank says."""
        if isinstance(message, Settled):
            self._writes.settle(
                Handle(message.handle), WriteStatus(message.status), message.digest, seconds=message.seconds
            )
        elif isinstance(message, Arrived):
            self._arrivals.add(Stamp(*message.stamp), message.digest, SpanTable.unpack(message.spans), message.region)
        else:
            self._advert = message.advert
            self._proof(message.question, is_fenced=message.is_fenced)

    # ------------------------------------------------------------ proofs

    def _fence(self, key: int | Peer, ask: Callable[[int], ToRank]) -> Fence:
        """What is proved of it by now; the rank does it (again), unless it was told to and has not answered, and says
        what it can prove then."""
        with self._lock:
            fence = Fence.FENCED if key in self._proved else Fence.CANNOT_FENCE
            if key in self._asked:
                return fence
            question = self._link.question()
            self._questions[question], self._asked[key] = key, question
        self._link.send(ask(question))
        return fence

    def _proof(self, question: int, *, is_fenced: bool) -> None:
        with self._lock:
            key = self._questions.pop(question)
            if self._asked.get(key) != question:
                return  # something was permitted since
            del self._asked[key]
            if is_fenced:
                self._proved[key] = None
            while len(self._proved) > MAX_PROOFS:
                self._proved.popitem(last=False)
        self.doorbell.ring()

    def _reopen(self, *keys: int | Peer) -> None:
        """What was proved holds no more, nor does what is being asked."""
        with self._lock:
            for key in keys:
                self._asked.pop(key, None)
                self._proved.pop(key, None)


class LinkedMemories:
    """Implements rank_memory.RankMemories: rank 0's pool here, the others behind their links, in the order of ranks."""

    def __init__(self, own: memoryview, links: Sequence[RankLink]) -> None:
        self._own = OwnMemories([own])
        self._links = tuple(links)

    def begin_digest(self, rank: int, spans: SpanTable) -> PendingAnswer:
        return self._links[rank - 1].digest(spans) if rank else self._own.begin_digest(0, spans)

    def mark(self) -> Answers:
        return [link.mark() for link in self._links]
