"""A hub among nodes and routers: order, gaps, bounds, strangers."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq
from wire_nodes import SETTINGS, Node, pump, start_again

from pdcluster.core import messages as m
from pdcluster.core.awake_clock import AwakeClock
from pdcluster.core.errors import ConfigError
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.codec import decode, encode
from pdcluster.wire.hub import Hub, LeaseEnded, LinkGap, LinkLost, Received
from pdcluster.wire.sockets import WireSettings

Context = zmq.Context[zmq.Socket[bytes]]
Make = Callable[..., Node]


class Caller:
    """A peer that we drive frame by frame: what a router sends, or what a broken or hostile one may send."""

    def __init__(self, context: Context, node: Node, me: Peer) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://{node.hub.address}")
        self.node, self.me, self.sequence = node, me, 0

    def say(self, message: m.AnyMessage, *, skip: int = 0, to: str | None = None) -> None:
        self.say_all((message,), skip=skip, to=to)

    def say_all(self, messages: tuple[m.AnyMessage, ...], *, skip: int = 0, to: str | None = None) -> None:
        self.sequence += 1 + skip
        incarnation = self.node.me.incarnation if to is None else to
        self.socket.send(
            encode(
                m.Envelope(m.PROTOCOL_VERSION, self.me.node, self.me.incarnation, incarnation, self.sequence, messages)
            )
        )

    def heard(self) -> list[m.Envelope]:
        envelopes = []
        while self.socket.poll(0):
            envelopes.append(decode(self.socket.recv()))
        return envelopes

    def close(self) -> None:
        self.socket.close(0)


@pytest.fixture
def node(make_node: Make) -> Node:
    return make_node("decode-0")


@pytest.fixture
def router(context: Context, node: Node) -> Iterator[Caller]:
    caller = Caller(context, node, Peer("router-0", "boot-r"))
    yield caller
    caller.close()


def test_messages_between_two_nodes_arrive_in_order_both_ways(make_node: Make) -> None:
    a, b = make_node("prefill-0"), make_node("decode-0")
    for number in range(300):
        assert a.hub.send(b.endpoint, m.AbortAck(number, "from a"))
    pump(lambda: len(b.messages(m.AbortAck)) == 300, a, b)
    for number in range(300):
        assert b.hub.send(a.me, m.AbortAck(number, "from b"))
    pump(lambda: len(a.messages(m.AbortAck)) == 300, a, b)
    assert b.messages(m.AbortAck) == [m.AbortAck(number, "from a") for number in range(300)]
    assert a.messages(m.AbortAck) == [m.AbortAck(number, "from b") for number in range(300)]
    assert {item.peer for item in b.received} == {a.me} and {item.kind for item in b.received} == {"node"}
    assert not a.events and not b.events and not a.hub.dropped and not b.hub.dropped


def test_what_is_said_in_one_turn_is_one_frame_per_peer(node: Node, context: Context) -> None:
    routers = [Caller(context, node, Peer(f"router-{number}", "b")) for number in range(2)]
    for router in routers:
        router.say(m.Hello("router"))
    pump(lambda: len(node.hub.peers("router")) == 2, node)
    for number in range(30):
        for router in routers:
            assert node.hub.send(router.me, m.Scheduled("r", number))
    node.hub.flush()
    for router in routers:
        frames: list[m.Envelope] = []
        pump(
            lambda found=frames, router=router: (
                found.extend(router.heard()) or any(isinstance(each.messages[0], m.Scheduled) for each in found)
            )
        )
        assert frames[-1].messages == tuple(m.Scheduled("r", number) for number in range(30))
        assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))
        router.close()


def test_a_large_message_does_not_wait_for_the_others_and_keeps_its_place(make_node: Make) -> None:
    a, b = make_node("prefill-0"), make_node("decode-0")
    said: list[m.AnyMessage] = [m.Release("before"), m.FileChunk("f", 0, 1 << 20, bytes(1 << 20)), m.Release("after")]
    for message in said:
        assert a.hub.send(b.endpoint, message)
    pump(lambda: len(b.received) == 4, a, b)
    assert [item.message for item in b.received[1:]] == said


def test_a_frame_that_came_after_a_gap_is_heard_whole(node: Node, router: Caller) -> None:
    router.say(m.Hello("router"))
    router.say_all((m.Release("r1"), m.Release("r2")))
    router.say_all((m.Release("r3"), m.Release("r4")), skip=1)
    pump(lambda: len(node.messages(m.Release)) == 4, node)
    assert node.messages(m.Release) == [m.Release(f"r{number}") for number in range(1, 5)]
    assert node.events == [LinkGap(router.me)] and node.hub.last_received(router.me) == 4


def test_what_a_turn_receives_is_bounded_and_the_rest_comes_in_the_next(make_node: Make, context: Context) -> None:
    node = make_node("decode-0", settings=WireSettings(heartbeat_s=5.0, lease_s=30.0, max_drain=10))
    router = Caller(context, node, Peer("router-0", "boot-r"))
    router.say(m.Hello("router"))
    for number in range(20):
        router.say_all(tuple(m.Release(f"r{number}-{part}") for part in range(4)))
    most = 0
    while len(node.messages(m.Release)) < 80:
        before = len(node.received)
        node.turn()
        most = max(most, len(node.received) - before)
    assert most < 10 + 4
    router.close()


def test_two_nodes_that_call_each_other_hear_each_message_once(make_node: Make) -> None:
    a, b = make_node("prefill-0"), make_node("decode-0")
    for number in range(50):
        assert a.hub.send(b.endpoint, m.AbortAck(number, ""))
        assert b.hub.send(a.endpoint, m.Release(f"r{number}"))
    pump(lambda: len(b.messages(m.AbortAck)) >= 50 and len(a.messages(m.Release)) >= 50, a, b)
    assert len(b.messages(m.AbortAck)) == 50 and len(a.messages(m.Release)) == 50


def test_the_first_frame_of_a_link_is_hello(make_node: Make) -> None:
    a, b = make_node("prefill-0"), make_node("decode-0")
    a.hub.send(b.endpoint, m.Release("r"))
    pump(lambda: b.messages(m.Release), a, b)
    assert b.received == [Received(a.me, "node", m.Hello("node")), Received(a.me, "node", m.Release("r"))]


def test_a_link_lives_on_while_nothing_is_said(make_node: Make) -> None:
    a, b = make_node("prefill-0"), make_node("decode-0")
    a.hub.send(b.endpoint, m.Release("r"))
    turns = iter(range(400))
    pump(lambda: next(turns) == 399, a, b)
    assert not a.events and not b.events


def test_a_router_is_known_while_it_pings_and_its_lease_ends_when_it_is_silent(node: Node, router: Caller) -> None:
    router.say(m.Hello("router", (("r1", 0, 3),)), to="")
    pump(lambda: node.hub.peers("router") == [router.me], node)
    assert node.received == [Received(router.me, "router", m.Hello("router", (("r1", 0, 3),)))]
    pump(lambda: node.events, node)
    assert node.events == [LeaseEnded(router.me)]
    assert node.hub.peers("router") == []
    assert not node.hub.send(router.me, m.Release("r"))
    assert node.hub.dropped["unreachable"] == 1


def test_a_router_whose_lease_ended_is_asked_for_a_hello_and_may_come_back(node: Node, router: Caller) -> None:
    router.say(m.Hello("router"))
    pump(lambda: node.events, node)
    router.say(m.Release("late"))
    pump(lambda: any(isinstance(envelope.messages[0], m.Hello) for envelope in router.heard()), node)
    assert node.messages(m.Release) == []
    router.say(m.Hello("router"))
    router.say(m.Release("now"))
    pump(lambda: node.messages(m.Release), node)
    assert node.messages(m.Release) == [m.Release("now")]


def test_a_hello_that_a_replaced_connection_still_held_is_no_news(node: Node, router: Caller, context: Context) -> None:
    router.say(m.Hello("router"))
    pump(lambda: len(node.messages(m.Hello)) == 1, node)
    newer = Caller(context, node, router.me)
    newer.say(m.Hello("router"), skip=8)
    pump(lambda: len(node.messages(m.Hello)) == 2, node)
    router.say(m.Hello("router"))
    pump(lambda: node.hub.dropped["old_connection"] == 1, node)
    newer.say(m.Release("r"))
    pump(lambda: bool(node.messages(m.Release)), node)
    assert len(node.messages(m.Hello)) == 2 and not node.hub.dropped["unknown_peer"]
    newer.close()


def test_a_busy_node_does_not_end_leases_of_routers_whose_pings_wait_unread(context: Context) -> None:
    now = [100.0]
    me = Peer("decode-0", "boot-1")
    hub = Hub(me, listen="127.0.0.1:0", context=context, settings=SETTINGS, clock=lambda: now[0])
    node = Node(hub, me)
    router = Caller(context, node, Peer("router-0", "boot-r"))
    router.say(m.Hello("router"))
    pump(lambda: hub.peers("router"), node)
    now[0] += 60.0
    hub.tick()
    assert hub.events() == []
    router.say(m.Ping())
    while hub.sockets()[0].poll(1000) == 0:
        pass
    node.turn()
    assert node.events == [] and hub.peers("router") == [router.me]
    now[0] += 60.0
    node.turn()
    assert node.events == [LeaseEnded(router.me)]
    router.close()
    hub.close()


def test_a_node_that_was_stopped_hears_its_routers_before_it_ends_their_leases(context: Context) -> None:
    """Nothing waits at its first turn: the routers were stopped, too."""
    now = [100.0]
    me = Peer("decode-0", "boot-1")
    clock = AwakeClock(SETTINGS.heartbeat_s / 2, lambda: now[0])
    node = Node(Hub(me, listen="127.0.0.1:0", context=context, settings=SETTINGS, clock=clock), me)
    router = Caller(context, node, Peer("router-0", "boot-r"))
    router.say(m.Hello("router"))
    pump(lambda: node.hub.peers("router"), node)
    now[0] += 60.0
    node.turn()
    assert node.events == [] and node.hub.peers("router") == [router.me]
    while not node.events:  # it is awake, and hears nobody
        now[0] += SETTINGS.heartbeat_s / 2
        node.turn()
    assert node.events == [LeaseEnded(router.me)] and now[0] < 160.0 + 2 * SETTINGS.lease_s
    router.close()
    node.hub.close()


def test_a_missing_number_is_a_gap_and_asks_for_a_hello(node: Node, router: Caller) -> None:
    router.say(m.Hello("router"))
    router.say(m.Release("r1"))
    router.say(m.Release("r3"), skip=1)
    pump(lambda: len(node.messages(m.Release)) == 2, node)
    assert node.events == [LinkGap(router.me)] and node.hub.gaps == 1
    pump(lambda: any(envelope.messages == (m.Hello("node"),) for envelope in router.heard()), node)


def test_a_number_seen_before_is_dropped_and_counted(node: Node, router: Caller) -> None:
    router.say(m.Hello("router"))
    router.say(m.Release("once"))
    router.sequence -= 1
    router.say(m.Release("once"))
    router.say(m.Release("next"))
    pump(lambda: m.Release("next") in node.messages(m.Release), node)
    assert node.messages(m.Release) == [m.Release("once"), m.Release("next")]
    assert node.hub.dropped == {"duplicate": 1}


def test_frames_for_another_boot_of_this_node_are_dropped_and_answered_with_who_lives_here(
    node: Node, router: Caller
) -> None:
    router.say(m.Hello("router"), to="older-boot")
    answers: list[m.Envelope] = []
    pump(lambda: answers.extend(router.heard()) or answers, node)
    assert node.received == [] and node.hub.dropped["other_incarnation"] == 1
    assert answers[0].incarnation == node.me.incarnation


def test_frames_without_a_hello_are_dropped_and_answered_with_a_request_for_it(node: Node, router: Caller) -> None:
    router.say(m.Release("r"))
    pump(lambda: any(isinstance(envelope.messages[0], m.Hello) for envelope in router.heard()), node)
    assert node.received == [] and node.hub.dropped["unknown_peer"] == 1


def test_a_new_boot_of_a_node_replaces_the_old_one_whose_frames_are_dropped(node: Node, context: Context) -> None:
    old = Caller(context, node, Peer("prefill-0", "boot-1"))
    new = Caller(context, node, Peer("prefill-0", "boot-2"))
    old.say(m.Hello("node"))
    pump(lambda: node.received, node)
    new.say(m.Hello("node"))
    pump(lambda: node.events, node)
    old.say(m.Release("stale"))
    old.say(m.Hello("node"))
    pump(lambda: node.hub.dropped["old_incarnation"] == 2, node)
    assert [type(event) for event in node.events] == [LinkLost] and node.events[0].peer == old.me
    assert node.messages(m.Release) == [] and node.hub.peers("node") == [new.me]
    old.close()
    new.close()


def test_two_routers_may_share_a_name(node: Node, context: Context) -> None:
    first, second = (Caller(context, node, Peer("router", boot)) for boot in ("boot-1", "boot-2"))
    first.say(m.Hello("router"))
    second.say(m.Hello("router"))
    pump(lambda: len(node.hub.peers("router")) == 2, node)
    assert node.events == []
    first.close()
    second.close()


def test_garbage_is_dropped_and_counted_and_harms_nobody(node: Node, router: Caller, context: Context) -> None:
    router.say(m.Hello("router"))
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://{node.hub.address}")
    for frame in (b"", b"\x00", b"\xdd\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", bytes(1000)):
        stranger.send(frame)
    stranger.send_multipart([b"a", b"b", b"c"])
    raw = socket.create_connection(node.hub.address.split(":"))
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    pump(lambda: node.hub.dropped["malformed"] == 6, node)
    router.say(m.Release("fine"))
    pump(lambda: node.messages(m.Release), node)
    assert node.messages(m.Release) == [m.Release("fine")]
    raw.close()
    stranger.close(0)


def test_a_peer_that_sends_too_much_in_one_frame_is_cut_off(make_node: Make, context: Context) -> None:
    node = make_node("decode-0", settings=WireSettings(heartbeat_s=0.05, lease_s=0.4, max_frame_bytes=1000))
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(f"tcp://{node.hub.address}")
    stranger.send(bytes(2000))
    # The cut costs whatever was sent behind it, so say something until it comes through on the next connection.
    pump(lambda: node.hub.dropped["malformed"] or stranger.send(b"small"), node)
    assert node.received == []
    stranger.close(0)


def test_a_node_that_dies_is_lost(make_node: Make) -> None:
    a, b = make_node("prefill-0"), make_node("decode-0")
    a.hub.send(b.endpoint, m.Release("r"))
    pump(lambda: b.messages(m.Release), a, b)
    b.hub.close()
    pump(lambda: a.events, a)
    assert [type(event) for event in a.events] == [LinkLost] and a.events[0].peer == b.me


def test_a_node_that_hangs_is_lost_at_both_ends_when_its_lease_ends(make_node: Make) -> None:
    a, b = make_node("prefill-0"), make_node("decode-0")
    a.hub.send(b.endpoint, m.Release("r"))
    pump(lambda: b.messages(m.Release), a, b)
    pump(lambda: a.events, a)
    assert [event.peer for event in a.events] == [b.me]
    pump(lambda: b.events, b)
    assert [event.peer for event in b.events] == [a.me]


def test_a_node_that_restarts_on_the_same_address_is_lost_and_never_gets_what_the_old_boot_was_sent(
    make_node: Make,
) -> None:
    a, old = make_node("prefill-0"), make_node("decode-0", "boot-1")
    a.hub.send(old.endpoint, m.Release("r"))
    pump(lambda: old.messages(m.Release), a, old)
    old.hub.close()
    new = start_again(make_node, old, "boot-2")
    a.hub.send(old.endpoint, m.Release("for the old boot"))
    pump(lambda: a.events, a, new)
    assert [event.peer for event in a.events] == [old.me]
    assert a.hub.send(new.endpoint, m.Release("for the new boot"))
    pump(lambda: new.messages(m.Release), a, new)
    assert new.messages(m.Release) == [m.Release("for the new boot")]


def test_an_address_where_another_boot_lives_is_lost_and_not_called_again(make_node: Make) -> None:
    a, b = make_node("prefill-0"), make_node("decode-0", "boot-2")
    older = m.Endpoint("decode-0", "boot-1", b.hub.address)
    a.hub.send(older, m.Release("r"))
    pump(lambda: a.events, a, b)
    assert a.events[0].peer == Peer("decode-0", "boot-1") and "boot-2" in a.events[0].reason
    assert not a.hub.send(older, m.Release("r"))
    assert b.messages(m.Release) == []


@pytest.mark.parametrize("address", ["nowhere", "256.1.1.1.1.1:99999", "tcp://x:1", "a b:1"])
def test_a_bad_address_is_refused_and_counted(node: Node, address: str) -> None:
    assert not node.hub.send(m.Endpoint("x", "y", address), m.Release("r"))
    assert node.hub.dropped["bad_address"] == 1


def test_a_node_called_for_the_first_time_after_its_end_is_lost_at_once(make_node: Make) -> None:
    """Its address came in a ticket: somebody spoke with it."""
    settings = replace(SETTINGS, lease_s=600.0, rewelcome_s=600.0)
    a, b = make_node("decode-0", settings=settings), make_node("prefill-0", settings=settings)
    endpoint = b.endpoint
    b.hub.close()
    a.hub.send(endpoint, m.Cancel("r1", 0, "why"))
    pump(lambda: a.events, a)
    assert isinstance(a.events[0], LinkLost) and a.events[0].peer == b.me


def test_an_address_where_nobody_listens_ends_as_a_lost_link(node: Node) -> None:
    free = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
    free.close()
    node.hub.send(m.Endpoint("x", "y", address), m.Release("r"))
    pump(lambda: node.events, node)
    assert isinstance(node.events[0], LinkLost)


def test_at_the_high_water_mark_frames_are_dropped_and_counted_and_the_receiver_sees_the_gap(
    make_node: Make, context: Context
) -> None:
    node = make_node("decode-0", settings=WireSettings(heartbeat_s=0.05, lease_s=30.0, high_water=4))
    router = Caller(context, node, Peer("router-0", "boot-r"))
    router.say(m.Hello("router"))
    pump(lambda: node.hub.peers("router"), node)
    num_said = 0
    while not node.hub.dropped["high_water"]:
        assert num_said < 4000 and node.hub.send(router.me, m.FileChunk("f", 0, 1 << 20, bytes(1 << 20)))
        num_said += 1
        node.hub.flush()
    sent = num_said - node.hub.dropped["high_water"]
    assert sent > 0
    sequences: list[int] = []
    pump(lambda: sequences.extend(envelope.sequence for envelope in router.heard()) or len(sequences) > sent, node)
    assert node.hub.send(router.me, m.Release("after"))
    pump(lambda: sequences.extend(envelope.sequence for envelope in router.heard()) or sequences[-1] > num_said, node)
    assert sequences == sorted(set(sequences)) and len(sequences) < sequences[-1]
    router.close()


def test_the_number_of_remembered_peers_is_bounded(make_node: Make, context: Context) -> None:
    node = make_node("decode-0", settings=WireSettings(heartbeat_s=0.05, lease_s=30.0, max_peers=3))
    callers = [Caller(context, node, Peer(f"router-{number}", "b")) for number in range(5)]
    for caller in callers:
        caller.say(m.Hello("router"))
    pump(lambda: node.hub.dropped["too_many_peers"] == 2, node)
    assert len(node.hub.peers("router")) == 3
    for caller in callers:
        caller.close()


def test_a_wildcard_address_needs_the_name_under_which_others_reach_us(make_node: Make) -> None:
    with pytest.raises(ConfigError, match="advertise"):
        make_node("x", listen="0.0.0.0:0")
    node = make_node("y", listen="0.0.0.0:0", settings=WireSettings(advertise_host="localhost"))
    assert node.hub.address.startswith("localhost:")


def test_a_taken_port_is_a_config_error(make_node: Make) -> None:
    taken = make_node("x")
    with pytest.raises(ConfigError, match="cannot listen"):
        make_node("y", listen=taken.hub.address)


def test_nodes_talk_over_ipv6_where_the_machine_has_it(make_node: Make) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    a, b = make_node("prefill-0", listen="[::1]:0"), make_node("decode-0", listen="[::1]:0")
    a.hub.send(b.endpoint, m.Release("r"))
    pump(lambda: b.messages(m.Release), a, b)
    assert b.messages(m.Release) == [m.Release("r")] and a.hub.address.startswith("[::1]")


def test_a_forgotten_node_is_silent_without_an_event(make_node: Make) -> None:
    a, b = make_node("prefill-0"), make_node("decode-0")
    a.hub.send(b.endpoint, m.Release("r"))
    pump(lambda: b.messages(m.Release), a, b)
    a.hub.forget(b.me)
    b.hub.close()
    turns = iter(range(200))
    pump(lambda: next(turns) == 199, a)
    assert a.events == []
