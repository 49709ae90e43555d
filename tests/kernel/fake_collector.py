"""A collector of OTLP/HTTP on the loopback: it reads requests by the published messages, and answers as a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from tests import loopback_server

_MESSAGES: dict[str, tuple[Any, Any]] = {
    "/v1/traces": (trace_service_pb2.ExportTraceServiceRequest, trace_service_pb2.ExportTraceServiceResponse),
    "/v1/metrics": (metrics_service_pb2.ExportMetricsServiceRequest, metrics_service_pb2.ExportMetricsServiceResponse),
    "/v1/logs": (logs_service_pb2.ExportLogsServiceRequest, logs_service_pb2.ExportLogsServiceResponse),
}


class Collector(loopback_server.LoopbackServer):
    """``seen`` are the paths and requests, ``headers`` those of the last. ``answers`` come first, one each."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.seen: list[tuple[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.answers: list[tuple[int, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        """Its address, for `agents` in [export]."""
        return f"http://127.0.0.1:{self.server_port}"

    def resources(self, path: str) -> list[dict[str, list[str]]]:
        """The attributes of each resource that came to a path, each with all of its values."""
        found = []
        for at, request in self.seen:
            for part in next((value for _, value in request.ListFields()), ()) if at == path else ():
                values: dict[str, list[str]] = {}
                for one in part.resource.attributes:
                    values.setdefault(one.key, []).append(one.value.string_value)
                found.append(values)
        return found


class _Handler(loopback_server.QuietHandler):
    server: Collector

    def do_POST(self) -> None:
        """Record the request and answer it."""
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        request, response = _MESSAGES[self.path]
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((self.path, request.FromString(raw)))
        status, headers, body = (
            self.server.answers.pop(0) if self.server.answers else (200, {}, response().SerializeToString())
        )
        self.send_response(status)
        for name, value in {"Content-Type": "application/x-protobuf", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Collector]:
    """A collector while the block lasts."""
    with loopback_server.serving(Collector()) as made:
        yield made
