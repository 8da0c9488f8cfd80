"""Weights of a node that sleeps, on its disk."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pdcluster.checkpoint.weight_image import StoredImage, new_image
from pdcluster.core.errors import ModelError
from pdcluster.core.weights import WeightTensor

TENSORS = (WeightTensor("a", "F32", (300, 7)), WeightTensor("b", "BF16", (41,)))


def test_an_image_comes_back_from_the_disk_with_its_bytes_and_digests(tmp_path: Path) -> None:
    image = new_image(TENSORS)
    image.digests = {"a": b"1", "b": b"2"}
    np.frombuffer(image.memory(), np.uint8)[4096:] = np.arange(image.nbytes - 4096, dtype=np.uint64).astype(np.uint8)
    before = bytes(image.memory())
    first = StoredImage(image, tmp_path)
    first.fill(image)
    image.close()
    assert os.listdir(tmp_path) == []  # without a name
    awake = first.open()
    first.close()
    first.close()
    stored = StoredImage(awake, tmp_path)  # the next sleep keeps the same file
    assert [os.fstat(fd).st_ino for fd in awake.fds] == [os.fstat(file.fileno()).st_ino for file in stored._files]
    stored.fill(awake)
    awake.close()
    again = stored.open()
    stored.close()
    assert bytes(again.memory()) == before and again.digests == {"a": b"1", "b": b"2"}
    assert {each.tensor.name: each.tensor for each in again.tensors} == {each.name: each for each in TENSORS}
    again.close()


def test_a_place_that_takes_no_files_is_named(tmp_path: Path) -> None:
    image, before = new_image(TENSORS), len(os.listdir("/proc/self/fd"))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot be kept in .*/file: .*set PDCLUSTER_CACHE_DIR"):
        StoredImage(image, tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before
    image.close()


def test_the_room_is_taken_before_anything_is_given_up(tmp_path: Path) -> None:
    image = new_image(TENSORS)
    stored = StoredImage(image, tmp_path)
    found = os.fstat(stored._files[0].fileno())
    assert found.st_size == image.nbytes and found.st_blocks * 512 >= image.nbytes
    stored.close()
    image.close()
