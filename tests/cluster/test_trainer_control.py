"""A trainer with a plain HTTP client before a cluster of real processes, whose router has two workers."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from processes import EXACT, Up, ask, running
from weight_versions import greedy, make_versions, network

PROMPT, NUM_TOKENS = [50, 300, 41, 17, 900, 12], 250
NUM_STREAMS = 3
# Logits of two orders of adding differ by less.
TIE = 1e-3
NODES = ["decode-0", "prefill-0"]
TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_versions(tmp_path_factory.mktemp("versions"), "base", "tuned")


@pytest.fixture(scope="module")
def up(versions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    flags = ("--model", str(versions["base"]), "--prefill", "1", "--decode", "1", "--workers", "2", *EXACT)
    more = ("node.threads=1", "router.control=127.0.0.1:0", f"router.admin_token_file={token}")
    with running(*flags, *(part for each in more for part in ("--set", each))) as made:
        yield made


@pytest.fixture
def trainer(up: Up) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=up.control, headers=headers, timeout=120.0, trust_env=False) as client:
        yield client
        client.post("/resume")  # a test that fails in its pause holds up no other one


class ServedWeights:
    """Which directory's weights a cluster was given under which label. Tests run in any order and number."""

    def __init__(self, trainer: httpx.Client) -> None:
        self.label: str = trainer.get("/get_weight_version").json()["weight_version"]
        self.name = name_of(self.label)
        self.next_name = "tuned" if self.name == "base" else "base"
        self.next_label = f"{self.next_name}-{uuid.uuid4().hex[:6]}"


def name_of(label: str) -> str:
    """Of the directory."""
    return label.partition("-")[0]


