"""OpenTelemetry traces out of the ledger's rows.  The only home of opentelemetry, which is an extra: greenroom[otel].

    traces = Traces.to("http://127.0.0.1:4318", service_name="greenroom", sample=1.0)
    ledger.listeners.append(traces)          # rows, on the writer's thread; taking one costs it a microsecond
    traces.close()

    request chat                             what a client waited for, from its arrival to its end
      wait                                   only where it waited
        wait.queue, wait.gate, wait.load, wait.wake      the latter two link to the start or wake they waited for
      relay                                  from its admission
        first_byte, generation
    start chat | wake | sleep | stop         a trace of its own

`request_span` and `move_span` say what is made of a row, as plain data; `Traces` makes it so on a thread of its own.
What comes faster than it can be told is dropped and counted.  Nothing that goes wrong here reaches who called.
"""

from __future__ import annotations

import ipaddress
import logging
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from greenroom import __version__

from .packs import Pack
from .rows import RequestRow, TransitionRow

log = logging.getLogger(__name__)

PACKAGES: Final = 'pip install "greenroom[otel]"'
PATH: Final = "/v1/traces"
QUEUED_MAX: Final = 8192  # rows taken and not yet told
BATCH_MAX: Final = 512  # spans sent at once
SEND_EVERY_S: Final = 2.0
SEND_S: Final = 5.0  # one batch, tries included
BREATHS: Final = 3.0  # after each row, times what it took: the loop needs the interpreter more than we do
MOVES_MAX: Final = 1024  # starts and wakes that requests can be linked to
SLACK_S: Final = 0.5  # a start may be seen to end so long after the request it was for went on
CLOSE_S: Final = 3.0
CHARS_MAX: Final = 1024  # of one attribute

# What a path asks for, in OpenTelemetry's words; the keys are the routes.
OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
FAILED: Final = frozenset({"engine_broke", "cut"})  # outcomes that are no one's wish
WAITS: Final = ("queue", "gate", "load", "wake")

Attribute: TypeAlias = str | int | float | bool | Sequence[str]
Move: TypeAlias = tuple[str, int]  # model and generation of a start or wake


class MissingExtra(Exception):
    """The packages are not installed; one sentence."""


# ---------------------------------------------------------------------------------------------------- spans as data


@dataclass(frozen=True, slots=True)
class Span:
    """One span to be; times are unix seconds."""

    name: str
    begin: float
    end: float
    kind: str = "internal"  # internal | server | client
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""  # why it failed; "" = it did not
    link: Move | None = None  # waited for this
    children: tuple[Span, ...] = ()


def request_span(row: RequestRow) -> Span:
    """A request with what it waited for.  Rows know sums: waits stand in a fixed order, whatever their true one was."""
    end = row.at + max(0.0, row.duration_s)
    wait = _wait_span(row, end)
    children = [] if wait is None else [wait]
    if row.start:
        children.append(_relay_span(row, min(row.at + row.waited_s, end), end))
    failed = row.outcome in FAILED or row.status >= 500
    return Span(
        name=f"{OPERATIONS.get(row.path, 'request')} {row.model}".rstrip(),
        begin=row.at,
        end=end,
        kind="server",
        attributes=_request_attributes(row),
        error=(row.code or row.outcome) if failed else "",
        children=tuple(children),
    )


def _request_attributes(row: RequestRow) -> dict[str, Attribute]:
    optional: dict[str, Attribute | None] = {
        "gen_ai.operation.name": OPERATIONS.get(row.path),
        "gen_ai.request.model": row.model or None,
        "gen_ai.usage.input_tokens": row.tokens_in,
        "gen_ai.usage.output_tokens": row.tokens_out,
        "http.route": row.path if row.path in OPERATIONS else None,
        "url.path": row.path or None,
        "http.response.status_code": row.status or None,
        ("client.address" if _is_address(row.client) else "enduser.id"): row.client or None,
        "error.type": _error_type(row),
        "greenroom.request": row.request,
        "greenroom.generation": row.generation or None,
        "greenroom.priority": row.priority,
        "greenroom.start": row.start or None,
        "greenroom.outcome": row.outcome,
        "greenroom.before": row.before or None,
    }
    return {name: value for name, value in optional.items() if value is not None}


def _error_type(row: RequestRow) -> str | None:
    if row.code:
        return row.code
    if row.outcome != "ok":
        return row.outcome
    return str(row.status) if row.status >= 400 else None


def _is_address(client: str) -> bool:
    try:
        ipaddress.ip_address(client)
    except ValueError:
        return False
    return True


