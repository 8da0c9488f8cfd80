"""Server and clients over real gRPC on loopback."""

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import uvloop
from bootstrap_cards import ADAPTERS, ALL_OTHER, FINGERPRINT, OTHER_ENGINE, make_card
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdcluster.bootstrap.agent import NodeAgent, Retry, watch
from pdcluster.bootstrap.card import ClusterSnapshot
from pdcluster.bootstrap.card_messages import card_to_proto
from pdcluster.bootstrap.server import SERVICE, serve, serving
from pdcluster.bootstrap.store import StoreSettings
from pdcluster.core.address import parse_address
from pdcluster.core.errors import ConfigError
from pdcluster.processes.ready import parse
from pdcluster.rpc import bootstrap_pb2 as pb
from pdcluster.rpc import bootstrap_pb2_grpc as stubs
from pdcluster.settings.config import BootstrapConfig
from pdcluster.transfer.backends.base import Peer

SETTINGS = StoreSettings(lease_s=0.6)
LIMIT_S = 30.0
MakeAgent = Callable[..., NodeAgent]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with serving("127.0.0.1:0", SETTINGS) as address:
        yield address


@pytest.fixture
async def make_agent() -> AsyncIterator[MakeAgent]:
    agents: list[NodeAgent] = []

    def make(*addresses: str) -> NodeAgent:
        agent = NodeAgent(addresses)
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        await stopped(agent)


class View:
    """The snapshots that a router sees, the last one kept."""

    def __init__(self) -> None:
        self.last: ClusterSnapshot | None = None
        self.seen: list[ClusterSnapshot] = []

    def names(self) -> list[str]:
        return [] if self.last is None else [card.node for card in self.last.nodes]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(*addresses: str) -> AsyncIterator[View]:
    view = View()

    async def follow() -> None:
        async with aclosing(watch(addresses)) as snapshots:
            async for snapshot in snapshots:
                view.last = snapshot
                view.seen.append(snapshot)

    task = asyncio.create_task(follow())
    yield view
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def stopped(agent: NodeAgent) -> None:
    await asyncio.to_thread(agent.stop)


async def news(agent: NodeAgent) -> list[Peer]:
    """What `gone` says once the wakeup descriptor is readable."""
    ready = await asyncio.to_thread(select.select, [agent.wakeup_fd], [], [], LIMIT_S)
    assert ready[0] == [agent.wakeup_fd]
    return agent.gone()


async def test_a_node_registers_says_so_once_and_is_seen_until_it_leaves(address: str, make_agent: MakeAgent) -> None:
    registered: list[str] = []
    agent = make_agent(address)
    async with watching(address) as view:
        agent.start(make_card(), registered=lambda: registered.append(threading.current_thread().name))
        await view.until(lambda: view.names() == ["prefill-0"])
        assert view.last is not None and view.last.nodes == (make_card(),)
        await stopped(agent)
        await view.until(lambda: view.names() == [])
    assert registered == [f"bootstrap {address}"]


async def test_a_registered_node_outlives_many_leases(address: str, make_agent: MakeAgent) -> None:
    """Those of another that registers, and is silent then."""
    make_agent(address).start(make_card())
    async with watching(address) as view, grpc.aio.insecure_channel(address) as channel:
        await view.until(lambda: view.names() == ["prefill-0"])
        first = len(view.seen) - 1
        for number in range(3):
            await stubs.BootstrapStub(channel).Register(pb.RegisterRequest(card=_proto(f"silent-{number}")))
            await view.until(lambda: len(view.names()) == 2)
            await view.until(lambda: len(view.names()) == 1)
        assert all("prefill-0" in [card.node for card in snapshot.nodes] for snapshot in view.seen[first:])


