"""Looking at the machine: what is counted as whose, and what a bad look costs."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

import greenroom.shell.watch as watch_module
from greenroom.core.facts import Cause, MemoryMeasured
from greenroom.engines.base import DeviceRef
from greenroom.host.gpus import GpuError, GpuSample
from greenroom.shell.watch import STALL_PROBES, Sampler, StallGuard

GPU = DeviceRef("gpu0", "gpu", "nvidia", "GPU-aaaa", 0, 80_000)
RAM = DeviceRef("ram", "ram", total_mib=64_000)
ME = frozenset({os.getpid()})


class FakeShell:
    def __init__(self) -> None:
        self.now = 100.0
        self.posted: list[Any] = []
        self.jobs: list[Any] = []

    def clock(self) -> float:
        return self.now

    def post(self, event: Any) -> None:
        self.posted.append(event)

    def spawn(self, job: Any) -> None:
        self.jobs.append(job)

    async def run_jobs(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            await job


def an_engine(model: str, device: DeviceRef, *, stall_s: float | None = None, busy_s: float | None = None) -> Any:
    config = SimpleNamespace(stall_s_max=stall_s, busy_s_max=busy_s)
    engine = SimpleNamespace(config=config, readiness=lambda: None)
    process = SimpleNamespace(tree=lambda: ME, started_at=0.0)
    note = lambda device, sample, pids: sum(mib for pid, mib in sample.processes.items() if pid in pids)  # noqa: E731
    return SimpleNamespace(
        asleep=0,
        model=model,
        generation=1,
        engine=engine,
        process=process,
        devices=(device,),
        ready=True,
        stopping=False,
        note=note,
        host="127.0.0.1",
        port=1,
    )


class FakeCrew:
    def __init__(self, *engines: Any) -> None:
        self.running = {each.model: each for each in engines}
        self.stage = SimpleNamespace(devices={"gpu0": GPU, "ram": RAM})
        self.ended: list[tuple[str, Cause, str]] = []

    async def end(self, model: str, generation: int, cause: Cause, why: str) -> None:
        self.ended.append((model, cause, why))

    async def wait_strays(self) -> list[Any]:
        return []


def a_sampler(crew: FakeCrew, sample: GpuSample | GpuError) -> tuple[Sampler, FakeShell]:
    def look(uuid: str) -> GpuSample:
        if isinstance(sample, GpuError):
            raise sample
        return sample

    shell: Any = FakeShell()
    return Sampler(shell, crew, SimpleNamespace(sample=look)), shell  # type: ignore[arg-type]


async def samples(sampler: Sampler, shell: FakeShell) -> dict[str, MemoryMeasured]:
    await sampler.sample()
    return {each.device: each for each in shell.posted}


async def test_what_a_gpu_holds_is_ours_or_somebodys() -> None:
    """By process; the largest stranger is named."""
    sampler, shell = a_sampler(FakeCrew(an_engine("a", GPU)), GpuSample(9000, {os.getpid(): 5000, 4711: 3000, 4712: 10}))
    seen = (await samples(sampler, shell))["gpu0"]

    assert (seen.used_mib, seen.own_mib, seen.holder) == (9000, {"a": 5000}, "pid 4711 (3000 MiB)")


async def test_the_ram_of_a_gpu_engine_is_its_own() -> None:
    """Not outside memory: the book already holds it."""
    sampler, shell = a_sampler(FakeCrew(an_engine("a", GPU)), GpuSample(0, {}))
    seen = (await samples(sampler, shell))["ram"]

    assert list(seen.own_mib) == ["a"]
    assert 0 < seen.own_mib["a"] <= seen.used_mib


async def test_a_lost_gpu_is_said_once_and_the_rest_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    """No sample of it, no flood of warnings."""
    sampler, shell = a_sampler(FakeCrew(), GpuError("GPU-aaaa is gone"))
    await sampler.sample()
    await sampler.sample()

    assert [each.device for each in shell.posted] == ["ram", "ram"]
    assert caplog.text.count("cannot be measured any more") == 1


async def test_one_bad_look_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A fault nobody thought of is logged, and the next sample comes."""
    sampler, shell = a_sampler(FakeCrew(), GpuSample(0, {}))
    monkeypatch.setattr(watch_module, "SAMPLE_S", 0.0)
    real, faults = sampler.sample, [ValueError("odd /proc")]

    async def sample() -> None:
        if faults:
            raise faults.pop()
        await real()

    monkeypatch.setattr(sampler, "sample", sample)
    running = asyncio.ensure_future(sampler.run())
    async with asyncio.timeout(10):
        while not shell.posted:  # noqa: ASYNC110 - turning the loop is the point
            await asyncio.sleep(0)
    running.cancel()

    assert "odd /proc" in caplog.text


# --------------------------------------------------------------------------------------------------------------- stalls


class Guarded:
    """A guard of one engine whose request has been silent for `silent_s`; probes answer `alive`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, silent_s: float | None, *, alive: bool = False, **limits: float) -> None:
        self.shell = FakeShell()
        self.engine = an_engine("a", GPU, **limits)  # type: ignore[arg-type]
        self.crew = FakeCrew(self.engine)
        self.silent_s = silent_s
        self.guard = StallGuard(self.shell, self.crew, SimpleNamespace())  # type: ignore[arg-type]

        async def probe(*args: Any) -> bool:
            return alive

        monkeypatch.setattr(watch_module, "probe_once", probe)

    async def looks(self, times: int = 1) -> list[tuple[str, Cause, str]]:
        for _ in range(times):
            self.guard._look(self.engine, None if self.silent_s is None else self.shell.now - self.silent_s)
            await self.shell.run_jobs()
            await self.shell.run_jobs()
        return self.crew.ended


async def test_silence_and_dead_probes_end_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three probes, not two."""
    guarded = Guarded(monkeypatch, 61.0)
    assert await guarded.looks(STALL_PROBES - 1) == []

    assert [ended[:2] for ended in await guarded.looks()] == [("a", Cause.STALLED)]


async def test_an_engine_that_answers_probes_may_think_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless busy_timeout says otherwise."""
    assert await Guarded(monkeypatch, 3600.0, alive=True).looks(10) == []
    (ended,) = await Guarded(monkeypatch, 31.0, alive=True, busy_s=30.0).looks()

    assert ended[2] == "no byte for 31 s on a request (busy_timeout 30 s)"


@pytest.mark.parametrize("silent_s", [None, 59.0])
async def test_nothing_in_flight_or_a_short_silence_is_no_stall(monkeypatch: pytest.MonkeyPatch, silent_s: float | None) -> None:
    """Nobody is probed."""
    assert await Guarded(monkeypatch, silent_s).looks(10) == []
