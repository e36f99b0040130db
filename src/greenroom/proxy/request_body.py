"""The body of a request: kept as it comes, read for its model, rewritten for its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from . import bodies, errors
from .admission import ModelRoute, Refusal
from .bodies import FormPeek
from .limits import KIB, MIB
from .rerank import RerankPlan
from .rerank import plan as plan_rerank
from .spool import Patched, SpoolFile
from .targets import Kind, Route
from .upstream import Body

if TYPE_CHECKING:
    from .client import Client


OWN_BODY_BYTES_MAX: Final = 64 * KIB  # of a request that no engine gets: some of those routes ask for no key


class RequestBody:
    """The part of an Exchange that holds a body until the first byte of the answer: in memory, or spooled."""

    __slots__ = ("body", "client", "content_type", "form", "holds_form", "plan", "route", "size", "source", "spool")

    def __init__(self, client: Client, route: Route | None) -> None:
        self.client = client
        self.route = route  # None: the head itself was refused
        self.content_type = b""
        self.holds_form = False
        self.body: bytes | bytearray = b""
        self.size = 0  # of the body, as it came
        self.spool: SpoolFile | None = None
        self.form: FormPeek | None = None
        self.source: Body | None = None  # what the engine gets, when it differs from what came
        self.plan: RerankPlan | None = None

    def take(self, data: bytes) -> Refusal | None:
        """Keep a piece of the body; a refusal when it is too much."""
        server = self.client.server
        self.size = size = self.size + len(data)
        spool = self.spool
        if spool is None and size <= server.spool_after_bytes:
            return self._take_in_memory(data)
        if size > self.size_max():
            return errors.body_too_large(self.size_max(), self.size_limit())
        if spool is None:
            if not self._may_spool(data):
                return self._take_in_memory(data)
            spool = self.spool = server.spool.open()
            if self.holds_form:
                self.form = FormPeek(self.content_type)
                self.form.feed(self.body)
            spool.append(self.body)
            self._forget_memory()
        spool.append(data)
        if self.form is not None:
            self.form.feed(data)
        return None

    def size_max(self) -> int:
        name = self.size_limit()
        size_max: int = getattr(self.client.server.limits, name) * MIB if name else OWN_BODY_BYTES_MAX
        return size_max

    def size_limit(self) -> str:
        """The limit that bounds it, by its name; "" = one of greenroom's own."""
        route = self.route
        if route is not None and route.kind is not Kind.INFERENCE:
            return "upload_mib_max" if route.kind is Kind.UPSTREAM else ""
        if route is not None and route.rerank:
            return "rerank_mib_max"
        return "upload_mib_max" if self._may_spool(b"") else "json_mib_max"

    def _may_spool(self, data: bytes) -> bool:
        """JSON that must be read for its model stays in memory, also where it is labelled as a form."""
        if self.spool is not None:
            return True
        route = self.route
        if route is not None and route.kind is Kind.INFERENCE:
            if not self.holds_form:
                return False
            return self.content_type[:1] in b"mM" or (self.body or data).lstrip(b" \t\r\n")[:1] != b"{"
        return True

    def _take_in_memory(self, data: bytes) -> Refusal | None:
        if not self.body:
            self.body = data
            return None
        stats = self.client.server.stats
        if isinstance(self.body, bytes):
            self.body = bytearray(self.body)
            stats.memory_bytes_now += len(self.body)
        self.body += data
        stats.memory_bytes_now += len(data)
        if stats.memory_bytes_now > self.client.server.memory_bytes_max:
            message = (
                f"Bodies under way already hold {self.client.server.limits.memory_mib_max} MiB of memory "
                "(limits.memory_mib_max): send this one again when they are done."
            )
            return Refusal(503, "memory_full", message, retry_after_s=5.0)
        return None

    def _forget_memory(self) -> None:
        if isinstance(self.body, bytearray):
            self.client.server.stats.memory_bytes_now -= len(self.body)
        self.body = b""

    def forget_body(self) -> None:
        self._forget_memory()
        self.source = None
        if self.spool is not None:
            self.spool.close()
            self.spool = None

    def peek(self) -> bodies.Peek:
        if self.form is not None:
            self.form.finish()
            return bodies.Peek(self.form.model, self.form.stream)
        return bodies.peek(self.body, self.content_type) if self.holds_form else bodies.peek_json(self.body)

    def was_form(self) -> bool:
        """Whether what came, and is whole, was a form."""
        return self.form is not None or (self.holds_form and self.size > 0 and bodies.is_form_body(self.body, self.content_type))

    def rewrite(self, route: Route, model: ModelRoute, asked: str) -> None:
        """Apply the model's filters and its engine's rerank dialect to the body."""
        if self.was_form():
            self._rewrite_form(model)
            return
        body = self.body
        if bodies.needs_rewrite(model, asked):
            self.source = body = bodies.rewrite_json(body, model, asked)
        if route.rerank:
            plan = plan_rerank(body, route.path, model.engine)
            if isinstance(plan, Refusal):
                raise bodies.BadBody(plan)
            self.plan = plan
            self.source = plan.body

    def rewrite_far(self, model: ModelRoute, asked: str) -> None:
        """What a peer gets: the model's filters alone, and its name there in the one place where a name is looked for.

        Always, because its reader may find another `model` in a body than ours did.
        """
        if self.was_form():
            self._rewrite_form(model)
        else:
            self.source = bodies.rewrite_json(self.body, model, asked)

    def far_type(self) -> bytes:
        """The Content-Type of `rewrite_far`: how the body was read here, whatever its label said."""
        return bodies.form_type(self.content_type) if self.was_form() else b"application/json"

    def _rewrite_form(self, model: ModelRoute) -> None:
        name = model.use_model_name
        if name is None:
            return
        form = self.form
        if form is None:
            form = FormPeek(self.content_type)
            form.feed(self.body)
            form.finish()
        if form.model == name:
            return
        start, end, put = form.patch(name)
        if self.spool is not None:
            self.source = Patched(self.spool, start, end, put)
        else:
            self.source = bytes(self.body[:start]) + put + bytes(self.body[end:])

    def outgoing(self) -> tuple[Body, int]:
        body: Body = self.source if self.source is not None else self.spool if self.spool is not None else self.body
        return body, len(body) if isinstance(body, (bytes, bytearray)) else body.size
