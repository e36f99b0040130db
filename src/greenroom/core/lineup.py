"""The models that wait for a device, kept in three orders, so that a decision never walks all of them.

By since (who becomes late first), by need (who could fit), by pull (who is worth most per second of
switching).  The keys are those of the moment an entry was last ranked: since only ever grows afterwards and
pull drifts within an eighth, so each order is a shortlist to look at, never the last word.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from .entry import Entry

PULL_DRIFT = 0.125  # a model is ranked anew when its pull changed by more than this share


class Lineup:
    """Models with a queue that are not ready."""

    __slots__ = ("_by_need", "_by_pull", "_by_since", "_entries", "_keys")

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._keys: dict[str, tuple[float, int, float]] = {}  # since, need, -pull as ranked
        self._by_since: list[tuple[float, str]] = []
        self._by_need: list[tuple[int, str]] = []
        self._by_pull: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, model: str) -> bool:
        return model in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Rank `entry`, or rank it anew after its queue or its need changed."""
        since, need, pull = entry.since, entry.least_mib, -entry.queue.weight / (entry.up_cost() + 0.05)
        old = self._keys.get(entry.id)
        if old is not None:
            if old[0] == since and old[1] == need and abs(pull - old[2]) <= PULL_DRIFT * -old[2]:
                return
            self.drop(entry)
        self._entries[entry.id] = entry
        self._keys[entry.id] = (since, need, pull)
        insort(self._by_since, (since, entry.id))
        insort(self._by_need, (need, entry.id))
        insort(self._by_pull, (pull, entry.id))

    def drop(self, entry: Entry) -> None:
        keys = self._keys.pop(entry.id, None)
        if keys is None:
            return
        del self._entries[entry.id]
        for order, key in ((self._by_since, keys[0]), (self._by_need, keys[1]), (self._by_pull, keys[2])):
            del order[bisect_left(order, (key, entry.id))]

    def oldest(self) -> Iterator[Entry]:
        """By since, oldest first (as ranked)."""
        for _, name in self._by_since:
            yield self._entries[name]

    def first_since(self) -> float:
        return self._by_since[0][0] if self._by_since else float("inf")

    def since_after(self, at: float) -> float:
        """The first since later than `at`; infinity if there is none."""
        index = bisect_left(self._by_since, (at, chr(0x10FFFF)))
        return self._by_since[index][0] if index < len(self._by_since) else float("inf")

    def smaller_than(self, mib: int) -> int:
        """How many need at most `mib`."""
        return bisect_left(self._by_need, (mib + 1, ""))

    def fitting(self, mib: int, count: int) -> list[Entry]:
        """Those that need at most `mib`: all when they are few, else the `count` that pull most."""
        few = self.smaller_than(mib)
        if few <= 4 * count:
            return [self._entries[name] for _, name in self._by_need[:few]]
        found: list[Entry] = []
        for _, name in self._by_pull:
            if self._keys[name][1] <= mib:
                found.append(self._entries[name])
                if len(found) == count:
                    break
        return found
