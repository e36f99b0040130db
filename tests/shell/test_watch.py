"""Looking at the machine: what is counted as whose, and what a bad look costs."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

import greenroom.shell.watch as watch_module
from greenroom.core.facts import Cause, MemoryMeasured, State
from greenroom.engines.base import DeviceRef
from greenroom.host.gpus import GpuError, GpuSample
from greenroom.shell.watch import STALL_PROBES, DozeWatch, Sampler, StallGuard

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
    config = SimpleNamespace(stall_s_max=stall_s, busy_s_max=busy_s, pin=False)
    engine = SimpleNamespace(config=config, readiness=lambda: None)
    process = SimpleNamespace(tree=lambda: ME, started_at=0.0)
    note = lambda device, sample, pids: sum(mib for pid, mib in sample.processes.items() if pid in pids)  # noqa: E731
    return SimpleNamespace(
        asleep=0,
        asleep_at=0.0,
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
        self.stage = SimpleNamespace(devices={"gpu0": GPU, "ram": RAM}, booked_only=frozenset(), dozers=frozenset({"a"}))
        self.ended: list[tuple[str, Cause, str]] = []

    def config_of(self, running: Any) -> Any:
        return running.engine.config

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


async def test_a_device_that_is_only_booked_is_not_looked_at() -> None:
    """`probe: none` holds for host RAM too: what this machine has free says nothing then."""
    crew = FakeCrew(an_engine("a", RAM))
    crew.stage.booked_only = frozenset({"ram"})
    sampler, shell = a_sampler(crew, GpuSample(0, {}))
    await sampler.sample()

    assert [each.device for each in shell.posted] == ["gpu0"]
    assert await sampler.look([RAM]) == ()


async def test_a_look_that_a_sleep_overtook_is_not_told() -> None:
    """It shows what the sleeper held before, which would be booked and remembered as what it keeps."""
    engine = an_engine("a", GPU)
    sampler, shell = a_sampler(FakeCrew(engine), GpuSample(6_000, {os.getpid(): 6_000}))
    engine.asleep_at = shell.now
    overtaken = await samples(sampler, shell)
    shell.now += 1.0
    told = await samples(sampler, shell)

    assert (overtaken, told["gpu0"].own_mib) == ({}, {"a": 6_000})


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


# ---------------------------------------------------------------------------------------------------------------- dozes


class Dozers:
    """A watch over one engine that may fall asleep by itself; its looks are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, report: Any, *, then: State = State.ASLEEP) -> None:
        self.shell, self.engine, self.report, self.looks = FakeShell(), an_engine("a", GPU), report, 0
        self.state, self.then = State.READY, then
        self.shell.scheduler = SimpleNamespace(state_of=lambda model: self.state)  # type: ignore[attr-defined]
        self.crew = FakeCrew(self.engine)
        self.crew.dozes = self.dozes  # type: ignore[attr-defined]
        monkeypatch.setattr(watch_module, "DOZE_LOOK_S", 0.0)

    async def dozes(self, running: Any) -> Any:
        self.looks += 1
        if isinstance(self.report, Exception):
            raise self.report
        if self.report is not None:
            running.asleep, self.state = 1, self.then
        return self.report

    async def watched(self, looks: int = 2) -> None:
        task = asyncio.ensure_future(DozeWatch(self.shell, self.crew).run())  # type: ignore[arg-type]
        for _ in range(200):
            await asyncio.sleep(0)
            if self.looks >= looks:
                break
        task.cancel()


async def test_one_that_dozes_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on it is not asked any more: it sleeps."""
    dozers = Dozers(monkeypatch, "asleep")
    await dozers.watched()

    assert (dozers.shell.posted, dozers.looks, dozers.engine.asleep) == (["asleep"], 1, 1)


async def test_one_that_was_woken_meanwhile_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler had let somebody in: the word came too late."""
    dozers = Dozers(monkeypatch, "asleep", then=State.READY)
    await dozers.watched()

    assert (dozers.looks, dozers.engine.asleep) == (2, 0)


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING, State.ASLEEP, State.STOPPING])
async def test_only_a_ready_one_is_asked(monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    """Nothing else can have fallen asleep unnoticed."""
    dozers = Dozers(monkeypatch, "asleep")
    dozers.state = state
    await dozers.watched()

    assert (dozers.looks, dozers.shell.posted) == (0, [])


@pytest.mark.parametrize("change", [{"ready": False}, {"asleep": 1}, {"model": "b"}])
async def test_nor_one_that_cannot_doze(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """Not ready, asleep already, or of a kind that never does."""
    dozers = Dozers(monkeypatch, "asleep")
    vars(dozers.engine).update(change)
    await dozers.watched()

    assert dozers.looks == 0


async def test_nor_one_that_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its room stays its own, so that looking again and again would be for nothing."""
    dozers = Dozers(monkeypatch, "asleep")
    dozers.engine.engine.config.pin = True
    await dozers.watched()

    assert dozers.looks == 0


async def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and asked again."""
    dozers = Dozers(monkeypatch, ValueError("odd answer"))
    await dozers.watched()

    assert (dozers.looks, dozers.shell.posted) == (2, [])
    assert "odd answer" in caplog.text


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
