"""Rules of the code that a reader relies on: where the environment is read, where protobuf ends, what is never used."""

import ast
from collections import Counter

from tree import PACKAGES, ROOT, bench_modules, example_modules, modules, modules_below, require_none, written

UNSAFE = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
MAX_LINES, MAX_COLUMNS = 800, 120
MAX_MODULES = 14
MAX_FUNCTION_LINES, MAX_PARAMETERS = 60, 8
# Compiled by numba: their parameters are arrays, and a call would cost them.
COMPILED = (
    "pdcluster.engine.kernels.",
    "pdcluster.transfer.copying.copy_kernel",
    "pdcluster.transfer.copying.page_kernel",
    "pdcluster_router.policy.predicted.",
)


def test_a_package_says_what_is_in_it_and_nothing_else() -> None:
    packages = [module for module in modules() if module.file.name == "__init__.py"]
    require_none(
        [module.at(1) for module in packages if not ast.get_docstring(module.tree) or len(module.tree.body) != 1],
        "an __init__.py is a docstring, and nothing else",
    )


def test_a_module_says_what_it_is() -> None:
    require_none(
        [module.at(1) for module in written() if not ast.get_docstring(module.tree)], "give it a docstring of its own"
    )


def test_a_module_can_be_read_in_one_sitting() -> None:
    lines = {module: module.text.splitlines() for module in written()}
    long = [module.at(len(text)) for module, text in lines.items() if len(text) > MAX_LINES]
    require_none(long, f"split it: more than {MAX_LINES} lines")
    wide = [
        module.at(number)
        for module, text in lines.items()
        for number, line in enumerate(text, 1)
        if len(line) > MAX_COLUMNS
    ]
    require_none(wide, f"break the line: more than {MAX_COLUMNS} columns")


def test_a_folder_can_be_overlooked() -> None:
    """Of the product, the benches, the examples and the tests of single packages."""
    roots = (*PACKAGES, ROOT / "bench", ROOT / "examples", ROOT / "tests" / "unit")
    files = [file for root in roots for file in root.rglob("*.py") if file.name not in ("__init__.py", "conftest.py")]
    counts = Counter(file.parent for file in files if "_pb2" not in file.name)
    require_none(
        [f"{folder.relative_to(ROOT)}: {count}" for folder, count in counts.items() if count > MAX_MODULES],
        f"make folders of it: more than {MAX_MODULES} modules",
    )


def test_a_function_is_short_and_takes_few_parameters() -> None:
    functions = [
        (f"{module.at(node)}: {node.name}", node)
        for module in written()
        if not module.name.startswith(COMPILED)
        for node in module.functions
    ]
    require_none(
        [place for place, node in functions if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES],
        f"split the function: more than {MAX_FUNCTION_LINES} lines",
    )
    require_none(
        [place for place, node in functions if _num_parameters(node.args) > MAX_PARAMETERS],
        f"give it a value that holds some: more than {MAX_PARAMETERS} parameters",
    )


def test_a_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for module in written():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.at(node))
    require_none(
        [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1], "give one another name"
    )


def test_the_environment_is_read_in_config_only() -> None:
    forbidden = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = []
    for module in written():
        if module.name == "pdcluster.settings.config":
            continue
        found += [module.at(node) for node in module.nodes if _is_attribute_of_os(node, forbidden)]
        found += [module.at(node) for node in module.nodes if _names_from_os(node) & forbidden]
    require_none(found, "add a key to config instead of reading the environment")


def test_benches_and_examples_read_no_environment() -> None:
    require_none(
        [
            module.at(node)
            for module in (*bench_modules(), *example_modules())
            for node in module.nodes
            if _is_attribute_of_os(node, {"environ", "getenv"})
        ],
        "take it as an argument, or start children with env NAME=VALUE",
    )


def test_nothing_that_runs_code_when_read_is_used() -> None:
    imported = [
        f"{module.at(found.line)}: {found.name}"
        for module in written()
        for found in module.imports
        if found.name.split(".")[0] in UNSAFE
    ]
    called = [
        f"{module.at(call)}: {call.func.id}"
        for module in written()
        for call in module.calls
        if isinstance(call.func, ast.Name) and call.func.id in ("eval", "exec")
    ]
    require_none(imported + called, "decode it with msgspec or json")


def test_nobody_waits_by_select() -> None:
    """It raises for a descriptor above 1023, which a node with many links has; poll does not."""
    require_none(
        [
            module.at(call)
            for module in written()
            for call in module.calls
            if isinstance(call.func, ast.Attribute)
            and call.func.attr == "select"
            and ast.unparse(call.func) == "select.select"
        ],
        "use select.poll",
    )


