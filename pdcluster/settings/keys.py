"""What a setting is: how a part declares one, its names outside, and how parts are built from the sources' values.

It knows no setting and reads no source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, cast

from pdcluster.core.errors import ConfigError
from pdcluster.settings.kinds import Kind

T = TypeVar("T")

# Between errors that are told together.
SEPARATOR = "\nerror: "
ENV_PREFIX = "PDCLUSTER_"
MASK = "********"


class Section:
    """A part that is a section of the file, with keys of its own."""

    __slots__ = ()

    def warnings(self) -> Iterable[str]:
        """What an operator should know of values that are allowed, a line each. It reads no file."""
        return ()


@dataclass(frozen=True, slots=True)
class Key:
    """What the outside knows about one field. path is dotted and starts with the section."""

    path: str
    flag: str
    help: str
    kind: Kind[Any]
    default: Any
    secret: bool
    flag_only: bool

    @property
    def variable(self) -> str:
        return variable_of(self.path)

    def show(self, value: object) -> str:
        """The value as `config check` prints it."""
        if value is None or value == ():
            return "-"
        if self.secret:
            return MASK
        if isinstance(value, tuple):
            return ",".join(str(item) for item in value)
        return str(value).lower() if isinstance(value, bool) else str(value)


def joined(problems: Iterable[str]) -> str:
    """Several errors as the text of one, a line each."""
    return SEPARATOR.join(dict.fromkeys(problems))


def variable_of(path: str) -> str:
    """The environment variable of a key."""
    return ENV_PREFIX + path.replace(".", "_").upper()


def key(default: T, kind: Kind[T], help: str, *, flag: str = "", secret: bool = False, flag_only: bool = False) -> T:
    """Declare a dataclass field that the three sources can set."""
    return field(
        default=default,
        repr=not secret,
        metadata={"kind": kind, "help": help, "flag": flag, "secret": secret, "flag_only": flag_only},
    )


def keys_below(cls: type, where: str) -> Iterator[Key]:
    """Every key of a part that stands at the dotted path `where`, in the order of the fields."""
    for part in fields(cls):
        path = f"{where}.{part.name}"
        if is_dataclass(part.default_factory):
            yield from keys_below(cast(type, part.default_factory), path)
            continue
        meta = part.metadata
        flag = "--" + (meta["flag"] or path.partition(".")[2].replace(".", "-").replace("_", "-"))
        yield Key(path, flag, meta["help"], meta["kind"], part.default, meta["secret"], meta["flag_only"])


def built(cls: type[Any], where: str, values: Mapping[str, object]) -> Any:
    """A part from the values of its keys, which are named by their dotted paths."""
    arguments: dict[str, object] = {}
    for part in fields(cls):
        path = f"{where}.{part.name}"
        nested = part.default_factory
        arguments[part.name] = built(cast(type, nested), path, values) if is_dataclass(nested) else values[path]
    return cls(**arguments)


def parsed(found: Key, raw: object, origin: str) -> object:
    """The value that a source gave; origin: flag, environment, or the file's name, for the error."""
    name = {"flag": found.flag, "environment": found.variable}.get(
        origin, f"{found.path} in {origin.removeprefix('file ')}"
    )
    shown = MASK if found.secret else repr(raw)
    try:
        return found.kind(raw)
    except ValueError as error:
        raise ConfigError(f"{name} is {shown}, but {error}") from error
