"""Spans out of rows: what they say as plain data, and what reaches a collector where the extra is installed."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.model import TracingConfig
from greenroom.ledger import traces as module
from greenroom.ledger.rows import RequestRow, TransitionRow
from greenroom.ledger.store import Ledger
from greenroom.ledger.traces import MissingExtra, Span, Traces, move_of, move_span, request_span, require, target_of
from greenroom.serve.server import Refused, check_tracing

NOW = 1_700_000_000.0
MODEL = "models: {a: {cmd: 'x ${PORT}'}}"


def is_installed() -> bool:
    try:
        require()
    except MissingExtra:
        return False
    return True


needs_extra = pytest.mark.skipif(not is_installed(), reason='the extra is not installed: pip install "greenroom[otel]"')


def a_request(**fields: Any) -> RequestRow:
    known: dict[str, Any] = {"request": 7, "at": NOW, "model": "chat", "generation": 3, "client": "team-a", "priority": "interactive"}
    return RequestRow(**{**known, "path": "/v1/chat/completions", "start": "hot", "status": 200, "duration_s": 2.0, **fields})


def a_move(kind: str = "start", **fields: Any) -> TransitionRow:
    known: dict[str, Any] = {"at": NOW, "model": "chat", "generation": 3, "devices": ("gpu0",), "took_s": 4.0, "ok": True}
    return TransitionRow(**{**known, "kind": kind, **fields})


def values(row: RequestRow) -> list[Any]:
    return [getattr(row, each.name) for each in dataclasses.fields(row)]


def everyone(span: Span) -> Iterator[Span]:
    yield span
    for child in span.children:
        yield from everyone(child)


def by_name(span: Span) -> dict[str, tuple[float, float]]:
    return {each.name: (round(each.begin - NOW, 3), round(each.end - NOW, 3)) for each in everyone(span)}


# ------------------------------------------------------------------ plain data


def test_a_request_that_waited_for_everything() -> None:
    row = a_request(queue_s=1.0, gate_s=2.0, load_s=3.0, wake_s=0.5, first_byte_s=0.25, duration_s=10.0, start="cold")

    span = request_span(row)

    assert by_name(span) == {
        "chat chat": (0.0, 10.0),
        "wait": (0.0, 6.5),
        "wait.queue": (0.0, 1.0),
        "wait.gate": (1.0, 3.0),
        "wait.load": (3.0, 6.0),
        "wait.wake": (6.0, 6.5),
        "relay": (6.5, 10.0),
        "first_byte": (6.5, 6.75),
        "generation": (6.75, 10.0),
    }
    assert {each.name: each.link for each in everyone(span) if each.link} == {"wait.load": ("chat", 3), "wait.wake": ("chat", 3)}
    assert {each.name: each.kind for each in everyone(span) if each.kind != "internal"} == {"chat chat": "server", "relay": "client"}


def test_a_hot_request_has_no_wait() -> None:
    assert list(by_name(request_span(a_request(first_byte_s=0.1)))) == ["chat chat", "relay", "first_byte", "generation"]


def test_who_was_never_admitted_has_no_relay() -> None:
    row = a_request(start="", generation=0, queue_s=2.0, outcome="refused", status=503, code="no_room")

    span = request_span(row)

    assert list(by_name(span)) == ["chat chat", "wait", "wait.queue"]
    assert (span.error, span.attributes["error.type"]) == ("no_room", "no_room")


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({}, "", None),
        ({"outcome": "client_gone", "status": 0}, "", "client_gone"),
        ({"status": 404}, "", "404"),
        ({"outcome": "engine_broke", "status": 502}, "engine_broke", "engine_broke"),
        ({"outcome": "cut"}, "cut", "cut"),
        ({"outcome": "refused", "status": 429, "code": "queue_full"}, "", "queue_full"),
    ],
)
def test_what_counts_as_a_failure(fields: dict[str, Any], error: str, kind: str | None) -> None:
    """A client that leaves, or asks for the wrong thing, is no failure of ours."""
    span = request_span(a_request(**fields))

    assert (span.error, span.attributes.get("error.type")) == (error, kind)


def test_attributes_of_a_request() -> None:
    assert request_span(a_request(tokens_in=5, tokens_out=9, before="embed")).attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "chat",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 9,
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "enduser.id": "team-a",
        "greenroom.request": 7,
        "greenroom.generation": 3,
        "greenroom.priority": "interactive",
        "greenroom.start": "hot",
        "greenroom.outcome": "ok",
        "greenroom.before": "embed",
    }


@pytest.mark.parametrize(("client", "name"), [("10.0.0.7", "client.address"), ("::1", "client.address"), ("grafana", "enduser.id")])
def test_a_client_is_an_address_or_a_key_name(client: str, name: str) -> None:
    assert request_span(a_request(client=client)).attributes[name] == client


def test_other_paths_have_no_operation() -> None:
    span = request_span(a_request(path="/upstream/chat/props"))

    assert span.name == "request chat"
    assert "gen_ai.operation.name" not in span.attributes
    assert "http.route" not in span.attributes


def test_no_span_ends_before_it_begins_or_outside_its_parent() -> None:
    """Rows whose halves do not agree: the data plane's duration is shorter than the core's waits."""

    def check(span: Span) -> None:
        assert span.begin <= span.end
        for child in span.children:
            assert span.begin <= child.begin <= child.end <= span.end
            check(child)

    check(request_span(a_request(queue_s=5.0, load_s=9.0, first_byte_s=3.0, duration_s=1.0)))
    check(request_span(a_request(first_byte_s=-1.0, duration_s=-1.0)))


def test_a_transition() -> None:
    span = move_span(a_move(reason="somebody asked", waiters=2, phases={"weights": 3.5}, mib={"gpu0": 800}))

    assert (span.name, span.begin, span.end, span.error) == ("start chat", NOW, NOW + 4.0, "")
    assert span.attributes["greenroom.phase.weights_s"] == 3.5
    assert span.attributes["greenroom.booked_mib.gpu0"] == 800
    assert move_span(a_move(ok=False, cause="out-of-memory")).error == "out-of-memory"
    assert [move_of(a_move(kind)) for kind in ("start", "wake", "sleep", "stop")] == [("chat", 3), ("chat", 3), None, None]


def test_nothing_names_an_engine() -> None:
    for span in (request_span(a_request(queue_s=1.0, first_byte_s=0.1)), move_span(a_move())):
        assert not any(name.startswith(("server.", "net.")) for each in everyone(span) for name in each.attributes)


def test_where_spans_are_posted() -> None:
    assert {target_of(each) for each in ("http://h:1", "http://h:1/", "http://h:1/v1/traces")} == {"http://h:1/v1/traces"}


# ------------------------------------------------------------------ configuration


def test_tracing_is_off_until_it_is_written() -> None:
    assert load_config_text(MODEL, env={}).tracing is None
    assert load_config_text(f"tracing:\n{MODEL}", env={}).tracing is None
    assert load_config_text(f"tracing: {{}}\n{MODEL}", env={}).tracing == TracingConfig()


def test_tracing_is_read() -> None:
    text = f"tracing: {{endpoint: 'https://otel.lan:4318/', service_name: lab, sample: 0.25}}\n{MODEL}"

    assert load_config_text(text, env={}).tracing == TracingConfig("https://otel.lan:4318", "lab", 0.25)


def test_a_missing_extra_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)

    with pytest.raises(MissingExtra, match=r'pip install "greenroom\[otel\]"'):
        require()
    with pytest.raises(Refused, match=r'pip install "greenroom\[otel\]"'):
        check_tracing(load_config_text(f"tracing: {{}}\n{MODEL}", env={}))
    check_tracing(load_config_text(MODEL, env={}))  # who does not trace needs nothing


# ------------------------------------------------------------------ with the extra


@pytest.fixture(autouse=True)
def _their_log() -> Iterator[None]:
    theirs = logging.getLogger("opentelemetry")
    before = theirs.propagate, list(theirs.handlers)
    yield
    theirs.propagate, theirs.handlers = before


def memory() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    class Kept(InMemorySpanExporter):
        def shutdown(self) -> None: ...  # what was sent is looked at afterwards

    return Kept()


@needs_extra
def test_spans_hang_together() -> None:
    """One trace for each request, and a link from the wait to the start it waited for."""
    exporter = memory()
    traces = Traces(exporter, service_name="lab")
    traces.moved(a_move(at=NOW + 1.0))
    traces.ended([values(a_request(queue_s=1.0, load_s=4.0, first_byte_s=0.5, duration_s=9.0, start="cold", outcome="cut"))])
    traces.close()

    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {"start chat", "chat chat", "wait", "wait.queue", "wait.load", "relay", "first_byte", "generation"}
    names = {span.context.span_id: name for name, span in spans.items()}
    parents = {name: names[span.parent.span_id] if span.parent else None for name, span in spans.items()}
    assert parents == {
        "start chat": None,
        "chat chat": None,
        "wait": "chat chat",
        "wait.queue": "wait",
        "wait.load": "wait",
        "relay": "chat chat",
        "first_byte": "relay",
        "generation": "relay",
    }
    assert [link.context for link in spans["wait.load"].links] == [spans["start chat"].context]
    assert len({span.context.trace_id for span in spans.values()}) == 2
    assert spans["chat chat"].kind.name == "SERVER"
    assert spans["chat chat"].status.status_code.name == "ERROR"
    assert spans["start chat"].start_time == int((NOW + 1.0) * 1e9)
    assert spans["wait"].resource.attributes["service.name"] == "lab"


@needs_extra
def test_a_start_of_long_ago_is_not_linked() -> None:
    """The instance woke since, and that wake is not known."""
    exporter = memory()
    traces = Traces(exporter)
    traces.moved(a_move(at=NOW - 100.0))
    traces.ended([values(a_request(wake_s=1.0))])
    traces.close()

    assert [len(span.links) for span in exporter.get_finished_spans() if span.name == "wait.wake"] == [0]


@needs_extra
def test_a_share_of_the_requests() -> None:
    exporter = memory()
    chances = iter([0.1, 0.9, 0.2, 0.5])
    traces = Traces(exporter, sample=0.5, chance=lambda: next(chances))
    traces.ended([values(a_request(request=number)) for number in range(4)])
    traces.moved(a_move("stop"))
    traces.close()

    told = [span.attributes.get("greenroom.request") for span in exporter.get_finished_spans() if span.parent is None]
    assert told == [0, 2, None]


@needs_extra
def test_rows_come_from_a_ledger() -> None:
    """As a listener of the real one, request and all."""
    from greenroom.proxy.record import Record

    exporter = memory()
    traces = Traces(exporter)
    ledger = Ledger(None)
    ledger.listeners.append(traces)
    ledger.ended(Record("chat", "json", "POST", "/v1/embeddings", "k", 429, "refused", "", 0, 0, 0, None, 0.1, request=5))
    ledger.close()
    traces.close()

    (span,) = exporter.get_finished_spans()
    assert (span.name, span.attributes["http.response.status_code"]) == ("embeddings chat", 429)


@needs_extra
def test_a_failing_collector_is_told_once_and_hinders_nobody(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        tries = 0

        def export(self, spans: Sequence[Any]) -> Any:
            self.tries += 1
            raise ConnectionError("away")

        def shutdown(self) -> None:
            raise ConnectionError("away")

    monkeypatch.setattr(module, "BATCH_MAX", 1)
    broken = Broken()
    traces = Traces(broken, "http://h/v1/traces")
    traces.ended([values(a_request()) for _ in range(5)])
    traces.ended([["no", "row"]])
    traces.close()

    assert broken.tries >= 5
    said = [record.getMessage() for record in caplog.records if record.name == module.__name__ and record.levelno >= logging.WARNING]
    assert len(said) == 2  # the collector's, and the bad row's
    assert said[0] == "traces: they cannot be sent to http://h/v1/traces (ConnectionError); requests are not affected (told once)"


@needs_extra
def test_a_collector_that_hangs_costs_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded, taking a row never waits, and closing is bounded too."""

    class Hanging:
        free = threading.Event()

        def export(self, spans: Sequence[Any]) -> Any:
            self.free.wait()

        def shutdown(self) -> None:
            self.free.set()

    monkeypatch.setattr(module, "BATCH_MAX", 1)
    monkeypatch.setattr(module, "QUEUED_MAX", 10)
    traces = Traces(Hanging())
    traces.ended([values(a_request())])
    time.sleep(0.1)
    began = time.monotonic()
    traces.ended([values(a_request()) for _ in range(100)])
    took = time.monotonic() - began
    traces.close(0.2)

    assert traces.dropped >= 89
    assert took < 5.0
    assert time.monotonic() - began < 2.0


@needs_extra
def test_spans_arrive_over_http() -> None:
    """OTLP as a collector reads it."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    posted: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        traces = Traces.to(f"http://127.0.0.1:{server.server_port}", service_name="lab", sample=1.0)
        traces.ended([values(a_request(first_byte_s=0.1))])
        traces.close()
        server.shutdown()

    ((path, body),) = posted
    (of_service,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert path == "/v1/traces"
    assert {span.name for span in of_service.scope_spans[0].spans} == {"chat chat", "relay", "first_byte", "generation"}


@needs_extra
def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    """The SDK's own complaints are not heard, ours once, and the end is bounded."""
    traces = Traces.to("http://127.0.0.1:9", service_name="lab", sample=1.0)
    traces.ended([values(a_request())])
    began = time.monotonic()
    traces.close(0.5)
    traces._thread.join(2.0)

    assert time.monotonic() - began < 3.0
    assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == [module.__name__]
