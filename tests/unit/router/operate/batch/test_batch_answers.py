"""The files of a batch: what a line looks like, and that a later run goes on from any point at which one was killed."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdcluster.core.errors import ConfigError
from pdcluster_router.operate.batch.answers import (
    LineAnswer,
    LineError,
    LineFailure,
    check_files,
    errors_beside,
    one_line,
    open_answers,
)
from pdcluster_router.operate.batch.lines import BadLine, LineIndex

NAMES = ("a", "b", "ü\n", "d" * 300)


def write_input(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    file = folder / "in.jsonl"
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {}} for name in names]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def good(name: str) -> LineAnswer:
    return LineAnswer(name, 200, f"req-{len(name)}", b'{"choices":[{"text":"x"}]}')


def ids(file: Path) -> list[str]:
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [json.loads(text)["custom_id"] for text in lines]


def test_an_answer_has_the_form_of_openai(tmp_path: Path) -> None:
    line = json.loads(good("ü\n").text())
    assert line == {
        "id": line["id"], "custom_id": "ü\n", "error": None,
        "response": {"status_code": 200, "request_id": "req-2", "body": {"choices": [{"text": "x"}]}},
    }  # fmt: skip
    assert line["id"].startswith("batch_req_") and good("ü\n").text().count(b"\n") == 1


def test_a_bad_line_has_an_error_with_its_number() -> None:
    line = json.loads(LineFailure.of(BadLine(7, None, "wrong", "url")).text())
    assert line["custom_id"] is line["response"] is None
    assert line["error"] == {"code": "invalid_request_error", "message": "wrong", "param": "url", "line": 7}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b'{"a":1.50}', b'{"a":1.50}'),
        (b'{\n "a": "x\\ny"\r\n}', b'{"a":"x\\ny"}'),
        (b"<html>\n", b'"<html>\\n"'),
        (b"\xff", '"�"'.encode()),
        (b"", b'""'),
    ],
)
def test_any_body_becomes_one_line(body: bytes, line: bytes) -> None:
    assert one_line(body) == line


def test_a_run_goes_on_from_every_point_at_which_the_files_were_cut(tmp_path: Path) -> None:
    names = NAMES[1:3]
    given = write_input(tmp_path, names)
    out, errors = tmp_path / "out.jsonl", errors_beside(tmp_path / "out.jsonl")
    whole = b"".join(good(name).text() for name in names)
    ends = [0]
    for name in names:
        ends.append(ends[-1] + len(good(name).text()))
    for cut in range(len(whole) + 1):
        out.write_bytes(whole[:cut])
        index = LineIndex.of(given)
        files = open_answers(out, errors, index)
        num_whole = sum(end <= cut for end in ends) - 1
        assert out.read_bytes() == whole[: ends[num_whole]]
        assert [index.is_done(name) for name in names] == [number < num_whole for number in range(len(names))]
        for name in names[num_whole:]:
            files.write(good(name))
        files.close()
        assert out.read_bytes() == whole


def test_errors_that_may_pass_are_tried_again_and_the_others_stay(tmp_path: Path) -> None:
    given, out = write_input(tmp_path, ("a", "b", "c", "d")), tmp_path / "out.jsonl"
    errors = errors_beside(out)
    files = open_answers(out, errors, LineIndex.of(given))
    lasting = LineAnswer("a", 400, "r", b'{"error":{}}')
    for line in (
        lasting, LineAnswer("b", 503, "r", b"{}"), LineFailure("c", LineError("batch_expired", "late")),
        LineFailure.of(BadLine(9, "a", "wrong")), LineFailure.of(BadLine(10, None, "wrong")), good("d"),
    ):  # fmt: skip
        files.write(line)
    files.close()
    with errors.open("ab") as torn:
        torn.write(b'{"id":"batch_req_1","custom_id":"b"')
    index = LineIndex.of(given)
    files = open_answers(out, errors, index)
    files.close()
    assert errors.read_bytes() == lasting.text() and files.num_kept_errors == 1
    assert [index.is_done(name) for name in "abcd"] == [True, False, False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}\n", "line 1 of .* is no answer of a batch"),
        (good("a").text() + b"\0\0\0\n" + good("b").text(), "line 2 of .* is no answer of a batch"),
        (good("other").text(), "line 1 of .* answers 'other', which is in no line of the input"),
        (good("a").text() * 2, "line 2 of .* answers 'a' once more"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{}}\n', "neither a response nor an error"),
        (b"a note of mine", "ends with text that is no answer"),
        (good("a").text() + b"a note", "ends with text that is no answer"),
    ],
)
def test_a_file_that_is_not_of_this_batch_is_left_as_it_is(tmp_path: Path, text: bytes, message: str) -> None:
    given, out = write_input(tmp_path), tmp_path / "out.jsonl"
    out.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        open_answers(out, errors_beside(out), LineIndex.of(given))
    assert out.read_bytes() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (good("other").text(), "line 1 of .* answers 'other', which is in no line of the input"),
        (LineAnswer("other", 400, "r", b"{}").text(), "answers 'other', which is in no line of the input"),
        (b'{"custom_id":"a","method":"POST"}\n', "neither a response nor an error"),
        (b"a note of mine", "ends with text that is no answer"),
    ],
)
def test_a_file_of_errors_that_is_not_of_this_batch_is_left_as_it_is(tmp_path: Path, text: bytes, message: str) -> None:
    given, out, errors = write_input(tmp_path), tmp_path / "out.jsonl", tmp_path / "notes"
    errors.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        open_answers(out, errors, LineIndex.of(given))
    assert errors.read_bytes() == text


def test_two_runs_do_not_write_one_file_of_errors(tmp_path: Path) -> None:
    given, errors = write_input(tmp_path), tmp_path / "errors"
    files = open_answers(tmp_path / "one", errors, LineIndex.of(given))
    with pytest.raises(ConfigError, match=r"another run writes .*errors"):
        open_answers(tmp_path / "two", errors, LineIndex.of(given))
    files.close()


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    given, out = write_input(tmp_path), tmp_path / "out.jsonl"
    files = open_answers(out, errors_beside(out), LineIndex.of(given))
    with pytest.raises(ConfigError, match="another run writes"):
        open_answers(out, errors_beside(out), LineIndex.of(given))
    files.close()
    open_answers(out, errors_beside(out), LineIndex.of(given)).close()


def test_no_file_is_two_of_them(tmp_path: Path) -> None:
    given, out = write_input(tmp_path), tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match="is the input, too"):
        check_files(given, given, errors_beside(given))
    with pytest.raises(ConfigError, match="would both go to"):
        open_answers(out, out, LineIndex.of(given))
    with pytest.raises(ConfigError, match=r"/none/out.jsonl cannot be written"):
        open_answers(tmp_path / "none" / "out.jsonl", errors_beside(out), LineIndex.of(given))


ENDS = st.sampled_from([200, 400, 404, 429, 500, 503, None])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=8, unique=True),
    runs=st.lists(st.tuples(st.lists(ENDS, max_size=8), st.integers(0, 200), st.integers(0, 200)), max_size=5),
)
def test_no_line_is_lost_or_written_twice_by_runs_that_are_killed(
    tmp_path: Path, names: list[str], runs: list[tuple[list[int | None], int, int]]
) -> None:
    """Each run answers some lines as drawn; then both files lose some bytes of their ends, as a torn machine leaves
    them."""
    given, out = write_input(tmp_path, tuple(names)), tmp_path / "out.jsonl"
    errors = errors_beside(out)
    out.unlink(missing_ok=True)
    errors.unlink(missing_ok=True)
    for ends, *cuts in [*runs, ([200] * len(names), 0, 0)]:
        index = LineIndex.of(given)
        files = open_answers(out, errors, index)
        written = [*ids(out), *ids(errors)]
        assert len(set(written)) == len(written) == index.num_done
        assert all(index.is_done(name) is (name in written) for name in names)
        for name, end in zip([name for name in names if not index.is_done(name)], ends, strict=False):
            failure = LineFailure(name, LineError("batch_expired", "late"))
            files.write(failure if end is None else LineAnswer(name, end, "r", b"{}"))
        files.close()
        for file, cut in zip((out, errors), cuts, strict=True):
            if not file.exists():
                continue
            text = file.read_bytes()
            file.write_bytes(text[: max(len(text) - cut, 0)])
    assert sorted([*ids(out), *ids(errors)]) == sorted(names)
    if errors.exists():
        assert {msgspec.json.decode(line)["response"]["status_code"] for line in errors.read_bytes().splitlines()} <= {
            400,
            404,
        }
