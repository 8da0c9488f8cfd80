"""Encrypted links: members of a cluster talk, nobody else is heard."""

from collections.abc import Callable

import pytest
import zmq
from wire_nodes import Node, pump
from zmq.utils import z85

from pdcluster.core import messages as m
from pdcluster.core.errors import ConfigError
from pdcluster.wire.curve import Gatekeeper
from pdcluster.wire.sockets import ZAP_DOMAIN, WireSettings, derive_keys

Context = zmq.Context[zmq.Socket[bytes]]
Make = Callable[..., Node]
KEY, OTHER_KEY = bytes(range(32)), bytes(32)


def settings(*keys: bytes) -> WireSettings:
    return WireSettings(heartbeat_s=0.05, lease_s=0.6, cluster_keys=keys)


def test_holders_of_the_cluster_key_talk(make_node: Make, other_context: Context) -> None:
    a, b = (
        make_node("prefill-0", settings=settings(KEY)),
        make_node("decode-0", settings=settings(KEY), own=other_context),
    )
    a.hub.send(b.endpoint, m.Release("r"))
    pump(lambda: b.messages(m.Release), a, b)
    b.hub.send(a.me, m.Release("back"))
    pump(lambda: a.messages(m.Release), a, b)
    assert (a.messages(m.Release), b.messages(m.Release)) == ([m.Release("back")], [m.Release("r")])


@pytest.mark.parametrize(
    ("keys_a", "keys_b"),
    [((KEY,), (KEY, OTHER_KEY)), ((KEY, OTHER_KEY), (OTHER_KEY, KEY)), ((OTHER_KEY, KEY), (OTHER_KEY,))],
    ids=["the new key is added", "the keys are swapped", "the old key is removed"],
)
def test_members_talk_at_every_step_of_a_change_of_keys(
    make_node: Make, other_context: Context, keys_a: tuple[bytes, ...], keys_b: tuple[bytes, ...]
) -> None:
    a, b = make_node("a", settings=settings(*keys_a)), make_node("b", settings=settings(*keys_b), own=other_context)
    a.hub.send(b.endpoint, m.Release("to b"))
    pump(lambda: b.messages(m.Release), a, b)
    b.hub.send(a.endpoint, m.Release("to a"))
    pump(lambda: a.messages(m.Release), a, b)
    assert (a.messages(m.Release), b.messages(m.Release)) == ([m.Release("to a")], [m.Release("to b")])


@pytest.mark.parametrize("keys", [(OTHER_KEY,), ()], ids=["another key", "no key"])
def test_strangers_are_refused(make_node: Make, other_context: Context, keys: tuple[bytes, ...]) -> None:
    member, stranger = (
        make_node("decode-0", settings=settings(KEY)),
        make_node("prefill-0", settings=settings(*keys), own=other_context),
    )
    stranger.hub.send(member.endpoint, m.Release("r"))
    pump(lambda: stranger.events, member, stranger)
    assert member.received == [] and not member.hub.dropped


def test_a_member_does_not_talk_to_an_unencrypted_node(make_node: Make, other_context: Context) -> None:
    member, stranger = (
        make_node("decode-0", settings=settings(KEY)),
        make_node("prefill-0", settings=settings(), own=other_context),
    )
    member.hub.send(stranger.endpoint, m.Release("r"))
    pump(lambda: member.events, member, stranger)
    assert stranger.received == []


def test_a_client_that_knows_the_public_key_but_not_the_secret_is_refused(
    make_node: Make, context: Context, other_context: Context
) -> None:
    """What the authenticator adds to CURVE: knowing whom to call is not enough."""
    node = make_node("decode-0", settings=settings(KEY))
    public, secret = zmq.curve_keypair()
    client = other_context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.setsockopt(zmq.CURVE_SERVERKEY, derive_keys(KEY).public)
    client.setsockopt(zmq.CURVE_PUBLICKEY, public)
    client.setsockopt(zmq.CURVE_SECRETKEY, secret)
    monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    client.connect(f"tcp://{node.hub.address}")
    client.send(b"hello?")
    pump(lambda: monitor.poll(0), node)
    assert node.hub.dropped == {} and node.received == []
    client.disable_monitor()
    monitor.close(0)
    client.close(0)


def test_a_context_has_one_gatekeeper_at_a_time(context: Context) -> None:
    first = Gatekeeper(context, [derive_keys(KEY)])
    with pytest.raises(ConfigError, match="context of its own"):
        Gatekeeper(context, [derive_keys(KEY)])
    first.close()
    for _ in range(200):
        Gatekeeper(context, [derive_keys(KEY)]).close()


def test_a_key_of_the_wrong_size_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="5 bytes") as refusal:
        WireSettings(cluster_keys=(b"short",))
    assert "short" not in str(refusal.value)


def test_secrets_never_show_in_a_repr() -> None:
    keys = derive_keys(KEY)
    shown = repr(WireSettings(cluster_keys=(KEY,))) + repr(keys)
    assert repr(KEY) not in shown and keys.secret.decode() not in shown and keys.public.decode() not in shown


def test_only_a_whole_answer_to_the_authenticators_question_lets_in(context: Context) -> None:
    gatekeeper, keys = Gatekeeper(context, [derive_keys(KEY)]), z85.decode(derive_keys(KEY).public)
    head = [b"1.0", b"1", ZAP_DOMAIN, b"127.0.0.1", b"someone"]
    try:
        for rest in ([b"CURVE"], [b"NULL", keys], [b"CURVE", z85.decode(derive_keys(OTHER_KEY).public)], []):
            assert gatekeeper._answer([*head, *rest])[2] == b"400"
        assert gatekeeper._answer([*head, b"CURVE", keys])[2] == b"200"
    finally:
        gatekeeper.close()


def test_every_member_derives_the_same_keys_and_other_keys_differ() -> None:
    assert derive_keys(KEY) == derive_keys(bytes(KEY)) != derive_keys(OTHER_KEY)
