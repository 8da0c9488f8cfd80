"""The YAML of deploy/ray against the schema that Ray reads it by, and its arguments as `build_pd_app` reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pdcluster.core.errors import ConfigError
from pdcluster.launch.ray_args import (
    bootstrap_command,
    environment_of,
    key_environment,
    node_command,
    parse_args,
    read_args,
    router_command,
)
from pdcluster.settings.config import BootstrapConfig, NodeConfig, RouterConfig, load

RAY = Path(__file__).parents[3] / "deploy" / "ray"
PAGE = Path(__file__).parents[3] / "docs" / "ray.md"
# Written by tests/ray, which checks that it is the installed Ray's.
SCHEMA = json.loads((Path(__file__).parent / "ray_serve_schema.json").read_text())
PLACES = ("10.0.0.7", "10.0.0.1:8998")


def config(name: str) -> dict[str, Any]:
    found = yaml.safe_load((RAY / name).read_text())
    return yaml.safe_load(found["spec"]["serveConfigV2"]) if found.get("kind") == "RayService" else found


@pytest.mark.parametrize("name", sorted(file.name for file in RAY.glob("*.yaml")))
def test_rays_schema_takes_it(name: str) -> None:
    jsonschema.validate(config(name), SCHEMA)
    wrong = config(name)
    wrong["applications"][0]["deployments"] = [{"name": "Decode", "ray_actor_options": {"num_cpus": "x"}}]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


@pytest.mark.parametrize("name", sorted(file.name for file in RAY.glob("*.yaml")))
def test_its_arguments_are_ours(name: str) -> None:
    (application,) = config(name)["applications"]
    assert application["import_path"] == "pdcluster.ray:build_pd_app"
    args = read_args(application["args"])
    assert set(args.pools()) in ({"prefill", "decode"}, {"mixed"})
    for pool in args.pools().values():
        options = pool.ray_actor_options.of_ranks(pool.tp, 0.5)
        jsonschema.validate(options, SCHEMA["$defs"]["RayActorOptionsSchema"])
        is_on_gpu = pool.settings.get("node.device") == "cuda" or args.engine == "vllm"
        assert options.get("num_gpus", 0) == (pool.tp if is_on_gpu else 0), "a GPU for each rank"


def settings_of(command: tuple[str, ...]) -> dict[str, str]:
    return dict(word.removeprefix("--set=").split("=", 1) for word in command if word.startswith("--set="))


def test_vllm_gets_its_arguments_its_ranks_and_the_time_that_ray_waits() -> None:
    pool = {"tp": 4, "vllm_args": ["--max-model-len", 4096, "--hf-overrides", '{"a": "b c"}'],
            "ray_actor_options": {"num_gpus": 1, "num_cpus": 2}}  # fmt: skip
    args = read_args({"engine": "vllm", "ready_s": 1200, "prefill": pool, "decode": {**pool, "tp": 8}})
    for role, tp in (("prefill", 4), ("decode", 8)):
        given = settings_of(node_command(args, role, "n", PLACES))
        assert not {"node.tp", "node.threads"} & set(given), "they are the native engine's"
        config = load(NodeConfig, given, environ=key_environment(args, lambda: "0123456789abcdef")).config
        assert (config.engine, config.vllm.start_s) == ("vllm", 1200.0)
        assert config.vllm.args == (
            "--tensor-parallel-size", str(tp), "--distributed-executor-backend", "mp",
            "--max-model-len", "4096", "--hf-overrides", '{"a": "b c"}',
        )  # fmt: skip
        assert args.pools()[role].ray_actor_options.of_ranks(tp, 0.5) == {"num_cpus": 2 * tp, "num_gpus": tp}


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"mixed": {"vllm_args": ["--max-model-len", 8]}}, "mixed.vllm_args need engine: vllm"),
        ({"engine": "vllm", "mixed": {"vllm_args": ["--tensor-parallel-size", 2]}}, "write tp"),
        ({"engine": "vllm", "mixed": {"vllm_args": ["--tensor_parallel_size=2"]}}, "write tp"),
        ({"engine": "vllm", "mixed": {"vllm_args": ["-tp", 2]}}, "write tp"),
        ({"engine": "vllm", "mixed": {"settings": {"node.vllm.args": "-tp 2"}}}, "write vllm_args"),
        ({"mixed": {"settings": {"node.engine": "vllm"}}}, "write engine"),
        ({"engine": "sglang"}, "engine"),
    ],
)
def test_arguments_that_contradict_the_engine_are_refused(args: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_args(args)


def test_every_process_gets_the_key_in_its_environment_and_in_no_argument() -> None:
    args, key = read_args({}), "0123456789abcdef0123"
    given = key_environment(args, lambda: key)
    commands = {
        BootstrapConfig: bootstrap_command(args, "10.0.0.1"),
        RouterConfig: router_command(args, "r", PLACES),
        NodeConfig: node_command(args, "decode", "n", PLACES),
    }
    for section, command in commands.items():
        config = load(section, settings_of(command), environ=given).config
        assert config.security.cluster_key == key and not list(config.warnings())[1:]
        assert key not in " ".join(command)


def test_a_file_of_keys_stands_in_the_place_of_the_applications_own(tmp_path: Path) -> None:
    file = tmp_path / "key"
    args = read_args({"cluster_key_file": str(file)})
    given = key_environment(args, lambda: pytest.fail("no key is made"))
    config = load(NodeConfig, settings_of(node_command(args, "decode", "n", PLACES)), environ=given).config
    assert (config.security.cluster_key, config.security.cluster_key_file) == (None, file)


@pytest.mark.parametrize("part", ["bootstrap", "router", "mixed"])
def test_no_part_has_a_key_of_its_own(part: str) -> None:
    section = "node" if part == "mixed" else part
    with pytest.raises(ConfigError, match=rf"{part}\.settings .* write cluster_key_file, for all processes"):
        read_args({"mixed": {}, part: {"settings": {f"{section}.security.cluster_key_file": "/key"}}})


def test_there_is_an_example_for_gpus_of_one_kind_with_several_in_a_node() -> None:
    (application,) = config("gpu.yaml")["applications"]
    (pool,) = read_args(application["args"]).pools().values()
    assert pool.tp > 1 and pool.ray_actor_options.num_gpus == 1 and pool.ray_actor_options.accelerator_type


def test_the_arguments_of_the_page_are_ours() -> None:
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    (whole,) = [block["args"] for block in blocks if "args" in block]
    (gpus,) = [block for block in blocks if "mixed" in block]
    assert read_args(whole).pools().keys() == {"prefill", "decode"}
    (example,) = config("gpu.yaml")["applications"]
    assert gpus["mixed"]["ray_actor_options"].items() <= example["args"]["mixed"]["ray_actor_options"].items()
    assert read_args(gpus).mixed is not None


def test_pods_get_no_variables_of_services() -> None:
    """KubeRay makes Services called pdcluster-…, whose variables our processes would refuse."""
    cluster = yaml.safe_load((RAY / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert [group["template"]["spec"].get("enableServiceLinks") for group in groups] == [False, False]


def test_without_arguments_there_is_one_node_of_each() -> None:
    assert set(read_args({}).pools()) == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prefil": {}}, "unknown field `prefil`"),
        ({"prefill": {"num_replicas": "two"}}, "at `$.prefill.num_replicas`"),
        ({"prefill": {}}, "there are only prefill nodes"),
        ({"mixed": {"num_replicas": 1, "autoscaling_config": {}}}, "keep one of them"),
        ({"mixed": {"tp": 0}}, "at least one rank"),
        ({"mixed": {"autoscaling_config": {"min_replicas": 0}}}, "no replica would be left"),
        ({"mixed": {"placement_group_bundles": []}}, "unknown field `placement_group_bundles`"),
        (
            {"mixed": {"ray_actor_options": {"acelerator_type": "A100"}}},
            "unknown field `acelerator_type` - at `$.mixed.ray_actor_options`; it takes num_cpus, num_gpus, memory, reso",
        ),
        ({"router": {"ray_actor_options": {"num_gpus": -1}}}, ">= 0.0 - at `$.router.ray_actor_options.num_gpus`"),
        ({"mixed": {"ray_actor_options": {"accelerator_type": ""}}}, "at `$.mixed.ray_actor_options.accelerator_type`"),
        ({"mixed": {"ray_actor_options": {"resources": {"GPU": 2}}}}, "resources has GPU; write num_gpus: 2 beside it"),
        ({"mixed": {"ray_actor_options": {"runtime_env": {"env_vars": {"A": 1}}}}}, "env_vars.A is 1, not text"),
        ({"mixed": {"ray_actor_options": {"runtime_env": {"env_vars": ["A"]}}}}, "env_vars is ['A']; write NAME"),
        ({"mixed": {"settings": {"node.thread": 1}}}, "did you mean node.threads"),
        ({"mixed": {"autoscaling_config": {}}, "router": {"settings": {"router.auto_roles": True}}}, "auto_roles"),
        ({"router": {"settings": {"router.tls_cert": "tls.crt"}}}, "Ray's own proxy the certificate"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_args(args)


def test_commands_have_the_settings_and_later_ones_count_more() -> None:
    args = parse_args({
        "served_model_name": "m", "router": {"port": 0, "settings": {"router.policy": "product"}},
        "decode": {"tp": 2, "ray_actor_options": {"num_cpus": 3}, "settings": {"node.warmup": False}},
    })  # fmt: skip
    node = node_command(args, "decode", "decode-x", PLACES, {"node.threads": 1})
    assert {"--set=node.name=decode-x", "--set=node.tp=2", "--set=node.warmup=false", "--set=node.threads=1"} <= set(
        node
    )
    assert "--set=node.threads=3" in node_command(args, "decode", "decode-x", PLACES)
    router = router_command(args, "router-x", PLACES)
    assert {"--set=router.http=10.0.0.7:0", "--set=router.policy=product"} <= set(router)
    assert "--set=bootstrap.listen=[::1]:8998" in bootstrap_command(args, "::1")


def test_the_one_actor_of_a_node_asks_for_all_of_its_ranks() -> None:
    given = {
        "num_cpus": 4, "num_gpus": 1, "memory": 2**30, "resources": {"nvlink": 0.5}, "accelerator_type": "A100",
        "runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}, "label_selector": {"zone": "b"},
    }  # fmt: skip
    (pool,) = read_args({"mixed": {"tp": 2, "ray_actor_options": given}}).pools().values()
    found = pool.ray_actor_options.of_ranks(pool.tp, 0.5)
    assert found == given | {"num_cpus": 8, "num_gpus": 2, "memory": 2**31, "resources": {"nvlink": 1.0}}
    jsonschema.validate(found, SCHEMA["$defs"]["RayActorOptionsSchema"])
    (pool,) = read_args({"mixed": {"tp": 2}}).pools().values()
    assert pool.ray_actor_options.of_ranks(pool.tp, 0.5) == {"num_cpus": 1.0}, "and nothing that was not told"


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7"])
def test_health_is_asked_at_the_machines_address_in_ray(host: str) -> None:
    args, places = read_args({}), (host, "10.0.0.1:8998")
    address = "[fd00::7]:0" if ":" in host else "10.0.0.7:0"
    assert f"--set=bootstrap.health={address}" in bootstrap_command(args, host)
    assert f"--set=router.health={address}" in router_command(args, "router-x", places)
    for role in args.pools():
        assert f"--set=node.health={address}" in node_command(args, role, "x", places)


def test_children_get_nothing_of_ray() -> None:
    found = environment_of({"RAY_AUTH_TOKEN": "secret", "OMP_NUM_THREADS": "1", "HOME": "/root", "PYTHONPATH": "/app"})
    assert set(found) == {"HOME", "PYTHONPATH"}
    assert found["PYTHONPATH"].startswith("/app")