def test_a_pause_of_the_bootstrap_ends_no_lease() -> None:
    """In a loop that counts stalls, as its own does. Meanwhile the node's renewals wait unread."""

    async def scenario() -> None:
        async with serving("127.0.0.1:0", SETTINGS) as address, watching(address) as view:
            agent = NodeAgent([address])
            agent.start(make_card())
            await view.until(lambda: view.names() == ["prefill-0"])
            num_seen = len(view.seen)
            time.sleep(3 * SETTINGS.lease_s)
            await asyncio.sleep(SETTINGS.lease_s)
            assert all(len(snapshot.nodes) == 1 for snapshot in view.seen[num_seen:])
            await stopped(agent)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(scenario())


async def test_draining_and_a_new_role_are_seen(address: str, make_agent: MakeAgent) -> None:
    agent = make_agent(address)
    agent.start(make_card())
    async with watching(address) as view:
        await view.until(lambda: view.names() == ["prefill-0"])
        agent.set_draining()
        await view.until(lambda: any(card.draining for card in view.seen[-1].nodes))
        assert view.seen[-1].nodes == (make_card(draining=True),)
        agent.set_role("mixed")
        await view.until(lambda: any(card.role == "mixed" for card in view.seen[-1].nodes))
        assert view.seen[-1].nodes == (make_card(draining=True, role="mixed"),)


async def test_a_live_change_of_adapters_is_seen(address: str, make_agent: MakeAgent) -> None:
    agent = make_agent(address)
    agent.start(make_card())
    async with watching(address) as view:
        await view.until(lambda: view.names() == ["prefill-0"])
        agent.set_adapters(ADAPTERS)
        await view.until(lambda: view.seen[-1].nodes == (make_card(adapters=ADAPTERS),))
        agent.set_adapters(())
        await view.until(lambda: view.seen[-1].nodes == (make_card(),))


async def test_a_silent_node_is_gone_when_its_lease_ends_and_others_are_told(
    address: str, make_agent: MakeAgent
) -> None:
    agent = make_agent(address)
    agent.start(make_card("prefill-0"))
    async with watching(address) as view, grpc.aio.insecure_channel(address) as channel:
        await stubs.BootstrapStub(channel).Register(pb.RegisterRequest(card=_proto("silent")))
        await view.until(lambda: view.names() == ["prefill-0", "silent"])
        assert await news(agent) == [Peer("silent", "boot-1")]
        await view.until(lambda: view.names() == ["prefill-0"])


async def test_a_node_that_leaves_is_told_to_the_others_at_once(address: str, make_agent: MakeAgent) -> None:
    staying, leaving = make_agent(address), make_agent(address)
    staying.start(make_card("prefill-0"))
    leaving.start(make_card("decode-0"))
    async with watching(address) as view:
        await view.until(lambda: len(view.names()) == 2)
        await stopped(leaving)
        assert await news(staying) == [Peer("decode-0", "boot-1")]
        assert staying.gone() == []


async def test_a_node_that_does_not_fit_is_told_why_and_stops_trying(address: str, make_agent: MakeAgent) -> None:
    fits, other = make_agent(address), make_agent(address)
    fits.start(make_card("prefill-0"))
    async with watching(address) as view:
        await view.until(lambda: view.names() == ["prefill-0"])
        other.start(make_card("decode-0", fingerprint=replace(FINGERPRINT, weights="sha-2")))
        with pytest.raises(ConfigError, match="weights 'sha-2' here, 'sha-1' there"):
            await news(other)
        assert view.names() == ["prefill-0"]


async def test_a_node_of_another_engine_is_told_so_and_a_cluster_of_that_engine_forms(
    address: str, make_agent: MakeAgent
) -> None:
    fits, other, mate = make_agent(address), make_agent(address), make_agent(address)
    fits.start(make_card("prefill-0", fingerprint=OTHER_ENGINE, capabilities=ALL_OTHER))
    async with watching(address) as view:
        await view.until(lambda: view.names() == ["prefill-0"])
        other.start(make_card("decode-0"))
        with pytest.raises(ConfigError, match=r"'decode-0' runs the engine 'native'.*'prefill-0'.* runs 'vllm'"):
            await news(other)
        mate.start(make_card("decode-1", fingerprint=OTHER_ENGINE, capabilities=ALL_OTHER))
        await view.until(lambda: view.names() == ["decode-1", "prefill-0"])
        assert view.last is not None and {card.capabilities for card in view.last.nodes} == {ALL_OTHER}


