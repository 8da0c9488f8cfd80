"""Rank 0's end of another rank's transfer endpoint: its backends and pool as if they were here, with later answers.

The loop's requests are sent at once, or by a thread of the link while the rank is busy. That thread also receives. So
the loop waits for no rank. A fence is reported only once the rank has proved it; until then the answer is "not yet",
and the caller asks again. A rank that does nothing although it is asked ends its node.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from pdcluster.core.awake_clock import AwakeClock
from pdcluster.core.errors import IntegrityError, PeerUnreachable
from pdcluster.node.native.tensor_parallel.channel import RankChannel, frame
from pdcluster.node.native.tensor_parallel.messages import (
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

# Fences remembered until asked for. A forgotten one is asked for anew.
MAX_PROOFS = 4096
JOIN_S = 5.0
# For an endpoint that hangs in a living process. A hanging process is noticed earlier, by its pulse. The fence of a
# connection may take seconds, and so may a digest.
PATIENCE_S = 30.0
LOOK_S = 1.0
MAX_UNSENT_BYTES = 256 << 20


class RankLink:
    """Used by the loop's thread, and by its own.

    adverts: the rank's, by medium.
    on_lost: called once, from any thread, with the reason.
    patience_s: how long the rank may send nothing.
    """

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
        """End the rank's endpoint. Idempotent."""
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
        """Run until the channel ends, or the rank is silent for too long. A living rank answers a Mark, so silence is
        probed by one.
        """
        look_s = min(LOOK_S, self._patience_s / 4)
        clock = AwakeClock(2 * look_s)
        now = heard_at = clock()
        while now - heard_at < self._patience_s:
            events = self._wait(look_s)
            now = clock()
            if events & select.POLLOUT:
                self._send_rest()
            if events & ~select.POLLOUT:
                heard_at = now
                if not self._hear():
                    self._lose("ended its transfers")
                    return
            elif not self._answers:
                self.mark()
        self._lose(f"has done nothing about transfers for {now - heard_at:.1f} s")

    def _wait(self, timeout_s: float) -> int:
        """Wait for the channel, or for more to send. Returns the channel's events."""
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
        """Take in the next message. False at the end of the channel."""
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
    """A backend of the rank. Implements base.Backend. Public methods belong to one thread, `take` to the link's."""

    def __init__(self, link: RankLink, name: str, advert: bytes) -> None:
        self.name = name
        self._link = link
        self._advert = advert
        self.doorbell = Doorbell()
        self.wakeup_fd = self.doorbell.fd
        # This end drops nothing.
        self.counters: Mapping[str, int] = Counter()
        self._writes = Writes(self.doorbell)
        self._arrivals = Arrivals(self.doorbell)
        self._lock = threading.Lock()
        # Adverts of peers that we write to.
        self._adverts: dict[Peer, bytes] = {}
        # The nonce or boot that each open question asks the rank to fence.
        self._questions: dict[int, int | Peer] = {}
        # The open question about each, unless something was permitted or written since. Never two: fences are asked for
        # again and again.
        self._asked: dict[int | Peer, int] = {}
        self._proved: OrderedDict[int | Peer, None] = OrderedDict()

    def register(self, region: Region) -> None:
        raise IntegrityError(f"region {region.id} is of another rank's process, which registers it itself")

    def advert(self) -> bytes:
        return self._advert

    def connect(self, peer: Peer, advert: bytes) -> None:
        """The rank is told with every write. Where it cannot connect, the write fails."""
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
            self._asked.pop(peer, None)  # the next close ends this write, too
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
        """The rank shuts its own backend down when its channel ends."""
        self.doorbell.close()

    def take(self, message: Settled | Arrived | Fenced) -> None:
        """Take in a message of the rank."""
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
        """What is proved by now. The rank is asked (again) unless a question is open."""
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
        """Earlier proofs, and open questions, hold no more."""
        with self._lock:
            for key in keys:
                self._asked.pop(key, None)
                self._proved.pop(key, None)


class LinkedMemories:
    """Implements rank_memory.RankMemories: rank 0's pool here, the others behind their links, in order of ranks."""

    def __init__(self, own: memoryview, links: Sequence[RankLink]) -> None:
        self._own = OwnMemories([own])
        self._links = tuple(links)

    def begin_digest(self, rank: int, spans: SpanTable) -> PendingAnswer:
        return self._links[rank - 1].digest(spans) if rank else self._own.begin_digest(0, spans)

    def mark(self) -> Answers:
        return [link.mark() for link in self._links]
