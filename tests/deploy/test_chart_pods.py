"""What the chart makes of a pool's values: arguments, images, ports and their policies, how it rolls out, the model that a Job brings,
and what a user merges into a pod."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from helm_chart import named, pods, processes, refusal, rendered, settings_of, template

from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import SECTIONS, BootstrapConfig, NodeConfig, RouterConfig, keys, load
from pdcluster.settings.keys import Key

pytestmark = pytest.mark.full

DIGEST = "sha256:" + "0123456789abcdef" * 4
CLASSES = {"node": NodeConfig, "router": RouterConfig, "bootstrap": BootstrapConfig}


def pod(objects: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    return dict(pods(objects))[name]


def container(objects: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    return pod(objects, name)["containers"][0]


def pool(**values: Any) -> dict[str, Any]:
    return {"pools": [{"name": "gpu", "role": "mixed", **values}]}


# ---------------------------------------------------------------- arguments


def largest(key: Key) -> float | None:
    """The largest round number that a setting takes; None where it takes none."""
    for number in (8589934592, 16777216, 100000, 60, 2):
        try:
            key.kind(number)
        except ValueError:
            continue
        return number
    return None


@pytest.mark.parametrize("section", CLASSES)
def test_every_number_of_a_file_is_what_the_process_reads(section: str) -> None:
    """helm reads the numbers of a file as floats, and prints those from a million on with an exponent."""
    own = set(settings_of(dict(processes(rendered()))[section]))
    given = {
        key.path: number
        for key in keys(SECTIONS[section])
        if not key.flag_only and key.path not in own and (number := largest(key)) is not None
    }
    taken = {}
    for path, number in given.items():  # one at a time: some contradict each other
        try:
            load(CLASSES[section], {path: number}, environ={})
        except ConfigError:
            continue
        taken[path] = number
    assert sum(number >= 10**6 for number in taken.values()) >= 3 or section == "bootstrap"
    where = {"poolDefaults" if section == "node" else section: {"settings": taken}}
    written = settings_of(dict(processes(rendered(where)))[section])
    assert {path: written[path] for path in taken} == {path: str(number) for path, number in taken.items()}


def test_decimals_switches_and_names_arrive_as_they_were_written() -> None:
    objects = rendered({
        "model": {"servedName": "my: model # 1"}, "bootstrap": {"leaseSeconds": 2.5},
        "router": {"settings": {"router.itl_s": 0.0005, "router.spare": False, "router.policy": "kv-cost: '\"%& <x> ä"}},
        "poolDefaults": {"drainSeconds": 3600000},
    })  # fmt: skip
    found = {name: settings_of(each) for name, each in processes(objects)}
    assert found["router"]["router.itl_s"] == "0.0005" and found["router"]["router.spare"] == "false"
    assert found["router"]["router.policy"] == "kv-cost: '\"%& <x> ä"
    assert found["bootstrap"]["bootstrap.lease_s"] == "2.5"
    assert found["node"]["node.served_model_name"] == "my: model # 1"
    assert found["node"]["node.drain_s"] == "3600000"
    assert pod(objects, "pd-decode")["terminationGracePeriodSeconds"] == 3600010


@pytest.mark.parametrize("name", ["1", "true", "null", "0x1f"])
def test_a_pools_name_stays_text(name: str) -> None:
    found = named(rendered({"pools": [{"name": name, "role": "mixed"}]}), "Deployment")[f"pd-{name}"]
    assert found["spec"]["selector"]["matchLabels"]["pdcluster.io/pool"] == name


@pytest.mark.parametrize(
    ("settings", "age", "deadline"),
    [({}, 1800.0, 2400.0), ({"router.hold.age_s": "2h"}, 7200.0, 7800.0), ({"router.deadline_s": 86400}, 1800.0, 86400.0)],
)  # fmt: skip
def test_requests_that_wait_for_a_first_node_do_not_expire_before(
    settings: dict[str, object], age: float, deadline: float
) -> None:
    """Their deadline leaves them the usual 600 s after the longest wait."""
    objects = rendered({
        "poolDefaults": {"startupMinutes": 30, "autoscaling": {"enabled": True, "minReplicas": 0}},
        "router": {"settings": settings},
    })  # fmt: skip
    config = load(RouterConfig, settings_of(dict(processes(objects))["router"]), environ={}).config
    assert (config.from_zero, config.hold.age_s, config.deadline_s) == (True, age, deadline)


def test_media_that_choose_their_ports_get_none() -> None:
    objects = rendered(pool(settings={"node.transfer.backend": "mooncake"}), {"networkPolicy": {"enabled": True}})
    assert "node.transfer.port" not in settings_of(container(objects, "pd-gpu"))
    assert [port["name"] for port in container(objects, "pd-gpu")["ports"]] == ["node", "health"]


# ---------------------------------------------------------------- images


def test_images_by_digest_by_tag_and_per_pool() -> None:
    objects = rendered({
        "image": {"router": f"registry:5000/router@{DIGEST}", "node": "registry:5000/node", "tag": "7"},
        "pools": [{"name": "a", "role": "prefill", "image": f"registry/cuda@{DIGEST}"}, {"name": "b", "role": "decode"},
                  {"name": "c", "role": "mixed", "image": "registry/other:1-cuda"}, {"name": "d", "role": "mixed", "image": "x/y"}],
    })  # fmt: skip
    found = {name: each["containers"][0]["image"] for name, each in pods(objects)}
    assert found == {
        "pd-router": f"registry:5000/router@{DIGEST}", "pd-bootstrap": f"registry:5000/router@{DIGEST}",
        "pd-a": f"registry/cuda@{DIGEST}", "pd-b": "registry:5000/node:7", "pd-c": "registry/other:1-cuda", "pd-d": "x/y:7",
    }  # fmt: skip


# ---------------------------------------------------------------- vLLM

VLLM = {"vllm": {"args": ["--tensor-parallel-size", 4, "--hf-overrides", '{"a": "b c"}'], "shmSize": "32Gi"}}


def gpu_pool(**more: Any) -> dict[str, Any]:
    return pool(engine="vllm", devices={"nvidia.com/gpu": 4}, startupMinutes=30, drainSeconds=60, **VLLM, **more)


def test_a_node_with_vllm_gets_its_arguments_and_as_long_to_start_as_the_probe_allows() -> None:
    node = container(rendered(gpu_pool()), "pd-gpu")
    cut = node["args"].index("--")
    assert node["args"][:2] == ["pdcluster", "node"]
    assert node["args"][cut + 1 :] == ["--tensor-parallel-size", "4", "--hf-overrides", '{"a": "b c"}']
    found = settings_of(node)
    given = {
        name: value.replace("$(POD_IP)", "10.0.0.7").replace("$(POD_NAME)", "pd-gpu-1") for name, value in found.items()
    }
    config = load(NodeConfig, {**given, "node.vllm.args": shlex.join(node["args"][cut + 1 :])}, environ={}).config
    assert (config.engine, config.vllm.side_port, config.vllm.start_s, config.tp) == ("vllm", 8101, 1800.0, 1)
    assert config.vllm.args == tuple(node["args"][cut + 1 :])
    assert not {"node.tp", "node.transfer.port"} & set(found), "they are the native engine's"
    probe = node["startupProbe"]
    assert probe["httpGet"]["path"] == "/readyz" and probe["periodSeconds"] * probe["failureThreshold"] == 1800
    assert [(port["name"], port["containerPort"]) for port in node["ports"]] == [("node", 8100), ("health", 8080), ("side", 8101)]  # fmt: skip


def test_a_node_with_vllm_gets_gpus_shared_memory_and_a_grace_to_end_its_processes() -> None:
    spec = pod(rendered(gpu_pool(runtimeClassName="nvidia")), "pd-gpu")
    node = spec["containers"][0]
    assert node["image"].startswith("pdcluster/vllm:")
    assert node["resources"]["limits"]["nvidia.com/gpu"] == node["resources"]["requests"]["nvidia.com/gpu"] == "4"
    assert {"name": "shm", "mountPath": "/dev/shm"} in node["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}} in spec["volumes"]
    assert spec["terminationGracePeriodSeconds"] == 90 and spec["runtimeClassName"] == "nvidia"


def test_a_node_of_our_own_engine_has_nothing_of_vllms() -> None:
    spec = pod(rendered(pool()), "pd-gpu")
    assert "shm" not in {each["name"] for each in spec["volumes"]} and "--" not in spec["containers"][0]["args"]
    settings = settings_of(spec["containers"][0])
    assert settings["node.engine"] == "native" and not [name for name in settings if "vllm" in name]


def test_a_policy_lets_the_cluster_reach_every_port_that_ucx_may_take() -> None:
    objects = rendered(gpu_pool(settings={"node.vllm.lease_s": "30s"}), {"networkPolicy": {"enabled": True}})
    router = named(objects, "Deployment")["pd-router"]["spec"]["template"]["metadata"]["labels"]
    policy = named(objects, "NetworkPolicy")["pd-gpu"]
    assert is_admitted(policy, 45678, router) and not is_admitted(policy, 45678, {"app": "else"})


def test_the_job_of_a_cluster_with_vllm_runs_in_its_image() -> None:
    (job,) = named(rendered(FILL, gpu_pool()), "Job").values()
    assert job["spec"]["template"]["spec"]["containers"][0]["image"].startswith("pdcluster/vllm:")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"pools": [{"name": "a", "role": "prefill", "engine": "vllm"}, {"name": "b", "role": "decode"}]},
            "one engine",
        ),
        (gpu_pool(tp=4), "give vLLM --tensor-parallel-size"),
        (pool(vllm={"args": ["--x"]}), "set engine: vllm"),
        (gpu_pool(settings={"node.vllm.side_port": 5600}), "which the chart sets itself"),
        (pool(engine="sglang"), "engine"),
    ],
)
def test_values_that_contradict_an_engine_are_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in refusal(values)


# ---------------------------------------------------------------- rollouts


def roll_out(strategy: dict[str, Any], replicas: int, machines: int) -> tuple[bool, int]:
    """A Deployment's rollout where each pod fills a machine: (whether it ends, fewest pods that served)."""
    surge, unavailable = strategy["rollingUpdate"]["maxSurge"], strategy["rollingUpdate"]["maxUnavailable"]
    old, new, waiting, fewest = replicas, 0, 0, replicas
    for _ in range(10 * replicas):
        waiting = min(replicas - new, replicas + surge - old - new)
        new += min(waiting, machines - old - new)
        leaving = max(0, min(old, old + new - (replicas - unavailable)))
        old -= leaving
        fewest = min(fewest, old + new)
    return old == 0 and new == replicas, fewest


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("claims", [{"devices": {"nvidia.com/gpu": 8}}, {"hostNetwork": True}])
def test_a_pool_without_a_spare_machine_rolls_out(claims: dict[str, Any], replicas: int) -> None:
    objects = rendered(pool(replicas=replicas, **claims), {"networkPolicy": {"machines": ["10.0.0.0/16"]}})
    strategy = named(objects, "Deployment")["pd-gpu"]["spec"]["strategy"]
    assert roll_out(strategy, replicas, machines=replicas) == (True, replicas - 1)


