"""A node with fixed ports and a cluster key: its next boot listens where the one before did."""

from __future__ import annotations

from pathlib import Path

from shared_network import free_port
from weight_versions import make_versions

from pdcluster.rpc import admin_pb2 as pb
from tests.chaos.cluster import ChaosCluster, ClusterShape
from tests.chaos.weights import WEIGHTS_KIND


async def test_a_node_with_fixed_ports_and_a_key_goes_over_again_and_again(tmp_path: Path) -> None:
    versions = make_versions(tmp_path / "versions", "base", "tuned")
    ports = "--listen", f"127.0.0.1:{free_port()}", f"--set=node.transfer.port={free_port()}"
    flags = ("--model", str(versions["base"]), *ports)
    shape = ClusterShape(
        0, 0, mixed=1, routers=1, bootstraps=1, transfer="tcp", node=flags, kind=WEIGHTS_KIND, is_guarded=True
    )
    async with ChaosCluster(shape, tmp_path / "logs") as cluster:
        (router,), (node,) = cluster.routers.values(), cluster.nodes.values()
        pid = node.pid
        for source, label in ((str(versions["tuned"]), "tuned"), ("", "base"), (str(versions["tuned"]), "tuned")):
            async with cluster.admin(router) as stub:
                request = pb.LoadWeightsRequest(source=source, label=label, finish_s=1.0)
                steps = [step async for step in stub.LoadWeights(request, timeout=60)]
                assert (steps[-1].done, steps[-1].label) == (1, label)
                (found,) = (await stub.ListNodes(pb.ListNodesRequest(), timeout=10)).nodes
                assert (found.weights.label, found.address) == (label, ports[1])
        assert node.is_running and node.pid == pid
