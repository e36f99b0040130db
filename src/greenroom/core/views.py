"""Read-only snapshots of the scheduler, for status and explanation; never used to decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .facts import SleepTier, State
from .thrash import Circle


@dataclass(frozen=True, slots=True)
class InstanceView:
    model: str
    state: State
    generation: int
    devices: tuple[str, ...]
    reserved_mib: Mapping[str, int]
    measured_mib: Mapping[str, int]
    host_mib: int
    in_flight: int
    since_s: float  # in this state
    idle_s: float | None  # None while busy or not ready
    level: int  # sleep level when asleep
    expected_s: float | None  # until the transition under way ends


@dataclass(frozen=True, slots=True)
class ModelView:
    id: str
    state: State
    pinned: bool
    queued: int
    oldest_s: float  # age of the oldest waiting request
    eta_s: float | None  # estimated wait of a request arriving now; None: cannot be said
    starts: int
    wakes: int
    evictions: int
    failures: int  # in a row
    backoff_s: float  # left of the back-off; 0 = none
    quarantined: bool
    need_mib: int | None
    need_source: str
    up_s: float  # learned cost of a cold start
    sleeps: int
    wake_failures: int
    sleep_levels: tuple[int, ...]  # it may be sent to now
    sleep_off: str  # why it does not sleep, though it may be wanted to; "" = it does, or nobody wants it to
    sleep_costs: tuple[SleepTier, ...]  # every level of its engine, with what was learned of it
    last_error: str
    blocked: str  # why a start cannot succeed as things are; "" = it can
    instances: tuple[InstanceView, ...]
    parallel: int | None = None  # requests in flight at once
    wake_s: float | None = None  # from the level it sleeps at, or from the cheapest; None = it does not sleep
    measured: int = 0  # starts and wakes measured since the server started
    next_state: str = ""  # where its idle ladder takes it next, if nobody comes; "" = nowhere
    next_s: float | None = None
    served_s: float | None = None  # of its turn, while somebody waits for its room
    owed_s: float | None = None
    gated_for: str = ""  # the model that it makes room for
    note: str = ""  # one clause for people
    failing: bool = False  # its latest start, or its engine, went wrong, and it has not been ready since


@dataclass(frozen=True, slots=True)
class StageView:
    """A part of what a waiting model has before it; done at fraction 1."""

    name: str  # gate | drain | sleep | stop | wake | load | slot
    expected_s: float
    fraction: float


@dataclass(frozen=True, slots=True)
class WaiterView:
    request: int
    age_s: float
    is_batch: bool


@dataclass(frozen=True, slots=True)
class QueueView:
    """What one model's requests wait for.  need = held + free + short, where something is short."""

    model: str
    device: str  # where it is short, or goes to; "" = nowhere
    need_mib: int
    held_mib: int
    free_mib: int
    short_mib: int
    victims: tuple[str, ...]
    eta_s: float | None  # of the first one, until its model is ready for it
    reason: str  # a sentence
    stages: tuple[StageView, ...]
    waiters: tuple[WaiterView, ...]  # the oldest ones
    waiting: int  # all of them


@dataclass(frozen=True, slots=True)
class PlaceView:
    """What one instance holds."""

    model: str
    state: State
    generation: int
    level: int
    held_mib: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TurnView:
    """A move that brings a model in."""

    model: str
    began_at: float
    victims: tuple[str, ...]
    first_at: float | None  # arrival of the first client who waits for it


@dataclass(frozen=True, slots=True)
class DeviceView:
    id: str
    kind: str
    name: str
    capacity_mib: int
    headroom_mib: int
    reserved_mib: int
    used_mib: int | None  # None: not measured
    outside_mib: int
    holder: str
    lane: str  # the model whose transition holds the device's lane, or ""
    available_mib: int | None = None  # host RAM: what could really be taken at the last sample


@dataclass(frozen=True, slots=True)
class View:
    at: float
    devices: tuple[DeviceView, ...]
    models: tuple[ModelView, ...]
    queue_length: int
    queue_oldest_s: float
    thrash: tuple[Circle, ...] = ()  # models that take turns on a device at the moment