def test_a_pool_whose_nodes_share_machines_never_has_fewer_nodes() -> None:
    strategy = named(rendered(pool(replicas=2)), "Deployment")["pd-gpu"]["spec"]["strategy"]
    assert roll_out(strategy, 2, machines=3) == (True, 2)
    assert roll_out(strategy, 2, machines=2) == (False, 2)


def test_a_pools_strategy_is_its_own() -> None:
    given = {"rollingUpdate": {"maxSurge": "50%", "maxUnavailable": 1}}
    objects = rendered({
        "poolDefaults": {"devices": {"nvidia.com/gpu": 1}, "strategy": {"type": "Recreate"}},
        "pools": [{"name": "a", "role": "prefill"}, {"name": "b", "role": "decode", "strategy": {"type": "RollingUpdate", **given}}],
    })  # fmt: skip
    found = {name: each["spec"]["strategy"] for name, each in named(objects, "Deployment").items()}
    assert found["pd-a"] == {"type": "Recreate"} and found["pd-b"] == {"type": "RollingUpdate", **given}
    assert found["pd-router"] == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


# ---------------------------------------------------------------- ports and policies

PORTS = {"node": 9100, "transfer": 9200, "health": 9080}


def is_admitted(policy: dict[str, Any], port: int, peer: dict[str, Any] | str) -> bool:
    """Whether a policy lets a peer in: a pod by its labels, or an address."""
    for rule in policy["spec"]["ingress"]:
        has_port = "ports" not in rule or any(
            each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"]
        )
        blocks = [each["ipBlock"]["cidr"] for each in rule.get("from", []) if "ipBlock" in each]
        labels = [each["podSelector"].get("matchLabels", {}) for each in rule.get("from", []) if "podSelector" in each]
        if isinstance(peer, str):
            has_peer = any(ip_address(peer) in ip_network(each) for each in blocks)
        else:
            has_peer = any(each.items() <= peer.items() for each in labels)
        if has_port and (has_peer or "from" not in rule):
            return True
    return False


