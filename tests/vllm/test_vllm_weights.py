"""A rollout of other weights over nodes with vLLM, under load: each range of tokens is that of the weights it names.

A greedy token is right when its logit is within 1e-3 of the best one that transformers computes in float32.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from vllm_cluster import VllmCluster, free_port, running_cluster
from weight_versions import make_versions, network

from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs

NEAR = 1e-3
NUM_TOKENS = 40
CLIENTS = 3
PROMPTS = [[50 + 7 * number, *range(100, 240), 17 + number] for number in range(CLIENTS)]
ROLLOUT_S = 240.0


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_versions(tmp_path_factory.mktemp("versions"), "base", "tuned")


class Rollouts:
    def __init__(self, cluster: VllmCluster, admin: str) -> None:
        self.cluster, self._admin = cluster, admin
        self._is_over = threading.Event()

    def load(self, source: Path | str, label: str) -> pb.RolloutProgress:
        """Its last word."""
        with grpc.insecure_channel(self._admin) as channel:
            request = pb.LoadWeightsRequest(source=str(source), label=label, finish_s=20.0, max_unavailable=1)
            return list(stubs.AdminStub(channel).LoadWeights(request, timeout=ROLLOUT_S))[-1]

    def undo(self) -> pb.RolloutProgress:
        with grpc.insecure_channel(self._admin) as channel:
            return list(stubs.AdminStub(channel).UndoWeights(pb.UndoWeightsRequest(), timeout=ROLLOUT_S))[-1]

    def refusal(self, source: Path | str, label: str) -> str:
        with pytest.raises(grpc.RpcError) as refused:
            self.load(source, label)
        return str(refused.value.details())  # type: ignore[attr-defined]

    def sleep_refusal(self) -> str:
        with grpc.insecure_channel(self._admin) as channel, pytest.raises(grpc.RpcError) as refused:
            stubs.AdminStub(channel).Sleep(pb.SleepRequest(mode="wait", max_pause_s=30.0), timeout=60)
        return str(refused.value.details())  # type: ignore[attr-defined]

    def ask(self, number: int) -> dict[str, Any]:
        return self.cluster.complete(PROMPTS[number], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)

    def loaded_answers(self, change: Any) -> list[tuple[int, dict[str, Any]]]:
        """What clients get while `change` runs, before and behind it."""
        found: list[tuple[int, dict[str, Any]]] = []
        self._is_over.clear()

        def ask(number: int) -> None:
            while not self._is_over.is_set():
                found.append((number, self.ask(number)))

        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(ask, number) for number in range(CLIENTS)]
            try:
                time.sleep(2.0)
                change()
                time.sleep(2.0)
            finally:
                self._is_over.set()
            for each in asking:
                each.result(180)
        return found


@pytest.fixture(scope="module")
def rollouts(versions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollouts]:
    admin = f"127.0.0.1:{free_port()}"
    with running_cluster(
        tmp_path_factory.mktemp("cluster"), versions["base"], ("prefill", "decode"), "--set", "router.mode=remote",
        "--admin", admin,
    ) as cluster:  # fmt: skip
        yield Rollouts(cluster, admin)


def labels_of(answer: dict[str, Any], prompt: list[int], versions: dict[str, Path]) -> list[str]:
    """The weights that the answer names. Each range is what they make of all that stands before."""
    tokens, labels = answer["choices"][0]["token_ids"], []
    ranges = answer["usage"]["pdcluster"]["weights"]
    assert [each["from"] for each in ranges] == [0, *(each["to"] for each in ranges[:-1])]
    assert ranges[-1]["to"] == len(tokens) == NUM_TOKENS
    for each in ranges:
        first, end = each["from"], each["to"]
        with torch.no_grad():
            logits = network(versions[each["label"]])(torch.tensor([[*prompt, *tokens[:end]]])).logits[0]
        rows = logits[len(prompt) + first - 1 : -1]
        gaps = rows.max(dim=1).values - rows.gather(1, torch.tensor(tokens[first:end])[:, None])[:, 0]
        assert gaps.max() <= NEAR, f"tokens {first} to {end} are not those of {each['label']}"
        labels.append(each["label"])
    return labels


def test_a_rollout_and_its_undoing_mix_no_weights_and_fail_no_request(
    rollouts: Rollouts, versions: dict[str, Path]
) -> None:
    progress: list[pb.RolloutProgress] = []

    def change() -> None:
        progress.append(rollouts.load(versions["tuned"], "tuned"))
        time.sleep(2.0)
        progress.append(rollouts.undo())

    answers = rollouts.loaded_answers(change)
    done, undone = progress
    assert (done.done, done.label, done.epoch) == (2, "tuned", 1)
    assert (undone.done, undone.label, undone.epoch) == (2, "base", 2)
    seen = {label for number, answer in answers for label in labels_of(answer, PROMPTS[number], versions)}
    assert seen == {"base", "tuned"}
    assert labels_of(rollouts.ask(0), PROMPTS[0], versions) == ["base"]


def test_what_cannot_be_loaded_is_refused_by_name_and_serving_goes_on(
    rollouts: Rollouts, versions: dict[str, Path], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(versions["tuned"], tmp_path / "other"))
    config = other / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.1}))
    assert "is another model: rms_norm_eps is 0.1" in rollouts.refusal(other, "other")
    assert "files" in rollouts.refusal("node:decode-1", "held")
    assert "gives no memory back" in rollouts.sleep_refusal()
    assert labels_of(rollouts.ask(1), PROMPTS[1], versions) == ["base"]


def test_a_node_that_starts_again_reads_what_the_cluster_serves(rollouts: Rollouts, versions: dict[str, Path]) -> None:
    """Its flag names the files of before."""
    assert rollouts.load(versions["tuned"], "tuned-again").done == 2
    node = rollouts.cluster.processes["decode-1"]
    node.terminate()
    assert node.wait(60) == 0
    rollouts.cluster.start_node("decode-1", "decode", 1)
    rollouts.cluster.wait_ready()
    answer = rollouts.ask(2)
    assert answer["usage"]["pdcluster"]["weights"][0]["label"] == "tuned-again"
    rows = {"tuned-again": versions["tuned"], **versions}
    assert labels_of(answer, PROMPTS[2], rows) == ["tuned-again"]
