"""Everything the core knows of one model: its facts, its instance, its queue, its costs, its failures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .costs import Costs
from .facts import Model, Operation, Policy, SleepTier, State
from .queue import ModelQueue
from .residency import HOME, LAWFUL, Instance, UnlawfulMove
from .words import misconfigured


@dataclass(slots=True)
class Wish:
    """What an operator still waits for."""

    request: int
    operation: Operation
    level: int | None = None  # of a sleep, where the operator has named one


@dataclass(slots=True)
class Entry:
    model: Model
    instance: Instance = field(default_factory=Instance)
    queue: ModelQueue = field(default_factory=ModelQueue)
    costs: Costs = field(default_factory=Costs)
    wishes: list[Wish] = field(default_factory=list)
    story: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=64))
    need_mib: int | None = None  # per device: declared or estimated, then learned
    need_source: str = "unknown"
    pinned: bool = False
    held_off: bool = False  # an operator unloaded it: a pin does not bring it back by itself
    retire: str = ""  # not empty: drain and stop, its definition changed or is gone
    successor: Model | None = None  # with `retire`: what it becomes afterwards; None = it is removed
    order: str = ""  # what an operator's wish drives it to: "" | unload | sleep
    order_level: int | None = None
    failures: int = 0  # in a row
    failing: bool = False  # its latest start, or its engine, went wrong, and it has not been ready since
    backoff_until: float = 0.0
    oom_tries: int = 0  # retries of the out-of-memory ladder used in this attempt
    displaced: frozenset[str] = frozenset()  # who was sent away for the attempt to bring it in
    ooms: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    quarantined: bool = False
    unkillable: bool = False  # its process does not end even after SIGKILL; its memory stays booked
    last_error: str = ""
    exit_code: int | None = None
    peak_mib: int = 0  # largest measured per device in this generation
    peak_at: float = 0.0
    told_mib: int = 0  # growth above the book was last told at this size
    served: int = 0  # requests finished in this generation
    measured_mib: dict[str, int] = field(default_factory=dict)
    host_mib: int = 0
    starts: int = 0
    wakes: int = 0
    evictions: int = 0
    sleeps: int = 0
    wake_failures: int = 0
    wake_ooms: int = 0  # in a row: wakes that found no room
    sleep_faults: deque[float] = field(default_factory=lambda: deque(maxlen=16))  # when a sleep or a wake went wrong
    sleep_off: str = ""  # not empty: why it stops instead of sleeping, until an operator or a reload says otherwise
    ladder_due: float = float("inf")  # when its idle ladder is looked at next

    @classmethod
    def of(cls, model: Model, policy: Policy) -> Entry:
        entry = cls(model=model, need_mib=model.need_mib, need_source=model.need_source, pinned=model.pinned)
        entry.costs.gaps = deque(maxlen=policy.gaps_kept)
        entry.story = deque(maxlen=policy.story_kept)
        return entry

    @property
    def id(self) -> str:
        return self.model.id

    @property
    def configured(self) -> Model:
        """As the configuration has it now, also while an engine of the old definition leaves."""
        return self.successor or self.model

    @property
    def state(self) -> State:
        return self.instance.state

    @property
    def barred(self) -> str:
        """Why no start of it is tried; "" when nothing speaks against one, or when its engine is there."""
        why = self.model.misconfigured
        return misconfigured(self.id, why) if why and self.state in HOME else ""

    def move(self, to: State, now: float) -> None:
        """Change the instance's state; anything not in the table is a bug told with its story."""
        instance = self.instance
        if to not in LAWFUL[instance.state]:
            raise UnlawfulMove(self.id, instance.state, to, [text for _, text in self.story])
        if instance.state is State.READY or (instance.state is State.DRAINING and to is not State.READY):
            instance.left_ready_at = now
        instance.state, instance.since = to, now
        if to in HOME:
            instance.devices, instance.level, instance.suspect = (), 0, False
            instance.unfit, instance.rehearsing = (), False
            instance.in_flight.clear()
            instance.quiet.clear()
            instance.cut.clear()

    @property
    def least_mib(self) -> int:
        """The least it may be started with, per device: a bound to throw out who cannot start anyway."""
        if self.need_mib is None:
            return 0
        return self.need_mib if self.model.base_mib is None else min(self.need_mib, self.model.base_mib)

    @property
    def since(self) -> float:
        """Since when it waits for a device: a model that was just resident queues again behind the others."""
        return max(self.queue.first().arrived_at, self.instance.left_ready_at)

    @property
    def admits(self) -> bool:
        """Whether a waiting request may go to its engine now."""
        instance = self.instance
        return instance.state is State.READY and not instance.suspect and not self.order and not self.retire

    @property
    def tiers(self) -> tuple[SleepTier, ...]:
        """The sleep levels it may be sent to now."""
        if self.sleep_off:
            return ()
        unfit = self.instance.unfit
        return tuple(tier for tier in self.model.sleep if tier.level not in unfit) if unfit else self.model.sleep

    def tier(self, level: int) -> SleepTier | None:
        """A level of its engine, also one that it only falls to by itself."""
        if not level:
            return None
        tier = next((tier for tier in self.model.sleep if tier.level == level), None)
        return tier or (self.model.doze if self.model.doze is not None and self.model.doze.level == level else None)

    def up_cost(self) -> float:
        """Expected seconds to become ready from where it is."""
        instance = self.instance
        if instance.state in (State.ASLEEP, State.WAKING, State.GOING_TO_SLEEP) and (tier := self.tier(instance.level)):
            return self.costs.waking(tier)
        return self.costs.up(self.model)

    def idle_for(self, now: float) -> float | None:
        if self.instance.state not in (State.READY, State.ASLEEP) or self.instance.busy or self.queue:
            return None
        return now - self.instance.idle_at
