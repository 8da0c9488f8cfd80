"""What documents tell people to type or to open exists, and they are as short as promised."""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import typer
from tree import PACKAGES, ROOT, require_none
from typer.core import TyperCommand, TyperGroup

from pdcluster import cli
from pdcluster_router import cli as router_cli
from pdcluster_router import pdctl

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "bench/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SHARED_FLAGS = {"--json", "--record"}
COMMANDS = {
    "pdcluster": typer.main.get_command(cli.app),
    "pdcluster-router": typer.main.get_command(router_cli.app),
    "pdctl": typer.main.get_command(pdctl.app),
}


def of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def code_lines(document: Path) -> list[str]:
    """Lines of code blocks, with continued lines joined and comments cut off, and inline code."""
    text = document.read_text()
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return lines + re.findall(r"`([^`\n]+)`", prose)


def test_make_targets_in_documents_exist() -> None:
    require_none(
        [
            f"{of(document)}: make {match[1]}"
            for document in DOCUMENTS
            for line in code_lines(document)
            if (match := re.match(r"make ([a-z-]+)", line)) and match[1] not in TARGETS
        ],
        "name a target of the Makefile",
    )


def test_commands_and_flags_in_documents_exist() -> None:
    found = []
    for document in DOCUMENTS:
        for line in code_lines(document):
            name = line.split(" ")[0]
            if name in COMMANDS and not re.search(r"[\[<…|]", line):
                found += [f"{of(document)}: {wrong}" for wrong in unknown(COMMANDS[name], shlex.split(line)[1:])]
    require_none(found, "name commands and flags that are there")


def unknown(command: TyperCommand | TyperGroup, words: list[str]) -> Iterator[str]:
    """Subcommands and flags among `words` that do not exist. What stands behind -- is another program's."""
    words = list(takewhile(lambda word: word != "--", words))
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            yield f"there is no command {words[0]}"
            return
        command = command.commands[words.pop(0)]
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("--") and word.split("=")[0] not in flags:
            yield f"{command.name} has no flag {word}"


def test_modules_in_documents_exist_and_have_the_flags_that_are_told() -> None:
    found = []
    for document in DOCUMENTS:
        for line in code_lines(document):
            if "NAME" not in line and (
                words := re.match(r"(?:\$ )?(?:\S*/)?python -m ((?:bench|examples)[.\w]+)(.*)", line)
            ):
                found += [f"{of(document)}: {wrong}" for wrong in unknown_of_module(words[1], words[2])]
    require_none(found, "name benches, examples and flags that are there")


def unknown_of_module(name: str, arguments: str) -> Iterator[str]:
    module = ROOT / name.replace(".", "/")
    file = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
    if not file.exists():
        yield f"there is no {name}"
        return
    for flag in re.findall(r"--[a-z][a-z-]*", arguments):
        if flag not in SHARED_FLAGS and f'"{flag}"' not in file.read_text():
            yield f"{name} has no flag {flag}"


def test_every_bench_is_told_of() -> None:
    table = (ROOT / "bench" / "README.md").read_text().partition("# Rivals")[0]
    benches = [file.stem for file in (ROOT / "bench").glob("*.py") if '"--quick"' in file.read_text()]
    assert len(benches) > 8 and [name for name in benches if f"`{name}`" not in table] == []


def test_every_target_of_the_makefile_is_phony_and_described() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    described = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert TARGETS == phony == described
    assert {"demo", "up", "test", "test-full", "lint", "fmt", "docs", "bench", "soak", "proto", "clean"} <= TARGETS


def test_the_ci_runs_make_test() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_files_that_documents_name_exist() -> None:
    """A path in inline code is below the repository, one of its packages, or the document's own folder."""
    siblings = {
        file.name for root in (ROOT / "pdcluster", ROOT / "router", ROOT / "tests") for file in root.rglob("*.py")
    }
    known = siblings | {"config.json", "tokenizer.json", "generation_config.json", "trace.jsonl", "node.json"}
    found = []
    for document in DOCUMENTS:
        roots = (ROOT, *PACKAGES, document.parent)
        words = re.findall(r"`([\w./:-]+\.(?:py|md|toml|json))`", document.read_text())
        named = [word.removeprefix("router:") for word in words]
        missing = [name for name in named if not any((root / name).exists() for root in roots)]
        found += [f"{of(document)}: {name}" for name in missing if name not in known]
    require_none(found, "name a file that is there")


def test_links_between_documents_lead_somewhere() -> None:
    require_none(
        [
            f"{of(document)}: {link}"
            for document in DOCUMENTS
            for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text())
            if "://" not in link and not (document.parent / link).exists()
        ],
        "link to a file that is there",
    )


def test_readme_and_architecture_are_short_and_all_documents_plain() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
    assert len((ROOT / "ARCHITECTURE.md").read_text().split()) <= 2500
    done = subprocess.run([sys.executable, ROOT / "scripts" / "prose.py"], capture_output=True, text=True, check=True)
    means = {line.split()[0]: float(line.split()[-3]) for line in done.stdout.splitlines()}
    assert len(means) > 10 and {name: mean for name, mean in means.items() if mean > 16} == {}


def test_tables_of_states_are_those_of_the_code() -> None:
    """`python scripts/state_tables.py` writes them."""
    spec = importlib.util.spec_from_file_location("state_tables", ROOT / "scripts" / "state_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert module.updated(text) == text
