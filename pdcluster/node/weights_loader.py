"""Other weights for a node that serves: they are made ready beside it, on a thread, and taken over by its next boot.
Sleep is a next boot, too: one without weights.

A node switches wholly or not at all. What fails leaves the weights that serve as they are. Owned by the node loop's
thread; `turn` takes in what the loading thread did.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from enum import Enum, auto
from queue import SimpleQueue
from typing import Protocol

from pdcluster.checkpoint.weight_image import WeightImage
from pdcluster.core.errors import BadRequest, ModelError, PdclusterError
from pdcluster.core.lifecycle import Table
from pdcluster.core.messages import (
    CommitWeights,
    DropWeights,
    PrepareWeights,
    ReceiveWeights,
    SleepNode,
    SwitchWeights,
    WeightsManaged,
    WeightsTarget,
)
from pdcluster.core.weights import NODE_SOURCE, WeightsVersion, check_source, holder_of
from pdcluster.node.outbox import Outbox
from pdcluster.node.weights_exchange import ImageIntake, WeightsExchange
from pdcluster.transfer.backends.base import Peer

logger = logging.getLogger(__name__)

# Time for a load that nobody wants any more to end.
STOP_S = 5.0


class PreparedBoot(Protocol):
    """What the node's next boot needs, with other weights in memory."""

    @property
    def version(self) -> WeightsVersion: ...

    @property
    def image(self) -> WeightImage | None:
        """The version's bytes, to be given to others."""
        ...

    @property
    def broken(self) -> Callable[[], str]:
        """Says why it cannot be taken over any more; "": it can."""
        ...

    @property
    def replace(self) -> Callable[[], str | None]:
        """Has an engine that is kept take the weights. Called again and again while nothing runs: None: not yet; "":
        this boot may end; else why the weights stay as they are.
        """
        ...

    @property
    def ended(self) -> threading.Event:
        """Set once its engine is closed. Its ranks die with the thread that started them, so that lives on until
        then.
        """
        ...

    def close(self) -> None:
        """Free it. It is not taken over."""
        ...


# Takes over the image, if it is given one: the weights are in it.
Prepare = Callable[[PrepareWeights, WeightImage | None], PreparedBoot]
# Raises PdclusterError where the node cannot sleep.
FallAsleep = Callable[[], PreparedBoot]


class LoaderState(Enum):
    IDLE = auto()
    # A thread loads.
    PREPARING = auto()
    # Ready to be switched to.
    PREPARED = auto()
    # The node takes no new work, and ends what it has.
    SWITCHING = auto()


L = LoaderState
LOADER: Table[LoaderState] = Table(
    {
        (L.IDLE, "prepare"): L.PREPARING,
        (L.PREPARING, "prepared"): L.PREPARED,
        (L.PREPARING, "failed"): L.IDLE,
        (L.PREPARED, "switch"): L.SWITCHING,
        (L.PREPARED, "drop"): L.IDLE,
        (L.IDLE, "sleep"): L.SWITCHING,
        (L.SWITCHING, "stay"): L.PREPARED,
    }
)