def test_two_pools_may_share_machines_and_their_policies_have_their_ports() -> None:
    objects = rendered({
        "networkPolicy": {"enabled": True}, "poolDefaults": {"settings": {"node.transfer.backend": "tcp"}},
        "pools": [{"name": "a", "role": "prefill", "tp": 2, "ports": PORTS}, {"name": "b", "role": "decode"}],
    })  # fmt: skip
    found = settings_of(container(objects, "pd-a"))
    assert found["node.listen"] == "$(POD_IP):9100" and found["node.health"] == "0.0.0.0:9080"
    assert found["node.transfer.port"] == "9200"
    assert [port["containerPort"] for port in container(objects, "pd-a")["ports"]] == [9100, 9080, 9200, 9201]
    policies = named(objects, "NetworkPolicy")
    assert set(policies) == {"pd-a", "pd-b", "pd-bootstrap", "pd-router"}
    deployments = named(objects, "Deployment")
    router = deployments["pd-router"]["spec"]["template"]["metadata"]["labels"]
    for name, ports in (("pd-a", (9100, 9200, 9201)), ("pd-b", (8100, 8101))):
        chosen = policies[name]["spec"]["podSelector"]["matchLabels"].items()
        assert chosen <= deployments[name]["spec"]["template"]["metadata"]["labels"].items()
        assert all(is_admitted(policies[name], port, router) for port in ports)
        assert not any(is_admitted(policies[name], port, {"app": "else"}) for port in ports)
        assert not is_admitted(policies[name], ports[-1] + 1, router)
    assert is_admitted(policies["pd-a"], 9080, {"app.kubernetes.io/name": "prometheus"})
    assert not is_admitted(policies["pd-a"], 9080, "10.9.9.9")
    everybody = named(rendered({"networkPolicy": {"metricsFrom": []}}), "NetworkPolicy")
    assert is_admitted(everybody["pd-prefill"], 8080, "10.9.9.9")


