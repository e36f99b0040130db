"""Looking at the machine while it serves: memory samples for the book, and engines that answer nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from greenroom.core.facts import Cause, InstanceReported, MemoryMeasured, State
from greenroom.engines.base import DeviceRef
from greenroom.host.gpus import GpuError, Gpus
from greenroom.host.memory import available_mib, total_mib
from greenroom.host.probes import probe_once

from .crew import HostCrew, Running, held_mib
from .heart import Shell

log = logging.getLogger("greenroom")

SAMPLE_S = 1.0
SAMPLE_FAST_S = 0.25  # while something starts or has just started: a peak must not be missed
FAST_FOR_S = 10.0
STALL_LOOK_S = 1.0
DOZE_LOOK_S = 0.5
STALL_PROBES = 3
STALL_PROBE_S_MAX = 5.0
STALL_DEFAULT_S = 60.0  # no byte on a request for this long, and no answer to probes: dead


class Pulse(Protocol):
    """Who knows of signs of life."""

    def oldest_beats(self) -> Mapping[str, float]:
        """For each model with requests in flight: since when the one that is silent longest is."""


class Sampler:
    """Measures every device that can be measured and posts the samples."""

    def __init__(self, shell: Shell, crew: HostCrew, gpus: Gpus) -> None:
        self._shell, self._crew, self._gpus = shell, crew, gpus
        self._lost: set[str] = set()
        self._total_mib = total_mib()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_FAST_S if self._is_busy() else SAMPLE_S)
            try:
                await self.sample()
                for report in await self._crew.wait_strays():
                    self._shell.post(report)
            except Exception:  # one bad look must not be the last one
                log.exception("memory could not be measured")

    def _is_busy(self) -> bool:
        now = self._shell.clock()
        return any(not running.ready or now - running.process.started_at < FAST_FOR_S for running in self._crew.running.values())

    async def sample(self) -> None:
        """Also while nobody holds or wants anything: the first start must know what others hold."""
        for ref in list(self._crew.stage.devices.values()):
            began_at = self._shell.clock()
            samples = await self.look([ref])
            if any(running.asleep_at >= began_at for running in self._crew.running.values()):
                continue  # it would book a sleeper as what it held before; the next look is soon
            for sample in samples:
                self._shell.post(sample)

    async def look(self, refs: Sequence[DeviceRef]) -> tuple[MemoryMeasured, ...]:
        """One sample of each of these devices that can be measured."""
        skipped = self._crew.stage.booked_only
        refs = [ref for ref in refs if ref.id not in skipped and (ref.kind == "ram" or (ref.kind in ("gpu", "mig") and ref.uuid))]
        measured = {ref.id for ref in refs}
        on_ram = any(ref.kind == "ram" for ref in refs)  # every engine holds some of it
        running = [each for each in self._crew.running.values() if on_ram or any(device.id in measured for device in each.devices)]
        trees = {each.model: each.process.tree() for each in running}
        samples = []
        for ref in refs:
            sample = await self._look_at_ram(ref, trees) if ref.kind == "ram" else await self._look_at_gpu(ref, running, trees)
            if sample is not None:
                samples.append(sample)
        return tuple(samples)

    async def _look_at_ram(self, ref: DeviceRef, trees: Mapping[str, frozenset[int]]) -> MemoryMeasured:
        running = [(each, trees[each.model]) for each in self._crew.running.values() if each.model in trees]
        own, available = await asyncio.to_thread(self._ram_in_use, running)  # milliseconds for each GiB
        used = max(0, self._total_mib - available)
        return MemoryMeasured(self._shell.clock(), ref.id, used, own, "other programs", available)

    def _ram_in_use(self, running: Sequence[tuple[Running, frozenset[int]]]) -> tuple[dict[str, int], int]:
        return {each.model: held_mib(each, pids) for each, pids in running}, available_mib()

    async def _look_at_gpu(self, ref: DeviceRef, running: Iterable[Running], trees: Mapping[str, frozenset[int]]) -> MemoryMeasured | None:
        try:
            sample = await asyncio.to_thread(self._gpus.sample, ref.uuid)  # a driver in trouble may take seconds
        except GpuError as exc:
            if ref.id not in self._lost:
                self._lost.add(ref.id)
                log.warning("device %s cannot be measured any more: %s", ref.id, exc)
            return None
        self._lost.discard(ref.id)
        if sample.used_mib is None:
            return None
        own: dict[str, int] = {}
        mine: set[int] = set()
        for each in running:
            if any(device.id == ref.id for device in each.devices):
                own[each.model] = each.note(ref.id, sample, trees[each.model])
            mine |= trees[each.model]
        others = {pid: mib for pid, mib in sample.processes.items() if pid not in mine}
        holder = ""
        if others:
            pid = max(others, key=lambda each: others[each])
            holder = f"pid {pid} ({others[pid]} MiB)"
        return MemoryMeasured(self._shell.clock(), ref.id, sample.used_mib, own, holder)


class DozeWatch:
    """Notices engines that fall asleep by themselves: what they gave back is free for others, and who asks for them waits for the wake."""

    def __init__(self, shell: Shell, crew: HostCrew) -> None:
        self._shell, self._crew = shell, crew

    async def run(self) -> None:
        while True:
            await asyncio.sleep(DOZE_LOOK_S)
            for running in list(self._crew.running.values()):
                if running.ready and running.model in self._crew.stage.dozers and self._is_quiet(running):
                    await self._look(running)

    def _is_quiet(self, running: Running) -> bool:
        if running.asleep or self._crew.config_of(running).pin:  # the room of a pinned one stays its own: nobody wants to know
            return False
        return self._shell.scheduler.state_of(running.model) is State.READY

    async def _look(self, running: Running) -> None:
        try:
            report = await self._crew.dozes(running)
        except Exception:  # one bad look must not be the last one
            log.exception("%s could not be asked whether it sleeps", running.model)
            return
        if report is None:
            return
        self._shell.post(report)
        if self._shell.scheduler.state_of(running.model) is not State.ASLEEP:
            running.asleep = 0  # somebody was admitted meanwhile, and has woken it


class StallGuard:
    """Ends engines that take requests and answer nothing: by silence alone (busy_timeout) or with dead probes (stall_timeout)."""

    def __init__(self, shell: Shell, crew: HostCrew, pulse: Pulse) -> None:
        self._shell, self._crew, self._pulse = shell, crew, pulse
        self._misses: dict[tuple[str, int], int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STALL_LOOK_S)
            beats = self._pulse.oldest_beats()
            alive = {(running.model, running.generation) for running in self._crew.running.values()}
            self._misses = {key: count for key, count in self._misses.items() if key in alive}
            for running in list(self._crew.running.values()):
                if running.ready and not running.stopping:
                    self._look(running, beats.get(running.model))

    def _look(self, running: Running, oldest: float | None) -> None:
        key = (running.model, running.generation)
        if oldest is None:
            self._misses.pop(key, None)
            return
        config = self._crew.config_of(running)
        silent_s = self._shell.clock() - oldest
        if config.busy_s_max is not None and silent_s > config.busy_s_max:
            self._end(running, f"no byte for {silent_s:.0f} s on a request (busy_timeout {config.busy_s_max:g} s)")
        elif silent_s > (config.stall_s_max or STALL_DEFAULT_S):
            self._shell.spawn(self._probe(running, key, silent_s))

    async def _probe(self, running: Running, key: tuple[str, int], silent_s: float) -> None:
        if await probe_once(running.host, running.port, running.engine.readiness(), STALL_PROBE_S_MAX):
            self._misses.pop(key, None)
            return
        self._misses[key] = self._misses.get(key, 0) + 1
        if self._misses[key] >= STALL_PROBES:
            self._misses.pop(key, None)
            self._end(running, f"no byte for {silent_s:.0f} s on a request and no answer to {STALL_PROBES} probes (stall_timeout)")

    def _end(self, running: Running, why: str) -> None:
        self._shell.spawn(self._ending(running, why))

    async def _ending(self, running: Running, why: str) -> None:
        report: InstanceReported | None = await self._crew.end(running.model, running.generation, Cause.STALLED, why)
        if report is not None:
            assert report.state is State.STOPPED
            self._shell.post(report)
