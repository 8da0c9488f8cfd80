"""What a node says to its routers: few frames, none of them too large for its reader."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Endpoint,
    Envelope,
    Release,
    Sampling,
    TokenLogprobs,
    TokenRow,
    Tokens,
    Work,
    pack_tokens,
)
from pdcluster.node.native.sequence_factory import SequenceFactory
from pdcluster.node.outbox import MAX_ROWS_BYTES, Outbox, bytes_of, most_bytes
from pdcluster.node.work_checks import WorkChecks
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.codec import MAX_FRAME_BYTES, decode, encode

ROUTER = Peer("router", "router-1")
ENTRY = TokenLogprobs(-0.123456789, tuple(range(100_000, 100_020)), (-1.5,) * 20)


@dataclass
class Frames:
    sent: list[AnyMessage] = field(default_factory=list)

    def send(self, to: Peer | Endpoint, message: AnyMessage) -> bool:
        self.sent.append(message)
        return True


def row(name: str, entries: int = 0) -> TokenRow:
    return TokenRow(name, 0, 0, (7,), prompt_logprobs=(ENTRY,) * entries)


def frame_bytes(message: AnyMessage) -> int:
    return len(encode(Envelope(PROTOCOL_VERSION, "a", "a1", "b1", 1, (message,)), max_bytes=1 << 40))


def test_all_new_tokens_of_a_turn_go_in_one_frame_before_what_follows_them() -> None:
    outbox, frames = Outbox(), Frames()
    for name in "abc":
        outbox.row(ROUTER, row(name))
    outbox.message(ROUTER, Release("a"))
    outbox.flush(frames)
    assert frames.sent == [Tokens((row("a"), row("b"), row("c"))), Release("a")]
    outbox.flush(frames)
    assert len(frames.sent) == 2


def test_rows_that_are_large_together_go_in_several_frames_in_their_order() -> None:
    outbox, frames = Outbox(), Frames()
    for number in range(5):
        outbox.row(ROUTER, row(f"r{number}", 70_000))
    outbox.flush(frames)
    assert 1 < len(frames.sent) <= 5
    assert all(frame_bytes(message) <= MAX_FRAME_BYTES for message in frames.sent)
    rows = [each.request for message in frames.sent if isinstance(message, Tokens) for each in message.rows]
    assert rows == [f"r{number}" for number in range(5)]


@pytest.mark.parametrize("entries", [0, 1, 1000])
def test_a_row_is_never_larger_than_it_is_taken_for(entries: int) -> None:
    one = TokenRow(
        "r" * 100, 1 << 20, 1 << 20, tuple(range(1 << 20, (1 << 20) + entries)), (ENTRY,) * entries, (ENTRY,) * entries
    )
    assert (
        frame_bytes(Tokens((one,))) - frame_bytes(Tokens(())) <= bytes_of(one) <= most_bytes(entries, 20, entries, 20)
    )
    assert decode(encode(Envelope(PROTOCOL_VERSION, "a", "a1", "b1", 1, (Tokens((one,)),)))).messages == (
        Tokens((one,)),
    )


def work(num_prompt: int, **sampling: int | None) -> Work:
    return Work("r", 0, pack_tokens([1] * num_prompt), num_prompt, b"", Sampling(seed=1, **sampling), 5.0)  # type: ignore[arg-type]


def test_logprobs_that_no_frame_can_hold_are_refused_with_the_limit_and_the_way_out() -> None:
    factory = SequenceFactory(WorkChecks(vocab_size=100, max_len=1 << 20), block_tokens=4, clock=lambda: 0.0)
    with pytest.raises(BadRequest, match=rf"an answer may take {MAX_ROWS_BYTES >> 20} MiB; ask for fewer alternatives"):
        factory.make(work(300_000, max_tokens=1, prompt_logprobs=20, logprobs=20), remote=False)
    with pytest.raises(BadRequest, match="MiB"):
        factory.make(work(10, max_tokens=1 << 20, logprobs=20), remote=False)
    assert factory.make(work(300_000, max_tokens=1, prompt_logprobs=0), remote=False).wants_prompt_logprobs
    assert not factory.make(work(300_000, max_tokens=100), remote=False).wants_prompt_logprobs


def test_the_longest_outputs_are_those_that_the_node_gives_and_not_those_that_were_asked_for() -> None:
    factory = SequenceFactory(WorkChecks(vocab_size=100, max_len=4096), block_tokens=4, clock=lambda: 0.0)
    taken = factory.make(work(10, max_tokens=1 << 30, logprobs=20), remote=False)
    assert taken.num_tokens == 10, "4,096 positions fit, a billion would not"