def _wait_span(row: RequestRow, end: float) -> Span | None:
    parts: list[Span] = []
    begin = row.at
    for cause, waited_s in zip(WAITS, (row.queue_s, row.gate_s, row.load_s, row.wake_s), strict=True):
        if waited_s > 0.0:
            until = min(begin + waited_s, end)
            link = (row.model, row.generation) if cause in ("load", "wake") and row.generation else None
            parts.append(Span(f"wait.{cause}", begin, until, attributes={"gen_ai.request.model": row.model}, link=link))
            begin = until
    if not parts:
        return None
    return Span("wait", row.at, begin, attributes={"gen_ai.request.model": row.model}, children=tuple(parts))


def _relay_span(row: RequestRow, begin: float, end: float) -> Span:
    children: tuple[Span, ...] = ()
    if row.first_byte_s is not None:
        first = min(begin + max(0.0, row.first_byte_s), end)
        children = (Span("first_byte", begin, first), Span("generation", first, end))
    error = row.outcome if row.outcome in FAILED else ""
    attributes: dict[str, Attribute] = {"gen_ai.request.model": row.model, "greenroom.generation": row.generation}
    return Span("relay", begin, end, kind="client", attributes=attributes, error=error, children=children)


def move_span(row: TransitionRow) -> Span:
    """A start, sleep, wake or stop."""
    optional: dict[str, Attribute | None] = {
        "gen_ai.request.model": row.model,
        "greenroom.generation": row.generation,
        "greenroom.transition": row.kind,
        "greenroom.devices": tuple(row.devices),
        "greenroom.sleep_level": row.level or None,
        "greenroom.reason": row.reason or None,
        "greenroom.waiters": row.waiters,
        "greenroom.evicted_for": row.evicted_for or None,
        "error.type": row.cause or (None if row.ok else "failed"),
        **{f"greenroom.phase.{name}_s": seconds for name, seconds in row.phases.items()},
        **{f"greenroom.booked_mib.{device}": mib for device, mib in row.mib.items()},
    }
    return Span(
        name=f"{row.kind} {row.model}",
        begin=row.at,
        end=row.at + max(0.0, row.took_s),
        attributes={name: value for name, value in optional.items() if value is not None},
        error="" if row.ok else (row.cause or "failed"),
    )


def move_of(row: TransitionRow) -> Move | None:
    """What requests that waited for it link to."""
    return (row.model, row.generation) if row.kind in ("start", "wake") else None


# ---------------------------------------------------------------------------------------------------- made with the SDK


def require() -> None:
    """Raises MissingExtra where the packages are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as exc:
        raise MissingExtra(f"`tracing` needs packages that are not installed ({exc.name}): {PACKAGES}, or remove `tracing`") from exc


def target_of(endpoint: str) -> str:
    """Where spans are posted, of a collector's address as people write it."""
    base = endpoint.rstrip("/")
    return base if base.endswith(PATH) else base + PATH


