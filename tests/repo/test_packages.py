"""Packages form layers: a module imports its own package or one of a lower level. A new package must find its place in
the table."""

import subprocess
import sys
from collections.abc import Iterable, Mapping

from tree import Module, bench_modules, example_modules, modules, require_none, written

LEVELS: dict[str, int] = {
    # words and plain services that every process uses
    "pdcluster.core": 0,
    "pdcluster.settings": 1,
    "pdcluster.cost": 1,
    "pdcluster.kv": 1,
    "pdcluster.api": 1,
    "pdcluster.processes": 2,
    "pdcluster.telemetry": 3,
    "pdcluster.checkpoint": 2,
    "pdcluster.scheduler": 2,
    # requests and replies as text
    "pdcluster.api.structured": 5,
    "pdcluster.api.tools": 6,
    "pdcluster.api.text": 7,
    "pdcluster.api.openai": 8,
    "pdcluster.api.openai.responses": 9,
    "pdcluster.api.anthropic": 9,
    # KV between nodes
    "pdcluster.transfer.layout": 2,
    "pdcluster.transfer.copying": 3,
    "pdcluster.transfer.backends": 4,
    "pdcluster.transfer.backends.staged": 5,
    "pdcluster.transfer.paths": 6,
    "pdcluster.transfer.protocol": 7,
    # messages between processes
    "pdcluster.wire": 6,
    "pdcluster.rpc": 9,
    "pdcluster.bootstrap": 10,
    # weights between processes
    "pdcluster.weights": 10,
    # models
    "pdcluster.engine.kernels": 3,
    "pdcluster.engine.model": 3,
    "pdcluster.engine.ops": 4,
    "pdcluster.engine.sampling": 8,
    "pdcluster.engine": 9,
    # the node
    "pdcluster.node.reports": 10,
    "pdcluster.node": 11,
    "pdcluster.node.native.tensor_parallel": 11,
    "pdcluster.node.native": 12,
    "pdcluster.node.vllm.engine": 10,
    "pdcluster.node.vllm.sampling": 11,
    "pdcluster.node.vllm": 12,
    # the router
    "pdcluster_router.prefix_index": 2,
    "pdcluster_router.core": 9,
    "pdcluster_router.policy.predicted": 10,
    "pdcluster_router.http": 10,
    "pdcluster_router.cluster": 11,
    "pdcluster_router.policy": 12,
    "pdcluster_router.queueing": 13,
    "pdcluster_router.explain": 14,
    "pdcluster_router.scaling": 14,
    "pdcluster_router.replay": 15,
    "pdcluster_router.request": 15,
    "pdcluster_router.frontend": 17,
    "pdcluster_router.admin": 18,
    "pdcluster_router.operate": 19,
    "pdcluster_router.operate.batch": 20,
    "pdcluster_router.console": 20,
    "pdcluster_router.control": 20,
    "pdcluster_router.workers": 21,
    "pdcluster_router.process": 22,
    "pdcluster_router.pdctl": 22,
    "pdcluster_router.warmup": 22,
    "pdcluster_router.cli": 23,
    "pdcluster_router.spare": 24,
    # commands
    "pdcluster.client": 10,
    "pdcluster.launch": 20,
    "pdcluster.ray": 21,
    "pdcluster.cli": 21,
}
NO_IO = {
    "zmq",
    "grpc",
    "google",
    "httptools",
    "socket",
    "asyncio",
    "subprocess",
    "mooncake",
    "nixl_cu12",
    "nixl_cu13",
    "ray",
}
MODEL_LIBRARIES = {"torch", "transformers", "numba", "safetensors"}
# Packages whose rules are tested without a clock, a socket or a model: who uses them passes these in.
PURE = (
    "pdcluster.core", "pdcluster.cost", "pdcluster.settings", "pdcluster.scheduler", "pdcluster.api",
    "pdcluster.transfer.layout",
    "pdcluster.transfer.paths", "pdcluster.transfer.protocol", "pdcluster_router.core", "pdcluster_router.policy",
    "pdcluster_router.prefix_index", "pdcluster_router.explain", "pdcluster_router.replay",
)  # fmt: skip
PURE_MODULES = (
    "pdcluster.kv.hashing", "pdcluster.kv.layout", "pdcluster.kv.pages", "pdcluster.bootstrap.card",
    "pdcluster.bootstrap.store",
    "pdcluster.wire.address", "pdcluster_router.queueing.gate", "pdcluster_router.queueing.headroom",
    "pdcluster_router.queueing.admission",
    "pdcluster_router.queueing.hold_queue", "pdcluster_router.queueing.fairness",
)  # fmt: skip
# `config check` asks the readers of the router's own files what is wrong with them.
READS_ROUTER_SETTINGS = {"pdcluster.launch.config_check"}
ROOTS = ("pdcluster", "pdcluster_router")
PACKAGES = {module.name for module in modules() if module.file.name == "__init__.py"}


