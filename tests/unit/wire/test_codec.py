"""Frames: every message comes back as it was, and no bytes do anything but be refused."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdcluster.core import messages as m
from pdcluster.core.errors import ProtocolError
from pdcluster.core.grammar import MAX_CHARS, Grammar
from pdcluster.core.sampling import Shaping
from pdcluster.core.weights import WeightsVersion, WeightTensor
from pdcluster.wire.codec import DIGEST_BYTES, decode, encode, seal

GRAMMAR = Grammar('{"type":"regex","pattern":"a+"}')
SAMPLING = m.Sampling(
    max_tokens=16, seed=-7, top_k=5, top_p=0.9, min_p=0.1, stop_token_ids=(2, 3), logprobs=2, grammar=GRAMMAR
)
WORK = m.Work("req-1", 0, m.pack_tokens(range(70)), 64, bytes(32), SAMPLING, 12.5)
READER = m.Endpoint("decode-0", "inc-d", "127.0.0.1:4000", (("tcp", b"\x01\x02"),))
WRITER = m.Endpoint("prefill-0", "inc-p", "[::1]:4001")
TICKET = m.Ticket(2**64 - 1, "req-1", 0, READER, WRITER, 0, m.pack_tokens([4, 9, 1]), 32, 65536, 70, 32, 9.5)
LOGPROBS = m.TokenLogprobs(-0.5, (3, 4), (-0.5, -math.inf))
TIMINGS = m.LegTimings(queue_s=0.1, transfer_bytes=1 << 40, backend="shm")
ROOT = (1e-3, -1e-5, 1e-6, 0.0, -1e-9, 1e-10)
COST = m.CostReport(0.01, 1e-4, 1e-9, 0.004, 1e-4, 1e-8, 512, 9, 1 << 40, 0.1, 0.02, ROOT, 0.2, 10.0, ROOT)
TENSOR = WeightTensor("model.norm.weight", "BF16", (64,))
MESSAGES: tuple[m.AnyMessage, ...] = (
    m.Hello("router", (("req-1", 0, 3),)),
    m.Ping(),
    m.Prefill(WORK, False, m.Pull(READER, 64), pooling=m.Pooling(32)),
    m.Reserve(WORK, WRITER),
    m.Deliver(TICKET),
    m.Cancel("req-1", 2, "client left"),
    m.Release("req-1"),
    m.FetchFile("tokenizer.json", 1 << 20),
    m.Welcome("mixed", (("req-1", 0),)),
    m.Scheduled("req-1", 0),
    m.Reserved(TICKET),
    m.Refused("req-1", 0, "reserve", "no pages", 0.25),
    m.Tokens((m.TokenRow("req-1", 0, 5, (7, 8), (LOGPROBS, LOGPROBS)),)),
    m.Delivered("req-1", 0, TIMINGS),
    m.Finished("req-1", 0, "eos", num_output=9, timings=TIMINGS, stop_token=2),
    m.Failed("req-1", 0, "node_lost", "why", True),
    m.Load(
        *range(12),
        draining=True,
        steps=1 << 40,
        waiting_pairs=1 << 50,
        rows=3,
        cost=COST,
        paths=(m.PathLoad("d0", "shm", 3.2e9, "half_open", True),),
        failed_writes=(("lost", 1),),
        resent_chunks=(("other_path", 2),),
    ),
    m.CacheDelta(1, True, bytes(48), b""),
    m.FileChunk("tokenizer.json", 4, 8, b"data"),
    m.Commit(5, 32, (m.Leg(0, 1, 0, 8, (m.ChunkEntry(0, 0, 32, 0, 4, 65536, 2**64 - 1),)),), 11, LOGPROBS),
    m.CommitAck(5, (0, 3)),
    m.Abort(5, "slot gone", 3.0),
    m.AbortAck(5, "drained", ("tcp",)),
    m.Manage(7, "decode", True),
    m.Managed(7, "mixed", False),
    m.ManageAdapter(7, "sql", "/adapters/sql"),
    m.AdapterManaged(7, "no such directory", "d1"),
    m.PrepareWeights(8, WeightsVersion("tuned", 1, "d1"), "/checkpoints/7"),
    m.ReceiveWeights(8, WeightsVersion("tuned", 1), WRITER, (TENSOR,)),
    m.CommitWeights(8, WeightsVersion("tuned", 1), ((TENSOR.name, bytes(16)),)),
    m.FetchWeights(2**64 - 1, WeightsVersion("tuned", 1, "d1")),
    m.WeightsOffer(5, (TENSOR,)),
    m.TakeWeights(WeightsVersion("tuned", 1, "d1"), m.WeightsTarget(5, READER, 0, (4096,), True)),
    m.WeightsWritten(5, ((TENSOR.name, bytes(16)),)),
    m.WeightsDeclined(5, "gone"),
    m.SwitchWeights(9, 1, 2.5, 10.0),
    m.SleepNode(11, 2.5),
    m.DropWeights(10),
    m.ShareWeights(11, 50.0),
    m.WeightsManaged(8, "", WeightsVersion("tuned", 1, "d1")),
    m.AskCache(),
    m.Fetch(TICKET, bytes(48)),
    m.Declined(5, "gone"),
    m.Computed("req-1", 0, 96),
    m.Embedded("req-1", 0, np.array([0.5, -2.0], "<f4").tobytes(), TIMINGS),
)
FRAMES = [encode(m.Envelope(m.PROTOCOL_VERSION, "a", "inc-a", "inc-b", 1, (message,))) for message in MESSAGES]


def envelope(message: m.AnyMessage, **changes: object) -> m.Envelope:
    return msgspec.structs.replace(m.Envelope(m.PROTOCOL_VERSION, "a", "inc-a", "inc-b", 1, (message,)), **changes)


def test_the_samples_hold_every_message_once() -> None:
    assert {type(message) for message in MESSAGES} == set(m.AnyMessage.__args__)
    assert len(MESSAGES) == len(m.AnyMessage.__args__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: m.AnyMessage) -> None:
    assert decode(encode(envelope(message))) == envelope(message)


def test_a_peer_of_another_protocol_version_is_told_both_versions() -> None:
    with pytest.raises(ProtocolError, match=rf"protocol 99.*speaks {m.PROTOCOL_VERSION}"):
        decode(encode(envelope(m.Ping(), protocol=99)))


def test_another_version_is_recognised_even_when_its_messages_are_unknown() -> None:
    with pytest.raises(ProtocolError, match="protocol 99"):
        decode(msgspec.msgpack.encode([99, "a", {"new": "shape"}]))


def test_a_frame_over_the_cap_is_refused_at_both_ends() -> None:
    frame = encode(envelope(m.FileChunk("f", 0, 1000, bytes(1000))))
    with pytest.raises(ProtocolError, match="limit of 100 bytes"):
        decode(frame, max_bytes=100)
    with pytest.raises(ProtocolError, match=r"FileChunk of .* split it"):
        encode(envelope(m.FileChunk("f", 0, 1000, bytes(1000))), max_bytes=100)


def test_only_hello_may_leave_the_receiver_open() -> None:
    assert decode(encode(envelope(m.Hello("node"), to_incarnation=""))).to_incarnation == ""
    with pytest.raises(ProtocolError, match="to_incarnation"):
        decode(encode(envelope(m.Ping(), to_incarnation="")))


@pytest.mark.parametrize(
    "changes", [{"sender": ""}, {"sender": "x" * 129}, {"incarnation": ""}, {"sequence": 0}, {"sequence": -1}], ids=str
)
def test_an_envelope_with_a_bad_field_is_refused(changes: dict[str, object]) -> None:
    place = list(m.Envelope.__struct_fields__).index(next(iter(changes)))
    with pytest.raises(ProtocolError, match=rf"malformed.*\$\[{place}\]"):
        decode(encode(envelope(m.Ping(), **changes)))


replace: Callable[..., m.AnyMessage] = msgspec.structs.replace


def work(**changes: object) -> m.Prefill:
    return m.Prefill(replace(WORK, **changes), True)


def sampling(**changes: object) -> m.Prefill:
    return work(sampling=replace(SAMPLING, **changes))


def ticket(**changes: object) -> m.Deliver:
    return m.Deliver(replace(TICKET, **changes))


def finished(**changes: object) -> m.AnyMessage:
    return replace(MESSAGES[14], **changes)


def cost(**changes: float) -> m.AnyMessage:
    return replace(MESSAGES[16], cost=replace(MESSAGES[16].cost, **changes))


def chunk(*values: int) -> m.Commit:
    return m.Commit(1, 32, (m.Leg(0, 0, 0, 1, (m.ChunkEntry(*values),)),), 0)


BAD: tuple[m.AnyMessage, ...] = (
    work(request=""), work(request="r" * 129), work(attempt=-1), work(token_ids=bytes(7)), work(token_ids=b""),
    work(hashes=bytes(17)),
    work(token_ids=m.pack_tokens([1, -1] * 32)), work(num_prompt=0), work(num_prompt=71), work(hashes=bytes(16 * 71)),
    work(deadline_s=math.nan), work(deadline_s=math.inf),
    sampling(max_tokens=0), sampling(seed=2**64 - 1, temperature=math.nan), sampling(temperature=-0.1),
    sampling(temperature=math.inf),
    sampling(top_k=0), sampling(top_p=1.1), sampling(min_p=-0.1), sampling(stop_token_ids=(-1,)),
    sampling(logprobs=-1), sampling(min_tokens=-1),
    *(sampling(shaping=Shaping(repetition=value)) for value in (0.0, 1e-30, 101.0, math.nan)),
    ticket(nonce=-1), ticket(pages=bytes(3)), ticket(pages=m.pack_tokens([1, 2])), ticket(cached_tokens=71),
    ticket(page_tokens=0),
    ticket(page_bytes=0), ticket(num_tokens=0), ticket(reader=replace(READER, address="nowhere")),
    ticket(writer=replace(WRITER, node="")),
    ticket(reader=replace(READER, adverts=(("tcp", bytes(1 << 17)),))), ticket(deadline_s=-math.inf),
    m.Hello("router", (("", 0, 0),)), m.Hello("router", (("r", -1, 0),)), m.Hello("router", (("r", 0, -1),)),
    m.Welcome("mixed", (("r", -1),)),
    m.Cancel("r", 0, "x" * 20000), m.Release(""), m.FetchFile("f", -1),
    m.ManageAdapter(-1, "a"), m.ManageAdapter(1, "a" * 129), m.ManageAdapter(1, "a", "x" * 20000),
    m.AdapterManaged(-1), m.AdapterManaged(1, digest="x" * 20000), m.Prefill(replace(WORK, adapter="a" * 129), False),
    m.Manage(-1), m.Managed(-1, "mixed", False), m.Refused("r", 0, "reserve", "", -1.0),
    m.Tokens((m.TokenRow("r", 0, -1, (1,)),)), m.Tokens((m.TokenRow("r", 0, 0, (-1,)),)), m.Tokens((m.TokenRow("r", 0,
    0, (1, 2), (LOGPROBS,)),)),
    m.Tokens((m.TokenRow("r", 0, 0, (1,), (m.TokenLogprobs(math.nan),)),)), m.Tokens((m.TokenRow("r", 0, 0, (1,),
    (m.TokenLogprobs(0.0, (1,)),)),)),
    finished(timings=m.LegTimings(decode_s=-1.0)), finished(stop_token=-1), finished(num_output=-1),
    m.Failed("r", 0, "", "", True), m.Failed("r", 0, "c", "x" * 20000, True), m.Refused("", 0, "reserve", "", 0.0),
    m.Scheduled("r", 0, -1), m.Computed("r", 0, -1), m.Computed("r", -1), m.Computed("", 0),
    m.Embedded("r", 0, b"", TIMINGS), m.Embedded("r", 0, bytes(5), TIMINGS), m.Embedded("r", -1, bytes(4), TIMINGS),
    m.Embedded("r", 0, bytes(2**18 + 4), TIMINGS), m.Embedded("", 0, bytes(4), TIMINGS),
    m.Embedded("r", 0, np.array([math.nan], "<f4").tobytes(), TIMINGS),
    m.Embedded("r", 0, np.array([1.0, math.inf], "<f4").tobytes(), TIMINGS),
    m.Embedded("r", 0, bytes(4), m.LegTimings(cached_tokens=1, pulled_tokens=2)),
    m.Prefill(WORK, False, pooling=m.Pooling(-1)), m.Prefill(WORK, False, pooling=m.Pooling(2**16 + 1)), m.Prefill(WORK, True, pooling=m.Pooling()),
    m.Commit(1, 32, (), None, opaque=bytes(2**20 + 1)), m.Commit(1, 32, (), None, holds_s=math.nan),
    m.Commit(1, 32, (), None, holds_s=-1.0),
    m.Scheduled("r", 2**31), m.Tokens((m.TokenRow("r", 0, 2**64 - 1, (1,)),)), m.Tokens((m.TokenRow("r", 0, 0,
    (2**63,)),)),
    m.Tokens((m.TokenRow("", 0, 0, (1,)),)), finished(timings=m.LegTimings(queue_s=math.nan)),
    finished(timings=m.LegTimings(transfer_bytes=2**63)),
    finished(timings=m.LegTimings(backend="x" * 20000)), work(hash_root=bytes(15)), m.Commit(1, 32, (), 0, round=-1),
    m.CommitAck(1, round=-1),
    m.Commit(1, 0, (), 0), ticket(ranks=0), m.Commit(1, 32, (m.Leg(0, 0, 0, 0, ()),), 0), m.Commit(1, 32, (m.Leg(0,
    9999, 0, 1, ()),), 0),
    cost(prefill_token_s=math.nan), cost(decode_fixed_s=-1e-9), cost(decode_row_s=math.inf), cost(chunk_tokens=-1),
    cost(prefill_samples=-1),
    cost(prefill_spread=-0.1), cost(decode_doubt=math.nan), cost(prefill_root=(0.0,) * 5 + (math.inf,)),
    cost(decode_root=(-1e300,) + (0.0,) * 5),
    cost(decode_root=(0.0,) * 5),
    replace(MESSAGES[16], slots=-1), replace(MESSAGES[16], waiting_pairs=-1), replace(MESSAGES[16], seen=2**63),
    replace(MESSAGES[16], itl_s=math.nan),
    replace(MESSAGES[16], paths=(m.PathLoad("", "shm", 1.0),)), replace(MESSAGES[16], paths=(m.PathLoad("d0", "shm",
    1e16),)),
    replace(MESSAGES[16], paths=(m.PathLoad("d0", "shm", 1.0),) * 1025), replace(MESSAGES[16], failed_writes=(("lost",
    -1),)),
    replace(MESSAGES[16], pulls=(("", 1),)), replace(MESSAGES[16], resent_chunks=(("digest", 1),) * 65),
    ticket(ranks=513), ticket(reader=replace(READER, adverts=(("tcp", b""),) * 65)), ticket(writer=replace(WRITER,
    adverts=(("", b""),))),
    m.CacheDelta(0, False, bytes(8), b""), m.CacheDelta(0, False, b"", bytes(1)), m.CacheDelta(-1, False, b"", b""),
    m.FileChunk("f", 5, 8, b"data"), chunk(-1, 0, 1, 0, 1, 1, 0), chunk(0, 0, 0, 0, 1, 1, 0), chunk(0, 0, 1, 0, 1, 0,
    0), chunk(0, 0, 1, 0, 1, 1, -1),
    chunk(0, 0, 1, 0, 1, 1, 0, -1),
    m.Commit(1, 32, (), -1), m.CommitAck(1, (-1,)), m.Abort(-1, "", 1.0), m.Abort(1, "", math.nan), m.AbortAck(1,
    "x" * 20000),
    m.AbortAck(1, "", ("",)), m.AbortAck(1, "", ("tcp",) * 65),
    m.Prefill(WORK, True, m.Pull(READER, 0)), m.Prefill(WORK, True, m.Pull(READER, 71)),
    m.Prefill(WORK, True, m.Pull(replace(READER, address="nowhere"), 64)),
    m.Fetch(TICKET, b""), m.Fetch(TICKET, bytes(17)), m.Fetch(replace(TICKET, num_tokens=0), bytes(16)),
    m.Declined(-1, ""), m.Declined(1, "x" * 20000),
    finished(timings=m.LegTimings(cached_tokens=4, pulled_tokens=5)), finished(timings=m.LegTimings(cached_tokens=4,
    pulled_tokens=-1)),
)  # fmt: skip


@pytest.mark.parametrize("message", BAD, ids=repr)
def test_a_message_with_a_bad_value_is_refused(message: m.AnyMessage) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(envelope(message)))


def taken(frame: bytes) -> m.Envelope | None:
    """What a frame says, None when it is refused; any other error is the test's."""
    try:
        return decode(frame)
    except ProtocolError:
        return None


