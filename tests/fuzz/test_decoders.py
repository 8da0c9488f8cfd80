"""Bytes of any kind at every decoder: taken, or refused with an error of its own; never a crash, never memory that was
not permitted, never an allocation that only a peer's word stands for. Half of the inputs are random, half are good ones
with some bytes changed.
"""

from __future__ import annotations

import random
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from decoders import Decoder, Guarded, decoders, feed

from pdcluster.core.errors import ProtocolError

SAMPLE, WHOLE = 1500, 100_000
NAMES = (
    "wire frame", "wire frame with a good digest", "address",
    "adverts of ranks", "ready line", "card", "snapshot", "demand",
    "generate request", "schema", "own grammar", "rank message",
    "transfer hello", "sealed record",
    "transfer advert", "tcp frame", "tcp answer", "staged notice", "staged grant", "staged answer", "shm notice",
    "shm advert",
    "shm hello", "shm regions", "control frame", 
    "vllm question", "vllm answer", "vllm reference", "vllm events", "vllm notice",
)  # fmt: skip
EXTREMES = (
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff" * 8,
    b"\x00" * 8,
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 2000,
)
UNPACKING = re.compile(
    r"msgspec\.(msgpack|json)\.(decode|Decoder)\(|json\.loads\(|\.(iter_)?unpack(_from)?\(|FromString\(|_from_proto\("
)
DEEP = (b"[" * 60_000, b"\x91" * 60_000, b'{"a":' * 10_000, b"\x0b" * 20_000)


@pytest.fixture(scope="module")
def every() -> Iterator[dict[str, Decoder]]:
    found = decoders()
    yield found
    for decoder in found.values():
        decoder.end()


def inputs(decoder: Decoder, count: int, seed: str) -> Iterator[bytes]:
    rng = random.Random(f"{decoder.name}/{seed}")
    yield from DEEP
    for number in range(count - len(DEEP)):
        yield rng.randbytes(rng.choice((0, 1, 3, 8, 20, 40, 90, 200))) if number % 2 else mutated(rng, decoder.corpus)


def mutated(rng: random.Random, corpus: tuple[bytes, ...]) -> bytes:
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
            case 2:
                data[at : at + rng.randrange(9)] = rng.choice(EXTREMES)
            case 3:
                del data[at:]
            case 4:
                data[at:at] = rng.choice(corpus)
            case 5:
                data[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 255, 65535, 1 << 20, 1 << 31, (1 << 32) - 1)))
    return bytes(data)


def run(decoder: Decoder, count: int, seed: str) -> Counter[str]:
    """How many inputs were taken, how many refused, and which did harm."""
    ends: Counter[str] = Counter()
    for data in inputs(decoder, count, seed):
        try:
            ends["taken" if feed(decoder, data) else "refused"] += 1
        except Exception as error:
            ends[f"harmed by {len(data)} bytes {data[:200]!r}: {error!r}"] += 1
    return ends


def check(ends: Counter[str], count: int, takes_anything: bool) -> None:
    assert set(ends) <= {"taken", "refused"} and ends.total() == count
    assert takes_anything or ends["refused"], "no input was so bad that it was refused"


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_bytes_does_no_harm(name: str, every: dict[str, Decoder]) -> None:
    check(run(every[name], SAMPLE, "sample"), SAMPLE, not every[name].errors)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_thousand_inputs_do_no_harm(name: str, every: dict[str, Decoder]) -> None:
    check(run(every[name], WHOLE, "whole"), WHOLE, not every[name].errors)


def test_harm_done_by_a_decoder_is_seen() -> None:
    """Three that must not pass: one crashes, one writes where nothing is permitted, one takes whatever comes."""

    def spoils(data: bytes) -> None:
        memory.bytes[0] = 1

    memory = Guarded()
    crashes = Decoder("crashes", (b"x",), lambda data: data[7], (ProtocolError,))
    writes = Decoder("writes", (b"x",), spoils, (ProtocolError,), memory.check)
    for decoder, seen in (
        (crashes, "IndexError"),
        (writes, "bytes landed outside"),
        (Decoder("takes", (b"x",), len, (ProtocolError,)), "no input"),
    ):
        with pytest.raises(AssertionError, match=seen):
            check(run(decoder, 20, "sample"), 20, takes_anything=False)


@pytest.mark.parametrize("name", NAMES)
def test_good_input_is_taken(name: str, every: dict[str, Decoder]) -> None:
    """A stream decoder goes on until the stream ends, and so never returns."""
    decoder = every[name]
    taken = 0
    for data in decoder.corpus:
        try:
            decoder.decode(data)
        except OSError as error:
            assert "the end of what it said" in str(error) or "closed" in str(error)
        decoder.check()
        taken += 1
    assert taken == len(decoder.corpus) > 0


def test_no_decoder_is_left_out(every: dict[str, Decoder]) -> None:
    """Every module of the product that unpacks bytes of others is known here."""
    assert set(every) == set(NAMES)
    root = Path(__file__).parents[2]
    known = {
        "wire/codec.py", "processes/ready.py", "bootstrap/card_messages.py", "rpc/inference.py",
        "node/native/tensor_parallel/channel.py",
        "engine/sampling/grammar.py", "transfer/backends/tcp_links.py", "transfer/backends/ranked.py",
        "transfer/backends/lane_hello.py", "transfer/backends/sealing.py",
        "transfer/backends/tcp.py", "transfer/backends/staged/backend.py", "transfer/backends/shm_frames.py",
        "transfer/backends/staged/staging.py", "transfer/backends/staged/pump.py",
        "bootstrap/demand.py",
        "bootstrap/server.py", "bootstrap/agent.py", "bootstrap/demand_client.py",  # use the converters above
        # tables of the same node's ranks: a bad one ends the node
        "node/native/tensor_parallel/endpoint_client.py", "node/native/tensor_parallel/endpoint.py",
        "node/native/tensor_parallel/messages.py",
        "node/vllm/engine/reference.py", "node/vllm/engine/read_confirmation.py", "node/vllm/events.py",
        "node/vllm/sampling/rules.py",  # from its own node
        "transfer/backends/shm_memory.py", "transfer/backends/shm.py",  # what the kernel says
        # a model's files
        "engine/model/config.py", "engine/model/weights.py", "api/text/model_text.py", "checkpoint/end_tokens.py",
        "checkpoint/token_ids.py", "checkpoint/inspection.py", "checkpoint/hub.py", "checkpoint/weight_image.py",
            "node/vllm/weights_change.py",
        "api/tools/arguments.py",  # of calls that a client sends back: tests/unit/api/openai/test_histories.py
        # HTTP bodies: tests/unit/router/frontend/openai/test_http_fuzz.py
        "api/openai/requests.py", "api/openai/embeddings.py", "api/openai/responses/requests.py", "api/anthropic/requests.py", "api/validate.py", "api/structured/constraints.py",
        "api/tools/calls.py",  # what a model says: tests/unit/api/tools
        "api/openai/responses/custom_input.py",  # the same: tests/unit/api/openai/responses/test_custom_input.py
        "launch/demo.py", "launch/up.py",  # our own router's answers
        "node/reports/leg_records.py",  # 24 bytes whose number wire/codec.py has checked
        "processes/spare.py",  # the arguments that its own supervisor writes
    }  # fmt: skip
    modules = [path for path in (root / "pdcluster").rglob("*.py") if "_pb2" not in path.name]
    found = {str(path.relative_to(root / "pdcluster")) for path in modules if UNPACKING.search(path.read_text())}
    assert found - known == set(), "a new decoder: add it to decoders.py"