class Stream:
    """One stream on a connection of its own, so that both workers get some. Read in a thread."""

    def __init__(self, up: Up) -> None:
        self.tokens: list[int] = []
        self.ranges: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self._up = up
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        try:
            self._read_all()
        except Exception as error:
            self.error = error

    def _read_all(self) -> None:
        body = {
            "model": self._up.model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        with (
            httpx.Client(base_url=self._up.url, timeout=120.0, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            if reply.status_code != 200:
                raise AssertionError(reply.read())
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        self.tokens += choice.get("token_ids") or []
                    if event.get("usage"):
                        self.ranges = event["usage"]["pdcluster"]["weights"]

    def wait(self) -> None:
        self._reading.join(120)
        assert not self._reading.is_alive() and self.error is None, f"{self.error!r}\n{self._up.output()}"

    @property
    def has_begun(self) -> bool:
        assert self.error is None, f"{self.error!r}\n{self._up.output()}"
        return bool(self.tokens)


def settled(streams: list[Stream]) -> list[int]:
    """How many tokens each has, once all that was sent before a pause is read."""
    counts: list[int] = []
    while (found := [len(stream.tokens) for stream in streams]) != counts:
        counts = found
        time.sleep(0.5)
    return counts


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def require_right(stream: Stream, versions: dict[str, Path]) -> None:
    """Each token is what transformers finds likeliest with the weights that its range names, up to the last bits of
    float32.
    """
    assert len(stream.tokens) == NUM_TOKENS
    assert [part["from"] for part in stream.ranges] == [0, *(part["to"] for part in stream.ranges[:-1])]
    assert stream.ranges[-1]["to"] == NUM_TOKENS
    context, made = torch.tensor([PROMPT + stream.tokens]), torch.tensor(stream.tokens)
    for part in stream.ranges:
        first, to = part["from"], part["to"]
        with torch.no_grad():
            logits = network(versions[name_of(part["label"])])(context).logits[0, len(PROMPT) - 1 : -1][first:to]
        chosen = logits.gather(1, made[first:to, None])[:, 0]
        assert (logits.max(1).values - chosen).max() < TIE, part


def test_streams_go_on_with_the_new_weights_after_a_pause(
    up: Up, trainer: httpx.Client, versions: dict[str, Path]
) -> None:
    was = ServedWeights(trainer)
    streams = [Stream(up) for _ in range(NUM_STREAMS)]
    wait_until(lambda: all(stream.has_begun for stream in streams))
    assert trainer.post("/pause", params={"mode": "keep", "max_pause_s": 120}).json()["status"] == "paused"
    assert trainer.get("/is_paused").json() == {"is_paused": True}
    assert trainer.post("/flush_cache").status_code == 200
    counts = settled(streams)
    assert all(count < NUM_TOKENS for count in counts), "no stream ran when the pause began"

    body = {"model_path": str(versions[was.next_name]), "weight_version": was.next_label}
    told = trainer.post("/update_weights_from_disk", json=body).json()
    assert told["success"] and told["message"].startswith(f"2 of 2 nodes serve {was.next_label} (epoch "), up.output()
    (served,) = trainer.get("/weight_info").json()["weight_versions"]
    assert (served["weight_version"], served["nodes"]) == (was.next_label, NODES) and served["epoch"] > 0
    late = Stream(up)
    time.sleep(0.3)
    assert not late.tokens and [len(stream.tokens) for stream in streams] == counts
    assert trainer.post("/resume").json() == {"status": "resumed", "was_paused": True}
    for stream in (*streams, late):
        stream.wait()
        require_right(stream, versions)
    assert all([part["label"] for part in stream.ranges] == [was.label, was.next_label] for stream in streams)
    assert [part["label"] for part in late.ranges] == [was.next_label]
    up.wait_idle()


def test_steps_of_vllm_take_a_stream_over_to_the_next_weights(
    up: Up, trainer: httpx.Client, versions: dict[str, Path]
) -> None:
    was, stream = ServedWeights(trainer), Stream(up)
    wait_until(lambda: stream.has_begun)
    assert trainer.post("/start_weight_update").status_code == 200
    assert trainer.post(
        "/update_weights", json={"update_info": {"model_path": str(versions[was.next_name])}}
    ).is_success
    done = trainer.post("/finish_weight_update", json={"weight_version": was.next_label})
    assert done.status_code == 200, done.text + up.output()
    assert trainer.get("/is_paused").json() == {"is_paused": False}
    stream.wait()
    require_right(stream, versions)
    assert [part["label"] for part in stream.ranges] == [was.label, was.next_label]


def test_nodes_give_memory_back_and_wake_with_their_weights(
    up: Up, trainer: httpx.Client, versions: dict[str, Path]
) -> None:
    right = greedy(versions[ServedWeights(trainer).name], PROMPT, 8)
    for asleep, awake in (("/sleep?level=2&mode=keep", "/wake_up"), ("/release_memory_occupation",
                                                                   "/resume_memory_occupation")):  # fmt: skip
        assert sorted(trainer.post(asleep).json()["nodes"]) == NODES, up.output()
        assert trainer.get("/is_sleeping").json() == {"is_sleeping": True}
        assert sorted(trainer.post(awake).json()["nodes"]) == NODES, up.output()
        assert trainer.get("/is_sleeping").json() == {"is_sleeping": False}
        assert ask(up, PROMPT, 8)[0] == right


def test_what_fails_or_is_refused_changes_nothing(
    up: Up, trainer: httpx.Client, versions: dict[str, Path], tmp_path: Path
) -> None:
    was = ServedWeights(trainer)
    failed = trainer.post("/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": "none"})
    assert failed.status_code == 500 and failed.json()["success"] is False
    assert "the rollout of none" in failed.json()["message"] and str(tmp_path) in failed.json()["message"]
    for path, body in (
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weights_from_disk", {"model_path": str(versions[was.next_name]), "flush_cache": False}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}),
    ):
        assert trainer.post(path, json=body).status_code == 400
        assert trainer.post(path, json=body, headers={"authorization": "Bearer no"}).status_code == 401
    assert trainer.get("/is_paused").json() == {"is_paused": False}
    assert trainer.get("/get_weight_version").json()["weight_version"] == was.label
    assert ask(up, PROMPT, 8)[0] == greedy(versions[was.name], PROMPT, 8)
