"""Weights from memory to memory, over media of their own, with both ends on threads."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from backend_ends import eventually
from msgspec.structs import replace
from safetensors.torch import load_file

from pdcluster.checkpoint.weight_image import new_image, open_image
from pdcluster.core.errors import TransferError
from pdcluster.core.messages import WeightsTarget
from pdcluster.core.weights import WeightTensor
from pdcluster.transfer.backends.base import Backend, Peer
from pdcluster.transfer.paths.choose import create_backends
from pdcluster.weights import pieces, receiver
from pdcluster.weights.receiver import WeightsReceiver
from pdcluster.weights.sender import SourceTensor, WeightsSender

ME, WRITER = Peer("d0", "d0-1"), Peer("trainer", "t-1")
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@pytest.fixture(params=["shm", "tcp"])
def medium(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither end leaves descriptors or threads behind."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)
    gc.collect()  # what tests before left to it would go while this one runs
    before = len(os.listdir("/proc/self/fd")), left()
    yield
    eventually(lambda: left() - before[1] == set(), "the threads ended")  # one that closed its link may still return
    assert len(os.listdir("/proc/self/fd")) == before[0]


def left() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(("kv-", "weights"))}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "norm": torch.rand(7).to(torch.bfloat16),
        "embed": torch.rand(100, 33),
        "none": torch.rand(0, 4),
        "head": torch.rand(50, 64).to(torch.float16),
    }


def sources_of(found: dict[str, torch.Tensor]) -> list[SourceTensor]:
    return [
        SourceTensor(WeightTensor(name, KINDS[tensor.dtype], tuple(tensor.shape)), tensor.data_ptr())
        for name, tensor in found.items()
    ]


class Ends:
    def __init__(self, medium: str, given: dict[str, torch.Tensor]) -> None:
        self.medium, self.given = medium, given
        self.sources = sources_of(given)
        self.receiver = WeightsReceiver(ME, "d0:1", WRITER, [each.tensor for each in self.sources], self.media)
        self.sender = self.sender_to(self.receiver.target)

    def media(self, me: Peer) -> dict[str, Backend]:
        return create_backends(self.medium, me, host="127.0.0.1", staging_bytes=1 << 20)

    def sender_to(self, target: WeightsTarget) -> WeightsSender:
        return WeightsSender(WRITER, self.sources, target, self.media)

    def receives(self) -> tuple[threading.Thread, list[object]]:
        results: list[object] = []

        def run() -> None:
            try:
                results.append(self.receiver.receive())
            except TransferError as error:
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, results


def ended(running: tuple[threading.Thread, list[object]]) -> object:
    thread, results = running
    thread.join(20)
    return results[0]


def test_what_arrives_is_a_safetensors_file_with_the_same_tensors(medium: str, tmp_path: Path) -> None:
    ends = Ends(medium, tensors())
    running = ends.receives()
    ends.receiver.commit(ends.sender.send())
    image = ended(running)
    assert image is ends.receiver.image
    (tmp_path / "copy.safetensors").write_bytes(image.paths[0].read_bytes())
    found = load_file(tmp_path / "copy.safetensors")
    assert found.keys() == ends.given.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in ends.given.items())
    # Every byte went over the link once.
    assert ends.sender.sent_bytes == {medium: sum(each.tensor.nbytes for each in ends.sources)}
    image.close()


def test_it_is_passed_on_from_there(medium: str) -> None:
    ends = Ends(medium, tensors())
    running = ends.receives()
    ends.receiver.commit(ends.sender.send())
    first = ended(running)
    again = open_image(first.paths)
    first.close()
    onward = [SourceTensor(each.tensor, each.address) for each in again.tensors]
    second = WeightsReceiver(ME, "d0:1", WRITER, [each.tensor for each in onward], ends.media)
    thread = threading.Thread(
        target=lambda: second.commit(WeightsSender(WRITER, onward, second.target, ends.media).send())
    )
    thread.start()
    image = second.receive()
    thread.join()
    assert image.digests == first.digests
    image.close()
    again.close()


def test_another_byte_than_was_sent_is_refused(medium: str) -> None:
    ends = Ends(medium, tensors())
    running = ends.receives()
    digests = dict(ends.sender.send())
    ends.receiver.commit(tuple({**digests, "norm": bytes(16)}.items()))
    error = ended(running)
    assert "tensor norm did not arrive as it was sent (1 such tensors); nothing is taken" in str(error)
    assert ends.receiver.image.fds == []


def test_a_sender_that_dies_leaves_nothing_behind(medium: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "START_S", 0.3)
    ends = Ends(medium, tensors())
    error = ended(ends.receives())
    assert "trainer sent 0 of 19614 bytes, then nothing for 0.3 s" in str(error)
    assert ends.receiver.image.fds == []


def test_a_sender_that_gives_up_ends_it_at_once(medium: str) -> None:
    ends = Ends(medium, tensors())
    running = ends.receives()
    ends.receiver.fail("no room")
    assert str(ended(running)) == "no room"


def test_a_receiver_that_is_gone_ends_the_sender(medium: str) -> None:
    ends = Ends(medium, tensors())
    ends.receiver.close()
    ends.receiver.image.close()
    with pytest.raises(TransferError, match="weights cannot be written to d0"):
        ends.sender.send()


def test_a_sender_stops(medium: str) -> None:
    ends = Ends(medium, tensors())
    ends.sender.stop()
    with pytest.raises(TransferError, match="was stopped"):
        ends.sender.send()
    ends.receiver.close()
    ends.receiver.image.close()


def test_a_target_of_other_tensors_is_refused(medium: str) -> None:
    ends = Ends(medium, tensors())
    with pytest.raises(TransferError, match="wants 1 of 4 tensors"):
        ends.sender_to(replace(ends.receiver.target, starts=(0,))).send()
    ends.receiver.close()
    ends.receiver.image.close()


def test_a_write_without_permit_lands_nowhere() -> None:
    """tcp checks at the receiver."""
    ends = Ends("tcp", tensors())
    with pytest.raises(TransferError, match="takes these weights no more"):
        ends.sender_to(replace(ends.receiver.target, nonce=1)).send()
    ends.receiver.close()
    ends.receiver.image.close()


def test_the_other_medium_carries_what_the_best_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends("auto", tensors())
    adverts = tuple(
        (name, b"bad" if name == "shm" else advert) for name, advert in ends.receiver.target.receiver.adverts
    )
    target = replace(ends.receiver.target, receiver=replace(ends.receiver.target.receiver, adverts=adverts))
    ends.sender = ends.sender_to(target)
    running = ends.receives()
    ends.receiver.commit(ends.sender.send())
    image = ended(running)
    assert ends.sender.sent_bytes.keys() == {"tcp"}
    image.close()


def test_an_image_that_is_read_closes_behind_its_reader() -> None:
    image = new_image([WeightTensor("x", "F32", (3,))])
    assert image.hold()
    image.close()
    assert not image.hold() and len(image.fds) == 1
    image.release()
    assert image.fds == []
