"""A router's link to a node over its life: up, hung, lost, restarted."""

import asyncio
import dataclasses
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop
import zmq
from wire_nodes import SETTINGS, Node, start_again

from pdcluster.core import messages as m
from pdcluster.core.errors import NodeLost
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire import router_link
from pdcluster.wire.client_link import Open
from pdcluster.wire.codec import decode, encode
from pdcluster.wire.curve import Gatekeeper
from pdcluster.wire.router_link import LinkState, NodeLink
from pdcluster.wire.sockets import CLUSTER_KEY_BYTES, ZAP_DOMAIN, WireSettings, derive_keys

Context = zmq.Context[zmq.Socket[bytes]]
Make = Callable[..., Node]
ME = Peer("router-0", "boot-r")
# Whose ticks are minutes apart.
PATIENT = dataclasses.replace(SETTINGS, heartbeat_s=2000.0, lease_s=9000.0, rewelcome_s=9000.0)


@dataclass(frozen=True)
class Own:
    """What a router's links need: a context, and the cluster key that both ends have, if any."""

    context: Context
    key: bytes | None

    def secured(self, settings: WireSettings) -> WireSettings:
        return dataclasses.replace(settings, cluster_keys=() if self.key is None else (self.key,))


class Router:
    """One link and everything it said."""

    def __init__(self, own: Own, endpoint: m.Endpoint, settings: WireSettings = SETTINGS) -> None:
        self.messages: list[m.AnyMessage] = []
        self.states: list[LinkState] = []
        self.open: Open = ()
        self.link = NodeLink(
            ME, endpoint, context=own.context, on_message=self.messages.append, on_state=self.states.append,
            open_attempts=lambda: self.open, settings=own.secured(settings),
        )  # fmt: skip


