"""Two engines, P and D: right tokens through a transfer, and what becomes of references that are no longer good.

Each misuse is also done with vLLM's stock connector, where it gives wrong tokens: so the tests see what they look for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from engine_kit import BLOCK_TOKENS, GREEDY, NUM_BLOCKS, Answer, EngineAtHand, model_directory, prompt, start_engine

from pdcluster.node.vllm.engine.interface import EngineRequest, EngineStep
from pdcluster.node.vllm.engine.reference import decode_reference, encode_reference

LEASE_S = 2
LONG = 500


@dataclass(slots=True)
class Pair:
    connector: str
    prefill: EngineAtHand
    decode: EngineAtHand

    def park(self, token_ids: list[int], fence: str = "fence1", key: str | None = None) -> bytes:
        answer = self.prefill.run(token_ids, parks=True, fence=fence, key=key)
        assert answer.last.finish == "length"
        return answer.last.reference

    def overwrite(self, seed: int) -> None:
        """Other prompts take every free block of P."""
        for number in range(NUM_BLOCKS * BLOCK_TOKENS // LONG + 2):
            self.prefill.run(prompt(LONG, 1000 * seed + number))

    def alone(self, token_ids: list[int]) -> list[int]:
        """What one engine says, without its prefix cache."""
        return self.prefill.run(token_ids, salt=f"alone{time.monotonic()}").tokens

    def read(self, token_ids: list[int], reference: bytes, salt: str, fence: str = "fence1") -> Answer:
        return self.decode.run(token_ids, reference=reference, fence=fence, salt=salt)


@pytest.fixture(scope="module", params=["fenced", "stock"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = model_directory(tmp_path_factory.mktemp("model"))
    # One after the other: the second one's settings would reach the first one's processes.
    engines = []
    try:
        for _ in range(2):
            engines.append(start_engine(model, request.param, LEASE_S))
            engines[-1].wait_ready(400.0)
        yield Pair(request.param, EngineAtHand(engines[0]), EngineAtHand(engines[1]))
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture
def fenced(pair: Pair) -> Pair:
    if pair.connector != "fenced":
        pytest.skip("of our connector only")
    return pair


def require_misuse_is_seen(pair: Pair, answer: Answer, token_ids: list[int], salt: str, expected: list[int]) -> None:
    """Ours: an error, and the right answer for the same prompt afterwards. Stock: wrong tokens, also afterwards."""
    again = pair.decode.run(token_ids, salt=salt)
    assert again.last.finish == "length"
    if pair.connector == "fenced":
        assert (answer.last.finish, answer.tokens) == ("error", [])
        assert again.tokens == expected
    else:
        assert answer.last.finish == "length"
        assert answer.tokens != expected
        assert again.tokens != expected, "the stock connector left D's prefix cache clean"


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 100, 256, 511, 512, 513, 1000])
def test_tokens_through_a_transfer_are_those_of_one_engine(fenced: Pair, length: int) -> None:
    token_ids = prompt(length)
    answer = fenced.read(token_ids, fenced.park(token_ids), salt=f"n{length}")
    assert answer.last.finish == "length"
    assert answer.tokens == fenced.alone(token_ids)


@pytest.mark.parametrize("cached", [BLOCK_TOKENS, 4 * BLOCK_TOKENS, 200])
def test_a_hit_in_the_prefix_cache_of_d_reads_the_rest(fenced: Pair, cached: int) -> None:
    token_ids = prompt(200, seed=cached)
    salt = f"hit{cached}"
    fenced.decode.run(token_ids[:cached], salt=salt)
    answer = fenced.read(token_ids, fenced.park(token_ids), salt=salt)
    assert answer.last.finish == "length"
    assert answer.tokens == fenced.alone(token_ids)


def test_a_stale_reference(pair: Pair) -> None:
    token_ids = prompt(LONG, seed=1)
    expected = pair.alone(token_ids)
    reference = pair.park(token_ids)
    time.sleep(LEASE_S + 1)
    pair.overwrite(seed=1)
    answer = pair.read(token_ids, reference, "stale")
    require_misuse_is_seen(pair, answer, token_ids, "stale", expected)


def test_a_replayed_reference(pair: Pair) -> None:
    token_ids = prompt(LONG, seed=2)
    expected = pair.alone(token_ids)
    reference = pair.park(token_ids)
    assert pair.read(token_ids, reference, "first").tokens == expected
    pair.overwrite(seed=2)
    answer = pair.read(token_ids, reference, "second")
    require_misuse_is_seen(pair, answer, token_ids, "second", expected)


def test_a_foreign_reference(pair: Pair) -> None:
    token_ids, other = prompt(LONG, seed=3), prompt(LONG, seed=4)
    expected = pair.alone(token_ids)
    answer = pair.read(token_ids, pair.park(other, fence="fence2"), "foreign")
    require_misuse_is_seen(pair, answer, token_ids, "foreign", expected)


def test_a_foreign_reader_leaves_the_kv_to_the_right_one(fenced: Pair) -> None:
    token_ids, other = prompt(LONG, seed=5), prompt(LONG, seed=6)
    reference = fenced.park(token_ids)
    assert fenced.read(other, reference, "thief", fence="fence2").last.finish == "error"
    assert fenced.read(token_ids, reference, "owner").tokens == fenced.alone(token_ids)


def test_blocks_that_the_holder_cannot_have_end_the_request_and_not_the_engine(fenced: Pair) -> None:
    token_ids = prompt(LONG, seed=7)
    reference = decode_reference(fenced.park(token_ids))
    [blocks] = reference.blocks
    beyond = encode_reference(replace_blocks(reference, (*blocks[:-1], NUM_BLOCKS + 7)))
    assert fenced.read(token_ids, beyond, "beyond").last.finish == "error"
    fewer = encode_reference(replace_blocks(reference, blocks[:-1]))
    assert "blocks" in fenced.read(token_ids, fewer, "fewer").last.error
    assert fenced.read(token_ids, b"\x93nonsense", "bytes").last.finish == "error"
    assert fenced.decode.run(prompt(40)).last.finish == "length"


def replace_blocks(reference: object, blocks: tuple[int, ...]) -> object:
    import msgspec

    return msgspec.structs.replace(reference, blocks=(blocks,))


def test_release_frees_parked_kv_at_once(fenced: Pair) -> None:
    token_ids = prompt(LONG, seed=8)
    fenced.prefill.wait_free(3 * LEASE_S)
    reference = fenced.park(token_ids, key="parked#1")
    assert fenced.prefill.last_usage(0.2) > 0.1
    fenced.prefill.engine.release("parked#1")
    assert fenced.prefill.wait_free(LEASE_S) < 0.5
    assert fenced.read(token_ids, reference, "released").last.finish == "error"


def test_the_lease_frees_what_nobody_reads(fenced: Pair) -> None:
    fenced.prefill.wait_free(3 * LEASE_S)
    fenced.park(prompt(LONG, seed=9))
    assert fenced.prefill.last_usage(LEASE_S - 1.0) > 0.1
    assert fenced.prefill.last_usage(2.0) == 0.0


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.005, 0.02, 0.05])
def test_an_aborted_leg_leaves_nothing(fenced: Pair, delay_s: float) -> None:
    token_ids = prompt(LONG, seed=10)
    key = fenced.decode.key()
    request = EngineRequest(
        key, token_ids, 0, replace_max_tokens(400), reference=fenced.park(token_ids), fence="fence1"
    )
    fenced.decode.engine.add(replace(request, salt=f"abort{delay_s}"))
    time.sleep(delay_s)
    fenced.decode.engine.abort(key)
    assert fenced.decode.finish(key).last.finish == "abort"
    assert fenced.decode.last_usage(0.5) == 0.0
    assert fenced.prefill.last_usage(LEASE_S + 1.0) == 0.0


def replace_max_tokens(count: int) -> object:
    import msgspec

    return msgspec.structs.replace(GREEDY, max_tokens=count)


def test_what_vllm_refuses_is_an_error_of_that_request(fenced: Pair) -> None:
    answer = fenced.decode.run(prompt(1100))
    assert answer.last.finish == "error"
    assert "1024" in answer.last.error
    assert "adapter" in fenced.decode.run(prompt(8), adapter=9).last.error


def test_an_end_token_and_a_stop_token_are_told_apart(fenced: Pair) -> None:
    import msgspec

    token_ids = prompt(40)
    second = fenced.alone(token_ids)[1]
    answer = fenced.decode.run(token_ids, msgspec.structs.replace(GREEDY, stop_token_ids=(second,), logprobs=1))
    assert (answer.last.finish, answer.last.stop_token) == ("stop", second)
    assert len(answer.logprobs) == len(answer.tokens) == 2


def test_steps_are_told(fenced: Pair) -> None:
    fenced.decode.others.clear()
    fenced.decode.run(prompt(100, seed=11))
    steps = [item for item in fenced.decode.others if isinstance(item, EngineStep)]
    assert sum(step.prompt_tokens for step in steps) == 100
    assert sum(step.output_tokens for step in steps) == GREEDY.max_tokens


def test_facts(fenced: Pair) -> None:
    facts = fenced.prefill.engine.facts
    assert (facts.block_tokens, facts.num_blocks, facts.max_len) == (BLOCK_TOKENS, NUM_BLOCKS, 1024)
    assert (facts.groups, facts.embedding_size, facts.lease_s, facts.version) == (1, 0, LEASE_S, "0.32.0")
    assert facts.token_bytes == 2 * 2 * 2 * 32 * 4
