"""A real OTLP receiver, over HTTP and gRPC: decodes what OpenTelemetry's exporters send with OpenTelemetry's own protocol definitions."""

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class Received:
    """A span as it came. ``resource`` and ``attributes``: plain values by their names. ``kind`` and ``status``: the numbers of the protocol."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    message: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]


@dataclass
class Receiver:
    """What arrived: ``spans``, and the ``paths`` and ``headers`` of HTTP requests."""

    port: int = 0
    spans: list[Received] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    """What HTTP requests are answered."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, request: ExportTraceServiceRequest) -> None:
        spans = [
            Received(
                span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name, span.kind, span.start_time_unix_nano, span.end_time_unix_nano,
                span.status.code, span.status.message, _values(span.attributes), _values(block.resource.attributes),
                [(event.name, _values(event.attributes)) for event in span.events],
            )
            for block in request.resource_spans for scope in block.scope_spans for span in scope.spans
        ]  # fmt: skip
        with self.lock:
            self.spans += spans

    def named(self, name: str) -> list[Received]:
        with self.lock:
            return [span for span in self.spans if span.name == name]

    def traces(self) -> dict[str, list[Received]]:
        with self.lock:
            by_id: dict[str, list[Received]] = {}
            for span in self.spans:
                by_id.setdefault(span.trace_id, []).append(span)
            return by_id


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


class HttpReceiver(Receiver):
    """Listens on a free port of 127.0.0.1 while it is a context."""

    def __enter__(self) -> "HttpReceiver":
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                receiver.paths.append(self.path)
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                if receiver.status == 200:
                    receiver.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(receiver.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class GrpcReceiver(Receiver):
    """Listens on a free port of 127.0.0.1 while it is a context."""

    def __enter__(self) -> "GrpcReceiver":
        receiver = self

        class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
                receiver.take(request)
                return ExportTraceServiceResponse()

        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"
