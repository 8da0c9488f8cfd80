"""Command-line flags made from the keys of the configuration. Each key is a flag of every command that takes its
section. Flags can also be made from the fields of dataclasses.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pdcluster.core.errors import ConfigError, PdclusterError
from pdcluster.settings.config import LoadedSection, S, keys, load
from pdcluster.settings.keys import Key
from pdcluster.settings.kinds import boolean

logger = logging.getLogger(__name__)

FILE_HELP = "TOML file with sections node, router, bootstrap and up"
SET_HELP = "set any key, such as node.kv.memory_bytes=2GiB; may be given several times"


def command(app: typer.Typer, cls: type[S], name: str, help: str, run: Callable[[LoadedSection[S]], int]) -> None:
    """Add a command that reads section `cls` from flags, environment and file, calls `run` and exits with what it
    returns."""
    found = keys(cls)
    names = {key.path.replace(".", "_"): key for key in found}

    def entry(config: Path | None, set: list[str] | None, **given: object) -> None:
        with reported():
            flags = {names[name].path: value for name, value in given.items() if value is not None}
            loaded = load(cls, {**assignments(set or []), **flags}, config)
            code = run(loaded)
        raise typer.Exit(code)

    parameters = [
        _parameter("config", Path | None, typer.Option("--config", metavar="FILE", help=FILE_HELP)),
        _parameter("set", list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP)),
    ]
    for parameter, key in names.items():
        parameters.append(_key_parameter(parameter, key))
    entry.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, help=help)(entry)


def _key_parameter(name: str, key: Key) -> inspect.Parameter:
    shown = f"{key.help} (default: {key.show(key.default)})" if key.default not in (None, ()) else key.help
    if key.kind is boolean:
        return _parameter(name, bool | None, typer.Option(f"{key.flag}/--no-{key.flag[2:]}", help=shown))
    return _parameter(name, str | None, typer.Option(key.flag, metavar="VALUE", help=shown, hidden=key.flag_only))


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def grouped(run: Callable[..., None]) -> Callable[..., None]:
    """A command that has, in place of each parameter that is a dataclass, flags for its fields. They are annotated as
    typer's parameters are.
    """
    hints = get_type_hints(run, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}

    def entry(**given: object) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        run(**made, **given)

    parameters: list[inspect.Parameter] = []
    for own in inspect.signature(run).parameters.values():
        if own.name in groups:
            parameters += _field_parameters(groups[own.name])
        else:
            parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[own.name]))
    entry.__name__, entry.__doc__ = run.__name__, run.__doc__
    entry.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return entry


def _field_parameters(group: type) -> Iterator[inspect.Parameter]:
    kinds = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[field.name]
        )


def log_warnings(loaded: LoadedSection[Any]) -> None:
    """At a process's start, once its log is set up."""
    for line in loaded.config.warnings():
        logger.warning(line)


def assignments(pairs: list[str]) -> dict[str, object]:
    """`KEY=VALUE` texts as a mapping."""
    given: dict[str, object] = {}
    for pair in pairs:
        path, equals, value = pair.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set is {pair!r}, but must be KEY=VALUE, such as node.kv.memory_bytes=2GiB")
        given[path] = value
    return given


@contextmanager
def reported() -> Iterator[None]:
    """Inside, pdcluster's errors end the process with one clear line. Exit code 2 for bad settings, 1 for the rest."""
    try:
        yield
    except PdclusterError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
