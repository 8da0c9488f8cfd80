"""Bodies of requests with one thing changed, anywhere in them."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12)
    | st.sampled_from([0, -1, "text", "auto", "none", "tool_use", "message", "function", "custom", 2**63, "x" * 5000])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("type"), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything inside a body."""
    if not isinstance(value, dict | list):
        return []
    found = []
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        found += [(*prefix, key), *paths(each, (*prefix, key))]
    return found


def changed(body: Json, path: tuple[Any, ...], change: str, value: Any) -> Json:
    body = copy.deepcopy(body)
    inside: Any = body
    for key in path[:-1]:
        inside = inside[key]
    if change == "drop":
        del inside[path[-1]]
    elif change == "add" and isinstance(inside, list):
        inside.insert(path[-1], value)
    else:
        inside[path[-1]] = value
    return body


CHANGES = st.sampled_from(["set", "set", "drop", "add"])


def changed_bodies(body: Json) -> st.SearchStrategy[Json]:
    return st.builds(changed, st.just(body), st.sampled_from(paths(body)), CHANGES, VALUES)