def room(name: str) -> str:
    """The package of a module; a module of a root package is a room of its own."""
    package = name if name in PACKAGES else name.rsplit(".", 1)[0]
    return name if package in ROOTS else package


def is_ours(name: str) -> bool:
    return name.split(".")[0] in ROOTS and name not in ROOTS


def is_pure(module: Module) -> bool:
    return module.name in PURE_MODULES or any(module.name.startswith(f"{package}.") for package in PURE)


def test_a_module_imports_its_own_package_or_a_lower_one() -> None:
    rooms = {module: room(module.name) for module in written()}
    require_none({own for own in rooms.values() if own not in LEVELS}, "give the package a level in the table")
    require_none(
        [
            f"{module.at(found.line)}: {own} (level {LEVELS[own]}) imports {found.name} "
            f"(level {LEVELS.get(room(found.name))})"
            for module, own in rooms.items()
            for found in module.imports
            if is_ours(found.name) and room(found.name) != own
            if LEVELS.get(room(found.name), LEVELS[own]) >= LEVELS[own]
        ],
        "import lower packages only",
    )


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """At any import: in functions and for type checkers too."""
    importers = (*written(), *bench_modules(), *example_modules())
    names = {module.name for module in importers}
    lines: dict[str, dict[str, str]] = {}
    for module in importers:
        places = {found.name: module.at(found.line) for found in reversed(module.all_imports)}
        lines[module.name] = {name: at for name, at in places.items() if name in names and name != module.name}
    require_none(
        [
            "\n  ".join(
                [" and ".join(sorted(circle))]
                + [
                    f"{at} imports {name}"
                    for one in sorted(circle)
                    for name, at in lines[one].items()
                    if name in circle
                ]
            )
            for circle in circles_of(lines)
        ],
        "move what both need to a module below them, or pass it in",
    )


def circles_of(graph: Mapping[str, Iterable[str]]) -> list[frozenset[str]]:
    """Largest groups whose members all lead to each other."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted((group for group in groups if group), key=sorted)


def reachable(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    found, new = set[str](), list(graph[start])
    while new:
        name = new.pop()
        if name not in found:
            found.add(name)
            new.extend(graph[name])
    return found


def test_a_circle_is_found_by_its_members_and_nobody_else() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": [], "e": ["f"], "f": ["g"], "g": ["e", "a"]}
    assert circles_of(graph) == [frozenset("bc"), frozenset("efg")]


def test_pdcluster_does_not_import_the_router() -> None:
    """It starts the router's modules as processes."""
    require_none(
        [
            f"{module.at(found.line)}: {found.name}"
            for module in written()
            if module.name.startswith("pdcluster.") and module.name not in READS_ROUTER_SETTINGS
            for found in module.all_imports
            if found.name.split(".")[0] == "pdcluster_router"
        ],
        "start the module as a process, or move what both need to pdcluster",
    )


def test_pure_modules_do_no_io_and_know_no_model_library() -> None:
    require_none(
        named_imports([module for module in written() if is_pure(module)], NO_IO | MODEL_LIBRARIES),
        "pass what it needs in",
    )


def test_core_needs_the_standard_library_msgspec_and_numpy_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"msgspec", "numpy", "pdcluster"}
    require_none(
        [
            f"{module.at(found.line)}: {found.name}"
            for module in written()
            if room(module.name) == "pdcluster.core"
            for found in module.imports
            if found.name.split(".")[0] not in allowed
        ],
        "core imports the standard library, msgspec and numpy only",
    )


def test_router_and_api_name_no_model_library() -> None:
    users = [module for module in written() if module.name.startswith(("pdcluster.api.", "pdcluster_router."))]
    require_none(named_imports(users, MODEL_LIBRARIES), "leave models to nodes")


def named_imports(importers: list[Module], libraries: set[str]) -> list[str]:
    return [
        f"{module.at(found.line)}: {found.name}"
        for module in importers
        for found in module.imports
        if found.name.split(".")[0] in libraries
    ]


def test_every_package_of_the_tables_exists() -> None:
    names = {module.name for module in modules()}
    assert {*LEVELS, *PURE, *PURE_MODULES} <= names, "the tables name packages that are not there"


def test_the_router_and_the_cli_never_load_torch() -> None:
    wanted = [module.name for module in written() if module.name.startswith("pdcluster_router")] + [
        "pdcluster.cli",
        "pdcluster.bootstrap.server",
    ]
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