def is_said_again(envelope: m.Envelope | None) -> bool:
    """Whether what was taken, if anything, is what it says when it is written anew."""
    return envelope is None or decode(encode(envelope)) == envelope


@given(st.binary(max_size=300))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x96\x01\xa1\xff")
@example(b"\x97" + FRAMES[1][1:] + b"\x91" * 100_000)
def test_random_bytes_are_refused_and_never_crash(frame: bytes) -> None:
    assert taken(frame) is None, "it has no digest"
    assert is_said_again(taken(seal(frame)))


@given(st.sampled_from(FRAMES), st.data())
def test_a_frame_with_any_bit_turned_or_its_end_missing_is_refused(frame: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    damaged = bytearray(frame)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        decode(bytes(damaged))
    with pytest.raises(ProtocolError):
        decode(frame[: bit // 8])


@st.composite
def mutated_frames(draw: st.DrawFn) -> bytes:
    frame = bytearray(draw(st.sampled_from(FRAMES)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        cut = draw(st.integers(0, 8))
        frame[at : at + cut] = draw(st.binary(max_size=8))
    return bytes(frame)


@given(mutated_frames())
def test_mutated_frames_are_refused_or_valid_and_never_crash(frame: bytes) -> None:
    assert taken(frame) is None or frame in FRAMES
    assert is_said_again(taken(seal(frame[:-DIGEST_BYTES])))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)


@given(st.sampled_from([type(message).__name__ for message in MESSAGES]), st.lists(plain, max_size=13))
def test_messages_with_fields_of_any_type_are_refused_and_never_crash(tag: str, fields: list[object]) -> None:
    envelope = taken(seal(msgspec.msgpack.encode([2, "a", "i", "j", 1, [[tag, *fields]]])))
    assert envelope is None or (type(envelope.messages[0]).__name__ == tag and is_said_again(envelope))


@pytest.mark.parametrize("size", [0, MAX_CHARS + 1])
def test_a_grammar_of_no_or_too_many_characters_is_refused(size: int) -> None:
    work = msgspec.structs.replace(WORK, sampling=msgspec.structs.replace(SAMPLING, grammar=Grammar("x" * size)))
    with pytest.raises(ProtocolError, match="length"):
        decode(encode(m.Envelope(m.PROTOCOL_VERSION, "a", "b", "c", 1, (m.Prefill(work, True),)), max_bytes=1 << 20))


@given(st.integers(1, 3000), st.data())
def test_a_negative_id_anywhere_in_a_prompt_is_refused(size: int, data: st.DataObject) -> None:
    """Short prompts are looked at in another way than long ones."""
    tokens = [2**31 - 1] * size
    work = msgspec.structs.replace(WORK, num_prompt=1, hashes=b"")
    assert decode(encode(envelope(m.Prefill(msgspec.structs.replace(work, token_ids=m.pack_tokens(tokens)), False))))
    tokens[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(-(2**31), -1))
    with pytest.raises(ProtocolError, match="negative"):
        decode(encode(envelope(m.Prefill(msgspec.structs.replace(work, token_ids=m.pack_tokens(tokens)), False))))
