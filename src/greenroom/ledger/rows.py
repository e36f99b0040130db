"""What the ledger remembers of a running server, row by row.

Times `at` are unix seconds; durations are seconds.  No row holds a prompt, an answer or a key, only the key's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(slots=True)  # not frozen: that would cost four times as much to make, and whole days of them are read
class RequestRow:
    """One request, from its arrival to its end.  The waits add up to the time before its admission."""

    request: int  # the shell's number, unique within a boot
    at: float  # arrival
    model: str
    generation: int  # of the instance that served it; 0 = none did
    client: str  # name of the key, or the address
    priority: str  # interactive | batch
    path: str
    queue_s: float = 0.0  # others had the device, or all its slots were taken
    gate_s: float = 0.0  # its victims finished what they had in flight, and left
    load_s: float = 0.0  # its model was started
    wake_s: float = 0.0  # its model was woken
    first_byte_s: float | None = None  # from the admission
    duration_s: float = 0.0  # from the arrival to the end
    tokens_in: int | None = None  # as the engine counted them; None = it did not say
    tokens_out: int | None = None
    start: str = ""  # hot | wake | cold; "" = never admitted
    outcome: str = "ok"  # ok | client_gone | engine_broke | cut | refused
    status: int = 0  # HTTP, as told to the client; 0 = nothing was
    code: str = ""  # of a refusal: queue_full, no_room, ...; `peer:NAME` where a peer was asked
    before: str = ""  # the model that was served last on its device before this one's; "" = itself, or nobody

    @property
    def waited_s(self) -> float:
        return self.queue_s + self.gate_s + self.load_s + self.wake_s


@dataclass(frozen=True, slots=True)
class TransitionRow:
    """A start, sleep, wake or stop, once it has ended."""

    at: float  # its beginning
    model: str
    generation: int
    kind: str  # start | sleep | wake | stop
    devices: tuple[str, ...]
    took_s: float
    ok: bool
    level: int = 0
    reason: str = ""  # why it was asked for, one sentence
    cause: str = ""  # of a failure: a core Cause
    why: str = ""  # of a failure, one sentence
    mib: Mapping[str, int] = field(default_factory=dict)  # booked per device at its end
    waiters: int = 0  # requests that waited for it when it began
    evicted_for: str = ""  # with sleep and stop: the model that needed the room; "" = nobody did (idle, operator, ...)
    phases: Mapping[str, float] = field(default_factory=dict)  # of a start: spawn, listen, weights, compile, graphs, ready, first_answer


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One look at a device."""

    at: float
    device: str
    reserved_mib: int
    used_mib: int | None
    outside_mib: int
    own_mib: Mapping[str, int] = field(default_factory=dict)


STARTED: Final = "began"  # the kind of a sentence that is not the core's: greenroom itself started


@dataclass(frozen=True, slots=True)
class TellRow:
    """One sentence of the core."""

    at: float
    model: str
    kind: str
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event of the core with its actions, as plain JSON values: what a replay is made from."""

    at: float
    clock: float  # the monotonic time in the event
    kind: str  # the event's class
    model: str  # "" = of no single one
    event: Mapping[str, Any]
    actions: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class BootRow:
    """A server start, or a reload: the settings that hold from then on."""

    boot: int
    at: float
    clock: float
    version: str
    setup: Mapping[str, Any]  # core.facts.Setup as plain JSON values
    marks: bool = False  # the journal of its run tells wherever a scheduler began
