"""Lines of a batch: which can be sent, what is wrong with the others, and that no name comes twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster_router.operate.batch import lines as batch_lines
from pdcluster_router.operate.batch.lines import SERVED, BadLine, BatchLine, LineIndex, parse, read_lines


def line(custom_id: object = "a", **changes: object) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": SERVED[0], "body": {"model": "m"}, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


@pytest.mark.parametrize("url", SERVED)
def test_a_line_keeps_its_body_as_it_stands(url: str) -> None:
    text = b'{"custom_id":"a","method":"POST","url":"%b","body": {"x" : 1.50, "stream": false}}\n' % url.encode()
    assert parse(3, text) == BatchLine(3, "a", url, b'{"x" : 1.50, "stream": false}')


@pytest.mark.parametrize(
    ("text", "custom_id", "message", "param"),
    [
        (b"{", None, "no request of a batch", None),
        (b"\xff\xfe", None, "no request of a batch", None),
        (b"[" * 100_000, None, "no request of a batch", None),
        (line(...), None, "custom_id", None),
        (line(7), None, "custom_id", None),
        (line(""), "", "custom_id", None),
        (line(body=...), "a", "body", None),
        (line(method="GET"), "a", "it must be POST", "method"),
        (line(url="/v1/files"), "a", "it must be one of /v1/chat/completions", "url"),
        (line(body=[1]), "a", "body is no object", "body"),
        (line(body={"stream": True}), "a", "stream is not possible in a batch", "body.stream"),
        (line(body={"stream": 1}), "a", "stream is not possible in a batch", "body.stream"),
    ],
)
def test_a_bad_line_is_told_by_its_field(text: bytes, custom_id: str | None, message: str, param: str | None) -> None:
    bad = parse(5, text)
    assert isinstance(bad, BadLine) and (bad.number, bad.custom_id) == (5, custom_id)
    assert message in bad.message and bad.param == param


def test_blank_lines_count_and_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(line("a") + b"\n\n  \n" + line("b"))
    assert [(each.number, each.custom_id) for each in read_lines(file)] == [(1, "a"), (4, "b")]


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 100)
    file = tmp_path / "in.jsonl"
    file.write_bytes(line("a", body={"x": "y" * 200}))
    with pytest.raises(ConfigError, match=r"line 1 of .* has more than 100 bytes"):
        list(read_lines(file))


def test_a_name_that_comes_twice_is_an_error_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join([line("a"), line("b"), line("c"), line("b"), line("a")]))
    with pytest.raises(ConfigError, match=r"line 4 of .* has custom_id 'b', which is that of line 2"):
        LineIndex.of(file)


def test_names_that_share_a_digest_are_no_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, seen = batch_lines._digest, set()

    def narrow(key: bytes, custom_id: str) -> int:
        """The first key has one digest for all names."""
        seen.add(key)
        return 1 if key == min(seen, key=list(seen).index) and len(seen) == 1 else right(key, custom_id)

    monkeypatch.setattr(batch_lines, "_digest", narrow)
    file = tmp_path / "in.jsonl"
    file.write_bytes(line("a") + b"\n" + line("b"))
    index = LineIndex.of(file)
    assert len(seen) == 2 and "a" in index and "b" in index and "c" not in index


def test_the_index_knows_what_is_done(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join(line(f"n{number}") for number in range(1000)) + b"\n" + line("bad", method="PUT"))
    index = LineIndex.of(file)
    assert len(index) == 1000 and "bad" not in index
    assert index.finish("n7") and not index.finish("n7") and index.num_done == 1
    assert [name for name in ("n6", "n7", "n8", "other") if index.is_done(name)] == ["n7"]
    with pytest.raises(KeyError):
        index.finish("other")