async def test_an_older_boot_of_a_node_is_told_that_it_was_replaced(address: str, make_agent: MakeAgent) -> None:
    older, newer = make_agent(address), make_agent(address)
    older.start(make_card(incarnation="boot-1"))
    async with watching(address) as view:
        await view.until(lambda: view.names() == ["prefill-0"])
        newer.start(make_card(incarnation="boot-2"))
        with pytest.raises(ConfigError, match="replaced by boot boot-2"):
            await news(older)
        assert view.last is not None and [card.incarnation for card in view.last.nodes] == ["boot-2"]


MOVED = {"incarnation": "boot-2", "address": "127.0.0.2:4000"}


async def test_a_node_elsewhere_waits_for_the_end_of_the_one_that_has_its_name(
    address: str, make_agent: MakeAgent
) -> None:
    first, moved = make_agent(address), make_agent(address)
    first.start(make_card())
    async with watching(address) as view:
        await view.until(lambda: view.names() == ["prefill-0"])
        moved.start(make_card(**MOVED))
        await asyncio.sleep(SETTINGS.lease_s)
        assert view.last is not None and view.last.nodes == (make_card(),)
        await stopped(first)
        await view.until(lambda: view.last is not None and view.last.nodes == (make_card(**MOVED),))
    assert moved.gone() == [Peer("prefill-0", "boot-1")]


async def test_a_node_goes_on_as_its_next_boot_without_a_gap(address: str, make_agent: MakeAgent) -> None:
    """At another address, too: the earlier boot leaves first."""
    agent = make_agent(address)
    agent.start(make_card())
    async with watching(address) as view:
        await view.until(lambda: view.names() == ["prefill-0"])
        began, after = time.monotonic(), make_card(**MOVED, weights_label="tuned", weights_epoch=1)
        agent.succeed(after)
        await view.until(lambda: view.last is not None and view.last.nodes == (after,))
        assert time.monotonic() - began < SETTINGS.lease_s
        await stopped(agent)
        await view.until(lambda: view.names() == [])


async def test_a_node_that_was_in_says_so_when_it_registers_again(address: str, make_agent: MakeAgent) -> None:
    """Others serve newer weights by then, and none has its own any more."""
    agent = make_agent(address)
    agent.start(make_card())
    async with watching(address) as view, grpc.aio.insecure_channel(address) as channel:
        await view.until(lambda: view.names() == ["prefill-0"])
        stub = stubs.BootstrapStub(channel)
        newer = make_card(
            node="d0", incarnation="d0-1", address="127.0.0.1:4001", weights_label="tuned", weights_epoch=1,
            fingerprint=replace(FINGERPRINT, weights="others"),
        )  # fmt: skip
        await stub.Register(pb.RegisterRequest(card=card_to_proto(newer)))
        await stub.Leave(pb.LeaveRequest(node="prefill-0", incarnation="boot-1"))
        await asyncio.sleep(0.7 * SETTINGS.lease_s)  # it renews, is not known, and registers
    assert all(peer.node != "prefill-0" for peer in agent.gone())
    assert agent.num_registered == 1


async def test_a_next_boot_with_the_same_weights_is_in_though_all_others_serve_newer(
    address: str, make_agent: MakeAgent
) -> None:
    """A node that sleeps is one."""
    agent = make_agent(address)
    agent.start(make_card())
    async with watching(address) as view, grpc.aio.insecure_channel(address) as channel:
        await view.until(lambda: view.names() == ["prefill-0"])
        newer = make_card(
            node="d0", incarnation="d0-1", address="127.0.0.1:4001", weights_label="tuned", weights_epoch=1,
            fingerprint=replace(FINGERPRINT, weights="others"),
        )  # fmt: skip
        await stubs.BootstrapStub(channel).Register(pb.RegisterRequest(card=card_to_proto(newer)))
        asleep = make_card(incarnation="boot-2", sleeping=True, draining=True)
        agent.succeed(asleep)
        await view.until(lambda: view.last is not None and asleep in view.last.nodes)
    assert all(not isinstance(each, BaseException) for each in agent.gone())


