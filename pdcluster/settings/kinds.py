"""Kinds of settings: functions that turn a raw value (text from a flag or a variable, a TOML value) into a field's
value.

Each raises ValueError that says what the value must be. The caller adds the setting and its source.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pdcluster.core.address import is_wildcard, parse_address, parse_host

T = TypeVar("T")
Kind = Callable[[object], T]


def text(raw: object) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError("must be text that is not empty")
    return raw


def label(raw: object) -> str:
    """Of what is shown in logs, metrics and heads of answers."""
    given = text(raw)
    if not given.isprintable():
        raise ValueError(f"must be printable characters only, {given!r} has others")
    return given


def path(raw: object) -> Path:
    given = text(raw)
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ValueError(f"must be a path; {given!r} names a home directory that this machine does not know") from error


def model_path(raw: object) -> Path:
    """A path, or a repository's name. What begins as a path is one, whether it exists or not."""
    found = path(raw)
    return found.absolute() if str(raw).startswith((".", "~")) else found


def boolean(raw: object) -> bool:
    known = {True: True, False: False, "true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
    value = raw.lower() if isinstance(raw, str) else raw
    if not isinstance(value, bool | str) or value not in known:
        raise ValueError("must be true or false")
    return known[value]


def integer(low: int, high: int = 2**31 - 1) -> Kind[int]:
    def parse(raw: object) -> int:
        if isinstance(raw, str) and re.fullmatch(r"[+-]?\d{1,18}", raw.strip()):
            raw = int(raw.strip())
        if not isinstance(raw, int) or isinstance(raw, bool) or not low <= raw <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return raw

    return parse


def duration(low: float = 0.0, high: float = 7 * 86400.0) -> Kind[float]:
    """Seconds, as a number or as text with a unit: 500ms, 2.5s, 10m, 1h."""
    units = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}

    def parse(raw: object) -> float:
        value = float(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) else None
        if isinstance(raw, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", raw.strip())):
            value = float(match[1]) * units[match[2]]
        if value is None or not low <= value <= high:
            raise ValueError(f"must be a duration from {low:g} to {high:g} seconds, such as 30, 2.5s, 500ms or 10m")
        return value

    return parse


def size(low: int = 0, high: int = 2**63 - 1) -> Kind[int]:
    """Bytes, as a number or as text with a unit: 512KiB, 64MB, 2GiB."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {letter + "iB": 1024**power, letter + "B": 1000**power, letter: 1024**power}

    def parse(raw: object) -> int:
        value = raw if isinstance(raw, int) and not isinstance(raw, bool) else None
        if (
            isinstance(raw, str)
            and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B|[KMGT]|)", raw.strip()))
            and match[2] in units
        ):
            value = round(float(match[1]) * units[match[2]])
        if value is None or value < low:
            raise ValueError(f"must be a size of at least {low} bytes, such as 67108864, 64MiB or 2GB")
        if value > high:
            raise ValueError(f"must be a size of at most {high} bytes")
        return value

    return parse


def choice(*options: str) -> Kind[Any]:
    def parse(raw: object) -> str:
        if raw not in options:
            raise ValueError(f"must be one of {', '.join(options)}{nearest(str(raw), options)}")
        return str(raw)

    return parse


def address(raw: object) -> str:
    """HOST:PORT; an IPv6 host stands in brackets; port 0 means any free port."""
    given = raw if isinstance(raw, str) else ""
    parse_address(given)
    return given


def own_host(raw: object) -> str:
    """A host by which others reach this one, without a port; an IPv6 address in brackets or not."""
    host = parse_host(text(raw))
    if is_wildcard(host):
        raise ValueError("must be an address or a name by which others reach this host, and not all of its addresses")
    return host


def address_or_none(raw: object) -> str | None:
    """HOST:PORT, or the word none."""
    return None if raw == "none" else address(raw)


def collector_or_none(raw: object) -> str | None:
    """http://HOST:PORT or https://HOST:PORT, or the word none."""
    if raw == "none":
        return None
    match = re.fullmatch(r"(https?)://([^/]+)/?", raw) if isinstance(raw, str) else None
    try:
        if match is not None:
            return f"{match[1]}://{address(match[2])}"
    except ValueError:
        pass
    raise ValueError("must be http://HOST:PORT or https://HOST:PORT, such as http://127.0.0.1:4317")


def addresses(raw: object) -> tuple[str, ...]:
    """Comma-separated text or a TOML list of HOST:PORT."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError("must be HOST:PORT[,HOST:PORT…]")
    return tuple(address(part.strip() if isinstance(part, str) else part) for part in parts)


def cores(raw: object) -> tuple[int, ...]:
    """CPU cores to run on: text such as 0,2 or 4-7, or a TOML list of numbers."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    found: set[int] = set()
    for part in parts if isinstance(parts, list | tuple) else ():
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", str(part).strip())
        if match is None:
            raise ValueError("must be CPU cores such as 0,2 or 4-7")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not found:
        raise ValueError("must be CPU cores such as 0,2 or 4-7")
    return tuple(sorted(found))


def devices(raw: object) -> tuple[str, ...]:
    """Network devices, each with a port or without: text such as mlx5_0,mlx5_1:1, or a TOML list of such names."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    found = [str(part).strip() for part in parts] if isinstance(parts, list | tuple) else []
    if (
        not found
        or len(set(found)) != len(found)
        or not all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}(:\d{1,3})?", each) for each in found)
    ):
        raise ValueError("must be names of RDMA devices, each once, such as mlx5_0,mlx5_1 or mlx5_0:1")
    return tuple(found)


def words(raw: object) -> tuple[str, ...]:
    """Arguments of another program: text as a shell splits it, or a TOML list."""
    parts = shlex.split(raw) if isinstance(raw, str) else raw
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str | int | float) for part in parts):
        raise ValueError("must be arguments, such as --max-model-len 4096, or a list of them")
    return tuple(map(str, parts))


def adapter_paths(raw: object) -> tuple[str, ...]:
    """LoRA adapters, each as NAME=DIRECTORY: comma-separated text or a TOML list."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    found = [str(part).strip() for part in parts] if isinstance(parts, list | tuple) else [""]
    names = [name for name, _, path in (each.partition("=") for each in found) if name and path]
    if len(set(names)) != len(found) or not all(each.isprintable() for each in found):
        raise ValueError(
            "must be NAME=DIRECTORY[,NAME=DIRECTORY] or a list of such, each name once, like sql=/loras/sql"
        )
    return tuple(found)


def model_names(raw: object) -> tuple[str, ...]:
    """What requests may call a model: comma-separated text or a TOML list."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    found = [str(part).strip() for part in parts] if isinstance(parts, list | tuple) else []
    if (
        not 1 <= len(found) <= 16
        or len(set(found)) != len(found)
        or not all(each.isprintable() and 0 < len(each) <= 256 for each in found)
    ):
        raise ValueError(
            "must be 1 to 16 names, each once and of at most 256 printable characters, such as ORG/NAME,my-model"
        )
    return tuple(found)


def origins(raw: object) -> tuple[str, ...]:
    """Of pages, as browsers name them: comma-separated text or a TOML list, or * for all."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    found = [str(part).strip().lower() for part in parts] if isinstance(parts, list | tuple) else []
    if not found or not all(each == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", each) for each in found):
        raise ValueError("must be origins such as https://app.example.com,http://localhost:3000 (no path), or *")
    return tuple(found)


def host_names(raw: object) -> tuple[str, ...]:
    """Names of hosts: comma-separated text or a TOML list."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    found = [str(part).strip().lower() for part in parts] if isinstance(parts, list | tuple) else []
    if not found or not all(re.fullmatch(r"[a-z0-9_.-]{1,253}", each) for each in found):
        raise ValueError("must be names of hosts without ports, such as console.example.com,gateway")
    return tuple(found)


def nearest(word: str, options: Sequence[str]) -> str:
    """The end of a message that says which of `options` was probably meant."""
    close = [option for option in options if word and option.startswith(word)] or difflib.get_close_matches(
        word, options, n=1, cutoff=0.4
    )
    return f"; did you mean {close[0]}?" if close else ""