async def until(condition: Callable[[], object], *nodes: Node, limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            for node in nodes:
                node.turn()
            await asyncio.sleep(0.002)


@pytest.fixture(params=[None, bytes(CLUSTER_KEY_BYTES)], ids=["plain", "curve"])
def own(request: pytest.FixtureRequest, other_context: Context) -> Own:
    return Own(other_context, request.param)


@pytest.fixture
def make_node(own: Own, make_node: Make) -> Make:
    def make(name: str, incarnation: str = "boot-1", *, settings: WireSettings = SETTINGS, **rest: Any) -> Node:
        return make_node(name, incarnation, settings=own.secured(settings), **rest)

    return make


@pytest.fixture
def node(make_node: Make) -> Node:
    return make_node("decode-0")


@pytest.fixture
async def router(own: Own, node: Node) -> AsyncIterator[Router]:
    router = Router(own, node.endpoint)
    yield router
    router.link.close()


async def test_a_link_comes_up_and_carries_messages_in_order_both_ways(node: Node, router: Router) -> None:
    for number in range(1500):
        router.link.send(m.Release(f"r{number}"))
    await until(lambda: len(node.messages(m.Release)) == 1500, node)
    assert router.states == [LinkState.UP]
    for number in range(1500):
        assert node.hub.send(ME, m.Scheduled("r", number))
    await until(lambda: len(router.messages) == 1500, node)
    assert node.messages(m.Release) == [m.Release(f"r{number}") for number in range(1500)]
    assert router.messages == [m.Scheduled("r", number) for number in range(1500)]
    assert not router.link.dropped and not node.hub.dropped and not router.link.gaps and not node.hub.gaps


@pytest.mark.parametrize("signals_while_sending", [False, True])
def test_a_link_lives_on_uvloop_too(own: Own, make_node: Make, signals_while_sending: bool) -> None:
    node = make_node("decode-0")

    async def scenario() -> Router:
        router = Router(own, node.endpoint)
        if signals_while_sending:
            await test_answers_arrive_while_requests_are_being_sent(node, router)
        else:
            await test_a_link_comes_up_and_carries_messages_in_order_both_ways(node, router)
        new = make_node("decode-0", "boot-2", listen="127.0.0.1:0", own=own.context)
        node.hub.close()
        await until(lambda: router.states[-1] is LinkState.LOST)
        again = Router(own, new.endpoint)
        again.link.send(m.Release("r"))
        await until(lambda: new.messages(m.Release), new)
        assert new.messages(m.Release) == [m.Release("r")] and again.states == [LinkState.UP]
        again.link.close()
        router.link.close()
        return router

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        router = runner.run(scenario())
    assert router.states[0] is LinkState.UP and router.states[-1] is LinkState.LOST
    assert len(router.messages) == (300 if signals_while_sending else 1500)


async def test_answers_arrive_while_requests_are_being_sent(node: Node, router: Router) -> None:
    """Sending may swallow the edge that would have announced an answer."""
    answered = 0
    for number in range(300):
        router.link.send(m.Release(f"r{number}"))
        node.turn()
        while answered < len(node.messages(m.Release)):
            node.hub.send(ME, m.Scheduled("r", answered))
            answered += 1
        await asyncio.sleep(0)
    await until(lambda: len(node.messages(m.Release)) == 300, node)
    for number in range(answered, 300):
        node.hub.send(ME, m.Scheduled("r", number))
    node.hub.flush()
    await until(lambda: len(router.messages) == 300)
    assert router.messages == [m.Scheduled("r", number) for number in range(300)]


async def test_a_node_is_heard_while_every_turn_sends_it_more_than_one_frame(
    own: Own, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them may swallow the edge that told of what came, also when others of the same turn are held for the next
    one."""
    now = 1.0
    monkeypatch.setattr(router_link, "perf_counter", lambda: now)
    router = Router(own, node.endpoint, PATIENT)
    await until(lambda: router.states, node)
    for number in range(200):
        node.hub.send(ME, m.Scheduled("r", number))
        node.turn()
        time.sleep(0.002)  # so that it lies there before the loop looks
        now += router_link.HELD_S
        for _ in range(200):  # ZMQ's thread may be late, the link may not
            router.link.send(m.Release("lets go of what was held"))
            router.link.send(m.Release("is held"))
            await asyncio.sleep(0)
            if len(router.messages) >= number - 2:
                break
            time.sleep(0.002)
            now += router_link.HELD_S
        assert len(router.messages) >= number - 2
    router.link.close()


async def test_what_is_more_than_one_drain_takes_is_read_while_every_turn_sends(
    listener: "Listener", caller: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "HELD_S", 1e9)
    for number in range(2000):
        listener.say(m.Scheduled("r", number), number + 2)
    time.sleep(0.2)  # a stall: all of it lies there
    for turn in range(2000):
        for _ in range(3):
            caller.link.send(m.Release("held"))
        await asyncio.sleep(0)
        if len(caller.messages) == 1 + 2000:
            break
        if turn % 10 == 9:
            time.sleep(0.01)  # for ZMQ's thread
    assert len(caller.messages) == 1 + 2000


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_lease_that_ends_is_told_in_the_tick_that_sees_it(
    own: Own, context: Context, run: Callable[..., None]
) -> None:
    """Nobody answers, and the tick after that one is half a minute away."""

    async def scenario() -> None:
        silent = socket.create_server(("127.0.0.1", 0))
        settings = WireSettings(heartbeat_s=120.0, lease_s=130.0, rewelcome_s=0.1)
        router = Router(own, m.Endpoint("decode-0", "boot-1", f"127.0.0.1:{silent.getsockname()[1]}"), settings)
        await asyncio.sleep(0.05)
        router.link._client_link._up_by = asyncio.get_running_loop().time() - 1.0
        router.link._tick()
        for _ in range(5):
            await asyncio.sleep(0)
        assert router.states == [LinkState.LOST]
        router.link.close()
        silent.close()

    run(scenario())


async def test_the_hello_names_the_open_attempts(own: Own, node: Node) -> None:
    router = Router(own, node.endpoint)
    router.open = (("late", 0, 0),)
    await until(lambda: node.received, node)
    assert node.received[0].message == m.Hello("router", ())
    router.link.close()


async def test_an_idle_link_stays_up(node: Node, router: Router) -> None:
    turns = iter(range(400))
    await until(lambda: next(turns) == 399, node)
    assert router.states == [LinkState.UP] and node.events == []


async def test_a_node_that_hangs_loses_its_link_when_the_lease_ends(node: Node, router: Router) -> None:
    await until(lambda: router.states, node)
    await until(lambda: router.states[-1] is LinkState.LOST)
    assert router.states == [LinkState.UP, LinkState.LOST] and "nothing heard" in router.link.lost_because
    with pytest.raises(NodeLost, match="decode-0"):
        router.link.send(m.Release("r"))


def test_a_pause_of_the_whole_machine_costs_no_link(own: Own, make_node: Make) -> None:
    """In a loop that counts stalls, as a router's does."""
    node = make_node("decode-0")

    async def scenario() -> None:
        router = Router(own, node.endpoint)
        await until(lambda: router.states == [LinkState.UP], node)
        time.sleep(3 * SETTINGS.lease_s)
        for _ in range(20):
            node.turn()
            await asyncio.sleep(SETTINGS.heartbeat_s / 4)
        assert router.states == [LinkState.UP]
        router.link.close()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(scenario())


async def test_a_node_that_dies_loses_its_link(node: Node, router: Router) -> None:
    await until(lambda: router.states, node)
    node.hub.close()
    await until(lambda: router.states[-1] is LinkState.LOST)
    assert router.states[0] is LinkState.UP and router.link.lost_because


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_node_that_dies_between_two_ticks_loses_its_link_at_once(
    own: Own, node: Node, run: Callable[..., None]
) -> None:
    """What becomes of the connection is heard when it happens: nothing else wakes the link, and the next tick is
    minutes away."""

    async def scenario() -> None:
        router = Router(own, node.endpoint, PATIENT)
        await until(lambda: router.states, node)
        node.hub.close()
        await until(lambda: router.states[-1] is LinkState.LOST)
        assert router.states[0] is LinkState.UP and "refuses connections" in router.link.lost_because
        router.link.close()

    run(scenario())


async def test_what_a_node_said_before_it_hung_up_is_heard(node: Node, router: Router) -> None:
    await until(lambda: router.states, node)
    for number in range(100):
        node.hub.send(ME, m.Scheduled("r", number))
        node.hub.flush()
    await until(lambda: router.messages)
    node.hub.close()
    await until(lambda: router.states[-1] is LinkState.LOST)
    assert router.messages == [m.Scheduled("r", number) for number in range(len(router.messages))]


async def test_nobody_at_the_address_ends_as_lost(own: Own) -> None:
    router = Router(own, m.Endpoint("decode-0", "boot-1", "127.0.0.1:1"))
    await until(lambda: router.states)
    assert router.states == [LinkState.LOST] and "did not answer" in router.link.lost_because
    router.link.close()


async def test_another_boot_at_the_address_ends_as_lost(own: Own, node: Node) -> None:
    router = Router(own, m.Endpoint("decode-0", "boot-0", node.hub.address))
    await until(lambda: router.states, node)
    assert router.states == [LinkState.LOST] and "another boot" in router.link.lost_because
    assert node.received == []
    router.link.close()


async def test_a_restart_on_the_same_address_ends_as_lost_and_a_new_link_works(
    own: Own, make_node: Make, node: Node, router: Router
) -> None:
    await until(lambda: router.states, node)
    node.hub.close()
    new = start_again(make_node, node, "boot-2")
    await until(lambda: router.states[-1] is LinkState.LOST, new)
    again = Router(own, new.endpoint)
    again.link.send(m.Release("r"))
    await until(lambda: new.messages(m.Release), new)
    assert new.messages(m.Release) == [m.Release("r")] and not node.messages(m.Release)
    again.link.close()


async def test_a_full_queue_raises_node_lost_and_the_link_goes_on(own: Own, make_node: Make) -> None:
    narrow = WireSettings(heartbeat_s=0.05, lease_s=30.0, high_water=4)
    node = make_node("decode-0", settings=narrow)
    router = Router(own, node.endpoint, narrow)
    await until(lambda: router.states, node)
    sent = 0
    with pytest.raises(NodeLost, match="takes no more frames"):
        for _ in range(2000):
            router.link.send(m.FileChunk("f", 0, 1 << 20, bytes(1 << 20)))
            sent += 1
    await until(lambda: len(node.messages(m.FileChunk)) == sent, node)
    router.link.send(m.Release("after"))
    await until(lambda: node.messages(m.Release), node)
    assert node.hub.gaps == 0
    router.link.close()


async def test_a_full_queue_is_not_tried_in_every_turn_of_the_loop(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody at the other end says a word, so that nothing leaves. HELD_S: the retry comes long after this test."""
    monkeypatch.setattr(router_link, "HELD_S", 1000.0)
    silent = socket.create_server(("127.0.0.1", 0))
    router = Router(
        own,
        m.Endpoint("decode-0", "boot-1", f"127.0.0.1:{silent.getsockname()[1]}"),
        dataclasses.replace(PATIENT, high_water=4),
    )
    with pytest.raises(NodeLost, match="takes no more frames"):
        for _ in range(20):
            router.link.send(m.FileChunk("f", 0, 1 << 20, bytes(1 << 20)))
    flush, tries = router.link._client_link.flush, 0

    def counted(now: float) -> bool:
        nonlocal tries
        tries += 1
        return flush(now)

    monkeypatch.setattr(router.link._client_link, "flush", counted)
    for _ in range(100):
        await asyncio.sleep(0)
    assert tries <= 4
    router.link.close()
    silent.close()


async def test_a_handler_that_fails_costs_one_message_only(own: Own, node: Node) -> None:
    seen: list[m.AnyMessage] = []
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: failures.append(report["exception"]))

    def handle(message: m.AnyMessage) -> None:
        seen.append(message)
        if len(seen) == 1:
            raise ValueError("not handled")

    link = NodeLink(
        ME,
        node.endpoint,
        context=own.context,
        on_message=handle,
        on_state=lambda _: None,
        open_attempts=tuple,
        settings=own.secured(SETTINGS),
    )
    await until(lambda: node.received, node)
    for number in range(3):
        node.hub.send(ME, m.Scheduled("r", number))
    await until(lambda: len(seen) == 3, node)
    assert [type(failure) for failure in failures] == [ValueError]
    link.close()


class Listener:
    """The node's end of a link, driven frame by frame."""

    def __init__(self, context: Context, key: bytes | None) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.gatekeeper = None
        if key is not None:
            keys = derive_keys(key)
            self.gatekeeper = Gatekeeper(context, [keys])
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self.socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(
            zmq.SNDHWM, 0
        )  # a ROUTER drops what is above its mark, which it passes when ZMQ's thread gets no core
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = m.Endpoint("decode-0", "boot-1", f"127.0.0.1:{port}")
        self.identity = b""

    def heard(self) -> list[m.AnyMessage]:
        messages: list[m.AnyMessage] = []
        while self.socket.poll(0):
            self.identity, frame = self.socket.recv_multipart()
            messages += decode(frame).messages
        return [message for message in messages if not isinstance(message, m.Ping)]

    def say(
        self, message: m.AnyMessage, sequence: int, *, incarnation: str = "boot-1", to: str = ME.incarnation
    ) -> None:
        self.say_all((message,), sequence, incarnation=incarnation, to=to)

    def say_all(
        self,
        messages: tuple[m.AnyMessage, ...],
        sequence: int,
        *,
        incarnation: str = "boot-1",
        to: str = ME.incarnation,
    ) -> None:
        self.socket.send_multipart(
            (self.identity, encode(m.Envelope(m.PROTOCOL_VERSION, "decode-0", incarnation, to, sequence, messages)))
        )

    def frames(self) -> list[m.Envelope]:
        """What was heard, frame by frame; nothing else may read here."""
        envelopes = []
        while self.socket.poll(0):
            self.identity, frame = self.socket.recv_multipart()
            envelopes.append(decode(frame))
        return envelopes


@pytest.fixture
def listener(context: Context, own: Own) -> Iterator[Listener]:
    listener = Listener(context, own.key)
    yield listener
    listener.socket.close(0)
    if listener.gatekeeper is not None:
        listener.gatekeeper.close()


@pytest.fixture
async def caller(own: Own, listener: Listener) -> AsyncIterator[Router]:
    """A router whose Hello the listener has heard and answered."""
    router = Router(
        own, listener.endpoint, WireSettings(heartbeat_s=5.0, lease_s=20.0, rewelcome_s=10.0, hello_interval_s=0.01)
    )
    await until(lambda: listener.heard() == [m.Hello("router")])
    listener.say(m.Welcome("decode"), 1)
    await until(lambda: router.messages)
    yield router
    router.link.close()


async def make_busy(router: Router, listener: Listener) -> None:
    """Several messages left together when last something was sent, and nothing waits."""
    for _ in range(3):
        router.link.send(m.Release("busy"))
    heard: list[m.AnyMessage] = []
    await until(lambda: heard.extend(listener.heard()) or len(heard) == 3)
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_is_sent_alone_leaves_at_once(
    listener: Listener, caller: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "HELD_S", 1e9)
    for number in range(5):
        listener.frames()
        caller.link.send(m.Release(f"alone {number}"))
        assert not caller.link._client_link.unsent
        await asyncio.sleep(0)
        frames: list[m.Envelope] = []
        await until(lambda frames=frames: frames.extend(listener.frames()) or frames)  # type: ignore[misc]
        assert [frame.messages for frame in frames] == [(m.Release(f"alone {number}"),)]


async def test_what_follows_in_the_same_turn_is_one_frame_behind_the_first(
    listener: Listener, caller: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "HELD_S", 1e9)
    listener.frames()
    for number in range(4):
        caller.link.send(m.Release(f"r{number}"))
    frames: list[m.Envelope] = []
    await until(lambda: frames.extend(listener.frames()) or len(frames) == 2)
    assert [len(frame.messages) for frame in frames] == [1, 3]


async def test_what_is_sent_in_one_turn_of_the_loop_is_one_frame(
    listener: Listener, caller: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "HELD_S", 1e9)
    await make_busy(caller, listener)
    numbers = {caller.link.send(m.Release(f"r{number}")) for number in range(50)}
    frames: list[m.Envelope] = []
    await until(lambda: frames.extend(listener.frames()) or frames)
    assert [frame.messages for frame in frames] == [tuple(m.Release(f"r{number}") for number in range(50))]
    assert numbers == {frames[0].sequence}
    assert caller.link.send(m.Release("next")) == frames[0].sequence + 1


async def test_what_is_sent_in_turns_that_follow_each_other_is_one_frame(
    listener: Listener, caller: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "HELD_S", 1e9)
    loop, sent = asyncio.get_running_loop(), [m.Release(f"r{number}") for number in range(50)]

    def send_next(number: int) -> None:
        caller.link.send(sent[number])
        if number + 1 < len(sent):
            loop.call_soon(send_next, number + 1)

    await make_busy(caller, listener)
    send_next(0)
    frames: list[m.Envelope] = []
    await until(lambda: frames.extend(listener.frames()) or frames)
    assert [frame.messages for frame in frames] == [tuple(sent)]


async def test_a_frame_leaves_as_soon_as_a_turn_sends_nothing(
    listener: Listener, caller: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "HELD_S", 1e9)
    await make_busy(caller, listener)
    caller.link.send(m.Release("alone"))
    assert caller.link._client_link.unsent
    for _ in range(3):
        await asyncio.sleep(0)
    assert listener.socket.poll(10_000)  # without a further turn
    assert [frame.messages for frame in listener.frames()] == [(m.Release("alone"),)]


async def test_what_follows_turn_by_turn_is_held_no_longer_than_that(
    listener: Listener, caller: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "HELD_S", 0.02)
    await make_busy(caller, listener)
    frames: list[m.Envelope] = []
    async with asyncio.timeout(20):
        while len(frames) < 2:  # there is never a turn that sends nothing
            caller.link.send(m.Release("again"))
            await asyncio.sleep(0)
            frames += listener.frames()
    assert len(frames[0].messages) > 1


async def test_what_is_sent_in_answer_to_a_frame_is_one_frame(
    own: Own, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "HELD_S", 1e9)
    calm = WireSettings(heartbeat_s=5.0, lease_s=20.0)

    def answer(message: m.AnyMessage) -> None:
        if isinstance(message, m.Scheduled):
            link.send(m.Release(message.request))

    link = NodeLink(
        ME,
        listener.endpoint,
        context=own.context,
        on_message=answer,
        on_state=lambda _: None,
        open_attempts=tuple,
        settings=own.secured(calm),
    )
    await until(lambda: listener.heard() == [m.Hello("router")])
    listener.say_all(tuple(m.Scheduled(f"r{number}", 0) for number in range(20)), 1)
    frames: list[m.Envelope] = []
    await until(lambda: frames.extend(listener.frames()) or frames)
    assert [frame.messages for frame in frames] == [tuple(m.Release(f"r{number}") for number in range(20))]
    link.close()


async def test_a_turn_that_takes_long_does_not_hold_the_first_message_back(
    listener: Listener, caller: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_busy(caller, listener)
    monkeypatch.setattr(router_link, "HELD_S", 1e9)
    caller.link.send(m.Release("first"))
    assert not listener.socket.poll(0)
    monkeypatch.setattr(router_link, "HELD_S", 0.0)  # any turn takes longer than that
    caller.link.send(m.Release("second"))
    caller.link.send(m.Release("third"))
    assert listener.socket.poll(10_000)  # without a turn of the loop
    assert listener.frames()[0].messages == (m.Release("first"), m.Release("second"))


async def test_more_than_a_frame_holds_goes_as_several(
    listener: Listener, caller: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "HELD_S", 1e9)
    await make_busy(caller, listener)
    sent = [m.Release(f"r{number}") for number in range(m.MAX_MESSAGES + 1)] + [
        m.FileChunk("f", 0, 1 << 20, bytes(200 << 10)) for _ in range(3)
    ]
    numbers = [caller.link.send(message) for message in sent]
    frames: list[m.Envelope] = []
    await until(lambda: frames.extend(listener.frames()) or sum(len(frame.messages) for frame in frames) == len(sent))
    assert [message for frame in frames for message in frame.messages] == sent
    assert numbers == [frame.sequence for frame in frames for _ in frame.messages]
    assert len(frames) == 4


async def test_a_gap_in_the_nodes_frames_makes_the_router_say_what_it_waits_for(
    listener: Listener, caller: Router
) -> None:
    caller.open = (("r1", 0, 7),)
    listener.say(m.Scheduled("r1", 0), 2)
    listener.say(m.Scheduled("r2", 0), 4)
    heard: list[m.AnyMessage] = []
    await until(lambda: heard.extend(listener.heard()) or heard)
    assert heard == [m.Hello("router", (("r1", 0, 7),))]
    assert caller.link.gaps == 1 and caller.messages[1:] == [m.Scheduled("r1", 0), m.Scheduled("r2", 0)]


async def test_what_was_lost_before_a_welcome_is_asked_for_again(listener: Listener, caller: Router) -> None:
    listener.say(m.Welcome("decode"), 3)  # the tokens that it said again in frame 2 were dropped at its high water
    await until(lambda: m.Hello("router") in listener.heard())
    assert caller.link.gaps == 1
    listener.say(m.Welcome("decode"), 1)  # it had forgotten us, and counts anew
    listener.say(m.Scheduled("r", 0), 2)
    await until(lambda: m.Scheduled("r", 0) in caller.messages)
    assert caller.link.gaps == 1 and not caller.link.dropped


async def test_a_hello_is_alone_in_its_frame_and_behind_what_was_said_before_it(
    listener: Listener, caller: Router
) -> None:
    listener.frames()
    listener.say_all((m.Scheduled("r1", 0), m.Scheduled("r2", 0)), 5)
    caller.link.send(m.Release("before"))
    frames: list[m.Envelope] = []
    await until(lambda: frames.extend(listener.frames()) or len(frames) == 2)
    assert [frame.messages for frame in frames] == [(m.Release("before"),), (m.Hello("router"),)]
    assert caller.link.gaps == 1 and caller.messages[1:] == [m.Scheduled("r1", 0), m.Scheduled("r2", 0)]


async def test_a_node_that_asks_for_a_hello_gets_it(listener: Listener, caller: Router) -> None:
    caller.open = (("r1", 0, 7),)
    listener.say(m.Hello("node"), 1)
    heard: list[m.AnyMessage] = []
    await until(lambda: heard.extend(listener.heard()) or heard)
    assert heard == [m.Hello("router", (("r1", 0, 7),))]
    assert caller.messages == [m.Welcome("decode")]


async def test_duplicates_and_garbage_and_frames_for_others_are_dropped_and_counted(
    listener: Listener, caller: Router
) -> None:
    listener.say(m.Scheduled("r", 0), 2)
    listener.say(m.Scheduled("r", 0), 2)
    listener.say(m.Scheduled("r", 1), 3, to="another-router")
    listener.socket.send_multipart((listener.identity, b"garbage"))
    listener.say(m.Scheduled("r", 2), 3)
    await until(lambda: len(caller.messages) == 3)
    assert caller.messages[1:] == [m.Scheduled("r", 0), m.Scheduled("r", 2)]
    assert caller.link.dropped == {"duplicate": 1, "misdirected": 1, "malformed": 1}


async def test_a_duplicate_of_a_frame_is_dropped_with_all_its_messages(listener: Listener, caller: Router) -> None:
    both = (m.Scheduled("r", 0), m.Scheduled("r", 1))
    listener.say_all(both, 2)
    listener.say_all(both, 2)
    listener.say_all((m.Ping(), m.Scheduled("r", 2)), 3)
    await until(lambda: len(caller.messages) == 4)
    assert caller.messages[1:] == [*both, m.Scheduled("r", 2)]
    assert caller.link.dropped == {"duplicate": 1} and caller.link.gaps == 0


async def test_a_cut_that_the_same_boot_heals_costs_no_link_and_starts_with_a_hello(
    own: Own, listener: Listener, caller: Router
) -> None:
    proxy = await CuttingProxy.start(listener.endpoint.address)
    router = Router(
        own,
        m.Endpoint("decode-0", "boot-1", proxy.address),
        WireSettings(heartbeat_s=5.0, lease_s=20.0, rewelcome_s=10.0),
    )
    await until(lambda: listener.heard() == [m.Hello("router")])
    listener.say(m.Welcome("decode"), 1)
    await until(lambda: router.states == [LinkState.UP])
    first_identity = listener.identity
    router.open = (("r1", 0, 7),)
    proxy.cut()
    heard: list[m.AnyMessage] = []
    await until(lambda: heard.extend(listener.heard()) or heard)
    assert heard[0] == m.Hello("router", (("r1", 0, 7),)) and listener.identity != first_identity
    listener.say(m.Welcome("decode"), 9)
    await until(lambda: len(router.messages) == 2)
    assert LinkState.LOST not in router.states and router.states[-1] is LinkState.UP
    router.link.close()
    await proxy.close()


class CuttingProxy:
    """A TCP hop that can be cut while both ends live."""

    def __init__(self, target: str) -> None:
        self._target = target.split(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.address = ""

    @classmethod
    async def start(cls, target: str) -> "CuttingProxy":
        proxy = cls(target)
        proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.address = f"127.0.0.1:{proxy._server.sockets[0].getsockname()[1]}"
        return proxy

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
        except ConnectionError:
            return
        finally:
            sink.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
