"""What one instance is doing, and which changes of it are lawful.

Transitions are data, so that documents can draw them and tests can walk them.  A change that is not
in the table is a bug of the core, raised with the instance's story attached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .facts import State

LAWFUL: dict[State, dict[State, str]] = {
    State.STOPPED: {State.STARTING: "somebody needs it"},
    State.FAILED: {State.STOPPED: "the back-off is over", State.STARTING: "an operator insists"},
    State.STARTING: {
        State.READY: "it can serve",
        State.STOPPING: "nobody waits for it any more, or an operator said so",
        State.STOPPED: "its start failed",
        State.FAILED: "its start failed",
    },
    State.READY: {
        State.DRAINING: "somebody else is owed its room",
        State.GOING_TO_SLEEP: "room needed, or idle",
        State.STOPPING: "room needed, or idle",
        State.ASLEEP: "it fell asleep by itself",
        State.STOPPED: "it died",
        State.FAILED: "it died again",
    },
    State.DRAINING: {
        State.READY: "nobody needs its room any more",
        State.GOING_TO_SLEEP: "drained",
        State.STOPPING: "drained, or cut by order",
        State.STOPPED: "it died",
        State.FAILED: "it died again",
    },
    State.GOING_TO_SLEEP: {
        State.ASLEEP: "asleep",
        State.STOPPING: "an operator said so",
        State.STOPPED: "it died",
        State.FAILED: "it died again",
    },
    State.ASLEEP: {
        State.WAKING: "somebody needs it",
        State.STOPPING: "its residue or its host RAM is needed, or idle",
        State.STOPPED: "it died",
        State.FAILED: "it died again",
    },
    State.WAKING: {
        State.READY: "it can serve",
        State.ASLEEP: "the wake failed and it sleeps on",
        State.STOPPING: "an operator said so",
        State.STOPPED: "it died",
        State.FAILED: "it died again",
    },
    State.STOPPING: {State.STOPPED: "gone, and its memory is back", State.FAILED: "gone, and backing off"},
}

HOME = frozenset({State.STOPPED, State.FAILED})
SERVING = frozenset({State.READY, State.DRAINING})
RISING = frozenset({State.STARTING, State.WAKING})
FALLING = frozenset({State.GOING_TO_SLEEP, State.STOPPING})


class UnlawfulMove(AssertionError):
    """The core asked for a change that the table does not know."""

    def __init__(self, model: str, before: State, after: State, story: Iterable[str]) -> None:
        super().__init__(f"{model}: {before} -> {after} is not a lawful move. Story:\n  " + "\n  ".join(story))


@dataclass(slots=True)
class Instance:
    """The state of a model's engine; memory is in the Book, requests waiting for it in its queue."""

    state: State = State.STOPPED
    generation: int = 0
    since: float = 0.0  # entered `state`
    devices: tuple[str, ...] = ()
    level: int = 0  # sleep level while going to sleep, asleep or waking
    in_flight: set[int] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)  # subset of in_flight: silent tunnels
    cut: set[int] = field(default_factory=set)  # subset of in_flight: told to end, not ended yet
    ready_at: float = 0.0
    idle_at: float = 0.0  # ready, or the last in-flight request ended
    unused: bool = False  # no request was taken in since idle_at
    left_ready_at: float = float("-inf")
    start: str = "cold"  # what the requests waiting for this start waited for: cold | wake
    proven: bool = False  # it has answered somebody since its start or wake
    suspect: bool = False  # a request was lost; no admissions until the host has looked
    beside: bool = False  # its start ran beside another one
    unfit: tuple[int, ...] = ()  # sleep levels this one must not use
    rehearsing: bool = False  # its first sleep, made early: it is woken again at once

    @property
    def busy(self) -> bool:
        return len(self.in_flight) > len(self.quiet)
