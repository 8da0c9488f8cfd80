"""Who may import whom: a module imports lower levels or its own package. The table is the architecture; a new module must find its place in it."""

import subprocess
import sys

import pytest
from tree import Module, imports, modules, written

LEVELS: dict[str, float] = {
    # 0: words. The standard library, msgspec and numpy only.
    "pdcluster.core.bounds": -0.5,
    "pdcluster.core.errors": 0,
    "pdcluster.core.grammar": -0.3,
    "pdcluster.core.lifecycle": 0,
    "pdcluster.core.messages": 0,
    "pdcluster.core.reported": -0.2,
    "pdcluster.core.sampling": -0.2,
    "pdcluster.core.history": 0.2,
    "pdcluster.core.step": 0.5,
    # 1: plain services everyone may use
    "pdcluster.checkpoint.bundled": 1,
    "pdcluster.settings.kinds": 0.5,
    "pdcluster.settings.keys": 0.8,
    "pdcluster.settings.config": 1,
    "pdcluster.cost.cost": 1,
    "pdcluster.cost.fit": 1.5,
    "pdcluster.settings.flags": 1.5,
    "pdcluster.telemetry.log": 1.5,
    "pdcluster.telemetry.metrics": 1.5,
    "pdcluster.processes.garbage": 1,
    "pdcluster.telemetry.tally": 1,
    "pdcluster.checkpoint.hub": 1.8,
    "pdcluster.checkpoint.inspection": 1.6,
    "pdcluster.processes.ready": 1.5,
    "pdcluster.api": 1.5,
    # 2: pure logic, no torch and no I/O
    "pdcluster.kv": 2,
    "pdcluster.scheduler": 2.5,
    "pdcluster.transfer.backends.base": 2,
    "pdcluster.transfer": 2.5,
    "pdcluster.wire.address": 2,
    "pdcluster.bootstrap.card": 2.5,
    "pdcluster.bootstrap.store": 2.5,
    # 3: memory and sockets
    "pdcluster.kv.pool": 3,
    "pdcluster.transfer.backends.fake": 3,
    "pdcluster.transfer.backends.shm_memory": 3,
    "pdcluster.transfer.backends.mooncake": 3,
    "pdcluster.transfer.copying.copy": 3,
    "pdcluster.transfer.copying.copy_kernel": 3,
    "pdcluster.transfer.backends.nixl": 3,
    "pdcluster.transfer.copying.page_kernel": 3,
    "pdcluster.transfer.backends.pidfd": 2,
    "pdcluster.transfer.backends.ranked": 3,
    "pdcluster.transfer.backends.shm": 3,
    "pdcluster.transfer.backends.shm_frames": 2.5,
    "pdcluster.transfer.backends.shm_notices": 3,
    "pdcluster.transfer.backends.staged": 3,
    "pdcluster.transfer.backends.staged_pieces": 3,
    "pdcluster.transfer.backends.staged_pump": 3,
    "pdcluster.transfer.backends.staging": 2,
    "pdcluster.transfer.backends.tcp": 3,
    "pdcluster.wire": 3,
    "pdcluster.rpc": 3,
    # 4: services on top of them
    "pdcluster.bootstrap": 4,
    "pdcluster.client": 4,
    "pdcluster.engine": 4,
    # 5, 6, 7: the processes
    "pdcluster.node": 5,
    "pdcluster_router": 6,
    "pdcluster.launch": 7,
    "pdcluster.processes.child_process": 4,
    "pdcluster.processes.spare": 4,
    "pdcluster.processes.supervisor": 4,
    "pdcluster.cli": 8,
}
HEAVY = {
    "torch", "transformers", "numba", "safetensors", "xgrammar", "zmq", "grpc", "google", "httptools", "mooncake", "nixl_cu12", "nixl_cu13", "ray",
}  # fmt: skip
MODEL_LIBRARIES = {"torch", "transformers", "numba", "safetensors", "xgrammar"}


def level(name: str) -> float | None:
    """By the longest prefix in the table."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in LEVELS:
            return LEVELS[prefix]
    return None


def is_ours(name: str) -> bool:
    return name.split(".")[0] in ("pdcluster", "pdcluster_router")


@pytest.mark.parametrize("module", written(), ids=lambda module: module.name)
def test_a_module_imports_lower_levels_or_its_own_package(module: Module) -> None:
    own = level(module.name)
    assert own is not None, f"{module.name} has no level; add it to the table"
    wrong = []
    for name, line in imports(module):
        if not is_ours(name) or name in ("pdcluster", "pdcluster_router"):
            continue
        other = level(name)
        same_package = module.package != "pdcluster" and name.startswith(module.package + ".")
        if not same_package and (other is None or other >= own):
            wrong.append(f"{module.file}:{line}: {module.name} (level {own}) imports {name} (level {other})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", [m for m in written() if (level(m.name) or 0) < 3], ids=lambda module: module.name)
def test_levels_0_to_2_are_pure(module: Module) -> None:
    heavy = [f"{module.file}:{line}: {name}" for name, line in imports(module) if name.split(".")[0] in HEAVY]
    assert not heavy, "levels 0 to 2 import no torch and do no I/O:\n" + "\n".join(heavy)


@pytest.mark.parametrize("module", [m for m in written() if level(m.name) == 0], ids=lambda module: module.name)
def test_level_0_needs_the_standard_library_and_msgspec_only(module: Module) -> None:
    allowed = set(sys.stdlib_module_names) | {"msgspec", "pdcluster"}
    assert {name.split(".")[0] for name, _ in imports(module)} <= allowed


@pytest.mark.parametrize("module", [m for m in written() if m.package in ("pdcluster.api", "pdcluster_router")], ids=lambda module: module.name)
def test_router_and_api_name_no_model_library(module: Module) -> None:
    assert not {name.split(".")[0] for name, _ in imports(module)} & MODEL_LIBRARIES


def test_every_module_of_the_table_exists() -> None:
    names = {module.name for module in modules()}
    assert set(LEVELS) <= names, "the table names modules that are not there"


def test_the_router_and_the_cli_never_load_torch() -> None:
    wanted = [module.name for module in written() if module.name.startswith("pdcluster_router")] + ["pdcluster.cli", "pdcluster.bootstrap.server"]
    code = f"""
import importlib, sys
for name in {wanted!r}:
    importlib.import_module(name)
loaded = {{name.split(".")[0] for name in sys.modules}} & {MODEL_LIBRARIES!r}
ours = {{name for name in sys.modules if name.startswith(("pdcluster.engine", "pdcluster.node"))}}
sys.exit(f"loaded {{loaded | ours}}" if loaded or ours else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_help_is_instant_because_nothing_heavy_is_imported_for_it() -> None:
    code = "import sys, pdcluster.cli; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not set(done.stdout.split()) & {"zmq", "grpc", "torch", "numpy", "httptools", "transformers"}