async def test_a_node_whose_name_stays_taken_gives_up_and_says_by_whom(address: str, make_agent: MakeAgent) -> None:
    first, moved = make_agent(address), make_agent(address)
    first.start(make_card())
    async with watching(address) as view:
        await view.until(lambda: view.names() == ["prefill-0"])
        began = time.monotonic()
        moved.start(make_card(**MOVED))
        with pytest.raises(ConfigError, match=r"boot-1 at 127.0.0.1:4000.*name of its own"):
            await news(moved)
    assert time.monotonic() - began > 3 * SETTINGS.lease_s and first.gone() == []


async def test_an_earlier_wait_for_a_name_does_not_count_for_a_later_one(address: str, make_agent: MakeAgent) -> None:
    first, moved = make_agent(address), make_agent(address)
    first.start(make_card())
    async with watching(address) as view, grpc.aio.insecure_channel(address) as channel:
        await view.until(lambda: view.names() == ["prefill-0"])
        moved.start(make_card(**MOVED))
        await asyncio.sleep(SETTINGS.lease_s)
        await stopped(first)
        await view.until(lambda: view.last is not None and view.last.nodes == (make_card(**MOVED),))
        await asyncio.sleep(3 * SETTINGS.lease_s)
        stub = stubs.BootstrapStub(channel)
        await stub.Leave(pb.LeaveRequest(node="prefill-0", incarnation="boot-2"))
        await stub.Register(pb.RegisterRequest(card=card_to_proto(make_card(incarnation="boot-3"))))
        await view.until(lambda: view.last is not None and view.last.nodes == (make_card(**MOVED),))
        assert all(peer.incarnation != "boot-2" for peer in moved.gone())


async def test_two_bootstraps_that_have_two_boots_of_a_name_stop_neither(make_agent: MakeAgent) -> None:
    """Each is registered somewhere. A router that saw the first one keeps it."""
    async with serving("127.0.0.1:0", SETTINGS) as one, serving("127.0.0.1:0", SETTINGS) as two:
        make_agent(one).start(make_card())
        async with watching(one, two) as view:
            await view.until(lambda: view.names() == ["prefill-0"])
            both = make_agent(one, two)
            both.start(make_card(**MOVED))
            async with watching(two) as other:
                await other.until(lambda: other.names() == ["prefill-0"])
            await asyncio.sleep(4 * SETTINGS.lease_s)
            assert both.gone() == [] and view.last is not None and view.last.nodes == (make_card(),)


async def test_while_a_bootstrap_restarts_nobody_is_lost_and_all_come_back(make_agent: MakeAgent) -> None:
    async with serving("127.0.0.1:0", SETTINGS) as address:
        agent, other = make_agent(address), make_agent(address)
        agent.start(make_card("prefill-0"))
        other.start(make_card("decode-0"))
        watched = watching(address)
        view = await watched.__aenter__()
        await view.until(lambda: len(view.names()) == 2)
        first_boot = view.last.boot if view.last else ""
    await asyncio.sleep(SETTINGS.lease_s)
    assert view.names() == ["decode-0", "prefill-0"]
    async with serving(address, StoreSettings(lease_s=3.0)):
        await view.until(lambda: view.last is not None and view.last.boot != first_boot and not view.last.settling)
        assert view.names() == ["decode-0", "prefill-0"]
        assert all(len(snapshot.nodes) == 2 for snapshot in view.seen[-3:])
        assert agent.gone() == [] and other.gone() == []
        await watched.__aexit__(None, None, None)


