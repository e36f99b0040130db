"""The seam between the data plane and the scheduler's shell: ask, be admitted or refused, report the end.

The data plane never decides.  It asks once per request; answers come as calls on the Waiter, possibly
before `ask` returns.  Every admission ends by exactly one of `finish` or `lost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from greenroom.core.facts import Outcome

# Made for every request, so not declared frozen (a microsecond each); never changed after they were made.


@dataclass(slots=True)
class Wish:
    """What a request wants.  `asked_name` is the id or alias the client wrote; `model` the resolved id."""

    model: str
    asked_name: str
    path: str
    client: str = ""  # key name or peer address
    batch: bool = False
    deadline_s: float | None = None
    hops: int = 0  # greenrooms it has passed, of a model that peers serve
    glance: bool = False  # a page's file: served as long as the model is there, and no use of it


@dataclass(frozen=True, slots=True)
class Far:
    """What is different about a request that a peer answers."""

    peer: str
    route: ModelRoute  # how its body is rewritten for there
    hops: int  # told to the peer
    response_s: float | None  # longest wait for the head of its answer
    stall_s: float | None  # longest silence within it


@dataclass(slots=True)
class Grant:
    """Where to send the request."""

    model: str
    host: str  # address of the engine
    port: int
    generation: int  # pooled connections belong to (host, port, generation)
    start: str  # hot | wake | cold
    waited_ms: int
    base_path: str = ""  # path prefix of the engine's URL ("" or "/x", no trailing slash)
    secret_headers: tuple[tuple[bytes, bytes], ...] = ()  # the engine's own key, when it has one
    wire: Any = None  # the data plane's own: what it derived from the address, once a grant
    far: Far | None = None  # a peer answers, not an engine of ours


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class Waiter(Protocol):
    """What the data plane gives to be called back on; calls come on the event loop's thread."""

    request: int  # its number, told before any call; 0 = it was never asked for

    def admitted(self, grant: Grant) -> None: ...

    def refused(self, refusal: Refusal) -> None: ...

    def cut(self, code: str, message: str) -> None:
        """End the admitted request with an error now, then call `finish(Outcome.CUT)`."""


class Ticket(Protocol):
    """One asked request, until its end."""

    def cancel(self) -> None:
        """The client left before the admission."""

    def finish(self, outcome: Outcome, status: int, bytes_out: int, first_byte_s: float | None) -> None:
        """The admitted request ended; `first_byte_s` counts from the admission."""

    def lost(self, why: str) -> None:
        """No byte came and the engine's connection died: admitted again once, or refused (502)."""

    def quiet(self, is_quiet: bool) -> None:
        """A tunnel fell silent or spoke again."""

    def alive(self) -> None:
        """A byte came from the engine, or it took one (called at most a few times a second)."""

    def held(self) -> None:
        """The engine is not read at present, because the client does not read: its silence is our doing (called as often)."""

    def progress(self) -> str:
        """For people, while waiting: `loading, about 12 s` or `queued behind agent-32b, about 40 s`."""


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """What the data plane must know of one model to route and rewrite; replaced as a whole on reload."""

    id: str
    aliases: tuple[str, ...] = ()
    engine: str = "generic"  # llama_server | vllm | sglang | tei | generic: which dialect its rerank speaks
    use_model_name: str | None = None
    strip_params: tuple[str, ...] = ()
    set_params: Mapping[str, Any] = field(default_factory=dict)
    set_params_by_id: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unlisted: bool = False
    name: str = ""
    description: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    keepalive: bool = True
    owner: str = "greenroom"  # for listings
    is_remote: bool = False  # no engine of ours serves it
    may_travel: bool = False  # a peer may answer: it is remote, or its peers help out


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything the data plane routes by."""

    models: Mapping[str, ModelRoute]  # by id
    names: Mapping[str, str]  # every id and alias (and setParamsByID key) -> id
    default_model: str | None = None
    include_aliases_in_list: bool = False
    upstream_ignore_paths: tuple[str, ...] = ()
    control_words: frozenset[str] = frozenset()  # last segments, lower case, of the sleep and wake calls that models declare
    created: int = 0  # unix time for listings


class FarTicket(Ticket, Protocol):
    """The ticket of a request that was admitted to a peer."""

    def answered(self, status: int, retry_after: bytes) -> str:
        """The head of its answer came.  "": relay it; else why not: give the connection up and call `lost`."""

    def timed_out(self, limit_s: float) -> str:
        """Nothing came, or was taken, for so long; the reason, to be passed to `lost`."""


class Admissions(Protocol):
    def ask(self, wish: Wish, waiter: Waiter) -> Ticket: ...

    def is_ready(self, model: str) -> bool:
        """Whether a request would be served without a start (for paths that must not wake a model)."""

    def state_of(self, model: str) -> str:
        """The model's state, for listings."""