def test_policies_let_the_machines_in_whose_network_a_pool_uses() -> None:
    """No selector chooses pods of the machines' network, neither as those that a policy is for nor as those that it lets in."""
    objects = rendered({
        "networkPolicy": {"enabled": True, "machines": ["10.0.0.0/16", "fd00:1::/64"]},
        "pools": [{"name": "a", "role": "prefill", "hostNetwork": True}, {"name": "b", "role": "decode"}],
    })  # fmt: skip
    policies = named(objects, "NetworkPolicy")
    assert set(policies) == {"pd-b", "pd-bootstrap", "pd-router"}
    for address in ("10.0.3.4", "fd00:1::5"):
        assert is_admitted(policies["pd-bootstrap"], 8998, address)
        assert is_admitted(policies["pd-b"], 8101, address)
        assert not is_admitted(policies["pd-router"], 50052, address)
    assert not is_admitted(policies["pd-bootstrap"], 8998, "10.1.0.1")
    closed = named(rendered({"networkPolicy": {"enabled": True, "machines": ["10.0.0.0/16"]}}), "NetworkPolicy")
    assert not is_admitted(closed["pd-bootstrap"], 8998, "10.0.3.4"), "no pool needs it"


# ---------------------------------------------------------------- the model

FILL = {"model": {"hub": {"name": "org/tiny@v1", "tokenSecret": "hub"}, "pvc": {"claim": "models", "path": "a/tiny", "fill": {"enabled": True}}}}  # fmt: skip


def test_a_job_fills_the_claim_and_nodes_wait_for_it() -> None:
    objects = rendered(FILL)
    (job,) = named(objects, "Job").values()
    spec = job["spec"]["template"]["spec"]
    (fill,) = spec["containers"]
    assert fill["args"] == ["python3", "-m", "pdcluster.launch.fill", "org/tiny@v1", "/model/a/tiny"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in fill["env"]
    (model,) = [each for each in spec["volumes"] if each["name"] == "model"]
    assert model["persistentVolumeClaim"] == {"claimName": "models"}, "it is written"
    node = pod(objects, "pd-decode")
    assert settings_of(node["containers"][0])["node.model"] == "/model/a/tiny"
    assert "HF_TOKEN" not in str(node)
    assert node["initContainers"][0]["args"][-2:] == ["/model/a/tiny", "900"]
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in node["volumes"]


WEIGHTS = {"weights": {"label": "tuned", "source": "/model/tuned: 1 # x", "canaryPercent": 12.5, "releaseFirst": True}}
ADMIN = {"auth": {"adminToken": {"existingSecret": "admin"}}}


def test_a_job_rolls_other_weights_out() -> None:
    objects = rendered({**WEIGHTS, **ADMIN})
    (name, job), *rest = named(objects, "Job").items()
    spec = job["spec"]["template"]["spec"]
    (weights,) = spec["containers"]
    assert not rest and weights["args"][:3] == ["pdctl", "weights", "load"]
    assert weights["args"][3:] == [
        "--admin=pd-admin:50052", "--token-file=/etc/pdcluster/admin/admin-token", "--label=tuned",
        "--max-unavailable=1", "--canary=12.5%", "--release-first", "--", "/model/tuned: 1 # x",
    ]  # fmt: skip
    (same,) = named(rendered({**WEIGHTS, **ADMIN, "router": {"replicas": 5}}), "Job")
    (other,) = named(rendered({"weights": {**WEIGHTS["weights"], "label": "tuned-2"}, **ADMIN}), "Job")
    assert same == name != other
    assert not named(rendered(ADMIN), "Job")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({**ADMIN, "weights": {"label": "tuned"}}, "weights.source is empty"),
        (WEIGHTS, "needs the Admin of the routers"),
        ({"weights": {"source": "/m"}}, "weights.label is empty"),
        ({**WEIGHTS, **ADMIN, "router": {"tls": {"existingSecret": "tls"}}}, "has no CA"),
        ({**ADMIN, "weights": {"label": "no label", "source": "/m"}}, "label"),
    ],
)
def test_weights_that_no_job_could_load_are_refused(values: dict[str, object], reason: str) -> None:
    assert reason in refusal(values)


