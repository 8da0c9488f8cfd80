"""Weights that come from another process's memory, and that go to other nodes.

The node loop's thread takes messages here. Transfers run on threads of their own, which hand what they have to say to
the loop. A node gives the versions that it serves or has ready, from the image in its memory.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from pdcluster.checkpoint.weight_image import WeightImage, open_image
from pdcluster.core.errors import ModelError, TransferError
from pdcluster.core.messages import (
    AnyMessage,
    Endpoint,
    FetchWeights,
    PrepareWeights,
    TakeWeights,
    WeightsDeclined,
    WeightsOffer,
    WeightsWritten,
)
from pdcluster.core.weights import WeightsVersion, WeightTensor, holder_of
from pdcluster.node.outbox import Outbox
from pdcluster.transfer.backends.base import Peer
from pdcluster.weights.pieces import OpenMedia
from pdcluster.weights.receiver import WeightsReceiver
from pdcluster.weights.sender import SourceTensor, WeightsSender

logger = logging.getLogger(__name__)

# For a holder's answer.
OFFER_S = 10.0
# For the bootstraps to tell of a holder's new boot, and how often to ask them.
FIND_S, FIND_LOOK_S = 5.0, 0.05
# Time for a sender that is stopped to end.
STOP_S = 5.0
MAX_SENDERS = 8


@dataclass(frozen=True, slots=True)
class ImageIntake:
    """How a node takes weights into its memory.

    check: raises ModelError or ConfigError for tensors that it cannot take, before any byte of them comes.
    find: another node by its name.
    """

    address: str
    check: Callable[[Sequence[WeightTensor]], None]
    open_media: OpenMedia
    find: Callable[[str], Endpoint | None]
    is_sealed: bool = False


class _Fetch:
    """Weights that a thread here waits for. The loop gives it what the holder says."""

    def __init__(self, holder: Peer) -> None:
        self.holder = holder
        self.answers: SimpleQueue[WeightsOffer | str] = SimpleQueue()
        self.receiver: WeightsReceiver | None = None
        # Before it said what it has.
        self.is_gone = False

    def fail(self, reason: str) -> None:
        self.answers.put(reason)
        if self.receiver is not None:
            self.receiver.fail(reason)


class WeightsExchange:
    """post: has the loop's thread call something soon. serving: the version of this boot, and its bytes; None where
    nobody can have them.
    """

    def __init__(
        self,
        me: Peer,
        outbox: Outbox,
        post: Callable[[Callable[[], None]], None],
        intake: ImageIntake | None,
        serving: tuple[WeightsVersion, WeightImage | None],
    ) -> None:
        self._me, self._outbox, self._post, self.intake = me, outbox, post, intake
        self.serving = serving
        self.prepared: tuple[WeightsVersion, WeightImage | None] | None = None
        self._fetches: dict[int, _Fetch] = {}
        self._receiver: WeightsReceiver | None = None
        self._stop_reason = ""
        self._senders: dict[int, tuple[WeightsSender, threading.Thread]] = {}

    # ------------------------------------------------------------ on the loop's thread

    def on_message(self, peer: Peer, message: AnyMessage) -> bool:
        """Take a message of another node. False when it is about something else."""
        if isinstance(message, FetchWeights):
            self._offer(peer, message)
        elif isinstance(message, TakeWeights):
            self._give(peer, message)
        elif isinstance(message, WeightsOffer | WeightsWritten | WeightsDeclined):
            fetch = self._fetches.get(message.nonce)
            if fetch is not None and fetch.holder == peer:
                _tell(fetch, message)
        else:
            return False
        return True

    def node_gone(self, peer: Peer) -> None:
        for fetch in list(self._fetches.values()):
            if fetch.holder == peer:
                fetch.is_gone = fetch.receiver is None
                fetch.fail(f"node {peer.node}, which gave the weights, is gone")

    def image_of(self, version: WeightsVersion) -> WeightImage | None:
        """The bytes of a version that is here."""
        for found in (self.serving, self.prepared):
            if found is not None and _is_version(found[0], version):
                return found[1]
        return None

    def begin(self) -> None:
        """Something else is received from now on."""
        self._stop_reason = ""

    def stop(self, reason: str) -> None:
        """End what is received."""
        self._stop_reason = reason
        if self._receiver is not None:
            self._receiver.fail(reason)
        for fetch in list(self._fetches.values()):
            fetch.fail(reason)

    def close(self) -> None:
        self.stop(f"node {self._me.node} stops")
        for sender, _ in list(self._senders.values()):
            sender.stop()
        for _, thread in list(self._senders.values()):
            thread.join(STOP_S)

    def _offer(self, peer: Peer, message: FetchWeights) -> None:
        image = self.image_of(message.version)
        if image is None:
            self._outbox.message(peer, WeightsDeclined(message.nonce, self._has_not(message.version)))
            return
        self._outbox.message(peer, WeightsOffer(message.nonce, tuple(each.tensor for each in image.tensors)))

    def _has_not(self, version: WeightsVersion) -> str:
        return (
            f"node {self._me.node} has no weights {version} in memory that it could give, but {self.serving[0]}; push "
            "or load them again"
        )

    def _give(self, peer: Peer, message: TakeWeights) -> None:
        nonce, image = message.target.nonce, self.image_of(message.version)
        if len(self._senders) >= MAX_SENDERS:
            reason = f"node {self._me.node} gives weights to {MAX_SENDERS} others already; ask again later"
            self._outbox.message(peer, WeightsDeclined(nonce, reason))
        elif image is None or self.intake is None or not image.hold():
            self._outbox.message(peer, WeightsDeclined(nonce, self._has_not(message.version)))
        else:
            sources = [SourceTensor(each.tensor, each.address) for each in image.tensors]
            sender = WeightsSender(self._me, sources, message.target, self.intake.open_media)
            thread = threading.Thread(
                target=self._send, args=(peer, nonce, sender, image), name=f"weights-to-{peer.node}", daemon=True
            )
            self._senders[nonce] = sender, thread
            thread.start()

    # ------------------------------------------------------------ on threads

    def _send(self, peer: Peer, nonce: int, sender: WeightsSender, image: WeightImage) -> None:
        answer: WeightsWritten | WeightsDeclined
        try:
            answer = WeightsWritten(nonce, sender.send())
        except Exception as error:  # the top of the thread: whoever waits gets the error
            logger.warning("giving weights to %s failed: %s", peer.node, error)
            answer = WeightsDeclined(nonce, str(error))
        finally:
            image.release()
            self._senders.pop(nonce, None)
        self._post(lambda: self._outbox.message(peer, answer))

    def receive(
        self, writer: Peer, tensors: Sequence[WeightTensor], opened: Callable[[WeightsReceiver], None]
    ) -> WeightImage:
        """Blocks until all is here. opened: told where the writer may write. Raises PdclusterError."""
        assert self.intake is not None  # who calls has asked
        self.intake.check(tensors)
        self._receiver = receiver = WeightsReceiver(
            self._me, self.intake.address, writer, tensors, self.intake.open_media, is_sealed=self.intake.is_sealed
        )
        if self._stop_reason:  # meanwhile
            receiver.fail(self._stop_reason)
        try:
            opened(receiver)
            return receiver.receive()
        finally:
            self._receiver = None

    def commit(self, digests: tuple[tuple[str, bytes], ...]) -> bool:
        """The writer is done. False where nothing is received."""
        receiver = self._receiver
        if receiver is not None:
            receiver.commit(digests)
        return receiver is not None

    def own_image(self, version: WeightsVersion) -> WeightImage | None:
        """Weights that are here already, perhaps under another label, as an image of their own."""
        image = self.image_of(version)
        if image is None or not image.hold():
            return None
        try:
            again = open_image(image.paths)
        finally:
            image.release()
        again.digests = image.digests
        return again

    def fetch(self, message: PrepareWeights) -> WeightImage:
        """Blocks until the weights are here, from the node that the source names. Raises PdclusterError.

        A holder that has just gone over to them is another boot, which this node hears of a moment later.
        """
        name, until = holder_of(message.source) or "", time.monotonic() + FIND_S
        if self.intake is None:
            raise ModelError(f"node {self._me.node} takes no weights from other nodes")
        while True:
            if self._stop_reason:
                raise TransferError(self._stop_reason)
            holder = self.intake.find(name) if name != self._me.node else None
            is_over = time.monotonic() >= until or name == self._me.node
            if holder is not None:
                fetch = _Fetch(Peer(holder.node, holder.incarnation))
                try:
                    return self._fetch(fetch, holder, message.version)
                except TransferError:
                    if is_over or not fetch.is_gone:
                        raise
            elif is_over:
                raise ModelError(f"node {name or '(none)'} is not known as one that has the weights {message.version}")
            time.sleep(FIND_LOOK_S)

    def _fetch(self, fetch: _Fetch, holder: Endpoint, version: WeightsVersion) -> WeightImage:
        nonce = secrets.randbits(63)
        self._fetches[nonce] = fetch
        try:
            self._post(lambda: self._outbox.message(holder, FetchWeights(nonce, version)))
            tensors = self._offered(fetch, holder.node)

            def opened(receiver: WeightsReceiver) -> None:
                fetch.receiver, target = receiver, receiver.target
                self._fetches[target.nonce] = fetch
                self._post(lambda: self._outbox.message(holder, TakeWeights(version, target)))

            return self.receive(fetch.holder, tensors, opened)
        finally:
            self._fetches = {number: each for number, each in self._fetches.items() if each is not fetch}

    def _offered(self, fetch: _Fetch, name: str) -> Sequence[WeightTensor]:
        try:
            answer = fetch.answers.get(timeout=OFFER_S)
        except Empty:
            raise TransferError(f"node {name} did not say within {OFFER_S:g} s which weights it has") from None
        if isinstance(answer, str):
            raise TransferError(answer)
        return answer.tensors


def _tell(fetch: _Fetch, message: WeightsOffer | WeightsWritten | WeightsDeclined) -> None:
    if isinstance(message, WeightsOffer):
        fetch.answers.put(message)
    elif isinstance(message, WeightsDeclined):
        fetch.fail(message.reason)
    elif fetch.receiver is not None:
        fetch.receiver.commit(message.digests)


def _is_version(found: WeightsVersion, wanted: WeightsVersion) -> bool:
    """One digest is the same weights, whatever they are called."""
    if wanted.digest:
        return wanted.digest == found.digest
    return (found.label, found.epoch) == (wanted.label, wanted.epoch)
