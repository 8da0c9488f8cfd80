"""Arrays of a JSON schema as parts of a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdcluster.api.structured.grammar_rules.rules import EMPTY, Many, Part, Text, one_of, row
from pdcluster.api.structured.json_grammar.values import Converter, not_kept, whole_number
from pdcluster.api.validate import shown
from pdcluster.core.errors import BadRequest

MAX_ITEMS = 100_000


def array(make: Converter, node: Mapping[str, Any], path: str) -> Part:
    """An array. All items of a tuple come, also those that minItems does not require. Other items come where they are
    named or required.
    """
    first, others = _schemas(node, path)
    least = whole_number(node, "minItems", path) or 0
    most = whole_number(node, "maxItems", path)
    if most is not None and most < least:
        raise BadRequest(
            f"{path} has a maxItems of {most} below its minItems of {least}; no array is so long, correct one of them",
            path,
        )
    if least > MAX_ITEMS:
        raise not_kept(path, f"minItems {least}", f"at most {MAX_ITEMS} are possible")
    if others is None and (not first or least > len(first)):
        others = True
    heads = [make.convert(schema, f"{path}.prefixItems[{index}]") for index, schema in enumerate(first[:most])]
    other = None if others in (None, False) or len(heads) == most else make.convert(others, f"{path}.items")
    return _written(make, heads, other, least, None if most is None else min(most, MAX_ITEMS))


def _schemas(node: Mapping[str, Any], path: str) -> tuple[list[Any], object]:
    """The schemas of the first items and of the rest. Older drafts have the first ones in `items`."""
    first, others = node.get("prefixItems"), node.get("items")
    if isinstance(others, list):
        if first is not None:
            raise BadRequest(f"{path}.items is a list beside prefixItems; send one of them", path)
        first, others = others, node.get("additionalItems")
    if first is not None and not isinstance(first, list):
        raise BadRequest(f"{path}.prefixItems is {shown(first)}; it must be a list of schemas", path)
    return first or [], others


def _written(make: Converter, heads: list[Part], other: Part | None, least: int, most: int | None) -> Part:
    separator = row(Text(","), make.space)
    options: list[Part] = []
    if heads:
        items = [part for head in heads for part in (separator, head, make.space)][1:]
        options.append(
            row(
                *items,
                _more(make, separator, other, max(least - len(heads), 0), None if most is None else most - len(heads)),
            )
        )
    elif other is not None and most != 0:
        rest = _more(make, separator, other, max(least - 1, 0), None if most is None else most - 1)
        options.append(row(other, make.space, rest))
    if not least and (not heads or most == 0):
        options.append(EMPTY)
    body = one_of([make.rules.name(option) if option != EMPTY else option for option in options])
    return row(Text("["), make.space, body, Text("]"))


def _more(make: Converter, separator: Part, other: Part | None, least: int, most: int | None) -> Part:
    """Items behind others. Without a schema for them there are none."""
    if other is None:
        return EMPTY if not least else one_of([])
    return Many(make.rules.name(row(separator, other, make.space)), least, most)