class Traces:
    """A listener of the ledger.  `exporter` is an OpenTelemetry SpanExporter."""

    def __init__(
        self,
        exporter: Any,
        where: str = "the collector",
        *,
        service_name: str = "greenroom",
        sample: float = 1.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        require()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider, sampling

        _quiet()
        self.dropped = 0  # rows, because they came faster than they could be told
        self._sample, self._chance = sample, chance
        self._exporter, self._where = exporter, where
        self._provider = TracerProvider(
            sampler=sampling.ALWAYS_ON,  # chosen here, before anything is made
            resource=Resource.create({"service.name": service_name, "service.version": __version__}),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_attribute_length=CHARS_MAX),
        )
        # Not the SDK's BatchSpanProcessor: it starts a thread in every process that we fork, before that is an engine.
        self._made: list[Any] = []  # on our thread only
        keep = {"on_end": lambda _, span: self._made.append(span)}
        self._provider.add_span_processor(type("Keep", (SpanProcessor,), keep)())
        self._tracer = self._provider.get_tracer("greenroom", __version__)
        self._moves: OrderedDict[Move, tuple[Any, float]] = OrderedDict()  # -> its span's context, its end
        self._rows: deque[Sequence[Any] | TransitionRow] = deque()
        self._some = threading.Event()
        self._sent_at = time.monotonic()
        self._closing = False
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    @classmethod
    def to(cls, endpoint: str, *, service_name: str, sample: float) -> Traces:
        """Sent as OTLP over HTTP.  Raises MissingExtra."""
        require()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        target = target_of(endpoint)
        return cls(OTLPSpanExporter(endpoint=target, timeout=SEND_S), target, service_name=service_name, sample=sample)

    # ------------------------------------------------------------------ called on the ledger's thread

    def ended(self, requests: Sequence[Sequence[Any]]) -> None:
        """Requests that ended: the values that RequestRows are made from."""
        for values in requests:
            if self._sample >= 1.0 or self._chance() < self._sample:
                self._take(values)

    def packed(self, pack: Pack) -> None:
        """Many requests at once; as `ended`."""
        chosen = range(len(pack)) if self._sample >= 1.0 else [one for one in range(len(pack)) if self._chance() < self._sample]
        for values in pack.values(chosen):
            self._take(values)

    def moved(self, row: TransitionRow) -> None:
        """A transition that ended; these are few, and all are told."""
        self._take(row)

    def _take(self, row: Sequence[Any] | TransitionRow) -> None:
        if self._closing or len(self._rows) >= QUEUED_MAX:
            self.dropped += 1
            return
        self._rows.append(row)
        if not self._some.is_set():
            self._some.set()

    # ------------------------------------------------------------------ called on any thread

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, for a bounded time."""
        self._closing = True
        self._some.set()
        self._thread.join(timeout_s)
        try:
            self._exporter.shutdown()  # ends a try that is under way
        except Exception:
            log.debug("the sender of traces could not be ended", exc_info=True)

    # ------------------------------------------------------------------ our own thread

    def _work(self) -> None:
        while True:
            self._some.wait(max(0.0, self._sent_at + SEND_EVERY_S - time.monotonic()) if self._made else None)
            self._some.clear()
            closing = self._closing  # before the rows are looked at: what was taken by then is told
            while self._rows:
                began = time.perf_counter()
                self._tell(self._rows.popleft())
                if not self._closing:
                    time.sleep(BREATHS * (time.perf_counter() - began))
                if len(self._made) >= BATCH_MAX:
                    self._send()
            if self._made and (closing or time.monotonic() >= self._sent_at + SEND_EVERY_S):
                self._send()
            if self.dropped:
                self._warn("dropped", f"some requests are left out: more ended than can be sent to {self._where}; lower tracing.sample")
            if closing:
                return

    def _send(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans, self._made[:] = tuple(self._made), ()
        try:
            why = "" if self._exporter.export(spans) is SpanExportResult.SUCCESS else "it does not take them"
        except Exception as exc:
            why = type(exc).__name__
        if why:
            self._warn("unsent", f"they cannot be sent to {self._where} ({why})")
        self._sent_at = time.monotonic()

    def _warn(self, what: str, sentence: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("traces: %s; requests are not affected (told once)", sentence)

    def _tell(self, row: Sequence[Any] | TransitionRow) -> None:
        try:
            if isinstance(row, TransitionRow):
                span = move_span(row)
                made = self._make(span, None)
                if move := move_of(row):
                    self._moves[move] = (made.get_span_context(), span.end)
                    self._moves.move_to_end(move)
                    if len(self._moves) > MOVES_MAX:
                        self._moves.popitem(last=False)
            else:
                self._make(request_span(RequestRow(*row)), None)
        except Exception as exc:  # a bug of ours costs spans, never the ledger
            self._warn("fault", f"an inner fault cost some of them ({type(exc).__name__}: {exc})")

    def _make(self, span: Span, parent: Any) -> Any:
        from opentelemetry import trace
        from opentelemetry.context import Context

        made = self._tracer.start_span(
            span.name,
            context=Context() if parent is None else trace.set_span_in_context(parent, Context()),
            kind=trace.SpanKind[span.kind.upper()],
            attributes=span.attributes,
            links=self._links(span),
            start_time=_nanoseconds(span.begin),
        )
        for child in span.children:
            self._make(child, made)
        if span.error:
            made.set_status(trace.StatusCode.ERROR, span.error)
        made.end(end_time=_nanoseconds(span.end))
        return made

    def _links(self, span: Span) -> list[Any]:
        """To the start or wake it waited for, unless what is known of that model ended before the wait began."""
        from opentelemetry.trace import Link

        known = self._moves.get(span.link) if span.link is not None else None
        return [Link(known[0])] if known is not None and known[1] >= span.begin - SLACK_S else []


def _quiet() -> None:
    """The SDK tells of each failure, and Python prints what no handler takes; ours is told once."""
    theirs = logging.getLogger("opentelemetry")
    theirs.propagate = False
    if not theirs.handlers:
        theirs.addHandler(logging.NullHandler())


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)


__all__: Sequence[str] = ("OPERATIONS", "MissingExtra", "Span", "Traces", "move_of", "move_span", "request_span", "require", "target_of")
