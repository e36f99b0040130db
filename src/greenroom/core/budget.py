"""The memory book: who holds how much of each device, and what is left.

One copy of the truth: reservations live here and nowhere else.  Outside memory (other programs) is kept
apart from our own drift, and counts only where it eats into what we may plan with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .facts import Device


@dataclass(slots=True)
class Pool:
    """One device: its budget, what is booked on it, what was last measured."""

    device: Device
    booked_mib: int = 0
    holders: dict[str, int] = field(default_factory=dict)  # model -> MiB
    outside_mib: int = 0
    used_mib: int | None = None
    holder: str = ""
    high_samples: int = 0  # samples in a row with more booked than the budget holds
    available_mib: int | None = None  # host RAM: what could really be taken at the last sample
    held_then_mib: int = 0  # what our engines really held of their bookings at that sample

    @property
    def budget_mib(self) -> int:
        return self.device.capacity_mib - self.device.headroom_mib - self.outside_mib

    @property
    def most_mib(self) -> int:
        """What could ever be planned here, were nobody else on the device."""
        return self.device.capacity_mib - self.device.headroom_mib

    @property
    def free_mib(self) -> int:
        return self.device.capacity_mib - self.device.headroom_mib - self.outside_mib - self.booked_mib

    def takes(self, mib: int, floor_mib: int) -> bool:
        """Whether a sleeper's copy may grow by `mib`: room in the book, and really there above the floor."""
        return self.spare_mib(floor_mib) >= mib

    def spare_mib(self, floor_mib: int) -> int:
        """MiB that sleepers' copies may still take; negative when there is less than the floor."""
        if self.available_mib is None:
            return self.free_mib
        promised = max(0, self.booked_mib - self.held_then_mib)  # booked, and not taken yet
        return min(self.free_mib, self.available_mib - promised - floor_mib)

    def outside_counted_mib(self, outside_mib: int) -> int:
        spare = max(0, (self.device.total_mib or self.device.capacity_mib) - self.device.capacity_mib)
        return max(0, outside_mib - spare)


@dataclass(slots=True)
class Book:
    pools: dict[str, Pool] = field(default_factory=dict)
    holdings: dict[str, dict[str, int]] = field(default_factory=dict)  # model -> device -> MiB

    def of(self, model: str) -> Mapping[str, int]:
        return self.holdings.get(model, {})

    def set(self, model: str, mib: Mapping[str, int]) -> None:
        """Replace what `model` holds by `mib` (device -> MiB) on all devices at once."""
        for device, old in self.holdings.pop(model, {}).items():
            pool = self.pools[device]
            pool.booked_mib -= old
            del pool.holders[model]
        kept = {device: amount for device, amount in mib.items() if amount > 0 and device in self.pools}
        for device, amount in kept.items():
            pool = self.pools[device]
            pool.booked_mib += amount
            pool.holders[model] = amount
        if kept:
            self.holdings[model] = kept

    def fits(self, mib: Mapping[str, int], model: str) -> bool:
        """Whether `model` could hold `mib` instead of what it holds now."""
        held = self.of(model)
        pools = self.pools
        return all(device not in pools or pools[device].free_mib + held.get(device, 0) >= amount for device, amount in mib.items())

    def replace_devices(self, devices: tuple[Device, ...], lived_on: Collection[str] = ()) -> None:
        """Take over new budgets; a device that still holds somebody, or on which somebody lives who holds nothing, stays."""
        wanted = {device.id: device for device in devices}
        for name, pool in list(self.pools.items()):
            if name in wanted:
                pool.device = wanted.pop(name)
            elif not pool.holders and name not in lived_on:
                del self.pools[name]
        for device in wanted.values():
            self.pools[device.id] = Pool(device)

    def check(self) -> None:
        """Assert that the two views of the book agree (cheap; run after every event that books)."""
        for name, pool in self.pools.items():
            total = sum(pool.holders.values())
            assert total == pool.booked_mib, f"device {name}: booked {pool.booked_mib} MiB, holders sum to {total} MiB"
