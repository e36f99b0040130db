"""What the control plane needs of the running server; `greenroom.serve` provides it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from greenroom.core.facts import Operation
from greenroom.core.views import QueueView, View


@dataclass(frozen=True, slots=True)
class Result:
    """How an operator's wish ended: `status` 200 (done), 202 (under way), 404, 409, 503 ..."""

    status: int
    message: str
    code: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceExtra:
    """What only the host knows of a running instance."""

    pid: int | None
    port: int | None
    phase: str = ""  # of its start, under way


class Facade(Protocol):
    """What only looks changes nothing: no model is started, woken or kept by it."""

    version: str
    boot_id: str  # another one after every start

    def now(self) -> float:
        """Unix seconds."""

    def stamp(self) -> object:
        """Another one whenever something may have changed."""

    def uptime_s(self) -> float: ...

    def view(self) -> View: ...

    def peers_status(self) -> list[dict[str, Any]]:
        """How each peer does, without asking it."""

    def extra(self, model: str) -> InstanceExtra: ...

    def static(self, model: str) -> dict[str, Any]:
        """aliases, engine, ttl_s, description ... of a model; secrets masked."""

    def resolve(self, name: str) -> str | None:
        """id or alias -> id."""

    def near(self, name: str) -> Sequence[str]:
        """Names that look like an unknown one, for `did you mean`."""

    async def operate(self, model: str, operation: Operation, *, force: bool, level: int | None, wait_s: float) -> Result:
        """Ask for it; wait at most `wait_s` for the end, then answer 202."""

    def why(self, model: str) -> Sequence[tuple[float, str]]:
        """(unix time, sentence): the model's story, oldest first."""

    def story(self, model: str) -> Sequence[dict[str, Any]]:
        """The same as {at, text, cause, refs}; `refs`: other models that it names."""

    def present(self, model: str) -> tuple[str, Sequence[str]]:
        """(what the model does now and why, a sentence; the models that it names)."""

    def queue(self) -> Sequence[QueueView]:
        """Every model that clients wait for, longest first."""

    def client_of(self, request: int) -> str:
        """Key name or address of an open request."""

    def outside_by(self, holder: str) -> Sequence[dict[str, Any]]:
        """{pid, name} of who holds a device's outside memory, as the core names it."""

    def rates(self) -> Mapping[str, dict[str, Any]]:
        """Model -> {value, unit} of the last seconds."""

    def headline(self) -> dict[str, Any] | None:
        """{text, link, severity} of the worst advice there is."""

    def advice_count(self) -> int:
        """How many things there are to change, as far as that was worked out."""

    def advice(self) -> dict[str, Any]:
        """The last that was found; never waits for the next."""

    def cancel(self, request: int) -> Result:
        """End a waiting or running request; its client is told so."""

    async def requests(
        self,
        *,
        since: float | None,
        model: str | None,
        outcome: str | None,
        waited_over_s: float | None,
        cursor: str,
        limit: int,
    ) -> dict[str, Any]:
        """{now, requests, cursor}; raises ValueError for a cursor that no page gave."""

    async def timeline(self, minutes: float) -> dict[str, Any]:
        """{now, from, spans, waits, swaps}."""

    async def history(self, model: str) -> dict[str, Any]:
        """{starts, footprint, day}."""

    def log_tail(self, model: str, lines: int) -> Sequence[str]:
        """Newest engine log lines, oldest first, secrets masked; "" as model = greenroom's own log."""

    def log_follow(self, model: str) -> AsyncIterator[str]: ...

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """One subscriber: {"id", "at" (unix s), "kind", "model", "level", "text"}; `kind: "dropped"` with `count` when it was too slow."""

    async def metrics(self, *, engines: bool) -> str:
        """Prometheus text; `engines`: with what engines that serve tell of themselves.  Nothing is started, woken or kept by it."""

    def recent(self, limit: int) -> Sequence[dict[str, Any]]:
        """The newest events, oldest first, in the shape of `events()`: what a late or returning subscriber missed."""
