"""The writing half of a staged backend: the thread that moves writes to one peer, piece by piece, through the library
and our own link.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field

from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends.base import Handle, Peer, Region, Stamp, WriteStatus
from pdcluster.transfer.backends.ledger import Inbox, level_of_end, start_or_release
from pdcluster.transfer.backends.staged.polling import DescriptorWaiter, WorkPace
from pdcluster.transfer.backends.staged.source_reads import SourceReads
from pdcluster.transfer.backends.staged.staging import (
    ANSWER,
    ANSWER_MAGIC,
    AWAKE_MAGIC,
    NOTICE,
    NOTICE_MAGIC,
    Blocks,
    Grant,
    StagedPiece,
    StagedSettings,
    TransferLibrary,
    cut,
    read_grant,
)
from pdcluster.transfer.backends.tcp_links import AnswerReader, Link, TcpAdvert, connect, sealed
from pdcluster.transfer.copying.copy import Payload
from pdcluster.transfer.layout.runs import RunTable

LOG = logging.getLogger(__name__)

# For a library that only works while it is called.
CALLED_EVERY_S = 0.0002


@dataclass(slots=True, eq=False)
class StagedWrite:
    handle: Handle
    source: Region
    region: int
    stamp: Stamp
    runs: RunTable
    # Digests what is sent, piece by piece.
    payload: Payload
    digests: bool
    # Not started yet. Cut when the size of the peer's blocks is known.
    pieces: deque[StagedPiece] | None = None
    # Pieces with the library or with the reader.
    unanswered: int = 0
    # Pieces whose notice was sent and not answered. The reader may copy them to the pages.
    noticed: int = 0
    failed: bool = False
    refused: bool = False


@dataclass(slots=True)
class PieceInFlight:
    """A piece in a block of the ring.
    staging: where it was gathered; None when it is read from its pages.
    batches: those of its entries that the library has; is_whole: none of them failed so far.
    """

    write: StagedWrite
    piece: StagedPiece
    staging: int | None
    batches: list[int]
    is_whole: bool = True
    # Bytes that the library had when it came, its own included.
    with_engine: int = 0
    submitted: float = field(default_factory=time.monotonic)


class Pump:
    """The thread that writes to one peer, over one link and one pair of rings."""

    def __init__(
        self,
        name: str,
        me: Peer,
        peer: Peer,
        advert: TcpAdvert,
        settings: StagedSettings,
        engine: TransferLibrary,
        reads: SourceReads,
    ) -> None:
        self._name, self._me, self._peer, self.advert = name, me, peer, advert
        self._settings, self._engine, self._reads = settings, engine, reads
        # A write stays queued until its last piece was begun.
        self.inbox: Inbox[StagedWrite] = Inbox()
        # Blocks of the ring; `_free_staging`: our own blocks. The last used goes first, as it is in the caches.
        self._free: list[int] = []
        self._free_staging: list[int] = []
        self._engine_has: dict[int, PieceInFlight] = {}
        self._reader_has: dict[int, PieceInFlight] = {}
        self._progress = 0.0
        self._awake_at = 0.0
        self._pace = WorkPace()
        self.thread = threading.Thread(target=self._run, name=f"kv-{name}-{peer.node}", daemon=True)
        start_or_release(self.thread, peer, self.inbox.fail)

    def _run(self) -> None:
        link: Link | None = None
        staging: Blocks | None = None
        far: str | None = None
        try:
            link = connect(
                self._me,
                self._peer,
                self.advert,
                connect_s=self._settings.connect_s,
                progress_s=self._settings.progress_s,
                is_sealed=self._settings.is_sealed,
            )
            grant = read_grant(link)
            far = self._engine.meet(grant.engine)
            staging = Blocks(self._engine, grant.blocks, grant.block_bytes)
            self._free, self._free_staging = list(range(grant.blocks)), list(range(grant.blocks))
            self._serve(link, grant, far, staging)
        except (OSError, ProtocolError) as error:
            is_at_work = self.inbox, self._engine_has, self._reader_has
            LOG.log(
                level_of_end(error, *is_at_work),
                "the transfer to %s by %s is over: %s",
                self._peer.node,
                self._name,
                error,
            )
        except Exception:
            LOG.exception("the transfer thread to %s by %s failed", self._peer.node, self._name)
        finally:
            self._end(link, staging, far)

    def _end(self, link: Link | None, staging: Blocks | None, far: str | None) -> None:
        """Release everything, last acquired first, whatever fails. An error of the library must leave no write without
        an answer.
        """
        try:
            with ExitStack() as steps:
                if far is not None:
                    steps.callback(self._engine.part, far)
                if staging is not None:
                    steps.callback(staging.retire)
                self._push_answers(steps)
                if link is not None:
                    steps.callback(link.sock.close)
        except Exception:
            LOG.exception("the transfer thread to %s by %s did not end cleanly", self._peer.node, self._name)

    def _push_answers(self, steps: ExitStack) -> None:
        queued = self.inbox.fail()
        begun = [flying.write for flying in (*self._engine_has.values(), *self._reader_has.values())]
        for write in [*begun, *queued]:
            steps.callback(self._reads.settle, write.handle, WriteStatus.LOST if write.noticed else WriteStatus.FAILED)
        for flying in self._engine_has.values():
            steps.callback(self._let_go, flying)

    def _let_go(self, flying: PieceInFlight) -> None:
        """The library may still read the pages of what it has not ended. Staging blocks belong to nobody."""
        if flying.staging is None and flying.batches:
            self._reads.keep(flying.write.handle, flying.batches, flying.submitted)

    def _serve(self, link: Link, grant: Grant, far: str, staging: Blocks) -> None:
        self._progress = time.monotonic()
        waiter, answers = DescriptorWaiter(link.sock.fileno(), self.inbox.fd), AnswerReader(link, ANSWER)
        while not self.inbox.is_ending:
            self._start_piece(grant, far, staging)
            self._keep_awake(link)
            self._check_engine(link)
            self._take_answers(answers)
            if not (self._free or self._engine_has or self._reader_has):
                raise ConnectionAbortedError(
                    "every staging block has a write of unknown outcome; a new connection gets new ones"
                )
            if self._reader_has and time.monotonic() - self._progress > self._settings.progress_s:
                raise TimeoutError(f"no answer for {self._settings.progress_s} s")
            if not self._can_start():
                self._wait(waiter)

    def _wait(self, waiter: DescriptorWaiter) -> None:
        """Wait for news. While the library has work, a reader's answer ends the wait only if its block is needed. The
        doorbell ends it only if nothing else follows that work.
        """
        is_idle = not self._engine_has
        _, was_reached = waiter.wait(self._timeout_s(), (is_idle or not self._free, is_idle or not self.inbox))
        if was_reached:
            self.inbox.was_heard()

    def _timeout_s(self) -> float | None:
        if not self._engine_has:
            return self._settings.progress_s / 4 if self._reader_has else None
        if self._engine.needs_calls:
            return CALLED_EVERY_S
        oldest = next(iter(self._engine_has.values()))
        return self._pace.next_look_s(time.monotonic() - oldest.submitted, oldest.with_engine)

    def _can_start(self) -> bool:
        """Whether another piece may start. The library gets only what keeps it busy: it moves everything at once, so
        the reader would otherwise have nothing to copy before all of it arrived.
        """
        return bool(self._free and self.inbox) and len(self._engine_has) < self._settings.flying

    def _start_piece(self, grant: Grant, far: str, staging: Blocks) -> None:
        """Start one piece at a time, so that answers for earlier pieces do not wait for the copies of later ones."""
        if not self._can_start():
            return
        write = self.inbox.first()
        if write.pieces is None:
            write.pieces = cut(
                write.runs, write.source.address, grant.block_bytes, may_be_straight=self._engine.reads_anywhere
            )
        piece = write.pieces.popleft()
        if not write.pieces:
            self.inbox.take()
        self._start(grant, far, staging, write, piece)

    def _start(self, grant: Grant, far: str, staging: Blocks, write: StagedWrite, piece: StagedPiece) -> None:
        block, own = self._free.pop(), None if piece.is_straight else self._free_staging.pop()
        with_engine = piece.nbytes + sum(each.piece.nbytes for each in self._engine_has.values())
        flying = PieceInFlight(write, piece, own, [], with_engine=with_engine)
        self._engine_has[block] = (
            # from now on, so that no error leaves a write without an answer or the library with its pages
            flying
        )
        write.unanswered += 1
        entries = self._read(write, piece) if own is None else self._gather(write, piece, staging.at(own))
        self._submit(flying, far, grant.address + block * grant.block_bytes, entries)
        if flying.batches:
            return
        del self._engine_has[block]
        self._free.append(block)  # refused before anything was sent
        if own is not None:
            self._free_staging.append(own)
        self._answered(flying, copied=False)

    def _submit(self, flying: PieceInFlight, far: str, target: int, entries: list[tuple[int, int, int]]) -> None:
        for address, at, nbytes in entries:
            batch = self._engine.submit(far, address, target + at, nbytes)
            if batch is None:
                flying.is_whole = False
                return
            flying.batches.append(batch)

    def _read(self, write: StagedWrite, piece: StagedPiece) -> list[tuple[int, int, int]]:
        """Digest a piece just before it is sent, because it is then still in the caches."""
        if write.digests:
            write.payload.extend(piece.reading())
            write.payload.advance(piece.nbytes)
        return piece.entries()

    def _gather(self, write: StagedWrite, piece: StagedPiece, block: int) -> list[tuple[int, int, int]]:
        write.payload.extend(piece.packing(block))
        write.payload.advance(piece.nbytes)
        return [(block, 0, piece.nbytes)]

    def _keep_awake(self, link: Link) -> None:
        """Tell the other end to call its library, which makes progress only then."""
        if not self._engine.needs_calls or not self._engine_has:
            return
        now = time.monotonic()
        if now >= self._awake_at:
            self._awake_at = now + self._settings.awake_s
            link.send(sealed(NOTICE.pack(AWAKE_MAGIC, 0, 0, 0, 0, 0, 0, 0, 0)))

    def _check_engine(self, link: Link) -> None:
        """Poll the library. Notices of one write go out in the order of its bytes, because the reader digests them
        so.
        """
        held: set[Handle] = set()
        for block, flying in list(self._engine_has.items()):
            if flying.write.handle in held:
                continue
            status = self._look(flying)
            if status is WriteStatus.PENDING:
                held.add(flying.write.handle)
                continue
            del self._engine_has[block]
            if status is WriteStatus.DONE:
                self._landed(link, block, flying)
            else:
                self._failed(flying)

    def _look(self, flying: PieceInFlight) -> WriteStatus:
        """DONE: all of it landed. UNKNOWN: it did not, or nobody knows; `batches` keeps what the library has not
        ended.
        """
        while flying.batches:
            status = self._engine.check(flying.batches[0])
            if status is WriteStatus.PENDING and time.monotonic() - flying.submitted < self._settings.unknown_s:
                return status
            if status not in (WriteStatus.DONE, WriteStatus.LOST):
                return WriteStatus.UNKNOWN
            flying.is_whole = flying.is_whole and status is WriteStatus.DONE
            flying.batches.pop(0)
        return WriteStatus.DONE if flying.is_whole else WriteStatus.UNKNOWN

    def _landed(self, link: Link, block: int, flying: PieceInFlight) -> None:
        self._pace.done(time.monotonic() - flying.submitted, flying.with_engine)
        if flying.staging is not None:
            self._free_staging.append(flying.staging)
        self._notify(link, block, flying)

    def _failed(self, flying: PieceInFlight) -> None:
        """Neither its block nor its staging block becomes free: the library may still use them."""
        LOG.warning(
            "%s does not know what became of %d bytes to %s; a block is retired",
            self._name,
            flying.piece.nbytes,
            self._peer.node,
        )
        self._let_go(flying)
        self._answered(flying, copied=False)

    def _notify(self, link: Link, block: int, flying: PieceInFlight) -> None:
        write, piece = flying.write, flying.piece
        stamp = write.stamp
        header = NOTICE.pack(
            NOTICE_MAGIC,
            block,
            piece.num_targets,
            stamp.nonce,
            stamp.chunk,
            stamp.trial,
            write.region,
            piece.nbytes,
            stamp.nbytes,
        )
        write.noticed += 1
        if not self._reader_has:
            self._progress = time.monotonic()
        self._reader_has[block] = flying
        link.send(sealed(header + piece.targets))

    def _take_answers(self, answers: AnswerReader) -> None:
        for magic, block, copied in answers.take():
            self._progress = time.monotonic()
            flying = self._reader_has.get(block)
            if magic != ANSWER_MAGIC or flying is None:
                raise ProtocolError(f"an answer for block {block} came that was not asked for")
            del self._reader_has[block]
            flying.write.noticed -= 1
            self._free.append(block)
            flying.write.refused = flying.write.refused or not copied
            self._answered(flying, copied=bool(copied))

    def _answered(self, flying: PieceInFlight, *, copied: bool) -> None:
        write = flying.write
        write.unanswered -= 1
        write.failed = write.failed or not copied
        if write.failed and write.pieces:
            write.pieces.clear()  # the rest need not go
            self.inbox.drop(write)
        if not write.unanswered and not write.pieces:
            if write.failed:
                self._reads.settle(write.handle, WriteStatus.REFUSED if write.refused else WriteStatus.FAILED)
            else:
                self._reads.settle(write.handle, WriteStatus.DONE, write.payload.digest() if write.digests else None)
