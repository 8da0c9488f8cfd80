"""A node believes no router's names of blocks: under a wrong name, KV would be found by other prompts."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster.core.messages import HASHES_PARAM, Refused, Sampling, Work, pack_tokens
from pdcluster.kv.hashing import block_hashes, chain_root
from pdcluster.node.acceptance import Acceptance
from pdcluster.transfer.backends.base import Peer

ROUTER = Peer("router", "router-1")
TOKENS = list(range(70))
WORK = Work(
    "r1",
    0,
    pack_tokens(TOKENS),
    70,
    block_hashes(TOKENS, salt=b"a"),
    Sampling(max_tokens=4, seed=1),
    10.0,
    chain_root(salt=b"a"),
)


class Box:
    def __init__(self) -> None:
        self.sent: list[Refused] = []

    def message(self, router: Peer, message: Refused) -> None:
        assert router == ROUTER
        self.sent.append(message)


class Standing:
    refuses_work = False


def taken(work: Work, block_tokens: int = 32) -> tuple[bool, list[Refused]]:
    box = Box()
    acceptance = Acceptance("n1", Standing(), box)  # type: ignore[arg-type]
    acceptance.block_tokens = block_tokens
    return acceptance.takes(ROUTER, work, "prefill", is_stuck=False), box.sent


def replaced(**fields: object) -> Work:
    return msgspec.structs.replace(WORK, **fields)


def test_names_that_fit_are_taken() -> None:
    for work in (WORK, replaced(hashes=WORK.hashes[:16]), replaced(hashes=b"", hash_root=b"")):
        assert taken(work) == (True, [])


@pytest.mark.parametrize(
    "work",
    [
        replaced(hashes=WORK.hashes[:16] + bytes(16)),
        replaced(token_ids=pack_tokens([1, *TOKENS[1:]])),
        replaced(hash_root=chain_root(salt=b"b")),
        replaced(hash_root=b""),
        replaced(hashes=WORK.hashes + bytes(16)),
        replaced(hashes=block_hashes(TOKENS, salt=b"a", block_tokens=16)[:32]),
    ],
    ids=["another name", "other tokens", "another root", "no root", "too many", "other blocks"],
)
def test_names_that_do_not_fit_are_refused_and_may_be_tried_again(work: Work) -> None:
    is_taken, sent = taken(work)
    assert not is_taken
    assert [(refused.retryable, refused.param, refused.leg) for refused in sent] == [(True, HASHES_PARAM, "prefill")]
    assert sent[0].reason == "node n1 computes other block hashes of the tokens than router router"


def test_long_prompts_are_checked_over_many_stretches() -> None:
    tokens = list(range(1, 5000))
    hashes = block_hashes(tokens, salt=b"a")
    work = replaced(token_ids=pack_tokens(tokens), num_prompt=len(tokens), hashes=hashes)
    assert taken(work)[0]
    wrong = bytearray(hashes)
    wrong[-1] ^= 1
    assert not taken(msgspec.structs.replace(work, hashes=bytes(wrong)))[0]