def test_another_job_has_another_name() -> None:
    """A Job cannot be changed, and an upgrade that changes nothing of it must not touch it."""
    (first,), (again,), (other,), (merged,) = (
        named(rendered(FILL, more), "Job")
        for more in ({}, {"router": {"replicas": 5}}, {"image": {"tag": "2"}}, {"model": {"pvc": {"fill": {"pod": {"priorityClassName": "low"}}}}})
    )  # fmt: skip
    assert first == again
    assert len({first, other, merged}) == 3


# ---------------------------------------------------------------- what is merged into a pod


def test_a_part_of_a_pods_spec_is_merged_by_names() -> None:
    part = {
        "schedulerName": "volcano", "priorityClassName": "high", "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
        "securityContext": {"runAsUser": None, "fsGroup": 1000700000},
        "containers": [
            {"name": "side", "image": "busybox"},
            {"name": "node", "securityContext": {"capabilities": {"add": ["SYS_NICE"]}}, "volumeMounts": [{"name": "data", "mountPath": "/data"}],
             "env": [{"name": "POD_IP", "value": "::1"}, {"name": "A", "value": "b"}], "resources": {"limits": {"memory": 8589934592}}},
        ],
        "initContainers": [{"name": "first", "image": "busybox"}],
        "volumes": [{"name": "data", "emptyDir": {}}, {"name": "cache", "persistentVolumeClaim": {"claimName": "kernels"}}],
    }  # fmt: skip
    plain, merged = (pod(rendered(pool(**more)), "pd-gpu") for more in ({}, {"pod": part}))
    assert merged["schedulerName"] == "volcano" and merged["priorityClassName"] == "high"
    assert merged["hostAliases"] == part["hostAliases"]
    wanted = {**plain["securityContext"], "fsGroup": 1000700000}
    del wanted["runAsUser"]
    assert merged["securityContext"] == wanted
    assert [each["name"] for each in merged["containers"]] == ["node", "side"]
    assert [each["name"] for each in merged["initContainers"]] == ["first"]
    node, before = merged["containers"][0], plain["containers"][0]
    assert (node["args"], node["image"], node["ports"]) == (before["args"], before["image"], before["ports"])
    assert node["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_NICE"]}
    assert node["volumeMounts"] == [*before["volumeMounts"], {"name": "data", "mountPath": "/data"}]
    values = {each["name"]: each.get("value") for each in node["env"]}
    assert values == {"POD_NAME": None, "POD_IP": "::1", "PDCLUSTER_CACHE_DIR": "/cache/pdcluster", "A": "b"}
    assert node["resources"]["limits"]["memory"] == 8589934592
    volumes = {each.pop("name"): each for each in merged["volumes"]}
    assert volumes["cache"] == {"persistentVolumeClaim": {"claimName": "kernels"}}, "the old one is not mixed in"
    assert volumes["data"] == {"emptyDir": {}} and "tmp" in volumes


def test_openshift_chooses_the_users_of_all_pods() -> None:
    part = {"pod": {"securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}}
    objects = rendered(
        FILL, {"router": part, "bootstrap": part, "poolDefaults": part, "model": {"pvc": {"fill": part}}}
    )
    found = {name: set(each["securityContext"]) for name, each in pods(objects)}
    assert len(found) == 5
    assert set(map(frozenset, found.values())) == {frozenset({"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"})}


def test_a_merge_that_makes_no_pod_is_seen_by_helm() -> None:
    assert template(pool(pod={"containers": "node"})).returncode == 0  # Kubernetes refuses it by name
    assert template(pool(pod=["node"])).returncode != 0