def test_protobuf_types_stay_in_rpc_and_bootstrap() -> None:
    at_the_border = (
        "pdcluster.client", "pdcluster_router.admin.grpc", "pdcluster_router.admin.scaler",
        "pdcluster_router.frontend.grpc", "pdcluster.weights.publisher",
    )  # fmt: skip
    packages = ("pdcluster.rpc", "pdcluster.bootstrap", "pdcluster_router.operate")
    require_none(
        [
            f"{module.at(found.line)}: {found.name}"
            for module in written()
            if module.package not in packages and module.name not in at_the_border
            for found in module.imports
            if "_pb2" in found.name or found.name.startswith("google.protobuf")
        ],
        "take and return our own types; pdcluster.rpc converts",
    )


def test_no_exception_is_swallowed() -> None:
    """A bare or broad except whose body is only `pass` loses errors; suppressing all of them does, too."""
    require_none(
        [
            module.at(node)
            for module in written()
            for node in module.nodes
            if isinstance(node, ast.ExceptHandler) and _takes_all(node.type)
            if all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
        ],
        "name the exceptions that are meant, or log what came",
    )


def test_an_exception_that_is_kept_is_not_raised() -> None:
    """Each raise adds frames to its traceback, and with them all that they refer to. Keep the text instead."""
    require_none(
        {
            module.at(node)
            for module in written()
            for function in module.functions
            for node in ast.walk(function)
            if isinstance(node, ast.Raise) and node.exc is not None and _is_kept(node.exc, function)
        },
        "make a new exception of its text",
    )


# Functions that start tasks and await them, or whose tasks hand on every failure themselves.
AWAITED = {
    "pdcluster.processes.tasks": {"watched"},
    "pdcluster.processes.supervisor": {"_ends"},
    "pdcluster.bootstrap.demand_client": {"keep"},
    "pdcluster.launch.up": {"_all_or_nothing", "unless", "stop_all"},
    "pdcluster.launch.ray_process": {"__init__"},
    "pdcluster.launch.ray_weights": {"_run_in_turn"},
    "pdcluster.node.vllm.engine.engine": {"_watch"},
    "pdcluster_router.admin.rollouts": {"_run", "_switch"},
    "pdcluster_router.frontend.choices": {"merge"},
    "pdcluster_router.operate.batch.run": {"_run"},
    "pdcluster_router.workers.supervisor": {"_serve", "_until", "_all_started"},
}


def test_a_task_that_nobody_awaits_is_watched() -> None:
    """By `processes.tasks`. Otherwise what it does ends for ever with one exception, and nobody knows."""
    found: dict[str, set[str]] = {}
    for module in written():
        for function in module.functions:
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {func.attr for func in calls if isinstance(func, ast.Attribute)}
            if names & {"create_task", "ensure_future"}:
                found.setdefault(module.name, set()).add(function.name)
    assert found == AWAITED


def test_test_files_have_unique_names() -> None:
    counts = Counter(
        file.name for file in (ROOT / "tests").rglob("*.py") if file.name not in ("conftest.py", "__init__.py")
    )
    require_none([name for name, count in counts.items() if count > 1], "name one after its own subject")


def test_test_files_do_not_import_each_other() -> None:
    """Nor does anybody else."""
    importers = [*bench_modules(), *modules_below(ROOT / "tests")]
    require_none(
        [
            f"{module.at(found.line)}: {found.name}"
            for module in importers
            for found in module.all_imports
            if found.name.rpartition(".")[2].startswith("test_")
            or (module.name.startswith("bench.") and found.name.split(".")[0] == "tests")
        ],
        "move what both need to tests/harness, a conftest or a file beside them",
    )


def test_there_are_no_files_without_a_subject() -> None:
    vague = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    require_none([module.at(1) for module in modules() if module.file.name in vague], "name it after its subject")


def _is_kept(raised: ast.expr, function: ast.AST) -> bool:
    """Whether it lies in an attribute of self, in a collection there, or in a future."""
    if isinstance(raised, ast.Name):
        values = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign)
            and raised.id in [ast.unparse(target) for target in getattr(node, "targets", None) or [node.target]]
        ]
        return any(
            value is not None and not isinstance(value, ast.Name) and _is_kept(value, function) for value in values
        )
    if isinstance(raised, ast.Call) and isinstance(raised.func, ast.Attribute):
        name, of = raised.func.attr, raised.func.value
        return name in ("result", "exception") or (name == "get" and bool(raised.args) and _is_of_self(of))
    return _is_of_self(raised)


def _is_of_self(node: ast.expr) -> bool:
    """self.NAME, or an item of it."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_attribute_of_os(node: ast.AST, names: set[str]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


def _names_from_os(node: ast.AST) -> set[str]:
    is_from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
    return {alias.name for alias in node.names} if is_from_os else set()


def _takes_all(caught: ast.expr | None) -> bool:
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


def _num_parameters(arguments: ast.arguments) -> int:
    """Without self or cls."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
