"""What the control plane needs of the running server; `greenroom.serve` provides it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from greenroom.core.facts import Operation
from greenroom.core.views import View


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


class Facade(Protocol):
    version: str

    def uptime_s(self) -> float: ...

    def view(self) -> View: ...

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

    def log_tail(self, model: str, lines: int) -> Sequence[str]:
        """Newest engine log lines, oldest first, secrets masked; "" as model = greenroom's own log."""

    def log_follow(self, model: str) -> AsyncIterator[str]: ...

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """One subscriber: {"id", "at" (unix s), "kind", "model", "level", "text"}; `kind: "dropped"` with `count` when it was too slow."""

    async def metrics(self, *, engines: bool) -> str:
        """Prometheus text; `engines`: with what engines that serve tell of themselves.  Nothing is started, woken or kept by it."""

    def recent(self, limit: int) -> Sequence[dict[str, Any]]:
        """The newest events, oldest first, in the shape of `events()`: what a late or returning subscriber missed."""
