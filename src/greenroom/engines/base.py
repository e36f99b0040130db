"""What an engine is, as pure description: how to launch it, when it is ready, what its words mean.

One dialect a file beside this one.  Nothing here touches the machine, except `estimate`, which may read
the headers of model files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from greenroom.config.model import ModelConfig
from greenroom.core.facts import Cause, SleepTier


@dataclass(frozen=True, slots=True)
class DeviceRef:
    """A device as an engine must be told of it."""

    id: str  # greenroom's name: gpu0, ram, ...
    kind: str  # gpu | mig | ram | declared
    vendor: str = ""  # nvidia | amd | ""
    uuid: str = ""  # GPU-... or MIG-...
    index: int | None = None  # bus order
    total_mib: int = 0


@dataclass(frozen=True, slots=True)
class Box:
    """The container that a launch makes, for whoever has to find, stop and remove it."""

    runtime: str  # podman | docker
    name: str
    image: str
    labels: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()  # the rest of its `run` command, image and command included
    pull: str = "missing"  # missing | always | never
    pull_s_max: float = 1800.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A command ready to be executed: no shell, ports and devices filled in."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # on top of the supervisor's own environment
    host: str
    port: int
    stop_argv: tuple[str, ...] = ()  # may hold ${PID}
    cwd: str | None = None
    term_again_s: float | None = None  # it may lose a TERM: say it again after this long, until it is gone
    detached: bool = False  # a container client: the engine is not in our process tree
    secrets: tuple[str, ...] = ()  # values never to be shown (masked in logs and status)
    box: Box | None = None  # the container it makes, when greenroom makes one


@dataclass(frozen=True, slots=True)
class Readiness:
    """How to see that an engine can serve.  Polled by host.probes; also the liveness check afterwards."""

    path: str | None  # None: an open port is enough
    fallback_paths: tuple[str, ...] = ("/v1/models",)  # tried when `path` answers 404/405
    headers: tuple[tuple[str, str], ...] = ()  # the engine's own key
    loading_statuses: frozenset[int] = frozenset({503})
    base_path: str = ""
    warmup_path: str | None = None
    warmup_body: bytes = b""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a model will need, before it was ever measured."""

    device_mib: int | None  # per device; None = cannot be said
    host_mib: int = 0
    source: str = "unknown"  # flags | estimated | unknown
    detail: str = ""  # for `check` and `why`: "weights 4,096 + KV 512 + overhead 300 MiB"
    weights_mib: int | None = None  # all weights together, where files on this host tell
    in_ram: bool = False  # its device is the host's RAM


@dataclass(frozen=True, slots=True)
class Ending:
    """What an exit meant."""

    cause: Cause
    summary: str  # one sentence: what, with the telling log line
    wanted_mib: int | None = None
    free_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request of a recipe.  Any 2xx is success; what the body says is never looked at."""

    path: str
    method: str = "POST"
    body: bytes = b""  # JSON
    optional: bool = False  # an engine that does not know the path (404, 405, 501) has nothing to do here


@dataclass(frozen=True, slots=True)
class AsleepCheck:
    """A GET that tells whether it sleeps: `value` at `field` of a JSON answer (dots go deeper).  It must not wake it."""

    path: str
    field: str = "is_sleeping"
    value: object = True


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed question whose answer is compared after a wake.  `pick` finds what is compared: text, or numbers."""

    path: str
    body: bytes
    pick: str  # dotted path into the JSON answer; `*` takes all items of a list


@dataclass(frozen=True, slots=True)
class SleepRecipe:
    """How one sleep level of one engine is entered and left.  Calls are made in order, at zero requests in flight."""

    level: int
    sleep: tuple[Call, ...]
    wake: tuple[Call, ...]
    check: AsleepCheck | None = None
    verify: bool = False  # compare the canary after this wake
    # A wake that ran out of memory may be called again, and the canary is compared then whatever `verify` says.
    repeatable: bool = True  # False: the engine would die of it, or be wrong unseen
    unfit: str = ""  # why this version of the engine must not use this level; then there are no calls


@dataclass(frozen=True, slots=True)
class Costs:
    """Priors until measured, seconds."""

    up_s: float
    down_s: float
    tiers: tuple[SleepTier, ...] = ()
    doze: SleepTier | None = None  # what it falls to by itself


LOGGED_PHASES = ("listen", "weights", "compile", "graphs")  # of a start, in no fixed order; greenroom itself sees the others


class Engine(Protocol):
    """One dialect, bound to one model's configuration."""

    kind: str  # llama_server | vllm | ...
    config: ModelConfig

    def launch(self, port: int, devices: Sequence[DeviceRef], generation: int = 0) -> Launch:
        """`generation` names a container; a process does not need it."""
        ...

    def readiness(self) -> Readiness: ...

    def estimate(self, devices: Sequence[DeviceRef]) -> Estimate: ...

    def costs(self, estimate: Estimate) -> Costs: ...

    def parallel(self) -> int: ...

    def lone_start(self) -> bool:
        """It profiles memory while starting: no other start on its device meanwhile."""

    def pinned_devices(self) -> tuple[str, ...]:
        """UUIDs or indices the operator set by hand in `env`; () = greenroom chooses."""

    def contexts(self, devices: Sequence[DeviceRef]) -> tuple[tuple[int, int], ...]:
        """(tokens, MiB that each device gets back) of smaller contexts than that of its command; () = cannot be said."""

    def missing(self) -> str:
        """A sentence, without its name, when it can never start as configured (no such file, ...), else ""."""

    def is_ready_hint(self, line: str) -> bool:
        """Whether a log line says that it is about ready: probe at once."""

    def phase_of(self, line: str) -> str:
        """The phase of a start that this log line ends, one of LOGGED_PHASES; "" = none.

        Of several lines the last counts, of `listen` the first.
        """
        ...

    def ending(self, exit_code: int | None, log_tail: Sequence[str]) -> Ending: ...

    def metrics_call(self) -> Call | None:
        """Where it tells figures of its own in Prometheus text, if asking neither wakes it nor keeps it awake; None = nowhere."""

    # sleep and wake; an engine that cannot sleep has no tiers in `costs`, so no recipe is ever asked for

    def no_sleep(self) -> str:
        """A clause that tells why it cannot sleep as configured ("--enable-sleep-mode is not given"); "" when it can."""

    def sleep_notes(self) -> tuple[str, ...]:
        """Sentences for `check`: what it could do and does not, or what may go wrong."""

    def control_headers(self) -> tuple[tuple[str, str], ...]:
        """The key that its sleep routes want, where it is another than the one for requests."""

    def version_call(self) -> Call | None:
        """Asked once after its start; the answer's `version` chooses the recipe.  None: the recipe does not depend on it."""

    def sleep_recipe(self, level: int, version: tuple[int, ...]) -> SleepRecipe: ...

    def canaries(self) -> tuple[Canary, ...]:
        """Fixed questions, one for each kind of model; the first that is answered is the model's own."""

    def dozes(self) -> AsleepCheck | None:
        """How to see that it has fallen asleep by itself; None = it never does."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two launches the same for learned footprints."""

    files: tuple[tuple[str, int, int], ...] = field(default=())  # path, size, mtime_ns
    argv_digest: str = ""
