"""Tools that items of a history bring, and names that meet."""

from __future__ import annotations

import pytest

from pdcluster.api.openai.responses.tools import Toolbox, digest_name
from pdcluster.core.errors import BadRequest

A, B = {"type": "function", "name": "a"}, {"type": "function", "name": "b"}


def test_a_tool_that_comes_again_is_offered_once() -> None:
    toolbox = Toolbox([A], None, [A, B, B])
    assert [tool.function.name for tool in toolbox.definitions] == ["a", "b"]
    with pytest.raises(BadRequest, match="names must differ"):
        Toolbox([A, A])


def test_names_that_meet_are_refused() -> None:
    digest = {"type": "function", "name": digest_name("f", "ns")}
    namespace = {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}]}
    with pytest.raises(BadRequest, match="rename one"):
        Toolbox([{"type": "function", "name": "ns__f"}, digest, namespace])
