"""The chart as helm renders it: each example, each option on and off, against the schemas of two Kubernetes versions; and
the arguments of its containers against the commands they are for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import (
    CHART,
    EXAMPLES,
    ROOT,
    SECTIONS,
    TOOLS,
    Values,
    bare_template,
    helm,
    in_pod,
    lay_out_models,
    named,
    places_of,
    pod_address,
    pods,
    processes,
    refusal,
    rendered,
    secret_files,
    settings_of,
    with_key,
    with_values,
)

from pdcluster.settings.config import BootstrapConfig, NodeConfig, RouterConfig, load

pytestmark = pytest.mark.full

KUBERNETES = ("1.33", "1.35")
# Kinds whose schemas are not Kubernetes's own: checked below.
CUSTOM = ("ScaledObject", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute")
SECRETS = """
auth:
  clusterKey: {existingSecret: keys}
  tenants: {existingSecret: tenants}
  adminToken: {existingSecret: admin}
"""
# Values files. Each is tried alone; all that fit together are tried together.
OPTIONS: Mapping[str, str] = {
    "autoscaling": "router: {autoscaling: {enabled: true}}",
    "pools by routers": """
        poolDefaults: {autoscaling: {enabled: true, minReplicas: 0}}
        networkPolicy: {enabled: true}""",
    "pools by prometheus": """
        poolDefaults: {autoscaling: {enabled: true, by: prometheus}}
        autoscaling: {prometheus: "http://prometheus:9090", pollingSeconds: 30}""",
    "no budgets": "{router: {pdb: {enabled: false}}, poolDefaults: {pdb: {enabled: false}}}",
    "secrets": SECRETS,
    "tls": "router: {tls: {existingSecret: tls}}",
    "no console": "console: {enabled: false}",
    "console": "{console: {hosts: [a.example, b.example]}, auth: {adminToken: {existingSecret: admin}}}",
    "tracing": "tracing: {otlp: 'http://collector:4317', samplePercent: 5}",
    "policy": """
        networkPolicy: {enabled: true, metricsFrom: [{namespaceSelector: {}}], machines: [10.0.0.0/16, "fd00::/8"]}
        poolDefaults: {settings: {node.transfer.backend: tcp}}""",
    "monitoring": "monitoring: {monitors: true, rules: true, dashboards: true, intervalSeconds: 1000000, labels: {release: p}}",
    "ingress": "ingress: {enabled: true, host: llm.example, className: nginx, tlsSecret: tls}",
    "route": "httpRoute: {enabled: true, parentRefs: [{name: gateway}], hostnames: [llm.example]}",
    "hub": "model: {hub: {name: Qwen/Qwen3-0.6B, tokenSecret: hub, endpoint: 'https://hub.example'}, servedName: 'q: 1 # x'}",
    "claim": "model: {pvc: {claim: models, path: a/b}}",
    "fill": "model: {hub: {name: Qwen/Qwen3-0.6B, tokenSecret: hub}, pvc: {claim: models, path: a/b, fill: {enabled: true}}}",
    "host path": "model: {hostPath: {path: '/models/m: 1 # x'}}",
    "image": "model: {image: {reference: 'registry/model:1', path: m}}",
    "IPv6": "{ipFamily: IPv6, auth: {adminToken: {existingSecret: admin}}}",
    "rdma": """
        networkPolicy: {machines: [10.0.0.0/16]}
        poolDefaults: {hostNetwork: true, infiniband: true, devices: {rdma/hca: 1}}""",
    "mooncake": """
        networkPolicy: {enabled: true}
        poolDefaults: {settings: {node.transfer.backend: mooncake}}""",
    "tp": "poolDefaults: {tp: 2, settings: {node.kv.memory_bytes: 1073741824}}",
    "vllm": """
        networkPolicy: {enabled: true}
        poolDefaults: {engine: vllm, devices: {nvidia.com/gpu: 2}, runtimeClassName: nvidia,
                       vllm: {args: [--tensor-parallel-size, 2], shmSize: 16Gi}}""",
    "places": """
        poolDefaults: {nodeSelector: {a: b}, priorityClassName: high, runtimeClassName: gvisor,
                       tolerations: [{key: gpu, operator: Exists}], strategy: {type: Recreate}}
        router: {nodeSelector: {a: b}}
        bootstrap: {nodeSelector: {a: b}}""",
    "pods": """
        poolDefaults: {pod: {schedulerName: volcano, volumes: [{name: cache, hostPath: {path: /var/cache/pdcluster}}],
                             initContainers: [{name: first, image: busybox}], containers: [{name: side, image: busybox}]}}
        router: {pod: {securityContext: {runAsUser: null}}}
        bootstrap: {pod: {priorityClassName: high}}""",
    "account": "serviceAccount: {name: mine}",
    "labels": """
        podLabels: {team: a}
        podAnnotations: {note: "b: # c"}
        serviceAccount: {annotations: {role: r}}
        router: {service: {type: LoadBalancer, annotations: {x: y}}}
        image: {pullSecrets: [registry], tag: 1.2.3}
        nameOverride: other""",
    "settings": """
        router: {settings: {router.policy: kv-cost, router.index_blocks: 4194304, router.itl_s: 0.0005}, workers: 2,
                 env: [{name: A, value: b}]}
        bootstrap: {settings: {bootstrap.max_nodes: 1000000}, leaseSeconds: 2.5}
        poolDefaults: {env: [{name: A, value: b}], settings: {node.kv.memory_bytes: 8589934592, node.warmup: false}}
        log: {requests: true}""",
}  # fmt: skip
ALONE = (
    "claim",
    "fill",
    "host path",
    "image",
    "IPv6",
    "no console",
    "no budgets",
    "account",
    "pools by routers",
    "mooncake",
    "vllm",
    "places",
)
CASES: dict[str, list[Values]] = {
    "defaults": [],
    **{f"example {file.stem}": [file] for file in EXAMPLES},
    **{name: [yaml.safe_load(text)] for name, text in OPTIONS.items()},
    "together": [yaml.safe_load(text) for name, text in OPTIONS.items() if name not in ALONE],
}


@pytest.mark.parametrize("case", CASES)
def test_it_lints_and_fits_two_kubernetes_versions(case: str, tmp_path: Path) -> None:
    lint = with_values(("lint", "--strict", str(CHART)), *with_key(*CASES[case]))
    assert lint.returncode == 0, lint.stdout
    objects = rendered(*CASES[case])
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    files = []
    for number, each in enumerate(objects):
        if each["kind"] not in CUSTOM:
            files.append(tmp_path / f"{number}.yaml")
            files[-1].write_text(yaml.safe_dump(each))
    for version in KUBERNETES:
        command = (TOOLS / "kubernetes-validate", "--strict", "-k", version, *files)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
        assert done.returncode == 0, f"Kubernetes {version}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("case", CASES)
def test_the_processes_take_their_arguments(case: str) -> None:
    """Each container's settings are known and fit, as the process itself would read them."""
    sections = {"node": NodeConfig, "bootstrap": BootstrapConfig, "router": RouterConfig}
    seen = set()
    objects = rendered(*CASES[case])
    for name, container in processes(objects):
        given = {key: in_pod(value, pod_address(objects, 0), "pd-x-1") for key, value in settings_of(container).items()}
        load(sections[name], given, environ={})
        seen.add(name)
    assert seen == set(sections)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_are_taken_by_config_check(file: Path, tmp_path: Path) -> None:
    """It reads the files that they name, which here lie in a folder of the test."""
    lay_out_models(tmp_path)
    objects = rendered(file)
    for _, pod in pods(objects):
        for container in (each for each in pod["containers"] if each["name"] in SECTIONS):
            places = places_of(pod, container)
            for path, content in secret_files(places).items():
                (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path[1:]).write_text(content)
            given = [in_pod(word, pod_address(objects, 0), "pd-x-1") for word in container["args"] if "--set" in word]
            for place in places:
                folder = tmp_path / ("claim" if place == "/model" else place[1:])
                given = [word.replace(f"={place}/", f"={folder}/") for word in given]
            command = (sys.executable, "-m", "pdcluster.cli", "config", "check", "--section", container["name"], *given)
            done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
            assert done.returncode == 0, f"{container['name']}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("case", ["together", "fill"])
