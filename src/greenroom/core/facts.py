"""The vocabulary of the scheduler core: values, events that come in, actions that go out.

Everything here is a plain, slotted value.  Memory is MiB, time is seconds on one monotonic clock
(`at` in every event); the core never reads a clock itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

RequestId: TypeAlias = int


class State(StrEnum):
    """Where one instance is (see docs/glossary.md)."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GOING_TO_SLEEP = "going_to_sleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    STOPPING = "stopping"
    FAILED = "failed"  # stopped, and backing off before the next start


class Priority(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


class Cause(StrEnum):
    """Why an instance left the path it was on; what the core does next depends on it."""

    NONE = ""
    EXITED = "exited"  # ended by itself (crash, wrong arguments, ...)
    OOM = "out-of-memory"  # the device was full: more room may help
    STARTUP_MEMORY = "startup-memory"  # refused itself at start: wanted a share that was not free
    TIMEOUT = "timeout"  # did not become ready / awake in time
    MISCONFIGURED = "misconfigured"  # can never work as configured: not retried
    STALLED = "stalled"  # answered nobody any more and was ended
    UNKILLABLE = "unkillable"  # did not go away after SIGKILL; its memory stays booked
    SLEEP_FAILED = "sleep-failed"  # could not be put to sleep, and was ended
    WAKE_FAILED = "wake-failed"  # could not be woken, or answered wrongly afterwards, and was ended


class Outcome(StrEnum):
    """How an admitted request ended; exactly one per admission."""

    OK = "ok"
    CLIENT_GONE = "client_gone"
    ENGINE_BROKE = "engine_broke"  # after the first byte: the client saw an error, never a clean end
    CUT = "cut"  # ended by order (forced unload, shutdown)


class Operation(StrEnum):
    """What an operator can ask of a model."""

    LOAD = "load"
    UNLOAD = "unload"
    SLEEP = "sleep"
    WAKE = "wake"
    PIN = "pin"
    UNPIN = "unpin"


# ---------------------------------------------------------------------------------------------- facts about the world


@dataclass(frozen=True, slots=True)
class Device:
    """A pool of memory with a budget: a GPU, a MIG instance, host RAM, or one declared by the operator."""

    id: str
    kind: str  # gpu | mig | ram | declared
    capacity_mib: int  # what may be planned with, before headroom
    headroom_mib: int = 0
    total_mib: int | None = None  # physical size when known; None = capacity. Outside use counts only where it eats into capacity
    name: str = ""
    measured: bool = True  # False: booked only, nobody can read it (probe: none)


@dataclass(frozen=True, slots=True)
class SleepTier:
    """What one sleep level of an engine costs and leaves behind (prior; measured values replace it)."""

    level: int
    residue_mib: int  # per device, while asleep
    host_mib: int  # host RAM, while asleep
    sleep_s: float
    wake_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """A hard constraint above the budget (scheduling.md §10)."""

    id: str
    members: frozenset[str]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """One model as the scheduler sees it."""

    id: str
    devices: tuple[str, ...]  # candidates
    need_mib: int | None = None  # per device when ready; None = unknown, the whole device is booked
    base_mib: int | None = None  # declared or estimated, whatever was measured since
    need_floor_mib: int = 0  # learning never lowers the need below this (e.g. an exact estimate on host RAM)
    need_source: str = "unknown"  # declared | flags | estimated | measured | unknown
    host_mib: int = 0  # host RAM when ready, booked on the device "ram" if there is one (for models not on "ram" itself)
    devices_count: int = 1
    parallel: int = 8  # requests in flight at once
    queue_limit: int = 256  # waiting requests; beyond: 429
    pinned: bool = False
    preload: bool = False  # load at start when it fits without evicting anybody
    on_conflict: str = "refuse"  # refuse | wait: what happens to a request that would need a pinned model's memory
    priority: Priority = Priority.INTERACTIVE
    sleep: tuple[SleepTier, ...] = ()  # the tiers its engine can do; empty: it stops instead
    doze: SleepTier | None = None  # what its engine falls to by itself when idle; it cannot be told to
    no_sleep: str = ""  # why it has no tiers, one clause for people
    sleep_after_s: float | None = None
    ttl_s: float | None = None
    up_s: float = 2.0  # prior of a cold start
    down_s: float = 0.2  # prior of a stop
    lone_start: bool = False  # profiles memory at start: never beside another start on its device
    misconfigured: str = ""  # not empty: every request is refused with this sentence, nothing is started
    digest: str = ""  # identity of its definition: a reload restarts it only when this changes
    ttl_auto: bool = False  # how long it stays idle is found from its own gaps; `ttl_s` is None
    aliases: tuple[str, ...] = ()  # what else it is called, for who reads the past; requests come with its id


@dataclass(frozen=True, slots=True)
class Policy:
    """Every constant of the scheduling rules; units in the names, defaults from measurement (docs/decisions)."""

    quantum_factor: float = 2.0  # k: a resident is owed k x the price of replacing it
    patience_s: float = 5.0
    late_min_s: float = 10.0
    late_factor: float = 4.0
    hold_cap: float = 0.25  # an idle resident is kept at most this share of the swap price
    hold_floor_s: float = 0.1
    hold_floor_share: float = 0.025
    hold_prior_s: float = 0.1
    hold_gain: float = 0.5
    hold_slack_s: float = 0.02
    gaps_kept: int = 16
    half_life_s: float = 600.0
    cost_ewma: float = 0.3
    exact_victims_max: int = 10
    min_residency_s: float = 0.0
    ttl_worth: float = 60.0  # ttl: auto; so many seconds idle are worth one second of a start that somebody waits for
    ttl_gaps_min: int = 10  # fewer gaps seen than this say nothing yet
    room_wait_s: float = 30.0  # how long a request waits for outside memory to go away before it is refused
    queue_limit: int = 4096  # waiting requests of all models together
    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    crash_forget_s: float = 60.0  # ready this long: earlier crashes are forgotten
    quarantine_ooms: int = 3
    quarantine_window_s: float = 600.0
    oom_growth: float = 1.1
    sleep_faults_max: int = 2  # failed or wrong sleeps and wakes in the window; then the model stops instead
    sleep_faults_window_s: float = 86400.0
    early_sleep_s: float | None = 20.0  # a first sleep is rehearsed after so much idle time; None = never
    ram_floor_mib: int = 1024  # of the host RAM that is really available, never taken by a sleeper's copy
    drain_timeout_s: float | None = None  # None: a swap waits for requests in flight as long as they last
    learn_margin: float = 1.05
    learn_stable_s: float = 10.0
    learn_requests: int = 3
    outside_samples: int = 3  # samples in a row before a growth of outside memory counts
    harm_check: float = 0.0  # share of the expected harm to the victim's clients that must have been waited; 0 = off
    lanes: int = 1  # memory-changing transitions on a device at once; 2 = a second start beside one that evicts nobody
    second_lane_ratio: float = 1.4  # lanes=2 closes again when a start beside another takes this much longer
    settle_rounds_max: int = 256
    story_kept: int = 64


@dataclass(frozen=True, slots=True)
class Setup:
    """All that configuration says, as one value; a reload is another one."""

    devices: tuple[Device, ...]
    models: tuple[Model, ...]
    groups: tuple[Group, ...] = ()
    policy: Policy = field(default_factory=Policy)

    def names(self) -> dict[str, str]:
        """All that models are called by -> the id; an id comes before another model's alias."""
        aliases = {alias: model.id for model in self.models for alias in model.aliases}
        return aliases | {model.id: model.id for model in self.models}


# ------------------------------------------------------------------------------------------------------------- events


# Values are never changed after they were made.  Those made for every request are not *declared* frozen: that would
# cost a microsecond each, a tenth of what a request costs in all.


@dataclass(slots=True)
class RequestArrived:
    at: float
    request: RequestId
    model: str
    priority: Priority | None = None  # None: the model's own
    deadline_s: float | None = None  # refuse at once when the estimated wait exceeds it
    client: str = ""  # who asks (key name or address), for reports


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client left while its request waited (no effect on an admitted one: that *finishes*)."""

    at: float
    request: RequestId


@dataclass(slots=True)
class RequestFinished:
    at: float
    request: RequestId
    outcome: Outcome = Outcome.OK


@dataclass(frozen=True, slots=True)
class RequestLost:
    """The engine went away before the first byte of the answer: back to the queue once, then refused."""

    at: float
    request: RequestId
    why: str = ""


@dataclass(frozen=True, slots=True)
class RequestQuiet:
    """A tunnel (WebSocket) fell silent or spoke again; silent ones do not keep a model from leaving."""

    at: float
    request: RequestId
    quiet: bool


@dataclass(frozen=True, slots=True)
class InstanceReported:
    """A transition ended, or an instance changed by itself.  `state` is READY, ASLEEP or STOPPED.

    STOPPED is only said when the whole process tree is reaped and the device shows the memory back
    (or the bounded wait for it is over: then `leaked_mib` tells the difference).
    """

    at: float
    model: str
    generation: int
    state: State
    took_s: float | None = None
    measured_mib: Mapping[str, int] = field(default_factory=dict)  # device -> MiB held by this instance now
    host_mib: int | None = None
    cause: Cause = Cause.NONE
    why: str = ""  # one sentence for people; may hold the last log lines
    exit_code: int | None = None
    leaked_mib: int = 0
    wanted_mib: int | None = None  # what the engine said it wanted, when it refused itself
    level: int = 0  # with ASLEEP
    samples: tuple[MemoryMeasured, ...] = ()  # with STOPPED and ASLEEP: its devices, measured after it left
    unfit_levels: tuple[int, ...] = ()  # with READY: sleep levels this instance must not use
    phases: Mapping[str, float] = field(default_factory=dict)  # of a start: when each ended, seconds from its spawn; told, never decided by


@dataclass(frozen=True, slots=True)
class MemoryMeasured:
    """One sample of a device: all use, and what each of our instances holds of it."""

    at: float
    device: str
    used_mib: int
    own_mib: Mapping[str, int]  # model -> MiB
    holder: str = ""  # who holds most of the outside part, for messages ("pid 4711 (python)")
    available_mib: int | None = None  # host RAM: what can really be taken now without swapping


@dataclass(frozen=True, slots=True)
class OperatorAsked:
    """An operator's wish; `request` is a fresh id under which the core answers with Done or Refuse."""

    at: float
    request: RequestId
    model: str
    operation: Operation
    force: bool = False
    level: int | None = None


@dataclass(frozen=True, slots=True)
class Ticked:
    """The timer asked for by SetTimer fired."""

    at: float


@dataclass(frozen=True, slots=True)
class SetupChanged:
    at: float
    setup: Setup


@dataclass(frozen=True, slots=True)
class ShutdownAsked:
    """Refuse everything that waits, stop every instance (in-flight ones when they end, or at once with force)."""

    at: float
    force: bool = False


Event: TypeAlias = (
    RequestArrived
    | RequestCancelled
    | RequestFinished
    | RequestLost
    | RequestQuiet
    | InstanceReported
    | MemoryMeasured
    | OperatorAsked
    | Ticked
    | SetupChanged
    | ShutdownAsked
)


# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(slots=True)
class Admit:
    """Forward this request to the model's instance now."""

    request: RequestId
    model: str
    generation: int
    start: str  # hot | wake | cold: what it waited for


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer this waiting request (or operator's wish) with an error."""

    request: RequestId
    status: int  # HTTP status
    code: str  # machine-readable: queue_full, no_room, backing_off, start_failed, start_timeout, unloaded, ...
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """End this admitted request now, with an error to its client; the core waits for its RequestFinished."""

    request: RequestId
    code: str  # unloaded | evicted | shutdown | stalled
    message: str


@dataclass(frozen=True, slots=True)
class Done:
    """An operator's wish is fulfilled."""

    request: RequestId
    message: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    model: str
    generation: int
    devices: tuple[str, ...]
    reserved_mib: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Sleep:
    model: str
    generation: int
    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    model: str
    generation: int
    level: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine: TERM, grace, KILL, reap, wait for the memory; then report STOPPED."""

    model: str
    generation: int
    reason: str
    freed_mib: Mapping[str, int] = field(default_factory=dict)  # device -> MiB expected back


@dataclass(frozen=True, slots=True)
class Verify:
    """A request was lost: look whether this engine still lives; report READY if so, else STOPPED."""

    model: str
    generation: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send Ticked at this time (replaces the earlier timer)."""

    at: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Something worth telling people: one sentence, for `events`, `why` and the log."""

    at: float
    model: str
    kind: str  # started, ready, evicted, stopped, crashed, refused, raised, ...
    text: str
    level: str = "info"  # info | warning


Action: TypeAlias = Admit | Refuse | Cut | Done | Start | Sleep | Wake | Stop | Verify | SetTimer | Tell
