"""Writes lines to a stream that may stand still, such as a pipe that nobody reads. Who has a line never waits for it.

A thread writes. Lines that wait are bounded by bytes; what comes beyond is left out and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TextIO

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

# Of lines that wait for the stream, in characters.
MAX_WAITING = 1 << 20
# At the end of the process: how long the stream may take for what waits.
LAST_WORD_S = 1.0


class LineWriter:
    """Any thread may write. The thread that writes begins with the first line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: deque[str] = deque()
        self._num_waiting = 0
        self._num_left_out = 0
        # Lines left out since the process began.
        self.num_lost = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """A line without its end."""
        with self._changed:
            if self._num_waiting + len(line) > MAX_WAITING:
                self._num_left_out += 1
                self.num_lost += 1
                return
            self._lines.append(line)
            self._num_waiting += len(line) + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, within_s: float = LAST_WORD_S) -> None:
        """Wait until all is written, at most so long."""
        until = time.monotonic() + within_s
        with self._changed:
            while self._num_waiting and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
                text = "".join(f"{line}\n" for line in self._lines)
                size, self._num_left_out, num_left_out = self._num_waiting, 0, self._num_left_out
                num_lines = len(self._lines)
                self._lines.clear()
            if num_left_out:
                text += f"{num_left_out} lines were left out here: nobody read what was written\n"
            is_written = self._put(text)
            with self._changed:
                self.num_lost += 0 if is_written else num_lines
                self._num_waiting -= size
                self._changed.notify_all()

    def _put(self, text: str) -> bool:
        """False when the stream is closed, or its reader is gone."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            return False
        return True


class LostLines(Collector):
    """The metric of lines that a writer left out."""

    def __init__(self, writer: LineWriter, registry: CollectorRegistry) -> None:
        self._writer = writer
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "pdcluster_log_lines_lost", "Log lines that were left out because nobody read them.", self._writer.num_lost
        )
