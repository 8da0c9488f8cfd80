"""References within a JSON schema, such as `#/$defs/a~1b%25`, by RFC 6901 and RFC 3986."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from pdcluster.api.structured.json_grammar.values import not_kept
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest


def target(whole: Mapping[str, Any], reference: object, path: str) -> object:
    """The target of a reference. Raises BadRequest naming path."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        raise not_kept(path, f"$ref {shown(reference)}", "refer to a part of this schema, such as #/$defs/NAME")
    found: object = whole
    for key in keys_of(reference, path):
        if isinstance(found, list) and key.isascii() and key.isdigit() and len(key) < 9 and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            raise BadRequest(
                f"{path} uses $ref {shown(reference)}, but the schema has no {shown(key)} there; add it or correct "
                "the reference",
                path,
            )
    return found


def keys_of(reference: str, path: str) -> tuple[str, ...]:
    """The steps of a reference, decoded."""
    try:
        pointer = unquote(reference[1:], errors="strict")
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"{path} uses $ref {shown(reference)}, whose % escapes are no UTF-8; correct it", path
        ) from error
    return tuple(key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:])
