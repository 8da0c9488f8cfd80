"""A collector of traces that keeps what it is sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as stubs
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class ReceivedSpan:
    """instance: the process that sent it."""

    service: str
    instance: str
    span: Span

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def attributes(self) -> dict[str, object]:
        return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in self.span.attributes}

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9


class Receiver(stubs.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.address = ""

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        for each in request.resource_spans:
            resource = {entry.key: entry.value.string_value for entry in each.resource.attributes}
            for scope in each.scope_spans:
                self.spans += [
                    ReceivedSpan(resource["service.name"], resource["service.instance.id"], span)
                    for span in scope.spans
                ]
        return pb.ExportTraceServiceResponse()

    def of(
        self, trace_id: str, num_spans: int, timeout_s: float = 60.0, beside: Set[str] = frozenset()
    ) -> list[ReceivedSpan]:
        """The spans of a trace, once there are so many. beside: names of those that may be there or not."""
        deadline = time.monotonic() + timeout_s
        found: list[ReceivedSpan] = []
        while sum(each.span.name not in beside for each in found) < num_spans:
            found = [each for each in self.spans if each.trace_id == trace_id]
            assert time.monotonic() < deadline, f"only {[each.span.name for each in found]}"
            time.sleep(0.1)
        return found


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    receiver, server = Receiver(), grpc.server(ThreadPoolExecutor(2))
    stubs.add_TraceServiceServicer_to_server(receiver, server)
    receiver.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None)