async def test_a_node_may_start_before_its_bootstrap(make_agent: MakeAgent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.settimeout(LIMIT_S)
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        agent = make_agent(address)
        agent.start(make_card())
        in_vain, _ = await asyncio.to_thread(nobody.accept)
        in_vain.close()
    async with serving(address, SETTINGS), watching(address) as view:
        await view.until(lambda: bool(view.names()))
        assert view.seen[-1].nodes == (make_card(),) and agent.gone() == []


async def test_a_node_registers_with_every_bootstrap_and_a_watcher_goes_to_the_next_when_one_fails(
    make_agent: MakeAgent,
) -> None:
    async with serving("127.0.0.1:0", SETTINGS) as second:
        async with serving("127.0.0.1:0", SETTINGS) as first:
            make_agent(first, second).start(make_card())
            watched = watching(first, second)
            view = await watched.__aenter__()
            await view.until(lambda: view.names() == ["prefill-0"])
            first_boot = view.last.boot if view.last else ""
        await view.until(lambda: view.last is not None and view.last.boot != first_boot)
        assert view.names() == ["prefill-0"]
        await watched.__aexit__(None, None, None)


def test_a_router_on_uvloop_sees_the_cluster_too() -> None:
    async def scenario() -> list[list[str]]:
        async with (
            serving("127.0.0.1:0", SETTINGS) as address,
            watching(address) as view,
            grpc.aio.insecure_channel(address) as channel,
        ):
            await stubs.BootstrapStub(channel).Register(pb.RegisterRequest(card=_proto("prefill-0")))
            await view.until(lambda: bool(view.names()))
            await view.until(lambda: not view.names())
            return [[card.node for card in snapshot.nodes] for snapshot in view.seen]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(scenario())
    assert [names for number, names in enumerate(seen) if names and seen[number - 1] != names] == [
        ["prefill-0"]
    ] and seen[-1] == []


async def test_bad_cards_and_unknown_nodes_get_codes_that_say_so(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = stubs.BootstrapStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Register(pb.RegisterRequest(card=pb.NodeCard(node="x")))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.KeepAlive(pb.KeepAliveRequest(node="x", incarnation="y"))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not (await stub.KeepAlive(pb.KeepAliveRequest(node="x", incarnation="y", role=pb.ROLE_MIXED))).known
        await stub.Leave(pb.LeaveRequest(node="x", incarnation="y"))


async def test_health_and_reflection_are_there(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        async for answer in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked):
            assert SERVICE in [service.name for service in answer.list_services_response.service]


async def test_two_bootstraps_cannot_share_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        async with serving(address, SETTINGS):
            pass


async def test_serve_announces_its_address_and_ends_with_its_event(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stop = asyncio.Event()
    with ready.open("wb") as file:
        config = BootstrapConfig(listen="127.0.0.1:0", lease_s=1.0, ready_fd=_duplicate(file.fileno()))
        serving_task = asyncio.create_task(serve(config, stop))
        async with asyncio.timeout(LIMIT_S):
            while not ready.read_bytes():
                await asyncio.sleep(0.01)
        address = str(parse(ready.read_bytes())["address"])
        async with watching(address) as view:
            await view.until(lambda: view.last is not None)
        stop.set()
        await serving_task
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(parse_address(address))


def test_an_agent_without_a_bootstrap_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="--bootstrap"):
        NodeAgent(())


def test_stopping_twice_or_before_the_start_is_fine() -> None:
    agent = NodeAgent(("127.0.0.1:1",))
    agent.stop()
    with pytest.raises(OSError):
        os.fstat(agent.wakeup_fd)
    with open(os.devnull) as other:  # takes the number of the descriptor that was closed
        agent.stop()
        assert os.fstat(other.fileno())


def test_pauses_grow_to_their_bound_and_start_again_after_a_success() -> None:
    retry = Retry(first_s=0.1, last_s=2.0)
    pauses = [retry.next_s() for _ in range(200)]
    assert 0.05 <= pauses[0] <= 0.1 and all(1.0 <= pause <= 2.0 for pause in pauses[5:])
    retry.reset()
    assert retry.next_s() <= 0.1


def _proto(node: str) -> pb.NodeCard:
    return card_to_proto(make_card(node))


def _duplicate(descriptor: int) -> int:
    return os.dup(descriptor)
