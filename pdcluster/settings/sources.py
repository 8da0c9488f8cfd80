"""Raw values of settings, as flags, variables and a file have them. Nothing here reads the environment itself.

Each function returns values by the paths of keys, and adds to `problems` what is no key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from pdcluster.core.errors import ConfigError
from pdcluster.settings.keys import ENV_PREFIX, Key
from pdcluster.settings.kinds import nearest

FILE_VARIABLE = "PDCLUSTER_CONFIG"
CACHE_VARIABLE = "PDCLUSTER_CACHE_DIR"
# What Kubernetes sets in pods for each Service of their namespace.
SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=\d+|PORT=\w+://.*|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.*)"
)


def from_flags(flags: Mapping[str, object], known: Mapping[str, Key], problems: list[str]) -> dict[str, object]:
    problems += [f"there is no key {name}{nearest(name, list(known))}" for name in flags if name not in known]
    return dict(flags)


def from_environment(environ: Mapping[str, str], known: Mapping[str, Key], problems: list[str]) -> dict[str, object]:
    variables = {found.variable: found for found in known.values() if not found.flag_only}
    given: dict[str, object] = {}
    for name, raw in environ.items():
        if not name.startswith(ENV_PREFIX) or name in (FILE_VARIABLE, CACHE_VARIABLE):
            continue
        if name in variables:
            given[variables[name].path] = raw
        elif SERVICE_LINK.fullmatch(f"{name}={raw}"):
            problems.append(
                f"the environment sets {name} to {raw}, as Kubernetes does for a Service whose name begins with "
                "pdcluster; give the pod enableServiceLinks: false"
            )
        else:
            problems.append(
                f"the environment sets {name}, which is no key{nearest(name, list(variables))} unset it or correct "
                "its name"
            )
    return given


def from_file(file: Path, known: Mapping[str, Key], problems: list[str]) -> dict[str, object]:
    try:
        tables = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} is not valid TOML: {error}") from error
    settable = [name for name, found in known.items() if not found.flag_only]
    given = dict(_flatten(tables, ""))
    problems += [
        f"config file {file} sets {name}, which is no key{nearest(name, settable)} remove it or correct its name"
        for name in given
        if name not in settable
    ]
    return given


def _flatten(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
