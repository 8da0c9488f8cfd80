"""Log lines: one per event, the same fields in both shapes, no secrets."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from pdcluster.settings.config import LogConfig
from pdcluster.settings.keys import MASK
from pdcluster.telemetry.log import (
    MAX_KINDS,
    REPEAT_S,
    REPEATS,
    Log,
    RepeatFilter,
    configure,
    requests,
    resolve_format,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_process_bound_and_own_fields() -> None:
    stream = io.StringIO()
    configure(LogConfig(), stream, process="decode-0")
    Log("node.loop", peer="prefill-0").bind(request="r1").warning("transfer failed", attempt=2)
    (line,) = lines(stream)
    assert {"process": "decode-0", "peer": "prefill-0", "request": "r1", "attempt": 2}.items() <= line.items()
    assert (line["level"], line["event"], line["logger"]) == ("warning", "transfer failed", "pdcluster.node.loop")


def test_text_lines_are_for_people() -> None:
    stream = Terminal()
    configure(LogConfig(), stream)
    Log("x").info("said", seconds=0.123456789, path="a b", empty="", absent=None)
    assert stream.getvalue().endswith('info    said  seconds=0.123457 path="a b" empty=""\n')


def test_auto_is_text_on_a_terminal_and_json_elsewhere() -> None:
    assert (resolve_format("auto", Terminal()), resolve_format("auto", io.StringIO())) == ("text", "json")
    assert resolve_format("text", io.StringIO()) == "text"


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    configure(LogConfig(level="warning"), stream)
    log = Log("x")
    log.debug("no")
    log.info("no")
    log.error("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


def test_libraries_log_in_the_same_shape() -> None:
    stream = io.StringIO()
    configure(LogConfig(), stream, process="router")
    logging.getLogger("some.library").warning("odd %s", "request")
    (line,) = lines(stream)
    assert (line["logger"], line["event"], line["process"]) == ("some.library", "odd request", "router")


def test_an_exception_stays_one_json_line_with_its_traceback() -> None:
    stream = io.StringIO()
    configure(LogConfig(), stream)
    try:
        raise ValueError("broken")
    except ValueError:
        Log("x").exception("step failed")
    (line,) = lines(stream)
    assert "ValueError: broken" in str(line["traceback"])


@pytest.mark.parametrize("name", ["cluster_key", "api_key", "client_secret", "Authorization", "password"])
def test_secret_fields_are_masked_in_both_shapes(name: str) -> None:
    for stream in (io.StringIO(), Terminal()):
        configure(LogConfig(), stream)
        Log("x").info("hello", **{name: "hunter2"})
        assert "hunter2" not in stream.getvalue()
        assert MASK in stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["json", "text"])
def test_what_others_sent_cannot_forge_a_line(stream: io.StringIO) -> None:
    configure(LogConfig(), stream)
    Log("x").info("model a\nb\x1b[31m unknown", model="c\nd\x1b[0m")
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


def test_configuring_again_does_not_double_lines() -> None:
    stream = io.StringIO()
    configure(LogConfig(), stream)
    configure(LogConfig(), stream)
    Log("x").info("once")
    assert len(lines(stream)) == 1


def test_lines_that_repeat_are_bounded_and_counted() -> None:
    moment = [0.0]
    repeats = RepeatFilter(lambda: moment[0])

    def passes(text: str, *args: object) -> logging.LogRecord | None:
        record = logging.LogRecord("pdcluster.x", logging.WARNING, "", 0, text, args, None)
        return record if repeats.filter(record) else None

    shown = [found for number in range(100) if (found := passes("node %s is gone", number)) is not None]
    assert [record.getMessage() for record in shown] == [f"node {number} is gone" for number in range(REPEATS)]
    assert shown[-1].__dict__["muted_s"] == REPEAT_S
    assert passes("something else") is not None
    moment[0] = REPEAT_S
    later = passes("node %s is gone", 100)
    assert later is not None
    assert later.__dict__["left_out"] == 100 - REPEATS


def test_kinds_of_lines_that_are_counted_are_bounded() -> None:
    repeats = RepeatFilter(lambda: 0.0)
    for number in range(3 * MAX_KINDS):
        assert repeats.filter(logging.LogRecord("x", logging.INFO, "", 0, f"text {number}", (), None))
    assert len(repeats._seen) <= MAX_KINDS


def test_lines_of_requests_are_written_when_asked_for_and_then_all_of_them() -> None:
    stream = io.StringIO()
    configure(LogConfig(level="error", requests=True), stream)
    for number in range(3 * REPEATS):
        requests.info("a request ended", request=f"r{number}")
    assert [line["request"] for line in lines(stream)] == [f"r{number}" for number in range(3 * REPEATS)]
    configure(LogConfig(level="debug"), stream := io.StringIO())
    assert not requests.is_on
    requests.info("a request ended", request="r")
    assert stream.getvalue() == ""
