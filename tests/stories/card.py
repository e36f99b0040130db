"""A graphics card for stories: the stand-in NVML library shows what the fake engines claim, and what the story adds.

A thread plays the driver: it reads the engines' claims and writes the file the library answers from.  Memory of a
process that ended stays used, with no process to its name, for `lag_s`.
"""

import json
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes import nvml

from .rig import Rig

MIB = 1 << 20
TICK_S = 0.005


@dataclass(frozen=True)
class Slot:
    """A card, or with `slot` a MIG part of card `gpu`."""

    gpu: int
    uuid: str
    total_mib: int
    slot: int = -1
    name: str = "Fake card"


@dataclass(slots=True)
class Held:
    """Memory of one process on one slot; `ended_at` once the process is gone."""

    mib: int
    where: Slot
    model: str
    ended_at: float | None = None


@dataclass
class Card:
    """The machine's cards; a story runs inside `async with card.rig(models, ...) as rig`."""

    home: Path
    slots: tuple[Slot, ...]
    lag_s: float = 0.0
    foreign: dict[int, tuple[int, int]] = field(default_factory=dict)  # pid of some other program -> (index of the slot, MiB)
    grown: dict[str, int] = field(default_factory=dict)  # model -> MiB it really holds
    foreign_on_exit: dict[int, tuple[int, int]] = field(default_factory=dict)  # appears as soon as an engine has ended
    held: dict[int, Held] = field(default_factory=dict)
    over: list[str] = field(default_factory=list)  # moments at which more was used than there is

    def __post_init__(self) -> None:
        self.machine = self.home / "machine"
        self.library = self.home / "nvml"
        self.library.mkdir()
        nvml.build(self.library)
        self.write()

    @property
    def env(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.library), "FAKE_NVML": str(self.machine)}

    @asynccontextmanager
    async def rig(self, models: Mapping[str, Any], **more: Any) -> AsyncIterator[Rig]:
        """A rig over this card; the driver plays on until the server is gone."""
        rig = Rig(self.home, models, env=self.env, **more)
        with Driver(self, rig):
            async with rig:
                yield rig

    def write(self) -> None:
        now = time.monotonic()
        for pid, each in list(self.held.items()):
            if each.ended_at is not None and now >= each.ended_at + self.lag_s:
                del self.held[pid]
        in_mig_mode = {slot.gpu for slot in self.slots if slot.slot >= 0}
        lines = [f"gpu {gpu} GPU-parent-{gpu} {80_000 * MIB} 0 1 Split card" for gpu in sorted(in_mig_mode)]
        for index, slot in enumerate(self.slots):
            lagging = sum(each.mib for each in self.held.values() if each.where == slot and each.ended_at is not None)
            used = sum(each.mib for each in self.held.values() if each.where == slot)
            used += sum(mib for where, mib in self.foreign.values() if where == index)
            if used > slot.total_mib:
                self.over.append(f"{used} MiB used of {slot.total_mib} on {slot.uuid}")
            sizes = f"{slot.uuid} {slot.total_mib * MIB} {lagging * MIB}"
            if slot.slot < 0:
                lines.append(f"gpu {slot.gpu} {sizes} -1 {slot.name}")
            else:
                lines.append(f"mig {slot.gpu} {slot.slot} {sizes} {slot.slot + 1} 0 {slot.name}")
        for pid, each in self.held.items():
            if each.ended_at is None:
                lines.append(f"proc {each.where.gpu} {each.where.slot} {pid} {each.mib * MIB}")
        for pid, (index, mib) in self.foreign.items():
            lines.append(f"proc {self.slots[index].gpu} {self.slots[index].slot} {pid} {mib * MIB}")
        new = self.machine.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.rename(self.machine)


class Driver(threading.Thread):
    """Keeps the card's file true to what the engines do."""

    def __init__(self, card: Card, rig: Rig) -> None:
        super().__init__(daemon=True)
        self.card, self.rig = card, rig
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self.join(10)

    def run(self) -> None:
        while not self._ended.wait(TICK_S):
            self.look()
            self.card.write()

    def look(self) -> None:
        card, now = self.card, time.monotonic()
        for path in self.rig.claims.glob("*.claim") if self.rig.claims.is_dir() else ():
            claim = json.loads(path.read_text())
            pid, alive = claim["pid"], is_alive(claim["pid"])
            if pid not in card.held:
                if alive and claim["mib"]:
                    card.held[pid] = Held(claim["mib"], self.slot_of(pid), claim["model"])
                continue
            each = card.held[pid]
            if each.ended_at is None:
                each.mib = card.grown.get(each.model, claim["mib"])
                if not alive:
                    each.ended_at = now
                    card.foreign |= card.foreign_on_exit

    def slot_of(self, pid: int) -> Slot:
        """Where the compute runtime would put this process, by its environment."""
        environment = environment_of(pid)
        wanted = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        for slot in self.card.slots:
            if slot.uuid == wanted:
                return slot
        in_bus_order = sorted(self.card.slots, key=lambda slot: slot.gpu)
        fastest_first = sorted(self.card.slots, key=lambda slot: -slot.total_mib)
        order = in_bus_order if environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" else fastest_first
        return order[int(wanted)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def environment_of(pid: int) -> Mapping[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
