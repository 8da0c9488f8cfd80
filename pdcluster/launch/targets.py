"""Health ports as Prometheus discovers them: the shape of file_sd_configs and http_sd_configs."""

from __future__ import annotations

from collections.abc import Mapping

from pdcluster.processes.supervisor import Facts

Target = dict[str, object]
# Hosts that one can listen on but not connect to.
ANY_HOST = ("0.0.0.0", "[::]")
NOTHING: Mapping[str, str] = {}


def target_of(
    facts: Facts, cluster: str, process: str, component: str, more: Mapping[str, str] = NOTHING
) -> Target | None:
    """One process, by what it announced. None when it has no health port.

    more: further labels. Prometheus drops those that begin with __meta_ after relabelling.
    """
    health = facts.get("health")
    if health is None:
        return None
    return {
        "targets": [str(health)],
        "labels": {"cluster": cluster, "process": process, "component": component, **more},
    }


def reachable(facts: Facts, own: str) -> Facts:
    """What a process announced, with addresses as other machines reach them. own: any address of this machine."""
    host = own.rpartition(":")[0]
    return {name: _at(host, fact) if isinstance(fact, str) else fact for name, fact in facts.items()}


def _at(host: str, fact: str) -> str:
    listens, _, port = fact.rpartition(":")
    return f"{host}:{port}" if listens in ANY_HOST else fact
