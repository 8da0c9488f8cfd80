"""A bootstrap with a cluster key serves members, each under its own name, and nobody else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing

import grpc
import pytest
from bootstrap_cards import make_card

from pdcluster.bootstrap.agent import NodeAgent, bootstrap_error, open_channel, watch
from pdcluster.bootstrap.card_messages import card_to_proto
from pdcluster.bootstrap.credentials import BootstrapCredentials, Identity, bootstrap_credentials, caller_of, root_of
from pdcluster.bootstrap.demand import RouterDemand, demand_to_proto
from pdcluster.bootstrap.demand_client import DemandExchange
from pdcluster.bootstrap.server import serving
from pdcluster.bootstrap.store import StoreSettings
from pdcluster.rpc import bootstrap_pb2 as pb
from pdcluster.rpc import bootstrap_pb2_grpc as stubs

KEY, NEXT_KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33)), bytes(32)
NODE, ROUTER = Identity("node", "prefill-0"), Identity("router", "router-0")
LIMIT_S = 30.0


@pytest.fixture
async def address() -> AsyncIterator[str]:
    credentials = BootstrapCredentials([KEY], Identity("bootstrap", "b"))
    async with serving("127.0.0.1:0", StoreSettings(lease_s=3.0), credentials=credentials) as address:
        yield address


async def code_of(call: Awaitable[object]) -> grpc.StatusCode | None:
    """None where it succeeded."""
    try:
        async with asyncio.timeout(LIMIT_S):
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


def calls(stub: stubs.BootstrapStub) -> dict[str, Awaitable[object]]:
    """One of each, as node prefill-0 or a router says it."""
    card, demand = make_card(), demand_to_proto(RouterDemand("boot", 1))
    return {
        "Register": stub.Register(pb.RegisterRequest(card=card_to_proto(card))),
        "KeepAlive": stub.KeepAlive(pb.KeepAliveRequest(node=card.node, incarnation="x", role=pb.ROLE_MIXED)),
        "ShareDemand": stub.ShareDemand(pb.ShareDemandRequest(demand=demand)),
        "Watch": aiter(stub.Watch(pb.WatchRequest())).__anext__(),
        "Leave": stub.Leave(pb.LeaveRequest(node=card.node, incarnation=card.incarnation)),
    }


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        (NODE, {"Register", "KeepAlive", "Leave", "Watch"}),
        (Identity("node", "prefill-1"), {"Watch"}),
        (ROUTER, {"ShareDemand", "Watch"}),
    ],
    ids=["the node", "another node", "a router"],
)
async def test_members_say_what_is_theirs(address: str, caller: Identity, allowed: set[str]) -> None:
    async with open_channel(address, BootstrapCredentials([KEY], caller)) as channel:
        found = {name: await code_of(call) for name, call in calls(stubs.BootstrapStub(channel)).items()}
    refused = {name for name, code in found.items() if code is grpc.StatusCode.PERMISSION_DENIED}
    assert refused == set(found) - allowed and all(code is None for name, code in found.items() if name in allowed)


@pytest.mark.parametrize("keys", [(OTHER_KEY,), (OTHER_KEY, KEY), ()], ids=["another", "another first", "none"])
async def test_strangers_are_refused_and_told_why(address: str, keys: tuple[bytes, ...]) -> None:
    async with open_channel(address, bootstrap_credentials(keys, NODE)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stubs.BootstrapStub(channel).Leave(
                pb.LeaveRequest(node="prefill-0", incarnation="x"), timeout=LIMIT_S
            )
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "cluster key" in str(bootstrap_error(refusal.value, address))


async def test_a_server_without_a_certificate_of_a_bootstrap_is_refused() -> None:
    async with (
        serving("127.0.0.1:0", StoreSettings(), credentials=BootstrapCredentials([KEY], NODE)) as address,
        open_channel(address, BootstrapCredentials([KEY], ROUTER)) as channel,
    ):
        stub = stubs.BootstrapStub(channel)
        assert await code_of(aiter(stub.Watch(pb.WatchRequest())).__anext__()) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("servers", "members"),
    [((KEY,), (KEY, NEXT_KEY)), ((KEY, NEXT_KEY), (NEXT_KEY, KEY)), ((NEXT_KEY, KEY), (NEXT_KEY,))],
    ids=["the new key is added", "the keys are swapped", "the old key is removed"],
)
@pytest.mark.parametrize("is_swapped", [False, True])
async def test_members_are_served_at_every_step_of_a_change_of_keys(
    servers: tuple[bytes, ...], members: tuple[bytes, ...], is_swapped: bool
) -> None:
    if is_swapped:
        servers, members = members, servers
    credentials = BootstrapCredentials(servers, Identity("bootstrap", "b"))
    async with (
        serving("127.0.0.1:0", StoreSettings(), credentials=credentials) as address,
        open_channel(address, BootstrapCredentials(members, ROUTER)) as channel,
    ):
        assert await code_of(aiter(stubs.BootstrapStub(channel).Watch(pb.WatchRequest())).__anext__()) is None


async def test_agent_watch_and_demand_work_with_a_key(address: str) -> None:
    agent = NodeAgent([address], credentials=BootstrapCredentials([KEY], NODE))
    router = BootstrapCredentials([KEY], ROUTER)
    demands = DemandExchange([address], lambda: RouterDemand("a", 1), credentials=router)
    sharing = asyncio.create_task(demands.keep())
    try:
        async with asyncio.timeout(LIMIT_S), aclosing(watch([address], router)) as snapshots:
            agent.start(make_card())
            async for snapshot in snapshots:
                if [card.node for card in snapshot.nodes] == ["prefill-0"]:
                    break
            while not demands._others:
                await asyncio.sleep(0.01)
    finally:
        sharing.cancel()
        await asyncio.gather(sharing, return_exceptions=True)
        await asyncio.to_thread(agent.stop)


@pytest.mark.parametrize("name", ["prefill-0", "a/b?c=d#e", "ü" * 64, "x" * 128, ""])
def test_identities_survive_their_certificates(name: str) -> None:
    identity = Identity("node", name)
    assert caller_of({"x509_subject_alternative_name": [b"bootstrap.pdcluster", identity.uri.encode()]}) == identity


def test_other_certificates_name_nobody() -> None:
    for name in (b"", b"pdcluster://boss/x", b"https://node/x", b"\xff", b"pdcluster://node"):
        found = caller_of({"x509_subject_alternative_name": [name]})
        assert found is None or found == Identity("node", "")
    assert caller_of({}) is None


def test_a_root_follows_from_its_key_alone() -> None:
    root_of.cache_clear()
    first = root_of(KEY).certificate.public_key()
    root_of.cache_clear()
    assert root_of(KEY).certificate.public_key() == first != root_of(OTHER_KEY).certificate.public_key()
