"""What a leg remembers, so that a lost frame can be said again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.messages import Finished, LegTimings, Sampling, TokenLogprobs, TokenRow, Tokens, Work, pack_tokens
from pdcluster.node.legs import EmittedTokens, EndedLeg, EndedLegs, key_of
from pdcluster.node.outbox import Outbox
from pdcluster.transfer.backends.base import Peer

ROUTER = Peer("router", "boot")


def make_work(num_prompt: int = 3, emitted: int = 0, attempt: int = 0) -> Work:
    tokens = list(range(num_prompt + emitted))
    return Work("r1", attempt, pack_tokens(tokens), num_prompt, b"", Sampling(max_tokens=9, seed=1), 5.0)


def test_positions_count_over_the_whole_request() -> None:
    output = EmittedTokens.of(make_work(num_prompt=3, emitted=4))
    row = output.append(77, None)
    assert (row.position, row.tokens) == (4, (77,))
    assert output.num_output == 5


@given(first=st.integers(0, 5), count=st.integers(0, 10), asked=st.integers(0, 20))
def test_what_is_said_again_continues_what_was_heard(first: int, count: int, asked: int) -> None:
    output = EmittedTokens.of(make_work(emitted=first))
    for token in range(count):
        output.append(100 + first + token, TokenLogprobs(-float(token)))
    row = output.since(asked)
    assert (
        row.tokens == tuple(range(100 + max(first, min(asked, first + count)), 100 + first + count))
        or asked > first + count
    )
    assert row.position == max(first, asked)
    assert len(row.logprobs) == len(row.tokens)


def test_prompt_logprobs_go_with_the_first_token_only() -> None:
    output = EmittedTokens.of(make_work())
    output.prompt_logprobs.extend([TokenLogprobs(-1.0), TokenLogprobs(-2.0)])
    assert len(output.append(5, None).prompt_logprobs) == 2
    assert output.append(6, None).prompt_logprobs == ()
    assert len(output.since(0).prompt_logprobs) == 2


def test_only_the_most_recent_last_words_are_kept() -> None:
    ended = EndedLegs(capacity=2)
    for attempt in range(3):
        word = Finished("r1", attempt, "length", 0, LegTimings())
        ended.add(EndedLeg(ROUTER, EmittedTokens("r1", attempt, 0), word))
    assert ended.get("r1", 0) is None
    assert ended.get("r1", 2) is not None


def test_a_new_attempt_has_a_key_of_its_own() -> None:
    assert key_of(make_work(attempt=0)) != key_of(make_work(attempt=1))


class Recorder:
    def __init__(self) -> None:
        self.sent: list[tuple[Peer, object]] = []

    def send(self, to: Peer, message: object) -> bool:
        self.sent.append((to, message))
        return True


def test_a_turn_is_one_token_frame_per_router_and_what_follows_the_tokens() -> None:
    outbox, recorder, other = Outbox(), Recorder(), Peer("router-2", "boot")
    word = Finished("r1", 0, "length", 1, LegTimings())
    outbox.message(ROUTER, word)
    outbox.row(ROUTER, TokenRow("r1", 0, 0, (5,)))
    outbox.row(other, TokenRow("r2", 0, 0, (6,)))
    outbox.row(ROUTER, TokenRow("r3", 0, 0, (7,)))
    outbox.flush(recorder)
    assert recorder.sent == [
        (ROUTER, Tokens((TokenRow("r1", 0, 0, (5,)), TokenRow("r3", 0, 0, (7,))))),
        (ROUTER, word),
        (other, Tokens((TokenRow("r2", 0, 0, (6,)),))),
    ]
    outbox.flush(recorder)
    assert len(recorder.sent) == 3, "nothing is sent twice"


def long_output(request: str, tokens: int, alternatives: int = 0) -> EmittedTokens:
    output = EmittedTokens(request, 0, 0)
    for token in range(tokens):
        output.append(
            token, TokenLogprobs(-1.0, tuple(range(alternatives)), (-2.0,) * alternatives) if alternatives else None
        )
    return output


def test_long_outputs_are_forgotten_before_many_short_ones_fill_the_memory() -> None:
    ended = EndedLegs(capacity=100, max_numbers=50)
    for index in range(4):
        ended.add(EndedLeg(ROUTER, long_output(f"r{index}", 20), Finished(f"r{index}", 0, "length", 20, LegTimings())))
    assert [ended.get(f"r{index}", 0) is not None for index in range(4)] == [False, False, True, True]
    ended.add(EndedLeg(ROUTER, long_output("wide", 2, alternatives=20), Finished("wide", 0, "length", 2, LegTimings())))
    assert len(ended) == 0, "two tokens with 20 alternatives each hold more than 50 numbers"
    ended.add(EndedLeg(ROUTER, long_output("r9", 5), Finished("r9", 0, "length", 5, LegTimings())))
    assert len(ended) == 1, "what was forgotten no longer counts"


def test_a_word_said_twice_counts_once_and_a_router_that_is_gone_asks_no_more() -> None:
    ended, other = EndedLegs(max_numbers=50), Peer("router-2", "boot")
    for _ in range(10):
        ended.add(EndedLeg(ROUTER, long_output("r1", 20), Finished("r1", 0, "length", 20, LegTimings())))
    ended.add(EndedLeg(other, long_output("r2", 20), Finished("r2", 0, "length", 20, LegTimings())))
    assert len(ended) == 2
    ended.forget_router(ROUTER)
    assert ended.get("r1", 0) is None and ended.get("r2", 0) is not None
