"""Every decoder of bytes that another process sent: what good input looks like, and which errors bad input may lead to.

A decoder of a stream gets its bytes through FedLink, which also sees that nothing large is asked for before its size
was checked.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from pdcluster.api.openai.answer_shape import AnswerShape, grammar_of_shape
from pdcluster.api.structured.constraints import StructuredOutputs
from pdcluster.bootstrap.card import NodeCard, check_card
from pdcluster.bootstrap.card_messages import card_from_proto, card_to_proto, snapshot_from_proto
from pdcluster.bootstrap.demand import RoleDemand, RouterDemand, demand_from_proto, demand_to_proto
from pdcluster.core import messages as m
from pdcluster.core.errors import BadRequest, PeerUnreachable, ProtocolError
from pdcluster.core.grammar import Grammar
from pdcluster.core.step import Row, StepPlan
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster.node.native.tensor_parallel import channel, messages
from pdcluster.node.vllm import events
from pdcluster.node.vllm.engine import read_confirmation, reference
from pdcluster.processes.ready import parse
from pdcluster.rpc import bootstrap_pb2 as pb
from pdcluster.rpc import inference_pb2
from pdcluster.rpc.inference import request_from_proto
from pdcluster.transfer.backends import lane_hello, ranked, shm_frames, tcp, tcp_links
from pdcluster.transfer.backends.base import Handle, Peer, Permit, Region, Stamp, WriteStatus
from pdcluster.transfer.backends.ledger import Doorbell, Writes
from pdcluster.transfer.backends.sealing import LENGTH, TAG_BYTES, RecordOpener, RecordSealer
from pdcluster.transfer.backends.shm import ShmBackend
from pdcluster.transfer.backends.shm_frames import Notices
from pdcluster.transfer.backends.staged import staging
from pdcluster.transfer.backends.staged.backend import StagedBackend
from pdcluster.transfer.backends.staged.pump import PieceInFlight, Pump, StagedWrite
from pdcluster.transfer.backends.staged.source_reads import SourceReads
from pdcluster.transfer.backends.staged.staging import Blocks, StagedSettings, cut
from pdcluster.transfer.backends.tcp_links import AnswerReader, Cursor, TcpAdvert
from pdcluster.transfer.copying.copy import Payload, table_of
from pdcluster.transfer.layout.runs import run_table, span_table
from pdcluster.transfer.layout.spans import CopyRun
from pdcluster.wire import codec
from pdcluster.wire.address import peer_address
from pdcluster.wire.batch import MessageBatch
from pdcluster_router.cluster.events import Event
from pdcluster_router.workers import frames as control

READER, WRITER = Peer("r", "r1"), Peer("w", "w1")
REGION_BYTES, PERMITTED = 1 << 16, (4096, 8192)
# Bytes that a decoder may ask for before it knows whether they come: the longest table of runs.
MOST_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Decoder:
    """errors: what it may raise; anything else is a crash. check: what must hold afterwards. ends: lets go of what it
    uses."""

    name: str
    corpus: tuple[bytes, ...]
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    check: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None


class FedLink:
    """A links.Link at whose other end somebody said `data` and hung up. Frames have no seals here, so that spoiled ones
    come to what is behind."""

    def __init__(self, data: bytes, peer: Peer = WRITER) -> None:
        self._data = memoryview(data)
        self.sock = self
        self.peer = peer
        self.lock = threading.Lock()
        self.is_sealed = False

    def receive_into(self, view: memoryview, *, idle: bool = False) -> None:
        if not self._take(view) == len(view):
            raise ConnectionResetError("the end of what it said")

    def receive(self, nbytes: int, *, idle: bool = False) -> bytearray:
        assert nbytes <= MOST_AT_ONCE, f"{nbytes} bytes are allocated because a peer says so"
        data = bytearray(nbytes)
        self.receive_into(memoryview(data), idle=idle)
        return data

    def receive_seal(self, *parts: bytes | bytearray) -> None:
        """A liar seals well."""

    def recvmsg_into(self, views: list[memoryview]) -> tuple[int]:
        return (sum(self._take(view) for view in views),)

    def recv_some(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        return bytes(data[: self._take(memoryview(data))])

    def send(self, data: bytes) -> None:
        """Nobody listens."""

    def wait(self, events: int, timeout_s: float | None) -> None:
        raise TimeoutError("nothing comes")

    def _take(self, view: memoryview) -> int:
        count = min(len(view), len(self._data))
        view[:count], self._data = self._data[:count], self._data[count:]
        return count


class NoEngine:
    """A transfer library that moves nothing."""

    needs_calls = True
    reads_anywhere = False

    def register(self, address: int, nbytes: int) -> None: ...
    def unregister(self, address: int, nbytes: int) -> None: ...
    def expect(self) -> None: ...
    def part(self, far: str) -> None: ...
    def close(self) -> None: ...

    def grant(self, address: int, nbytes: int) -> bytes:
        return b"engine"

    def meet(self, grant: bytes) -> str:
        return "far"

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        return None

    def check(self, batch: int) -> WriteStatus:
        return WriteStatus.UNKNOWN


def _span(offset: int, nbytes: int) -> bytes:
    return span_table([(offset, nbytes)]).pack()


class Guarded:
    """A region of which a permit opens a part; nothing else of it may change."""

    def __init__(self) -> None:
        self.bytes = np.zeros(REGION_BYTES, np.uint8)
        self.region = Region(0, self.bytes.ctypes.data, REGION_BYTES)
        self.permit = Permit(7, WRITER, 0, (PERMITTED,), True)

    def check(self) -> None:
        start, length = PERMITTED
        assert not self.bytes[:start].any() and not self.bytes[start + length :].any(), (
            "bytes landed outside of what was permitted"
        )
        self.bytes[start : start + length] = 0


# ---------------------------------------------------------------- control


def frames() -> tuple[bytes, ...]:
    work = m.Work("r", 0, m.pack_tokens(range(40)), 33, bytes(16), m.Sampling(max_tokens=4, seed=1), 5.0)
    shaped = msgspec.structs.replace(work, sampling=m.Sampling(max_tokens=4, seed=1, grammar=Grammar("start: /a+/")))
    reader, writer = m.Endpoint("d0", "d1", "127.0.0.1:4000", (("tcp", b"\x01"),)), m.Endpoint("p0", "p1", "[::1]:4001")
    ticket = m.Ticket(2**64 - 1, "r", 0, reader, writer, 0, m.pack_tokens([4, 9]), 32, 65536, 40, 32, 9.5)
    logprobs = m.TokenLogprobs(-0.5, (3,), (-0.5,))
    said: tuple[m.AnyMessage, ...] = (
        m.Hello("router", (("r", 0, 3),)),
        m.Prefill(work, True),
        m.Prefill(shaped, True),
        m.Prefill(work, False, pooling=m.Pooling(64)),
        m.Reserve(work, writer),
        m.Deliver(ticket),
        m.Tokens((m.TokenRow("r", 0, 5, (7, 8), (logprobs, logprobs)),)),
        m.Embedded("r", 0, np.linspace(-1.0, 1.0, 64, dtype="<f4").tobytes(), m.LegTimings(cached_tokens=32)),
        m.Commit(5, 32, (m.Leg(0, 0, 0, 8, (m.ChunkEntry(0, 0, 32, 0, 4, 65536, 2**64 - 1),)),), 11, logprobs),
        m.CommitAck(5, (0, 3)),
        m.CacheDelta(1, True, bytes(48), b""),
    )
    alone = tuple(codec.encode(m.Envelope(m.PROTOCOL_VERSION, "a", "a1", "b1", 1, (message,))) for message in said)
    batch = MessageBatch(Peer("a", "a1"), "b1", max_frame_bytes=codec.MAX_FRAME_BYTES)
    for message in said[1:]:
        assert batch.put(message)
    return (*alone, batch.frame(2**63 - 1))


def wire_decoders() -> list[Decoder]:
    whole = frames()
    bodies = tuple(frame[: -codec.DIGEST_BYTES] for frame in whole)
    return [
        Decoder("wire frame", whole, codec.decode, (ProtocolError,)),
        Decoder("wire frame with a good digest", bodies, lambda data: codec.decode(codec.seal(data)), (ProtocolError,)),
        Decoder(
            "address",
            (b"127.0.0.1:80", b"[::1]:9", b"node-3.x:1"),
            lambda data: peer_address(data.decode("latin-1")),
            (ProtocolError,),
        ),
        Decoder("ready line", (b'{"ready": true, "address": "h:1", "name": "x"}\n',), parse, (ProtocolError,)),
    ]


def card_decoders() -> list[Decoder]:
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, page_tokens=32, dtype="float32")
    card = NodeCard(
        "p0",
        "p1",
        "prefill",
        "127.0.0.1:4000",
        "tiny",
        Fingerprint("tiny", "sha", 1, 32, layout),
        2048,
        1000,
        64,
        (2,),
        "abc",
        ("tcp",),
    )
    good = card_to_proto(card)
    errors = (BadRequest, DecodeError)
    snapshot = pb.Snapshot(boot="b", version=3, nodes=[good, good])
    demand = RouterDemand("boot", 3, (("prefill", RoleDemand(0.5, 9.0)), ("decode", RoleDemand(0.0, 90.0))), 1.5, 3)
    return [
        Decoder(
            "card",
            (good.SerializeToString(),),
            lambda data: check_card(card_from_proto(pb.NodeCard.FromString(data))),
            errors,
        ),
        Decoder(
            "snapshot",
            (snapshot.SerializeToString(),),
            lambda data: snapshot_from_proto(pb.Snapshot.FromString(data)),
            errors,
        ),
        Decoder(
            "demand",
            (demand_to_proto(demand).SerializeToString(),),
            lambda data: demand_from_proto(pb.RouterDemand.FromString(data)),
            errors,
        ),
    ]


def generate_decoder() -> Decoder:
    text = inference_pb2.GenerateRequest(model="tiny", text="once", max_tokens=4, stop=["x"], logprobs=2)
    ids = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]), temperature=0.5, seed=3)
    choice = inference_pb2.StructuredOutputs(choice=inference_pb2.Choices(texts=["a", "b"]))
    shaped = [
        inference_pb2.GenerateRequest(text="a", structured_outputs=form)
        for form in (choice, inference_pb2.StructuredOutputs(json='{"items": {}}'))
    ]
    corpus = tuple(request.SerializeToString() for request in (text, ids, *shaped))
    decode = inference_pb2.GenerateRequest.FromString
    return Decoder(
        "generate request",
        corpus,
        lambda data: request_from_proto(decode(data), "tiny"),
        (BadRequest, DecodeError),
    )


def schema_decoder() -> Decoder:
    """Of a schema that came as text, and the grammar that is written for it."""
    schemas = (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": [1, "x", None]}}},
        {
            "oneOf": [
                {"type": "integer", "minimum": 3, "exclusiveMaximum": 9.5},
                {"type": "string", "pattern": "^[^a-z]{2,}$"},
            ]
        },
        {"allOf": [{"properties": {"a": {}}}, {"required": ["a"]}], "propertyNames": {"enum": ["a", "b"]}},
    )

    def decode(data: bytes) -> None:
        asked = StructuredOutputs(json=data.decode(errors="replace"))
        grammar_of_shape(AnswerShape("structured_outputs", None, asked))

    return Decoder("schema", tuple(json.dumps(schema).encode() for schema in schemas), decode, (BadRequest,))


def own_grammar_decoder() -> Decoder:
    corpus = (
        b'root ::= "a" item{2,3}\nitem ::= [^a-z] | "(" root ")"',
        b'start: "a" item*\nitem: /[a-z]+/ | %json {"type": "null"}',
    )

    def decode(data: bytes) -> None:
        asked = StructuredOutputs(grammar=data.decode(errors="replace"))
        grammar_of_shape(AnswerShape("structured_outputs", None, asked))

    return Decoder("own grammar", corpus, decode, (BadRequest,))


def rank_decoder() -> Decoder:
    row = Row("r", np.arange(4, dtype=np.int32), 0, np.arange(2, dtype=np.int32), m.Sampling(max_tokens=4, seed=1), 0)
    said = (
        channel.pack_plan(StepPlan((row,))),
        channel.Ready(4, "d", (("tcp", b"a"),)),
        channel.Here(),
        messages.WriteRequest("tcp", 1, ("r", "r1"), b"advert", 1, 0, (7, 0, 1, 64), bytes(24), True),
        messages.Arrived("tcp", (7, 0, 1, 64), 5, bytes(16), 1),
    )

    def decode(data: bytes) -> None:
        near, far = socket.socketpair()
        with near, far:
            far.sendall(data)
            far.shutdown(socket.SHUT_WR)
            found = channel.RankChannel(near, send_s=1.0).receive(1.0)
        if isinstance(found, channel.RankPlan):
            channel.unpack_plan(found)

    return Decoder("rank message", tuple(channel.frame(message) for message in said), decode, (ProtocolError,))


# ---------------------------------------------------------------- transfer


def hello_decoder() -> Decoder:
    """What a writer says until it has to prove something, in plain and sealed lanes."""
    good = [
        lane_hello.HELLO.pack(lane_hello.MAGIC, bytes(32), is_sealed, 2, 4) + b"p0p0-1" for is_sealed in (False, True)
    ]

    def decode(data: bytes) -> None:
        wants_seal = data[40:41] == b"\x01"
        link, said = FedLink(data), lane_hello.hear_hello(bytes(32), is_sealed=wants_seal, send=lambda _: None)
        needed = next(said)
        while True:
            needed = said.send(bytes(link.receive(needed)))

    return Decoder("transfer hello", tuple(good), decode, (ProtocolError, OSError))


def record_decoder() -> Decoder:
    """What comes over a sealed lane."""
    sealer = RecordSealer(bytes(32))
    records = [bytes(sealer.seal(bytes([number]) * 50)) for number in range(3)]

    def decode(data: bytes) -> None:
        link, opener = FedLink(data), RecordOpener(bytes(32))
        while True:
            head = link.receive(LENGTH.size)
            sealed = link.receive(opener.size_of(head))
            opener.open_into(head, memoryview(sealed), memoryview(bytearray(len(sealed) - TAG_BYTES)))

    return Decoder("sealed record", (records[0], b"".join(records)), decode, (ProtocolError, OSError))


def advert_decoder() -> Decoder:
    return Decoder(
        "transfer advert",
        (msgspec.msgpack.encode(TcpAdvert("127.0.0.1", 4000, bytes(32))),),
        tcp_links.decode_advert,
        (PeerUnreachable,),
    )


def rank_adverts_decoder() -> Decoder:
    good = tuple(ranked.pack_adverts([b"advert"] * count) for count in (1, 2, ranked.MAX_RANKS))
    return Decoder("adverts of ranks", good, ranked.unpack_adverts, (PeerUnreachable,))


def tcp_frame_decoder() -> Decoder:
    memory, backend = Guarded(), tcp.TcpBackend(READER)
    backend.register(memory.region)
    backend.permit(memory.permit)
    one = tcp.FRAME.pack(tcp.WRITE_MAGIC, 1, 7, 0, 1, 0, 64) + _span(4096, 64) + b"\xaa" * 64
    two = tcp.FRAME.pack(tcp.WRITE_MAGIC, 2, 7, 1, 1, 0, 96) + _span(8000, 32) + _span(5000, 64) + b"\xbb" * 96

    def decode(data: bytes) -> None:
        backend._serve(FedLink(data))  # type: ignore[arg-type]

    def check() -> None:
        memory.check()
        backend.arrivals()

    return Decoder("tcp frame", (one, two, one + two), decode, (ProtocolError, OSError), check, backend.shutdown)


def _no_body() -> tcp._Body:
    return tcp._Body(Cursor(memoryview(b"")), None, 0)


def lane_decoder() -> Decoder:
    """What a reader answers a writer of tcp."""
    doorbell = Doorbell()
    lane = tcp._Lane(
        WRITER,
        READER,
        TcpAdvert("127.0.0.1", unused_port(), bytes(32)),
        tcp.TcpSettings(connect_s=0.1),
        Writes(doorbell),
    )
    lane.thread.join()

    def decode(data: bytes) -> None:
        lane._unanswered = deque(
            tcp._Write(Handle(n), Stamp(7, n, 1, 64), Cursor(memoryview(b"")), _no_body) for n in range(3)
        )
        answers = AnswerReader(FedLink(data), tcp.ACK)  # type: ignore[arg-type]
        while True:
            lane._take_answers(answers)

    good = b"".join(tcp.ACK.pack(tcp.ACK_MAGIC, 7, n, 1, 1) for n in range(3))
    return Decoder("tcp answer", (good, good[: tcp.ACK.size]), decode, (ProtocolError, OSError), end=doorbell.close)


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def staged_decoders() -> list[Decoder]:
    memory, engine = Guarded(), NoEngine()
    settings = StagedSettings(block_bytes=4096, blocks=4)
    backend = StagedBackend(READER, "staged", engine, settings)
    backend.register(memory.region)
    backend.permit(memory.permit)
    ring = Blocks(engine, 4, 4096)

    def decode(data: bytes) -> None:
        link, landed = FedLink(data), OrderedDict()  # type: ignore[var-annotated]
        while True:
            backend._receive(link, ring, landed)  # type: ignore[arg-type]

    def check() -> None:
        memory.check()
        backend.arrivals()

    one = staging.NOTICE.pack(staging.NOTICE_MAGIC, 0, 1, 7, 0, 1, 0, 64, 64) + _span(4096, 64)
    awake = staging.NOTICE.pack(staging.AWAKE_MAGIC, 0, 0, 0, 0, 0, 0, 0, 0)
    grant = msgspec.msgpack.encode(staging.Grant(b"engine", 1 << 40, 4096, 4))
    grants = (staging.LENGTH.pack(len(grant)) + grant,)
    errors = (ProtocolError, OSError)
    return [
        Decoder("staged notice", (one, awake + one, one + one), decode, errors, check, backend.shutdown),
        Decoder("staged grant", grants, lambda data: staging.read_grant(FedLink(data)), errors),  # type: ignore[arg-type]
        pump_decoder(),
    ]


def pump_decoder() -> Decoder:
    """What a reader answers a writer of a staged medium."""
    doorbell, engine, advert = Doorbell(), NoEngine(), TcpAdvert("127.0.0.1", unused_port(), bytes(32))
    pump = Pump(
        "staged",
        WRITER,
        READER,
        advert,
        StagedSettings(connect_s=0.1),
        engine,
        SourceReads(engine, Writes(doorbell), 1.0),
    )
    pump.thread.join()
    source = Region(0, 0, REGION_BYTES)

    def decode(data: bytes) -> None:
        pump._free = []
        payload = Payload(table_of(()), digests=False)
        run = run_table((CopyRun(0, 0, 64),))
        writes = [
            StagedWrite(Handle(n), source, 0, Stamp(7, n, 1, 64), run, payload, False, deque(), 1, 1) for n in range(3)
        ]
        piece = cut(run, 0, 4096, may_be_straight=True)[0]
        pump._reader_has = {n: PieceInFlight(write, piece, None, []) for n, write in enumerate(writes)}
        answers = AnswerReader(FedLink(data), staging.ANSWER)  # type: ignore[arg-type]
        while True:
            pump._take_answers(answers)

    good = b"".join(staging.ANSWER.pack(staging.ANSWER_MAGIC, n, 1) for n in range(3))
    return Decoder("staged answer", (good,), decode, (ProtocolError, OSError), end=doorbell.close)


def shm_decoders() -> list[Decoder]:
    memory, backend = Guarded(), ShmBackend(READER)
    backend._regions[0] = memory.region  # not in shared memory, and never mapped by anybody here
    backend.permit(memory.permit)
    notices = Notices(backend._regions, backend._permits, backend._arrivals, backend._counts)
    told = [
        shm_frames.CopyNotice(Stamp(7, 0, 1, 64), 0, span_table([(4096, 64)]), has_begun) for has_begun in (False, True)
    ]
    corpus = (*map(shm_frames.pack_notice, told), shm_frames.pack_progress(64))
    token = secrets.token_bytes(16)

    def check() -> None:
        memory.check()
        backend.arrivals()

    return [
        Decoder(
            "shm notice", corpus, lambda data: notices.take(WRITER, data), (ProtocolError,), check, backend.shutdown
        ),
        Decoder(
            "shm advert",
            (shm_frames.encode(shm_frames.ShmAdvert(b"name", token)),),
            shm_frames.decode_advert,
            (PeerUnreachable,),
        ),
        Decoder(
            "shm hello",
            (shm_frames.encode(shm_frames.ShmHello(token, 0, "p0", "p1")),),
            shm_frames.decode_hello,
            (ProtocolError,),
        ),
        Decoder(
            "shm regions",
            (shm_frames.encode(shm_frames.SharedRegions(((0, 4096), (1, 4096)))),),
            shm_frames.decode_shared,
            (ProtocolError,),
        ),
    ]


def vllm_decoders() -> list[Decoder]:
    """What nodes with vLLM get from each other, and from the vLLM beside them."""
    known = reference.Reference(
        1, "engine-1", "r1-0", "10.0.0.1", 5600, 1, 1, 1, 32, 70, ((0, 1, 2),), ("tcp://10.0.0.1:7",)
    )
    batch = events.EventBatch(
        1.5, [events.BlockStored([b"hash"], None, [1, 2], 2, None, None), events.AllBlocksCleared()]
    )
    notice = read_confirmation.ReadNotice("r1-0", "reader", "fence").name + ":1"
    return [
        Decoder(
            "vllm question",
            (msgspec.msgpack.encode(read_confirmation.ReadQuestion("r1-0", "reader", "fence")),),
            read_confirmation.decode_question,
            (ProtocolError,),
        ),
        Decoder(
            "vllm answer",
            (msgspec.msgpack.encode(read_confirmation.ReadAnswer("reader", True)),),
            read_confirmation.decode_answer,
            (ProtocolError,),
        ),
        Decoder("vllm reference", (reference.encode_reference(known),), reference.decode_reference, (ProtocolError,)),
        Decoder("vllm events", (msgspec.msgpack.encode(batch),), events.decode_events, (ProtocolError,)),
        Decoder(
            "vllm notice",
            (notice.encode(),),
            lambda data: read_confirmation.parse_notice(data.decode("utf-8", "replace")) or refuse(),
            (ProtocolError,),
        ),
    ]


def refuse() -> None:
    raise ProtocolError("no notice")


def control_decoder() -> Decoder:
    """What a router's workers and their supervisor say to each other."""
    told = control.WorkerEvent(Event(1, 2.5, "role", "n0", "prefill becomes decode"))
    said = (
        control.Joined(1, "boot", 77),
        control.WorkerQuestion(1, control.AskCordon("n0", True)),
        control.WorkerAnswer(1, b"\x90"),
        told,
    )
    return Decoder(
        "control frame", tuple(control.encode(frame)[4:] for frame in said), control.decode, (ProtocolError,)
    )


def decoders() -> dict[str, Decoder]:
    every: list[Any] = [
        *wire_decoders(),
        *card_decoders(),
        generate_decoder(),
        schema_decoder(),
        own_grammar_decoder(),
        rank_decoder(),
    ]
    every += vllm_decoders()
    every += [hello_decoder(), record_decoder(), advert_decoder(), rank_adverts_decoder()]
    every += [control_decoder(), tcp_frame_decoder(), lane_decoder(), *staged_decoders(), *shm_decoders()]
    return {decoder.name: decoder for decoder in every}


def feed(decoder: Decoder, data: bytes) -> bool:
    """Whether it was taken; raises whatever it must not raise."""
    taken = False
    with contextlib.suppress(*decoder.errors):
        decoder.decode(data)
        taken = True
    decoder.check()
    return taken
