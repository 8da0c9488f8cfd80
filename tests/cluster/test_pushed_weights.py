"""Weights that a trainer pushes into a cluster of real processes, and that nodes pass on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from processes import EXACT, Up, ask, running
from safetensors.torch import load_file
from weight_versions import greedy, make_versions

from pdcluster.core.errors import PdclusterError
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.weights.publisher import Publisher

PROMPT, NUM_TOKENS = [50, 300, 41, 17, 900, 12], 12


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_versions(tmp_path_factory.mktemp("versions"), "base", "tuned", "third")


@pytest.fixture(scope="module")
def up(versions: dict[str, Path]) -> Iterator[Up]:
    flags = ("--model", str(versions["base"]), "--prefill", "1", "--decode", "1", "--set", "node.threads=1")
    with running(*flags, *EXACT) as made:
        yield made


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_all_nodes_serve_what_was_pushed(up: Up, versions: dict[str, Path]) -> None:
    before, after = (greedy(versions[name], PROMPT, NUM_TOKENS) for name in ("base", "tuned"))
    assert before != after and ask(up, PROMPT, NUM_TOKENS)[0] == before
    given = tensors(versions["tuned"])
    with Publisher(up.admin) as publisher:
        version = publisher.push(given, "tuned", finish_s=5.0)
        assert (version.label, version.epoch) == ("tuned", 1) and version.digest
        assert sum(publisher.sent_bytes.values()) == sum(each.nbytes for each in given.values())
        assert ask(up, PROMPT, NUM_TOKENS)[0] == after, up.output()
        # Sent again, nothing changes; other weights have no place under that label.
        assert publisher.push(given, "tuned", finish_s=5.0) == version
        with pytest.raises(PdclusterError, match=r"has other weights as tuned .* another label"):
            publisher.push(tensors(versions["third"]), "tuned", finish_s=5.0)


def test_tensors_of_another_model_are_refused_before_they_are_sent(up: Up, versions: dict[str, Path]) -> None:
    given = tensors(versions["tuned"])
    given.pop("model.norm.weight")
    with Publisher(up.admin) as publisher:
        with pytest.raises(PdclusterError, match=r"node \S+ does not take .* tensor model.norm.weight .* is missing"):
            publisher.push(given, "half")
        assert publisher.sent_bytes == {}


def test_a_node_that_starts_again_takes_what_the_others_serve(up: Up, versions: dict[str, Path]) -> None:
    right = greedy(versions["tuned"], PROMPT, NUM_TOKENS)
    for node in ("decode-0", "prefill-0"):
        up.kill(node)
        up.wait_nodes(1)
        up.wait_nodes(2)
        assert ask(up, PROMPT, NUM_TOKENS)[0] == right, up.output()
    with grpc.insecure_channel(up.admin) as channel:
        nodes = stubs.AdminStub(channel).ListNodes(pb.ListNodesRequest(), timeout=10).nodes
    assert [(node.weights.label, node.weights.epoch) for node in nodes] == [("tuned", 1)] * 2
