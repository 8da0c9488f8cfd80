"""`python -m tests.chaos`: a cluster under load and faults. Exits 1 when an answer was wrong, lost or hung, or a node
still holds something when all is over. The seed that it prints repeats the requests and the faults."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.changes import AbortWindows, TrainerProcess, WeightsChanger
from tests.chaos.cluster import NATIVE, ROOT, ChaosCluster, ClusterShape, lease_flags
from tests.chaos.faults import FAULTS, FaultMaker
from tests.chaos.load import LIMIT_S, ChaosLoad, LoadReport, requests_of
from tests.chaos.scenarios import SCENARIOS, run_scenario
from tests.chaos.weights import WEIGHTS_KIND, WeightsLoad, WeightsOracle
from tests.harness.models.weight_versions import make_versions


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are made")
    parser.add_argument("--seed", type=int, help="of requests and faults; default: a new one")
    parser.add_argument("--engine", choices=["native", "vllm"], default="native", help="of nodes; vllm: greedy load")
    parser.add_argument("--hold-s", type=float, default=60.0, help="how long a request may wait for a node")
    parser.add_argument("--faults", default="", help="comma-separated; default: all; none: only the load")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--transfer", default="auto", help="auto, shm, tcp, mooncake or nixl")
    parser.add_argument("--guarded", action="store_true", help="with a cluster key, TLS and a tenant's key")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--requests", type=int, default=60, help="different requests")
    parser.add_argument("--lease-s", type=float, help="of nodes, routers and bootstraps; default: their own")
    parser.add_argument(
        "--rolling", type=Path, nargs="?", const=ROOT, metavar="DIR",
        help="instead of faults: restart every process in turn with this code, at first from the checkout in DIR",
    )  # fmt: skip
    parser.add_argument(
        "--weights", action="store_true", help="weights that change by loads and pushes, in pauses too, and kills"
    )
    parser.add_argument("--scenario", choices=["all", *SCENARIOS], help="named faults instead of drawn ones")
    parser.add_argument("--times", type=int, default=5, help="how often each scenario runs")
    parser.add_argument("--logs", type=Path, help="folder for the processes' logs; default: a temporary one")
    return parser.parse_args()


async def chaos(given: argparse.Namespace, seed: int, folder: Path) -> bool:
    if given.engine == "vllm":
        from tests.chaos.vllm_nodes import VLLM as node_kind
        from tests.chaos.vllm_nodes import VLLM_FAULTS as faults
        from tests.chaos.vllm_nodes import GreedyOracle, greedy_requests_of

        requests, is_right = greedy_requests_of(seed, given.requests), (GreedyOracle().is_right,)
    else:
        node_kind, faults, requests, is_right = NATIVE, FAULTS, requests_of(seed, given.requests), ()
    kinds = tuple(kind for kind in (given.faults or ",".join(faults)).split(",") if kind != "none")
    if unknown := [kind for kind in kinds if kind not in faults]:
        raise SystemExit(f"no fault is called {', '.join(unknown)}; there are {', '.join(faults)}")
    shape = ClusterShape(
        given.prefill, given.decode, transfer=given.transfer, tp=given.tp, kind=node_kind,
        node=lease_flags(given.lease_s, "node"),
        router=(*lease_flags(given.lease_s, "router"), f"--set=router.hold.age_s={given.hold_s:g}"),
        source=(given.rolling or ROOT).absolute(), is_guarded=given.guarded,
    )  # fmt: skip
    began = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)

    tell(f"seed {seed}; logs in {folder}")
    async with ChaosCluster(shape, folder) as cluster:
        load = ChaosLoad(cluster, requests, seed, *is_right, limit_s=LIMIT_S - 60.0 + given.hold_s)
        await load.learn()
        tell(f"{given.requests} undisturbed answers are known")
        maker = FaultMaker(cluster, seed, kinds, tell, faults)
        clients = asyncio.create_task(load.run(given.clients))
        if given.rolling is not None:
            await roll(cluster, tell)
        elif kinds:
            await maker.run(given.minutes * 60.0)
        else:
            await asyncio.sleep(given.minutes * 60.0)
        load.end()
        await clients
        for child in cluster.all():
            child.resume()
        await cluster.until_ready()
        left = await cluster.until_idle()
        await load.close()
        tell("faults: " + (", ".join(f"{count} {kind}" for kind, count in sorted(maker.counts.items())) or "none"))
        is_quiet = not kinds and given.rolling is None
        return judged(load.report, left, tell, seed) and (not is_quiet or no_node_was_lost(folder, tell))


async def changing_weights(given: argparse.Namespace, seed: int, folder: Path) -> bool:
    """Each answer is checked range by range against the weights that it names."""
    directories = make_versions(folder / "versions", "base", "tuned", "third")
    shape = ClusterShape(
        given.prefill, given.decode, transfer=given.transfer, tp=given.tp, kind=WEIGHTS_KIND,
        node=("--model", str(directories["base"]), *lease_flags(given.lease_s, "node")),
        router=(*lease_flags(given.lease_s, "router"), f"--set=router.hold.age_s={given.hold_s:g}"),
        is_guarded=given.guarded,
    )  # fmt: skip
    began = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)

    tell(f"seed {seed}; logs in {folder}")
    async with TrainerProcess(folder / "trainer.log") as trainer, ChaosCluster(shape, folder) as cluster:
        aborts = AbortWindows()
        load = WeightsLoad(cluster, WeightsOracle(directories), aborts, seed)
        clients = asyncio.create_task(load.run(given.clients))
        changer = WeightsChanger(cluster, trainer, directories, aborts, tell)
        await changer.run(given.minutes * 60.0, seed, kills=given.faults != "none")
        load.end()
        await clients
        await cluster.until_ready()
        left = [*await changer.end(), *await cluster.until_idle()]
        await load.close()
    for what, counts in (*changer.counts.items(), ("aborted by a pause, right so far", load.aborted)):
        tell(f"{what}: " + (", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"))
    return judged(load.report, left, tell, seed)


async def roll(cluster: ChaosCluster, tell) -> None:
    """Restart every process in turn, as an upgrade does: nodes, registries, routers."""
    for child in (*cluster.nodes.values(), *cluster.bootstraps.values(), *cluster.routers.values()):
        child.source = ROOT
        code = await child.terminate(120.0)
        assert code == 0, f"{child.name} ended with {code} instead of draining"
        await cluster.restart(child)
        await cluster.until_ready()
        tell(f"{child.name} is back")


def judged(report: LoadReport, left: list[str], tell, seed: int) -> bool:
    tell(
        f"right: {report.num_right} ({', '.join(f'{count} {kind}' for kind, count in sorted(report.by_kind.items()))})"
    )
    tell(f"slowest: {report.slowest_s:.1f} s")
    for name, found in (("wrong", report.wrong), ("lost", report.lost), ("hung", report.hung), ("leaked", left)):
        tell(f"{name}: {len(found)}")
        for each in found[:10]:
            print(f"           {each}")
    tell(f"excused, because their router was killed or not there: {len(report.excused)}")
    is_clean = report.is_clean and not left
    if not is_clean:
        print(f"repeat it with --seed {seed}")
    return is_clean


def no_node_was_lost(folder: Path, tell) -> bool:
    """Without faults nobody may be declared dead."""
    lines = [line for log in sorted(folder.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    lost = [line for line in lines if "is lost:" in line or "lease ended" in line or "is gone: its requests" in line]
    tell(f"declared dead without a fault: {len(lost)}")
    for line in lost[:10]:
        print(f"           {line}")
    return not lost


async def scenarios(given: argparse.Namespace, seed: int, folder: Path) -> bool:
    names = list(SCENARIOS) if given.scenario == "all" else [given.scenario]
    return all([await run_scenario(name, given.times, seed, folder / name) for name in names])


def main() -> int:
    given = arguments()
    seed = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    folder = given.logs or Path(tempfile.mkdtemp(prefix="pdcluster-chaos-"))
    run = scenarios if given.scenario else changing_weights if given.weights else chaos
    return 0 if asyncio.run(run(given, seed, folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