def test_pods_are_restricted_and_probed(case: str) -> None:
    seen = set()
    for name, pod in pods(rendered(*CASES[case])):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "a Service called pdcluster-… would set variables that are refused"
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"] + pod.get("initContainers", []):
            if container["image"] == "busybox":
                continue
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            seen.add(container["name"])
            if container["name"] not in SECTIONS:
                continue
            ports = {port["name"] for port in container["ports"]}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert container[probe]["httpGet"]["port"] in ports, name
            startup = container["startupProbe"]
            if container["name"] == "node":
                assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert seen >= {"node", "router", "bootstrap"} | ({"fill", "model"} if case == "fill" else set())


@pytest.mark.parametrize(("drain", "pre_stop"), [(30, 5), (600, 15)])
def test_a_pods_grace_is_what_its_drain_takes(drain: int, pre_stop: int) -> None:
    objects = rendered(
        {"router": {"drainSeconds": drain, "preStopSeconds": pre_stop}, "poolDefaults": {"drainSeconds": drain}}
    )
    deployments = named(objects, "Deployment")
    graces = {
        name: each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] for name, each in deployments.items()
    }
    assert graces == {"pd-router": pre_stop + drain + 10, "pd-prefill": drain + 10, "pd-decode": drain + 10}


def test_services_choose_the_pods_that_they_are_for() -> None:
    objects = rendered(*CASES["together"])
    pods = [each["spec"]["template"] for each in objects if each["kind"] in ("Deployment", "StatefulSet")]
    for service in (each for each in objects if each["kind"] == "Service"):
        wanted = service["spec"]["selector"].items()
        chosen = [pod for pod in pods if wanted <= pod["metadata"]["labels"].items()]
        assert len(chosen) == 1, service["metadata"]["name"]
        names = {port["name"] for container in chosen[0]["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    (monitor,) = [each for each in objects if each["kind"] == "ServiceMonitor"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    chosen = [each for each in objects if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()]
    assert [each["metadata"]["name"] for each in chosen] == ["other-admin"]
    assert {end["port"] for end in monitor["spec"]["endpoints"]} <= {
        port["name"] for port in chosen[0]["spec"]["ports"]
    }


def test_what_is_scraped_names_its_cluster_and_alerts_link_where_they_are_told_to() -> None:
    ours = rendered(*CASES["monitoring"])
    given = rendered(
        *CASES["monitoring"], {"monitoring": {"cluster": "blue", "runbookUrl": "https://wiki.example/pd/"}}
    )
    for objects, cluster, link in ((ours, "llm/", "docs/runbooks/"), (given, "blue", "https://wiki.example/pd/")):
        by_kind = {each["kind"]: each["spec"] for each in objects if each["kind"] in CUSTOM}
        ends = [*by_kind["ServiceMonitor"]["endpoints"], *by_kind["PodMonitor"]["podMetricsEndpoints"]]
        for end in ends:
            (label,) = [each for each in end["relabelings"] if each.get("targetLabel") == "cluster"]
            assert label["replacement"].startswith(cluster)
        rules = [rule for group in by_kind["PrometheusRule"]["groups"] for rule in group["rules"] if "alert" in rule]
        assert rules and all(rule["annotations"]["runbook_url"].removeprefix(link).count("/") == 0 for rule in rules)


def test_without_a_token_admin_and_console_stay_inside_the_pod() -> None:
    objects = rendered({"networkPolicy": {"enabled": True}})
    ports = {port["name"] for each in objects if each["kind"] == "Service" for port in each["spec"]["ports"]}
    assert ports == {"registry", "http", "grpc", "health"}
    given = settings_of(dict(processes(objects))["router"])
    assert given["router.admin"] == "127.0.0.1:50052"
    assert given["router.console"] == "127.0.0.1:8001"


ONLY_KEY = {"auth": {"clusterKey": {"existingSecret": "keys"}}}
OPEN = {"auth": {"insecure": ["bootstrap", "links", "kv"]}}
SCALED_POOLS = {"poolDefaults": {"autoscaling": {"enabled": True}}}


def test_without_a_key_it_renders_nothing_and_prints_the_two_commands() -> None:
    for values in ({}, {"auth": {"insecure": ["bootstrap", "links"]}}, {"auth": {"insecure": ["scaler", "admin"]}}):
        said = bare_template(values).stderr
        assert "create secret generic pd-cluster-key --from-literal=cluster-key=$(openssl rand -hex 32)" in said
        assert "--set auth.clusterKey.existingSecret=pd-cluster-key" in said
        assert "-n llm " in said and "--set 'auth.insecure={" in said
    assert bare_template(ONLY_KEY).returncode == bare_template(OPEN).returncode == 0
    assert not named(rendered(), "Secret"), "a secret that helm makes lies in the release's values"


def test_pools_that_routers_scale_need_a_token_too() -> None:
    said = bare_template(ONLY_KEY, SCALED_POOLS).stderr
    assert "create secret generic pd-scaler-token --from-literal=scaler-token=$(openssl rand -hex 32)" in said
    assert "--set auth.scalerToken.existingSecret=pd-scaler-token" in said
    assert "--set 'auth.insecure={scaler}'" in said
    assert bare_template(ONLY_KEY, SCALED_POOLS, {"auth": {"insecure": ["scaler"]}}).returncode == 0
    by = {"poolDefaults": {"autoscaling": {"enabled": True, "by": "prometheus"}}}
    assert bare_template(ONLY_KEY, by, {"autoscaling": {"prometheus": "http://p:9090"}}).returncode == 0


def test_what_may_be_open_is_told_to_every_process() -> None:
    everything = {"auth": {"insecure": ["bootstrap", "links", "kv", "admin", "console", "scaler"]}}
    done = bare_template(everything, SCALED_POOLS)
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    sections = {"node": NodeConfig, "bootstrap": BootstrapConfig, "router": RouterConfig}
    for name, container in processes(objects):
        given = {key: in_pod(value, "10.0.0.1", "pd-x-1") for key, value in settings_of(container).items()}
        assert load(sections[name], given, environ={}).config.insecure == tuple(everything["auth"]["insecure"])
    given = settings_of(dict(processes(objects))["router"])
    assert (given["router.admin"], given["router.console"]) == ("0.0.0.0:50052", "0.0.0.0:8001")


def test_policies_are_on_and_know_prometheus_and_keda() -> None:
    policies = {name: each["spec"] for name, each in named(rendered(SCALED_POOLS), "NetworkPolicy").items()}
    assert set(policies) == {"pd-prefill", "pd-decode", "pd-bootstrap", "pd-router"}
    by_port = {port["port"]: rule.get("from") for rule in policies["pd-router"]["ingress"] for port in rule["ports"]}
    assert by_port[8000] is None and by_port[50051] is None, "the API is for everybody unless apiFrom says who"
    (keda,) = by_port[50053]
    assert keda["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "keda"}
    for spec in policies.values():
        (health,) = [rule for rule in spec["ingress"] if rule.get("ports", [{}])[0].get("port") == 8080]
        assert health["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}


def test_custom_objects_fit_the_schemas_of_their_definitions() -> None:
    found = {each["kind"]: each for each in rendered(*CASES["together"]) if each["kind"] in CUSTOM}
    assert set(found) == set(CUSTOM)
    check_custom(list(found.values()))
    route = found["HTTPRoute"]["spec"]
    assert route["rules"][0]["backendRefs"] == [{"name": "other", "port": 8000}]
    wrong = {**found["PodMonitor"], "spec": {"selector": {}, "podMetricsEndpoints": [{"port": 1}]}}
    with pytest.raises(AssertionError, match="port must be string"):
        check_custom([wrong])


def test_pools_scale_as_routers_say() -> None:
    objects = rendered(*CASES["pools by routers"])
    scaled = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "ScaledObject"}
    assert set(scaled) == {"pd-prefill", "pd-decode"}
    (trigger,) = scaled["pd-decode"]["triggers"]
    metadata = {"scalerAddress": "pd-scaler.llm:50053", "role": "decode", "tokenFromEnv": "SCALER_TOKEN"}
    assert trigger == {"type": "external-push", "metadata": metadata}
    assert scaled["pd-decode"]["scaleTargetRef"]["envSourceContainerName"] == "node"
    (token,) = [each for each in dict(processes(objects))["node"]["env"] if each["name"] == "SCALER_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "keys", "key": "scaler-token"}}
    down = scaled["pd-decode"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down == {"stabilizationWindowSeconds": 300, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}
    for each in objects:
        if each["kind"] == "Deployment" and each["metadata"]["name"] in scaled:
            assert "replicas" not in each["spec"], "helm would set it back"
    given = settings_of(dict(processes(objects))["router"])
    assert given["router.scaler"] == "0.0.0.0:50053" and given["router.from_zero"] == "true"
    assert given["router.scaler_token_file"] == "/etc/pdcluster/scaler/scaler-token"
    (asked,) = next(
        each["spec"]["triggers"] for each in rendered(*CASES["pools by prometheus"]) if each["kind"] == "ScaledObject"
    )
    assert asked["metadata"]["ignoreNullValues"] == "false"
    assert "router.from_zero" not in str(rendered(*CASES["pools by prometheus"]))


def check_custom(objects: Sequence[dict[str, Any]]) -> None:
    """By schemas made from the operators' own definitions."""
    command = ("node", str(Path(__file__).parent / "validate_custom.mjs"), str(TOOLS.parent / "node" / "node_modules"))
    done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 0, done.stderr


MIXED = {"name": "p", "role": "mixed"}
SCALED = {"enabled": True}
HUB = {"hub": {"name": "a/b"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"router": {"replicas": "abc"}}, "/router/replicas"),
        ({"ruter": {"replicas": 1}}, "'ruter' not allowed"),
        ({"poolDefaults": {"replcas": 1}}, "'replcas' not allowed"),
        ({"cache": {"hostPath": "/var/cache"}}, "'hostPath' not allowed"),
        ({"pools": [{"name": "p", "role": "both"}]}, "/pools/0/role"),
        ({"pools": [{"name": "p", "role": "prefill"}]}, "needs prefill and decode, or mixed"),
        ({"pools": [MIXED, MIXED]}, "two pools are named p"),
        ({"pools": [{**MIXED, "name": "router"}]}, "a pool is named router, as the cluster's own objects are"),
        ({"pools": [{**MIXED, "name": "bootstrap"}]}, "a pool is named bootstrap, as the cluster's own objects are"),
        ({"model": {**HUB, "pvc": {"claim": "c"}}}, "model.hub.name and model.pvc.claim are set"),
        ({"model": {"pvc": {"claim": "c", "path": "p", "fill": {"enabled": True}}}}, "model.pvc.fill needs model.hub.name"),
        ({"model": {**HUB, "pvc": {"claim": "c", "fill": {"enabled": True}}}}, "model.pvc.path"),
        ({"poolDefaults": {"autoscaling": {**SCALED, "by": "prometheus"}}}, "autoscaling.prometheus is empty"),
        ({"poolDefaults": {"autoscaling": SCALED}, "router": {"settings": {"router.auto_roles": True}}}, "would undo each other"),
        ({"poolDefaults": {"autoscaling": {**SCALED, "minReplicas": 9}}}, "minReplicas above maxReplicas"),
        ({"pools": [{**MIXED, "autoscaling": SCALED}, {**MIXED, "name": "q"}]}, "the routers count nodes by role"),
        ({"poolDefaults": {"autoscaling": {**SCALED, "minReplicas": 0}}, "router": {"settings": {"router.deadline_s": "5m"}}},
         "router.deadline_s ends requests after 300 s, before the 900 s"),
        ({"ingress": {"enabled": True}}, "needs ingress.host"),
        ({"httpRoute": {"enabled": True}}, "needs httpRoute.parentRefs"),
        ({"router": {"settings": {"router.hold.age": 1}}}, "invalid propertyName 'router.hold.age'"),
        ({"poolDefaults": {"settings": {"node.threds": 1}}}, "invalid propertyName 'node.threds'"),
        ({"pools": [{**MIXED, "settings": {"router.policy": "x"}}]}, "invalid propertyName 'router.policy'"),
        ({"bootstrap": {"settings": {"node.tp": 2}}}, "invalid propertyName 'node.tp'"),
        ({"pools": [{**MIXED, "settings": {"node.listen": "0.0.0.0:1"}}]}, "pool p has node.listen, which the chart sets itself"),
        ({"pools": [{**MIXED, "settings": {"node.engine": "vllm"}}]}, "pool p has node.engine, which the chart sets itself"),
        ({"pools": [{**MIXED, "engine": "vllm", "settings": {"node.engine": "native"}}]}, "pool p has node.engine, which the chart sets itself"),
        ({"poolDefaults": {"settings": {"node.vllm.args": "--seed 1"}}, "pools": [MIXED]}, "pool p has node.vllm.args in its settings"),
        ({"poolDefaults": {"engine": "vllm", "vllm": {"args": ["--seed", "1"]}}, "pools": [{**MIXED, "settings": {"node.vllm.args": "--seed 2"}}]},
         "give vLLM's arguments as vllm.args"),
        ({"pools": [{**MIXED, "engine": "vllm", "settings": {"node.tp": 2}}]}, "pool p has engine vllm and node.tp in its settings"),
        ({"router": {"settings": {"router.http": "0.0.0.0:1"}}}, "router.settings has router.http, which the chart sets itself"),
        ({"poolDefaults": {"hostNetwork": True}, "networkPolicy": {"enabled": True}}, "set networkPolicy.machines"),
        ({"poolDefaults": {"ports": {"health": 8102}, "tp": 2}}, "give each its own"),
        ({"poolDefaults": {"ports": {"transfer": 65535}, "tp": 2}}, "up to 65535"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


def test_it_can_be_packaged(tmp_path: Path) -> None:
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.iterdir()
    assert helm("template", "pd", str(package), "--set", "auth.clusterKey.existingSecret=keys").returncode == 0


def test_the_dockerfile_lints() -> None:
    done = subprocess.run(
        (TOOLS / "hadolint", str(ROOT / "deploy" / "docker" / "Dockerfile")), capture_output=True, text=True, timeout=60.0, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
