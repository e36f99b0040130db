"""The requests that wait for one model: arrival order, O(1) for every operation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

BATCH_WEIGHT = 0.25  # a batch request counts this much when models compete for a device


@dataclass(slots=True)
class Waiting:
    request: int
    arrived_at: float
    weight: float = 1.0
    retried: bool = False  # was lost once already
    ghost: bool = False  # no client: a preload, a pinned start, an operator's load
    quiet_ghost: bool = False  # a ghost that never evicts anybody (preload, restore)


class ModelQueue:
    __slots__ = ("_ghosts", "_items", "arrived_sum", "weight")

    def __init__(self) -> None:
        self._items: OrderedDict[int, Waiting] = OrderedDict()
        self._ghosts = 0
        self.weight = 0.0
        self.arrived_sum = 0.0  # of weight x arrival, so that the sum of ages needs no walk

    def __len__(self) -> int:
        return len(self._items)

    def __bool__(self) -> bool:
        return bool(self._items)

    def __contains__(self, request: int) -> bool:
        return request in self._items

    def items(self) -> Iterable[Waiting]:
        """In arrival order."""
        return self._items.values()

    @property
    def clients(self) -> int:
        """Waiting requests that somebody sent."""
        return len(self._items) - self._ghosts

    @property
    def ghostly(self) -> bool:
        """Whether something without a client waits here."""
        return self._ghosts > 0

    @property
    def only_quiet(self) -> bool:
        """Nobody here may cost anybody else their place."""
        return self._ghosts == len(self._items) and all(item.quiet_ghost for item in self._items.values())

    def add(self, item: Waiting, *, front: bool = False) -> None:
        """At the end; or, for one that comes back, before all that arrived after it."""
        earlier = []
        while front and self._items and self.first().arrived_at <= item.arrived_at:
            earlier.append(self._items.popitem(last=False))
        self._items[item.request] = item
        if front:
            self._items.move_to_end(item.request, last=False)
        for request, other in reversed(earlier):
            self._items[request] = other
            self._items.move_to_end(request, last=False)
        self._ghosts += item.ghost
        self.weight += item.weight
        self.arrived_sum += item.weight * item.arrived_at

    def first(self) -> Waiting:
        return next(iter(self._items.values()))

    def pop_first(self) -> Waiting:
        _, item = self._items.popitem(last=False)
        self._forget(item)
        return item

    def remove(self, request: int) -> Waiting | None:
        item = self._items.pop(request, None)
        if item is not None:
            self._forget(item)
        return item

    def drain(self) -> list[Waiting]:
        items = list(self._items.values())
        self._items.clear()
        self._ghosts, self.weight, self.arrived_sum = 0, 0.0, 0.0
        return items

    def arrive_anew(self, at: float) -> None:
        """All of them count from `at`."""
        for item in self._items.values():
            item.arrived_at = at
        self.arrived_sum = self.weight * at

    def _forget(self, item: Waiting) -> None:
        self._ghosts -= item.ghost
        if self._items:
            self.weight -= item.weight
            self.arrived_sum -= item.weight * item.arrived_at
        else:
            self.weight = self.arrived_sum = 0.0

    def age_sum(self, now: float) -> float:
        """Weighted seconds that everybody here has waited together."""
        return self.weight * now - self.arrived_sum
