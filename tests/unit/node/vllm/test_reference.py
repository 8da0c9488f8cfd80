"""References from peers are hostile until decoded, and none that a reader's engine would die of gets past."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.bounds import MAX_OPAQUE_BYTES
from pdcluster.core.errors import ProtocolError
from pdcluster.node.vllm.engine.reference import Reference, check_reference, decode_reference, encode_reference

GOOD = Reference(
    version=1,
    engine="5c2f",
    request="r1-a4920227",
    host="10.0.0.1",
    port=5600,
    tp_size=1,
    dcp_size=1,
    pp_size=1,
    block_tokens=32,
    num_tokens=65,
    blocks=((4, 9, 2),),
    addresses=("tcp://10.0.0.1:4711",),
)


def test_a_reference_is_read_as_it_was_written() -> None:
    assert decode_reference(encode_reference(GOOD)) == GOOD


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"engine": ""},
        {"request": "r1|x"},
        {"request": "r1:2"},
        {"request": "r1,r2"},
        {"request": "r1\n"},
        {"host": "a b"},
        {"port": 0},
        {"port": 70000},
        {"tp_size": 0},
        {"blocks": ()},
        {"blocks": ((),)},
        {"blocks": ((-1,),)},
        {"blocks": ((1 << 40,),)},
        {"blocks": (tuple(range((1 << 17) + 1)),)},
        {"addresses": ()},
        {"addresses": ("tcp://a:1", "tcp://b:1")},
        {"addresses": ("ipc:///tmp/x",)},
        {"num_tokens": 0},
    ],
)
def test_what_is_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    data = msgspec.msgpack.encode(msgspec.structs.replace(GOOD, **change))
    with pytest.raises(ProtocolError):
        decode_reference(data)


def test_a_reference_beyond_its_bytes_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode_reference(b"\x00" * (MAX_OPAQUE_BYTES + 1))


@given(st.binary(max_size=300))
def test_other_bytes_raise_one_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_reference(data)


def test_a_reference_of_this_prompt_passes() -> None:
    check_reference(GOOD, num_tokens=65, block_tokens=32, groups=1)


@pytest.mark.parametrize(
    ("num_tokens", "block_tokens", "groups"), [(64, 32, 1), (66, 32, 1), (97, 32, 1), (65, 16, 1), (65, 32, 2)]
)
def test_a_reference_of_another_prompt_or_engine_is_refused(num_tokens: int, block_tokens: int, groups: int) -> None:
    with pytest.raises(ProtocolError, match="KV"):
        check_reference(GOOD, num_tokens, block_tokens, groups)
