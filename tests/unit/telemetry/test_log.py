"""Log lines: one per event, the same fields in both shapes, no secrets."""

import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pdcluster.settings.config import LogConfig
from pdcluster.settings.keys import MASK
from pdcluster.telemetry.health import exposition_of, process_registry
from pdcluster.telemetry.line_writer import MAX_WAITING, LineWriter
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
    assert not requests.is_on()
    requests.info("a request ended", request="r")
    assert stream.getvalue() == ""


def test_a_line_that_is_a_bare_placeholder_is_written() -> None:
    stream = io.StringIO()
    configure(LogConfig(), stream)
    logging.getLogger("some.library").warning("%s")
    logging.getLogger("some.library").warning("%s", *["given"])
    assert [line["event"] for line in lines(stream)] == ["%s", "given"]


# ---------------------------------------------------------------- streams that nobody reads


def test_who_writes_never_waits_for_who_reads_and_what_is_lost_is_said() -> None:
    reader, end = os.pipe()
    writer = LineWriter(os.fdopen(end, "w"))
    began = time.monotonic()
    for _ in range(4 * MAX_WAITING // 1024):
        writer.write("x" * 1024)
    assert writer.num_lost > MAX_WAITING // 1024
    writer.flush(0.05)
    assert time.monotonic() - began < 30.0, "the pipe holds 64 KiB, and nobody reads it"
    num_lost = writer.num_lost
    with os.fdopen(reader, "rb") as stream:
        line = told = stream.readline()
        while line == told:
            line = stream.readline()
    assert b"lines were left out here" in line and 0 < int(line.split()[0]) <= num_lost


def test_a_reader_that_is_gone_is_no_error_and_its_lines_count_as_lost() -> None:
    reader, end = os.pipe()
    os.close(reader)
    writer = LineWriter(os.fdopen(end, "w"))
    writer.write("one")
    writer.flush(5.0)
    assert writer.num_lost == 1


def test_lines_are_whole_and_in_order_at_the_end_of_a_process() -> None:
    program = (
        "import logging\n"
        "from pdcluster.settings.config import LogConfig\n"
        "from pdcluster.telemetry.log import configure\n"
        "configure(LogConfig(format='text'))\n"
        "for number in range(500): logging.getLogger(f'l{number}').warning(f'line {number}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=paths(), capture_output=True, text=True, timeout=60.0)
    assert [line.split()[-1] for line in done.stderr.splitlines()] == [str(number) for number in range(500)]


def test_a_process_whose_log_nobody_reads_goes_on_and_ends() -> None:
    program = (
        "import logging\n"
        "from pdcluster.settings.config import LogConfig\n"
        "from pdcluster.telemetry.log import configure\n"
        "configure(LogConfig())\n"
        "for number in range(3000): logging.getLogger(f'l{number}').warning('x' * 1000 + str(number))\n"
        "print('done', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=paths(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "done\n"
        assert process.wait(30.0) == 0
    finally:
        process.kill()
        process.communicate()


def test_lost_lines_are_a_metric_of_every_process() -> None:
    assert b"pdcluster_log_lines_lost_total 0.0" in exposition_of(process_registry())()


def paths() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
