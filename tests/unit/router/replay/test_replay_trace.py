"""Readers of traces: what they take from a line, and what they say about a broken one."""

import json
import time
from pathlib import Path

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster_router.replay.trace import BlockChain, read_trace


def _write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def _row(
    timestamp: float = 0, tokens: int = 1100, output: int = 5, hash_ids: list[int] | None = None
) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": [0, 1, 2] if hash_ids is None else hash_ids,
    }


def test_a_mooncake_line_becomes_a_request_with_its_full_blocks(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path / "t.jsonl", _row(2000), _row(4500, 1024, 7, [0, 9])))
    first, second = trace.requests
    assert (first.arrival_s, first.num_tokens, first.num_output, len(first.blocks)) == (0.0, 1100, 5, 2), (
        "76 tokens fill no block"
    )
    assert (second.arrival_s, len(second.blocks)) == (2.5, 2)
    assert first.blocks[0] is second.blocks[0] and first.blocks[1] != second.blocks[1]


def test_a_block_is_named_by_all_before_it(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path / "t.jsonl", _row(0, 1024, 1, [1, 7]), _row(1, 1024, 1, [2, 7])))
    first, second = trace.requests
    assert first.blocks[1] != second.blocks[1], "the same id behind another beginning is other KV"


def test_requests_are_sorted_by_arrival(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path / "t.jsonl", _row(5000, output=2), _row(1000, output=3)))
    assert [(r.arrival_s, r.num_output) for r in trace.requests] == [(0.0, 3), (4.0, 2)]


def test_an_empty_answer_still_has_its_first_token(tmp_path: Path) -> None:
    assert read_trace(_write(tmp_path / "t.jsonl", _row(output=0))).requests[0].num_output == 1


def test_speeding_up_moves_arrivals_only(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path / "t.jsonl", _row(0), _row(8000)))
    faster = trace.at_speed(4)
    assert [r.arrival_s for r in faster.requests] == [0.0, 2.0] and faster.requests[1].blocks is trace.requests[
        1
    ].blocks
    with pytest.raises(ConfigError, match="above 0, not -1"):
        trace.at_speed(-1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "t.jsonl:2"),
        (_row() | {"hash_ids": [1, 2, 3, 4]}, "4 hash_ids for 1100 tokens, at most 3"),
        (_row(tokens=-1), "a prompt of -1 tokens"),
        (_row(output=10**9), "an? answer of 1000000000 tokens"),
        (_row() | {"timestamp": "NaN"}, "no moment"),
        (_row() | {"input_length": "many"}, "t.jsonl:2.*input_length"),
        (_row() | {"hash_ids": [2**70, 1, 2]}, "t.jsonl:2"),
        ({"timestamp": 1}, "t.jsonl:2"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(_write(tmp_path / "t.jsonl", _row(), line))


def test_a_trace_may_come_from_other_tools(tmp_path: Path) -> None:
    """Byte order mark, whole numbers as floats or strings, times before the clock's zero, no hashes, fields that nobody
    asked for."""
    odd = _row(timestamp=-2000.5) | {"input_length": 1100.0, "output_length": "7", "session_id": {"a": 1}}
    path = _write(tmp_path / "t.jsonl", odd, {"timestamp": 0, "input_length": 600, "output_length": 1})
    path.write_text("\ufeff" + path.read_text())
    first, second = read_trace(path).requests
    assert (first.arrival_s, first.num_tokens, first.num_output, len(first.blocks)) == (0.0, 1100, 7, 2)
    assert (second.arrival_s, second.blocks) == (2.0005, ())


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_dates_without_a_zone_do_not_follow_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In New York, 02:30 on this day is an hour before 03:00 by the sun, not half an hour."""
    file = tmp_path / "a.csv"
    file.write_text(f"{AZURE}\n2024-03-10 01:30:00,10,1\n2024-03-10 02:30:00,10,1\n2024-03-10 03:00:00Z,10,1\n")
    for zone in ("UTC", "America/New_York", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert [request.arrival_s for request in read_trace(file).requests] == [0.0, 3600.0, 5400.0], zone
    monkeypatch.undo()
    time.tzset()


def test_azure_rows_share_nothing(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "a.csv", AZURE, "2023-11-16 18:15:46.6805900,4808,10", "2023-11-16 18:15:50.9951690,3180,8"
    )
    first, second = read_trace(path).requests
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)
    assert (first.num_tokens, first.num_output, len(first.blocks)) == (4808, 10, 9)
    assert not set(first.blocks) & set(second.blocks)


def test_azure_files_of_2024_have_a_zone_and_more_columns(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "a.csv",
        f"{AZURE},Extra",
        "2024-05-10 00:00:00.009930+00:00,100,1,x",
        "2024-05-10 00:00:01+00:00,200,2,y",
    )
    assert [r.num_tokens for r in read_trace(path).requests] == [100, 200]


def test_azure_tables_may_count_seconds_and_have_passed_a_spreadsheet(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", f"\ufeff{AZURE}", "1700000000.5,100.0,1", "1700000003,200,2")
    first, second = read_trace(path).requests
    assert (first.num_tokens, second.arrival_s) == (100, 2.5)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("TIMESTAMP,ContextTokens", "x,1"), "a.csv:1.*lack"),
        ((AZURE, "yesterday,1,1"), "a.csv:2"),
        ((AZURE, "2023-11-16 18:15:46,one,1"), "a.csv:2"),
        ((AZURE, "2023-11-16 18:15:46"), "a.csv:2"),
        ((AZURE, "2023-11-16 18:15:46,1.5,1"), "1.5 is no whole number"),
        ((AZURE,), "holds no request"),
        (("hello",), "starts neither"),
    ],
)
def test_a_broken_table_is_named(tmp_path: Path, lines: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(_write(tmp_path / "a.csv", *lines))


def test_a_file_that_is_no_text_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")


def test_equal_names_are_one_object() -> None:
    chain = BlockChain()
    assert chain.extend((), [1, 2])[1] is chain.extend((), [1, 2])[1]
