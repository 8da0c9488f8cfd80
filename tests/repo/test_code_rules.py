"""Rules of the code that a reader relies on: where the environment is read, where protobuf ends, what is never used."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from tree import PACKAGES, ROOT, Module, imports, modules, written

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


@pytest.mark.parametrize(
    "module", [m for m in modules() if m.file.name == "__init__.py"], ids=lambda module: module.name
)
def test_a_package_says_what_is_in_it_and_nothing_else(module: Module) -> None:
    assert ast.get_docstring(module.tree) and len(module.tree.body) == 1


@pytest.mark.parametrize("module", written(), ids=lambda module: module.name)
def test_a_module_says_what_it_is(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.file} has no docstring"


@pytest.mark.parametrize("module", written(), ids=lambda module: module.name)
def test_a_module_can_be_read_in_one_sitting(module: Module) -> None:
    lines = module.file.read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS] == []


def test_a_folder_can_be_overlooked() -> None:
    """Of the product, the benches and the tests of single packages."""
    roots = (*PACKAGES, ROOT / "bench", ROOT / "tests" / "unit")
    files = [file for root in roots for file in root.rglob("*.py") if file.name not in ("__init__.py", "conftest.py")]
    counts = Counter(file.parent for file in files if "_pb2" not in file.name)
    assert {str(folder): count for folder, count in counts.items() if count > MAX_MODULES} == {}


@pytest.mark.parametrize(
    "module", [m for m in written() if not m.name.startswith(COMPILED)], ids=lambda module: module.name
)
def test_a_function_is_short_and_takes_few_parameters(module: Module) -> None:
    functions = [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES]
    assert long == [], f"functions of {module.name} with more than {MAX_FUNCTION_LINES} lines"
    wide = [node.name for node in functions if _num_parameters(node.args) > MAX_PARAMETERS]
    assert wide == [], f"functions of {module.name} with more than {MAX_PARAMETERS} parameters"


def test_a_public_class_has_a_name_of_its_own() -> None:
    classes = [node.name for module in written() for node in module.tree.body if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(classes).items() if count > 1 and not name.startswith("_")] == []


@pytest.mark.parametrize(
    "module", [m for m in written() if m.name != "pdcluster.settings.config"], ids=lambda module: module.name
)
def test_the_environment_is_read_in_config_only(module: Module) -> None:
    forbidden = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in forbidden and _is_os(node.value)
    ]
    found += [line for name, line in imports(module) if name == "os" and _names_imported(module, line) & forbidden]
    assert not found, f"{module.file} reads the environment in lines {found}; add a key to config instead"


@pytest.mark.parametrize("file", sorted((ROOT / "bench").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_benches_read_no_environment(file: Path) -> None:
    tree = ast.parse(file.read_text(), str(file))
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and _is_os(node.value)
    ]
    assert not found, (
        f"{file} reads the environment in lines {found}; take it as an argument, or start children with env NAME=VALUE"
    )


@pytest.mark.parametrize("module", written(), ids=lambda module: module.name)
def test_nothing_that_runs_code_when_read_is_used(module: Module) -> None:
    found = [f"{module.file}:{line}: {name}" for name, line in imports(module) if name.split(".")[0] in UNSAFE]
    found += [
        f"{module.file}:{node.lineno}: {node.func.id}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", written(), ids=lambda module: module.name)
def test_nobody_waits_by_select(module: Module) -> None:
    """It raises for a descriptor above 1023, which a node with many links has; poll does not."""
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if ast.unparse(call.func) == "select.select"], (
        f"{module.file} calls select.select; use select.poll"
    )


@pytest.mark.parametrize("module", written(), ids=lambda module: module.name)
def test_protobuf_types_stay_in_rpc_and_bootstrap(module: Module) -> None:
    at_the_border = (
        "pdcluster.client", "pdcluster_router.admin.grpc", "pdcluster_router.admin.scaler",
        "pdcluster_router.frontend.grpc",
    )  # fmt: skip
    packages = ("pdcluster.rpc", "pdcluster.bootstrap", "pdcluster_router.operate")
    if module.package in packages or module.name in at_the_border:
        return
    found = [
        f"{module.file}:{line}: {name}"
        for name, line in imports(module)
        if "_pb2" in name or name.startswith("google.protobuf")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", written(), ids=lambda module: module.name)
def test_no_exception_is_swallowed(module: Module) -> None:
    """A bare or broad except whose body is only `pass` loses errors; suppressing all of them does, too."""
    found = [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")))
        and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]
    assert not found, f"{module.file} swallows every exception in lines {found}"


def test_an_exception_that_is_kept_is_not_raised() -> None:
    """Each raise adds frames to its traceback, and with them all that they refer to. Keep the text instead."""
    found = [
        f"{module.file}:{node.lineno}"
        for module in written()
        for function in ast.walk(module.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and node.exc is not None and _is_kept(node.exc, function)
    ]
    assert not found, "make a new exception of its text:\n" + "\n".join(found)


# Functions that start tasks and await them, or whose tasks hand on every failure themselves.
AWAITED = {
    "pdcluster.processes.tasks": {"watched"},
    "pdcluster.processes.supervisor": {"_ends"},
    "pdcluster.bootstrap.demand_client": {"keep"},
    "pdcluster.launch.up": {"_all_or_nothing", "unless", "stop_all"},
    "pdcluster.launch.ray_process": {"__init__"},
    "pdcluster_router.frontend.choices": {"merge"},
    "pdcluster_router.workers.supervisor": {"_serve", "_until", "_all_started"},
}


def test_a_task_that_nobody_awaits_is_watched() -> None:
    """By `processes.tasks`. Otherwise what it does ends for ever with one exception, and nobody knows."""
    found: dict[str, set[str]] = {}
    for module in written():
        for function in ast.walk(module.tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {func.attr for func in calls if isinstance(func, ast.Attribute)}
            if names & {"create_task", "ensure_future"}:
                found.setdefault(module.name, set()).add(function.name)
    assert found == AWAITED


def test_test_files_have_unique_names() -> None:
    counts = Counter(
        file.name for file in (ROOT / "tests").rglob("*.py") if file.name not in ("conftest.py", "__init__.py")
    )
    assert [name for name, count in counts.items() if count > 1] == []


def test_there_are_no_files_without_a_subject() -> None:
    vague = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    assert [file for package in PACKAGES for file in package.rglob("*.py") if file.name in vague] == []


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


def _is_os(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "os"


def _names_imported(module: Module, line: int) -> set[str]:
    return {
        alias.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.lineno == line
        for alias in node.names
    }


def _num_parameters(arguments: ast.arguments) -> int:
    """Without self or cls."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