class WeightsLoader:
    """wakeup_fd: readable when the thread is done.
    prepare: called on the thread; None: the node's engine loads no other weights while it runs.
    intake: None: it takes none from other processes' memory.
    serving: the version of this boot, and its bytes where others may have them.
    fall_asleep: makes the boot without weights; None: the engine cannot give its memory back while the process runs.
    is_asleep: this boot is one.
    """

    def __init__(
        self,
        me: Peer,
        outbox: Outbox,
        prepare: Prepare | None,
        intake: ImageIntake | None = None,
        serving: tuple[WeightsVersion, WeightImage | None] = (WeightsVersion(), None),
        *,
        fall_asleep: FallAsleep | None = None,
        is_asleep: bool = False,
    ) -> None:
        self._node, self._outbox, self._prepare = me.node, outbox, prepare
        self._fall_asleep, self._is_asleep = fall_asleep, is_asleep
        self.exchange = WeightsExchange(me, outbox, self._post, intake, serving)
        # What threads have for the loop's thread to do.
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Replaces what is received now, once its thread has ended.
        self._next: tuple[Peer, PrepareWeights | ReceiveWeights] | None = None
        self._is_receiving = False
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._state = L.IDLE
        self._changed_share: float | None = None
        # What is loaded, and who waits for it, with the number of each question.
        self._wanted: PrepareWeights | None = None
        self._waiting: list[tuple[Peer, int]] = []
        # Nobody wants what the thread loads any more.
        self._is_dropped = False
        self._prepared: PreparedBoot | None = None
        # Set when the thread has loaded, or failed to; what it ended with.
        self._is_done = threading.Event()
        self._result: PreparedBoot | Exception | None = None
        # Held while the descriptor is written or closed: the number may be another one's afterwards.
        self._closing, self._is_closed = threading.Lock(), False
        # Who asked for the switch.
        self._switch: tuple[Peer, SwitchWeights | SleepNode] | None = None

    @property
    def is_switching(self) -> bool:
        return self._state is L.SWITCHING

    @property
    def is_preparing(self) -> bool:
        return self._state is L.PREPARING

    @property
    def prepared(self) -> WeightsVersion | None:
        return None if self._prepared is None else self._prepared.version

    @property
    def share(self) -> float | None:
        """What the switch, or a router since, says of the weights' share; None: it stays as it is."""
        assert self._switch is not None  # one is under way
        return self._switch[1].share if isinstance(self._switch[1], SwitchWeights) else self._changed_share

    def change_share(self, share: float) -> None:
        """Of the weights that serve."""
        self._changed_share = share

    def catch_up(self, me: Peer, message: PrepareWeights) -> None:
        """Begin to load for this node itself."""
        assert self._prepare is not None and self._state is L.IDLE
        self._begin(me, message)
        self._waiting.clear()

    def load(self, router: Peer, message: PrepareWeights) -> None:
        """Begin to load, or answer at once: it is loaded, or cannot be now."""
        try:
            check_source(message.source)
        except BadRequest as error:
            self._answer(router, message.number, str(error))
            return
        if self._prepare is None:
            reason = f"the engine of node {self._node} loads no other weights while it runs; start a node with them"
            self._answer(router, message.number, reason)
        elif holder_of(message.source) is not None and self.exchange.intake is None and not self._is_asleep:
            self._answer(router, message.number, self._from_files_only())
        elif self._state is L.IDLE:
            self._begin(router, message)
        elif self._state is L.PREPARED and not self._is_wanted(message):
            self._state = LOADER[self._state, "drop"]
            self._free()
            self.load(router, message)
        elif self._state is L.PREPARING and self._is_receiving and not self._is_wanted(message):
            self._replace_received(router, message)
        elif not self._is_wanted(message):
            self._answer(router, message.number, self._in_hand())
        elif self._state is L.PREPARING and self._is_dropped:
            self._answer(router, message.number, f"node {self._node} is about to drop these weights; ask again")
        elif self._state is L.PREPARING:
            self._waiting.append((router, message.number))
        else:
            self._answer(router, message.number)

    def _begin(self, router: Peer, message: PrepareWeights, receives: ReceiveWeights | None = None) -> None:
        self._state = LOADER[self._state, "prepare"]
        self._wanted, self._is_dropped, self._is_receiving = message, False, receives is not None
        self._waiting = [(router, message.number)]
        self._is_done.clear()
        self.exchange.begin()
        threading.Thread(target=self._run, args=(message, receives), name="weights", daemon=True).start()

    def _from_files_only(self) -> str:
        return (
            f"the engine of node {self._node} takes no weights from the memory of trainers and nodes; write them to "
            "files and load these with pdctl weights load"
        )

    def _in_hand(self) -> str:
        return (
            f"node {self._node} has {self._wanted.version if self._wanted else 'other weights'} in hand; drop them "
            "first, or wait until they serve"
        )

    def receive(self, router: Peer, message: ReceiveWeights) -> None:
        """Take weights that somebody writes, or answer at once: they are here, or cannot be taken."""
        serving, number = self.exchange.serving[0], message.number
        wanted = PrepareWeights(number, message.version, NODE_SOURCE)
        if self._prepare is None or self.exchange.intake is None:
            self._answer(router, number, self._from_files_only())
        elif not self._is_asleep and (serving.label, serving.epoch) == (message.version.label, message.version.epoch):
            self._outbox.message(router, WeightsManaged(number, "", serving))
        elif self._state is L.IDLE:
            self._begin(router, wanted, message)
        elif self._state in (L.PREPARED, L.SWITCHING) and self._is_wanted(wanted):
            self._answer(router, number)
        elif self._state is L.PREPARED:
            self._state = LOADER[self._state, "drop"]
            self._free()
            self._begin(router, wanted, message)
        elif self._state is L.PREPARING and self._is_receiving:
            self._replace_received(router, message)
        else:
            self._answer(router, number, self._in_hand())

    def _replace_received(self, router: Peer, message: PrepareWeights | ReceiveWeights) -> None:
        """A later order counts: whoever wrote these weights may be gone."""
        self.exchange.stop(f"the weights {message.version} take the place of these")
        self._forget_next(f"the weights {message.version} took their place")
        self._next = router, message

    def commit(self, router: Peer, message: CommitWeights) -> None:
        """All bytes of what is received are written. Of weights that are here already, check that they are the same."""
        version, number = message.version, message.number
        image = self.exchange.image_of(version)
        if image is not None:
            serving = self.exchange.serving[0]
            found = serving if serving.label == version.label else self.prepared
            is_same = image.digests is not None and image.digests == dict(message.digests)
            reason = f"node {self._node} has other weights as {version}; push these under another label"
            self._outbox.message(router, WeightsManaged(number, "" if is_same else reason, found))
        elif (
            self._state is L.PREPARING and self._is_receiving and self._wanted is not None
            and self._wanted.version == version and self.exchange.commit(message.digests)
        ):  # fmt: skip
            self._waiting.append((router, number))
        else:
            self._answer(router, number, f"node {self._node} receives no weights {version}; push them again")

    def _opened(self, target: WeightsTarget) -> None:
        """The thread can be written to."""
        waiting, self._waiting = self._waiting, []
        for router, number in waiting:
            self._outbox.message(router, WeightsManaged(number, "", self.prepared, target))

    def _is_wanted(self, message: PrepareWeights) -> bool:
        """Whether that is what is loaded. The digest may have been asked for only later. Which node gave weights does
        not matter.
        """
        wanted = self._wanted
        if wanted is None or wanted.version.epoch != message.version.epoch:
            return False
        if wanted.source != message.source and None in (holder_of(wanted.source), holder_of(message.source)):
            return False
        known = wanted.version.digest or ("" if self._prepared is None else self._prepared.version.digest)
        return wanted.version.label == message.version.label and message.version.digest in ("", known)

    def drop(self, router: Peer, message: DropWeights) -> None:
        if self._state is L.SWITCHING:
            self._answer(router, message.number, f"node {self._node} is about to serve them; load others afterwards")
            return
        if self._state is L.PREPARED:
            logger.info("the weights %s are dropped", self.prepared)
            self._state = LOADER[self._state, "drop"]
            self._free()
        self._is_dropped = True
        self._forget_next("nobody wants these weights any more")
        self.exchange.stop("nobody wants these weights any more")
        self._answer(router, message.number)

    def _forget_next(self, reason: str) -> None:
        following, self._next = self._next, None
        if following is not None:
            self._answer(following[0], following[1].number, reason)

    def switch(self, router: Peer, message: SwitchWeights) -> bool:
        """Whether the node is to end what it has now. The router is answered where it is not."""
        if self._state is L.SWITCHING and self._prepared is not None and message.epoch == self._prepared.version.epoch:
            return False  # repeated
        if self._state is not L.PREPARED or self._prepared is None or self._prepared.version.epoch != message.epoch:
            has = "none" if self._prepared is None else str(self._prepared.version)
            reason = f"node {self._node} has no weights of epoch {message.epoch} ready, but {has}; prepare them first"
            self._answer(router, message.number, reason)
            return False
        if why := self._prepared.broken():
            self._state = LOADER[self._state, "drop"]
            self._free()
            self._answer(router, message.number, f"what node {self._node} had ready is lost: {why}; load it again")
            return False
        self._state, self._switch = LOADER[self._state, "switch"], (router, message)
        logger.info("switching to the weights %s", self._prepared.version)
        return True

    def sleep(self, router: Peer, message: SleepNode) -> bool:
        """Whether the node is to end what it has now, and sleep. The router is answered where it is not. What was ready
        is dropped: its memory goes, too.
        """
        is_repeated = self._switch is not None and isinstance(self._switch[1], SleepNode)
        if self._is_asleep or is_repeated:
            if self._is_asleep:
                self._answer(router, message.number)
            return False
        if self._state in (L.PREPARING, L.SWITCHING):
            self._answer(router, message.number, self._in_hand())
            return False
        try:
            boot = self._boot_asleep()
        except PdclusterError as error:
            self._answer(router, message.number, str(error))
            return False
        if self._state is L.PREPARED:
            self._state = LOADER[self._state, "drop"]
            self._free()
        self._state, self._prepared, self._switch = LOADER[self._state, "sleep"], boot, (router, message)
        logger.info("about to sleep")
        return True

    def _boot_asleep(self) -> PreparedBoot:
        if self._fall_asleep is None:
            raise ModelError(
                f"the engine of node {self._node} gives no memory back while its process runs; stop the node instead"
            )
        return self._fall_asleep()

    def stay(self, reason: str) -> None:
        """The switch is off: the old weights serve on."""
        assert self._switch is not None  # one is under way
        router, message = self._switch
        self._state, self._switch = LOADER[self._state, "stay"], None
        if isinstance(message, SleepNode):
            self._state = LOADER[self._state, "drop"]
            self._free()
        logger.warning("the weights stay as they are: %s", reason)
        self._answer(router, message.number, reason)

    def replace(self) -> str | None:
        """Whether this boot may end, in the words of PreparedBoot.replace."""
        assert self._prepared is not None and self._state is L.SWITCHING
        return self._prepared.replace()

    def take(self) -> PreparedBoot:
        """What the switch leads to. It belongs to the caller."""
        assert self._prepared is not None and self._state is L.SWITCHING
        prepared, self._prepared = self._prepared, None
        return prepared

    def turn(self) -> None:
        """Take in what the thread did."""
        try:
            os.eventfd_read(self.wakeup_fd)
        except BlockingIOError:
            return
        while not self._posted.empty():
            self._posted.get_nowait()()
        if self._state is not L.PREPARING or not self._is_done.is_set():
            return
        result, self._result, error = self._result, None, ""
        assert result is not None  # the thread sets it first
        if isinstance(result, Exception):
            self._state, error = LOADER[self._state, "failed"], str(result)
            self._wanted = None
        else:
            self._state, self._prepared = LOADER[self._state, "prepared"], result
            self.exchange.prepared = result.version, result.image
            if self._is_dropped:
                self._state, error = LOADER[self._state, "drop"], "they were dropped meanwhile"
                self._free()
        waiting, self._waiting = self._waiting, []
        for router, number in waiting:
            self._answer(router, number, error)
        following, self._next = self._next, None
        if following is not None:
            router, message = following
            self.load(router, message) if isinstance(message, PrepareWeights) else self.receive(router, message)

    def close(self) -> None:
        """Free what is not taken over. A load that still runs has STOP_S to end. Idempotent."""
        self.exchange.close()
        if self._state is L.PREPARING and self._is_done.wait(STOP_S):
            self._prepared = None if isinstance(self._result, Exception) else self._result
        self._free()
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.wakeup_fd)

    @property
    def num_busy(self) -> int:
        """Threads that load on after `close`."""
        return int(self._state is L.PREPARING and not self._is_done.is_set())

    def _free(self) -> None:
        prepared, self._prepared, self._wanted = self._prepared, None, None
        self.exchange.prepared = None
        if prepared is not None:
            prepared.close()

    def _answer(self, router: Peer, number: int, error: str = "") -> None:
        self._outbox.message(router, WeightsManaged(number, error, self.prepared))

    def _post(self, action: Callable[[], None]) -> None:
        """Have the loop's thread do something. Called by threads."""
        self._posted.put(action)
        self._wake()

    def _wake(self) -> None:
        with self._closing:
            if not self._is_closed:
                os.eventfd_write(self.wakeup_fd, 1)

    def _image(self, message: PrepareWeights, receives: ReceiveWeights | None) -> WeightImage | None:
        """What comes from another process's memory. Blocks."""
        if receives is not None:
            writer = Peer(receives.writer.node, receives.writer.incarnation)
            return self.exchange.receive(
                writer, receives.tensors, lambda receiver: self._post(lambda: self._opened(receiver.target))
            )
        holder = holder_of(message.source)
        if holder is None:
            return None
        if holder == self._node:
            own = self.exchange.own_image(message.version)
            if own is not None or self._is_asleep:
                return own
        return self.exchange.fetch(message)

    def _run(self, message: PrepareWeights, receives: ReceiveWeights | None) -> None:
        """On the thread."""
        assert self._prepare is not None  # as `load` checked
        logger.info("loading the weights %s from %s", message.version, message.source)
        result: PreparedBoot | Exception
        try:
            result = self._prepare(message, self._image(message, receives))
        except PdclusterError as error:
            logger.warning("the weights %s cannot be loaded: %s", message.version, error)
            result = error
        except Exception as error:  # the top of the thread: the node serves on, and whoever asked gets the error
            logger.exception("loading the weights %s failed", message.version)
            result = error
        self._result = result
        self._is_done.set()
        self._wake()
        if not isinstance(result, Exception):
            result.ended.wait()
