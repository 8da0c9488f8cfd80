"""The chart as helm renders it: each example, each option on and off, against the schemas of two Kubernetes versions; and
the arguments of its containers against the commands they are for."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster.settings.config import BootstrapConfig, NodeConfig, RouterConfig, load

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "pdcluster"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
TOOLS = ROOT / ".venv-deploy" / "bin"
HELM = shutil.which("helm", path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}") or "helm"
KUBERNETES = ("1.33", "1.35")
# Kinds whose schemas are not Kubernetes's own: checked below.
CUSTOM = ("ScaledObject", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute")
SECRETS = (
    "auth.clusterKey.existingSecret=keys",
    "auth.tenants.existingSecret=tenants",
    "auth.adminToken.existingSecret=admin",
)
# Each is tried alone; all that fit together are tried together.
OPTIONS: Mapping[str, Sequence[str]] = {
    "autoscaling": ("router.autoscaling.enabled=true",),
    "pools by routers": ("poolDefaults.autoscaling.enabled=true", "poolDefaults.autoscaling.minReplicas=0", "networkPolicy.enabled=true"),
    "pools by prometheus": ("poolDefaults.autoscaling.enabled=true", "poolDefaults.autoscaling.by=prometheus",
                            "autoscaling.prometheus=http://prometheus:9090", "autoscaling.pollingSeconds=30"),
    "no budgets": ("router.pdb.enabled=false", "poolDefaults.pdb.enabled=false"),
    "secrets": SECRETS,
    "no console": ("console.enabled=false",),
    "console": ("console.hosts={a.example,b.example}", SECRETS[2]),
    "tracing": ("tracing.otlp=http://collector:4317", "tracing.samplePercent=5"),
    "policy": ("networkPolicy.enabled=true",),
    "monitoring": ("monitoring.monitors=true", "monitoring.rules=true", "monitoring.dashboards=true", "monitoring.labels.release=p"),
    "ingress": ("ingress.enabled=true", "ingress.host=llm.example", "ingress.className=nginx", "ingress.tlsSecret=tls"),
    "route": ("httpRoute.enabled=true", "httpRoute.parentRefs[0].name=gateway", "httpRoute.hostnames={llm.example}"),
    "hub": ("model.hub.name=Qwen/Qwen3-0.6B", "model.hub.tokenSecret=hub", "model.hub.endpoint=https://hub.example", "model.servedName=q"),
    "claim": ("model.pvc.claim=models", "model.pvc.path=a/b"),
    "host path": ("model.hostPath.path=/models/m",),
    "image": ("model.image.reference=registry/model:1", "model.image.path=m"),
    "IPv6": ("ipFamily=IPv6", SECRETS[2]),
    "rdma": ("poolDefaults.hostNetwork=true", "poolDefaults.infiniband=true", "poolDefaults.devices.rdma/hca=1"),
    "tp": ("poolDefaults.tp=2", "poolDefaults.settings.node\\.kv\\.memory_bytes=1GiB"),
    "places": ("poolDefaults.nodeSelector.a=b", "router.nodeSelector.a=b", "bootstrap.nodeSelector.a=b", "cache.hostPath=/var/cache/p",
               "poolDefaults.priorityClassName=high", "poolDefaults.runtimeClassName=gvisor"),
    "account": ("serviceAccount.name=mine",),
    "labels": ("podLabels.team=a", "podAnnotations.note=b", "serviceAccount.annotations.role=r", "router.service.type=LoadBalancer",
               "router.service.annotations.x=y", "image.pullSecrets={registry}", "image.tag=1.2.3", "nameOverride=other"),
    "settings": ("router.settings.router\\.policy=kv-cost", "bootstrap.settings.bootstrap\\.max_nodes=64", "router.workers=2",
                 "log.requests=true", "router.env[0].name=A", "router.env[0].value=b", "poolDefaults.env[0].name=A", "poolDefaults.env[0].value=b"),
}  # fmt: skip
TOGETHER = [
    name
    for name in OPTIONS
    if name not in ("claim", "host path", "image", "IPv6", "no console", "no budgets", "account", "pools by routers")
]


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((HELM, *words), capture_output=True, text=True, timeout=60.0, check=False)


def rendered(*words: str) -> list[dict[str, Any]]:
    done = helm("template", "pd", str(CHART), "--namespace", "llm", *words)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def flags(names: Sequence[str]) -> list[str]:
    return list(itertools.chain.from_iterable(("--set", each) for name in names for each in OPTIONS[name]))


CASES: dict[str, list[str]] = {
    "defaults": [],
    **{f"example {file.stem}": ["-f", str(file)] for file in EXAMPLES},
    **{name: flags([name]) for name in OPTIONS},
    "together": flags(TOGETHER),
}


@pytest.mark.parametrize("case", CASES)
def test_it_lints_and_fits_two_kubernetes_versions(case: str, tmp_path: Path) -> None:
    lint = helm("lint", "--strict", str(CHART), *CASES[case])
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
    for name, words in arguments(rendered(*CASES[case])):
        pairs = dict(word.removeprefix("--set=").split("=", 1) for word in words if word.startswith("--set="))
        assert len(pairs) == sum(word.startswith("--set=") for word in words), "a setting is given twice"
        values = {
            key: value.replace("$(POD_IP)", "10.0.0.7").replace("$(POD_NAME)", "pd-x-1") for key, value in pairs.items()
        }
        load(sections[name], values, environ={})
        seen.add(name)
    assert seen == set(sections)


def arguments(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet"):
            for container in each["spec"]["template"]["spec"]["containers"]:
                yield container["name"], container["args"]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_are_taken_by_config_check(file: Path) -> None:
    for name, words in arguments(rendered("-f", str(file))):
        given = [
            word.replace("$(POD_IP)", "10.0.0.7").replace("$(POD_NAME)", "pd-x-1")
            for word in words
            if word.startswith("--set")
        ]
        command = (sys.executable, "-m", "pdcluster.cli", "config", "check", "--section", name, *given)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


def test_pods_are_restricted_and_probed() -> None:
    for each in rendered(*CASES["together"]):
        if each["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = each["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        startup = container["startupProbe"]
        if container["name"] == "node":
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


@pytest.mark.parametrize(("drain", "pre_stop"), [(30, 5), (600, 15)])
def test_a_pods_grace_is_what_its_drain_takes(drain: int, pre_stop: int) -> None:
    objects = rendered(
        "--set", f"router.drainSeconds={drain}", "--set", f"router.preStopSeconds={pre_stop}", "--set", f"poolDefaults.drainSeconds={drain}"
    )  # fmt: skip
    graces = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for each in objects if each["kind"] == "Deployment"
    }  # fmt: skip
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


def test_without_a_token_admin_and_console_stay_inside_the_pod() -> None:
    objects = rendered("--set", "networkPolicy.enabled=true")
    ports = {port["name"] for each in objects if each["kind"] == "Service" for port in each["spec"]["ports"]}
    assert ports == {"registry", "http", "grpc", "health"}
    words = dict(arguments(objects))["router"]
    assert "--set=router.admin=127.0.0.1:50052" in words
    assert "--set=router.console=127.0.0.1:8001" in words


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
    assert trigger == {"type": "external-push", "metadata": {"scalerAddress": "pd-scaler.llm:50053", "role": "decode"}}
    down = scaled["pd-decode"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down == {"stabilizationWindowSeconds": 300, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}
    for each in objects:
        if each["kind"] == "Deployment" and each["metadata"]["name"] in scaled:
            assert "replicas" not in each["spec"], "helm would set it back"
    words = dict(arguments(objects))["router"]
    assert {"--set=router.scaler=0.0.0.0:50053", "--set=router.from_zero=true", "--set=router.hold.age_s=900"} <= set(
        words
    )
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "router.replicas=abc"), "/router/replicas"),
        (("--set", "ruter.replicas=1"), "'ruter' not allowed"),
        (("--set", "poolDefaults.replcas=1"), "'replcas' not allowed"),
        (("--set", "pools[0].name=p", "--set", "pools[0].role=both"), "/pools/0/role"),
        (("--set", "pools[0].name=p", "--set", "pools[0].role=prefill"), "needs prefill and decode, or mixed"),
        (("--set", "pools[0].name=p,pools[0].role=mixed,pools[1].name=p,pools[1].role=mixed"), "two pools are named p"),
        (("--set", "model.hub.name=a/b", "--set", "model.pvc.claim=c"), "model.hub.name and model.pvc.claim are set"),
        (("--set", "poolDefaults.autoscaling.enabled=true,poolDefaults.autoscaling.by=prometheus"), "autoscaling.prometheus is empty"),
        (("--set", "poolDefaults.autoscaling.enabled=true,router.settings.router\\.auto_roles=true"), "would undo each other"),
        (("--set", "poolDefaults.autoscaling.enabled=true,poolDefaults.autoscaling.minReplicas=9"), "minReplicas above maxReplicas"),
        (("--set", "pools[0].name=p,pools[0].role=mixed,pools[0].autoscaling.enabled=true,pools[1].name=q,pools[1].role=mixed"),
         "the routers count nodes by role"),
        (("--set", "ingress.enabled=true"), "needs ingress.host"),
        (("--set", "httpRoute.enabled=true"), "needs httpRoute.parentRefs"),
        (("--set", "router.settings.ruter\\.http=x"), "does not match pattern"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(words: tuple[str, ...], message: str) -> None:
    done = helm("template", "pd", str(CHART), *words)
    assert done.returncode != 0
    assert message in done.stderr


def test_it_can_be_packaged(tmp_path: Path) -> None:
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.iterdir()
    assert helm("template", "pd", str(package)).returncode == 0


def test_the_dockerfile_lints() -> None:
    done = subprocess.run(
        (TOOLS / "hadolint", str(ROOT / "deploy" / "docker" / "Dockerfile")), capture_output=True, text=True, timeout=60.0, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
