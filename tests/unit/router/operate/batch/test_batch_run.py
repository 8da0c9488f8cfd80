"""pdctl batch run against HTTP servers that answer, refuse, break off and come back."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from pathlib import Path

import pytest
from batch_router import Answer, BatchRouter, good, serving
from typer.testing import CliRunner, Result

from pdcluster_router import pdctl


def write_lines(folder: Path, num: int, *more: str, url: str = "/v1/completions") -> Path:
    file = folder / "in.jsonl"
    lines = [
        {"custom_id": f"n{number}", "method": "POST", "url": url, "body": {"name": f"n{number}"}}
        for number in range(num)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "".join(f"{line}\n" for line in more))
    return file


def run(folder: Path, api: str, *words: str) -> Result:
    given, out = folder / "in.jsonl", folder / "out.jsonl"
    return CliRunner().invoke(pdctl.app, ["batch", "run", str(given), "-o", str(out), "--api", api, *words])


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def answers(folder: Path) -> list[dict]:
    return read(folder / "out.jsonl")


def errors(folder: Path) -> list[dict]:
    return read(folder / "out.errors.jsonl")


def names(lines: list[dict]) -> list[str]:
    return [line["custom_id"] for line in lines]


def test_every_line_is_answered_once_by_routers_that_share_them(tmp_path: Path) -> None:
    write_lines(tmp_path, 200)
    one, other = BatchRouter(), BatchRouter()
    with serving(one) as first, serving(other) as second:
        result = run(tmp_path, f"{first},{second}")
    assert result.exit_code == 0, result.output
    assert sorted(names(answers(tmp_path))) == sorted(f"n{number}" for number in range(200))
    assert min(len(one.paths), len(other.paths)) > 20 and not errors(tmp_path)
    (line,) = [line for line in answers(tmp_path) if line["custom_id"] == "n7"]
    assert line["response"]["request_id"] == "id-n7" and line["response"]["body"]["name"] == "n7"
    head = {name.lower(): value for name, value in one.heads[0].items()}
    assert head["x-pdcluster-class"] == "batch" and float(head["x-request-deadline-s"]) == 600.0
    assert "authorization" not in head
    assert "200 of 200 lines, 0 failed" in result.output


def test_no_more_lines_are_open_than_asked_for(tmp_path: Path) -> None:
    write_lines(tmp_path, 60)
    router = BatchRouter(pause_s=0.01)
    with serving(router) as api:
        assert run(tmp_path, api, "--concurrency", "7").exit_code == 0
    assert router.most_open == 7


def test_answers_may_come_in_the_order_of_the_input(tmp_path: Path) -> None:
    write_lines(tmp_path, 120, '{"custom_id": "bad"}')

    def answer(name: str, num_try: int) -> Answer:
        time.sleep(0.05 if name.endswith("3") else 0.0)
        return (400, {}, b"{}") if name == "n50" else good(name, num_try)

    with serving(BatchRouter(answer)) as api:
        assert run(tmp_path, api, "--ordered", "--concurrency", "16").exit_code == 1
    assert names(answers(tmp_path)) == [f"n{number}" for number in range(120) if number != 50]
    assert names(errors(tmp_path)) == ["n50", "bad"]


def test_bad_lines_and_refused_ones_are_in_the_file_of_errors_and_stay_there_by_kind(tmp_path: Path) -> None:
    write_lines(tmp_path, 3, "no json", '{"custom_id":"s","method":"POST","url":"/v1/messages","body":{"stream":true}}')
    refused = b'{"error":{"message":"no such model"}}'
    is_well = False

    def answer(name: str, num_try: int) -> Answer:
        if name == "n0":
            return 404, {}, refused
        return good(name, num_try) if name == "n2" or is_well else (500, {}, b"{}")

    router = BatchRouter(answer)
    with serving(router) as api:
        result = run(tmp_path, api)
        assert result.exit_code == 1 and "what failed is in" in result.output
        found = {line["custom_id"]: line for line in errors(tmp_path)}
        assert set(found) == {"n0", "n1", None, "s"} and names(answers(tmp_path)) == ["n2"]
        assert found["n0"]["response"]["status_code"] == 404 and found["n0"]["error"] is None
        assert found["n0"]["response"]["body"] == json.loads(refused)
        assert found[None]["error"]["line"] == 4 and found["s"]["error"]["param"] == "body.stream"
        assert router.tries == {"n0": 1, "n1": 3, "n2": 1}, "a fault of the router is tried three times"
        is_well = True
        assert run(tmp_path, api).exit_code == 1
    assert router.tries == {"n0": 1, "n1": 4, "n2": 1}
    assert sorted(names(answers(tmp_path))) == ["n1", "n2"]
    assert Counter(names(errors(tmp_path))) == Counter(["n0", None, "s"])


def test_a_line_that_may_end_nodes_is_sent_once_and_by_the_next_run_once_more(tmp_path: Path) -> None:
    write_lines(tmp_path, 2)
    stopped: Answer = (500, {"x-should-retry": "false"}, b'{"error":{"code":"request_stopped"}}')
    router = BatchRouter(lambda name, num_try: stopped if name == "n0" else good(name, num_try))
    with serving(router) as api:
        for num_runs in (1, 2):
            assert run(tmp_path, api).exit_code == 1
            assert router.tries == {"n0": num_runs, "n1": 1} and names(errors(tmp_path)) == ["n0"]


def test_refusals_and_lost_connections_are_tried_again_after_the_time_that_is_asked_for(tmp_path: Path) -> None:
    write_lines(tmp_path, 3)
    script: dict[str, list[Answer]] = {"n0": [(429, {"retry-after": "1"}, b"{}")], "n1": [(503, {}, b"{}"), None]}

    def answer(name: str, num_try: int) -> Answer:
        said = script.get(name, [])
        return said[num_try] if num_try < len(said) else good(name, num_try)

    router, began = BatchRouter(answer), time.monotonic()
    with serving(router) as api:
        result = run(tmp_path, api)
    assert result.exit_code == 0 and time.monotonic() - began >= 1.0
    assert router.tries == {"n0": 2, "n1": 3, "n2": 1} and "3 sent again" in result.output


def test_a_line_fails_at_its_deadline_with_what_it_got_last_and_is_tried_by_the_next_run(tmp_path: Path) -> None:
    write_lines(tmp_path, 2)
    with serving(BatchRouter(lambda name, _: (503, {}, b'{"e":1}') if name == "n0" else None)) as api:
        assert run(tmp_path, api, "--deadline", "0.6s").exit_code == 1
    found = {line["custom_id"]: line for line in errors(tmp_path)}
    assert found["n0"]["response"]["status_code"] == 503
    assert found["n1"]["response"] is None and found["n1"]["error"]["code"] == "batch_expired"
    assert "the connection ended" in found["n1"]["error"]["message"]
    with serving(BatchRouter()) as api:
        assert run(tmp_path, api).exit_code == 0
    assert sorted(names(answers(tmp_path))) == ["n0", "n1"] and not errors(tmp_path)


def test_the_other_router_goes_on_where_one_is_gone(tmp_path: Path) -> None:
    write_lines(tmp_path, 50)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    router = BatchRouter()
    with serving(router) as api:
        assert run(tmp_path, f"{gone},{api}", "--concurrency", "8").exit_code == 0
    assert len(answers(tmp_path)) == 50 and set(router.tries.values()) == {1}


@pytest.mark.parametrize("status", [429, 503])
def test_a_router_that_refuses_at_once_does_not_take_the_lines_of_another(tmp_path: Path, status: int) -> None:
    """A router without open lines has the fewest. What it refused goes to the other one."""
    write_lines(tmp_path, 80)
    refusing, router = BatchRouter(lambda *_: (status, {"retry-after": "1"}, b"{}")), BatchRouter(pause_s=0.02)
    with serving(refusing) as first, serving(router) as second:
        assert run(tmp_path, f"{first},{second}", "--concurrency", "16").exit_code == 0
    assert len(answers(tmp_path)) == 80 and len(router.paths) == 80
    assert len(refusing.paths) < 80 / 2 and set(refusing.tries.values()) == {1}


def test_a_router_that_ends_before_its_first_answer_is_waited_for(tmp_path: Path) -> None:
    write_lines(tmp_path, 4)
    router = BatchRouter(lambda name, num_try: None if num_try < 3 else good(name, num_try))
    with serving(router) as api:
        assert run(tmp_path, api).exit_code == 0
    assert len(answers(tmp_path)) == 4


def test_errors_but_refusals_are_tried_three_times(tmp_path: Path) -> None:
    write_lines(tmp_path, 2)
    router = BatchRouter(lambda name, _: ({"n0": 502, "n1": 504}[name], {}, b"{}"))
    with serving(router) as api:
        assert run(tmp_path, api).exit_code == 1
    assert set(router.tries.values()) == {3} and len(errors(tmp_path)) == 2


def test_an_input_that_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.jsonl")
    result = run(tmp_path, "127.0.0.1:9")
    assert result.exit_code == 2 and "is no file that can be read twice" in result.output


def test_a_run_without_any_router_ends_with_exit_code_4_and_writes_nothing(tmp_path: Path) -> None:
    write_lines(tmp_path, 5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    result = run(tmp_path, gone)
    assert result.exit_code == 4 and f"no router answers at {gone}" in result.output
    assert not answers(tmp_path) and not errors(tmp_path)


def test_the_key_is_sent_and_never_shown_and_a_wrong_one_ends_the_run(tmp_path: Path) -> None:
    write_lines(tmp_path, 5)
    key = tmp_path / "key"
    key.write_text("sk-secret\n")
    key.chmod(0o600)
    router = BatchRouter(lambda name, _: (401, {}, b"{}"))
    with serving(router) as api:
        result = run(tmp_path, api, "--key-file", str(key))
    assert result.exit_code == 5 and "does not take the API key" in result.output
    assert "sk-secret" not in result.output and not errors(tmp_path)
    assert router.heads[0]["authorization"] == "Bearer sk-secret"
    key.write_text("two\nlines")
    assert run(tmp_path, api, "--key-file", str(key)).exit_code == 2


def test_messages_carry_their_version(tmp_path: Path) -> None:
    write_lines(tmp_path, 1, url="/v1/messages")
    router = BatchRouter()
    with serving(router) as api:
        assert run(tmp_path, api).exit_code == 0
    assert router.paths == ["/v1/messages"] and router.heads[0]["anthropic-version"] == "2023-06-01"


@pytest.mark.parametrize("words", [("--concurrency", "0"), ("--deadline", "soon"), ("--api", "here")])
def test_wrong_use_ends_with_exit_code_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_lines(tmp_path, 1)
    assert run(tmp_path, "127.0.0.1:1", *words).exit_code == 2


def test_a_name_that_comes_twice_sends_nothing(tmp_path: Path) -> None:
    twice = json.dumps({"custom_id": "n0", "method": "POST", "url": "/v1/completions", "body": {"name": "n0"}})
    write_lines(tmp_path, 3, twice)
    router = BatchRouter()
    with serving(router) as api:
        result = run(tmp_path, api)
    assert result.exit_code == 2 and "line 4 of" in result.output and "that of line 1" in result.output
    assert not router.paths and not answers(tmp_path)


def test_an_empty_input_is_done_at_once(tmp_path: Path) -> None:
    write_lines(tmp_path, 0)
    assert run(tmp_path, "127.0.0.1:1").exit_code == 0
