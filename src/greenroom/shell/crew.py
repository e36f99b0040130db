"""Carrying out starts and stops on this machine: engines say what, host does it, the end is one report."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from greenroom.config.model import ModelConfig
from greenroom.core.facts import Cause, InstanceReported, MemoryMeasured, Sleep, Start, State, Stop, Verify, Wake
from greenroom.engines.base import DeviceRef, Engine, Launch
from greenroom.engines.container import PORT_TAKEN, owned
from greenroom.engines.oom import ran_out
from greenroom.host.calls import Line
from greenroom.host.containers import Contained, spawn_contained, stop_contained
from greenroom.host.docks import BoxError, Docks
from greenroom.host.gpus import GpuError, Gpus, GpuSample
from greenroom.host.logs import LogRing
from greenroom.host.memory import tree_mib, unmapped_mib
from greenroom.host.ports import PortError, free_port, listening, owner_is
from greenroom.host.probes import NotReady, probe_once, wait_ready
from greenroom.host.processes import KILL_S_MAX, Process, SpawnError, StopOutcome, spawn, stop
from greenroom.host.supervisor import Supervisor

from .sleeper import Sleeper, Trouble

log = logging.getLogger("greenroom")

PORT_TRIES_MAX = 3  # starts on another port when a stranger took the first one
RELEASE_S_MAX = 30.0  # bounded wait for a device to show the memory back
RELEASE_POLL_S = 0.05
RELEASE_SHARE = 0.05  # back within 5 %
RELEASE_SLACK_MIB = 64  # drivers keep a little
END_ALL_GRACE_S = 3.0
HURRY_KILL_S_MAX = 3.0  # after KILL to a container, once greenroom itself is to end
VERIFY_S_MAX = 2.0
LIMIT_SLACK_S = 1.0  # one call gives up later than the whole sleep or wake, whose end tells which limit it was
STALLED_GRACE_S = 0.5
STEADY_SHARE = 0.01  # two looks at a sleeper's memory that differ by less tell what it keeps
STEADY_POLL_S_MIN = 0.01
STEADY_S_MAX = 2.0  # where nothing was given back
HEARD_LINES_MAX = 500  # of an engine's log, while it is woken
TAIL_LINES = 400  # of an engine that ended: the root cause may stand far above its last words
DOZE_LEVEL = 1


class Phases:
    """When each phase of a start ended, seconds from the moment its process was asked for."""

    def __init__(self, ring: LogRing, engine: Engine, clock: Callable[[], float]) -> None:
        self._phase_of, self._clock, self._began_at = engine.phase_of, clock, clock()
        self.ended_s: dict[str, float] = {}
        self._undo = ring.listen(self._hear)

    def _hear(self, lines: Sequence[str]) -> None:
        for line in lines:
            if (phase := self._phase_of(line)) and not (phase == "listen" and phase in self.ended_s):
                self.note(phase)

    def note(self, phase: str) -> None:
        self.ended_s[phase] = round(self._clock() - self._began_at, 4)

    def close(self) -> dict[str, float]:
        """Hear no more; what was heard."""
        self._undo()
        return self.ended_s


@dataclass(slots=True)
class Running:
    """One live engine process of ours."""

    model: str
    generation: int
    engine: Engine
    launch: Launch
    process: Process
    devices: tuple[DeviceRef, ...]
    port: int
    host: str = "127.0.0.1"
    ready: bool = False
    stopping: bool = False
    held_mib: dict[str, int] = field(default_factory=dict)  # device -> MiB, as last measured
    rest_mib: dict[str, int] = field(default_factory=dict)  # device -> MiB used by no process the driver names, at the same moment
    pids: frozenset[int] = frozenset()  # its tree, as last looked at
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    hot: object = None  # what the front end keeps for requests that need not wait
    sleeper: Sleeper | None = None  # of an engine that can sleep
    asleep: int = 0  # the level it sleeps at; 0 = it does not
    heard: deque[str] = field(default_factory=lambda: deque(maxlen=HEARD_LINES_MAX))  # its log lines during a sleep or a wake
    compare_next: bool = False  # its last wake failed half-way: what it answers is compared after the next
    phases: Phases | None = None  # of its start, while it starts
    turns: int = 0  # sleeps and wakes begun
    asleep_at: float = 0.0  # when it was last reported to sleep

    def note(self, device: str, sample: GpuSample, pids: frozenset[int]) -> int:
        """MiB it holds on a device; remembered for its end, so no more once it is ending: the driver may forget it piece by piece."""
        own = sum(mib for pid, mib in sample.processes.items() if pid in pids)
        if self.stopping or self.process.exited:
            return own
        self.held_mib[device], self.pids = own, pids
        if sample.used_mib is not None:
            self.rest_mib[device] = sample.used_mib - sum(sample.processes.values())
        return own


@dataclass(slots=True)
class Stage:
    """What the crew works with; replaced as a whole on reload."""

    engines: Mapping[str, Engine]
    devices: Mapping[str, DeviceRef]
    start_port: int = 5800
    levels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # model -> sleep levels it may be sent to
    dozers: frozenset[str] = frozenset()  # models whose engines fall asleep by themselves
    booked_only: frozenset[str] = frozenset()  # devices that are never measured (probe: none)


@dataclass(slots=True)
class Attempt:
    """A start under way, until it is over; a stop may come at any moment of it."""

    generation: int
    called_off: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    report: InstanceReported | None = None  # how it ended, where it had been called off
    preparing: asyncio.Task[None] | None = None  # what comes before its container: questions, a pull

    def call_off(self) -> None:
        self.called_off = True
        if self.preparing is not None:
            self.preparing.cancel()


class HostCrew:
    """The real crew.  One instance a server; safe to call for several models at once."""

    def __init__(
        self,
        stage: Stage,
        *,
        gpus: Gpus,
        supervisor: Supervisor | None,
        log_dir: Path | None,
        clock: Callable[[], float] = time.monotonic,
        release_s_max: float = RELEASE_S_MAX,
        echo: Callable[[str, Sequence[str]], None] | None = None,
        docks: Docks | None = None,
    ) -> None:
        self.stage = stage
        self.running: dict[str, Running] = {}
        self._attempts: dict[str, Attempt] = {}
        self.logs: dict[str, LogRing] = {}
        self._gpus = gpus
        self._supervisor = supervisor
        self._docks = docks or Docks("" if supervisor is None else supervisor.home)
        self._log_dir = log_dir
        self._clock = clock
        self._release_s_max = release_s_max
        self._echo = echo
        self._ports: set[int] = set()
        self._last_port: dict[str, int] = {}
        self.look: Callable[[Sequence[DeviceRef]], Awaitable[tuple[MemoryMeasured, ...]]] = _blind  # measures devices
        self.lacking: dict[str, str] = {}  # model -> what it lacks to start, as last seen
        self._strays: list[Running] = []
        self._hurried = False
        self.masked: tuple[str, ...] = ()  # never shown in any log: client keys that an engine may print

    # ------------------------------------------------------------------ start

    async def start(self, action: Start) -> InstanceReported | None:
        """Spawn, wait until it can serve, report READY; or STOPPED with the reason, its process gone."""
        engine = self.stage.engines[action.model]
        if missing := engine.missing():
            self.lacking[action.model] = missing
            return self._failed(action, Cause.MISCONFIGURED, missing)
        attempt = self._attempts[action.model] = Attempt(action.generation)
        try:
            report = await self._try(action, engine, attempt)
            if attempt.called_off:
                attempt.report, report = report, None  # the stop tells
            return report
        finally:
            attempt.over.set()
            if self._attempts.get(action.model) is attempt:
                del self._attempts[action.model]

    async def _try(self, action: Start, engine: Engine, attempt: Attempt) -> InstanceReported | None:
        """As `start`; None when it was stopped by order, and that stop reports."""
        began_at: float | None = None  # not before its image is here: a pull is no start
        for tries_left in reversed(range(PORT_TRIES_MAX)):
            try:
                launch = await self._prepare(action, engine, attempt)
                began_at = self._clock() if began_at is None else began_at
                running = await self._spawn(action, engine, launch)
            except (SpawnError, PortError, BoxError) as exc:
                if isinstance(exc, BoxError) and attempt.called_off:
                    return None
                lacking = isinstance(exc, SpawnError) or (isinstance(exc, BoxError) and exc.lacking)
                return self._failed(action, Cause.MISCONFIGURED if lacking else Cause.EXITED, str(exc))
            if attempt.called_off:
                return None  # while it was spawned: it is ended by the stop that waits for us
            try:
                await self._until_ready(running, began_at)
                phases = self._phases_of(running)
            except NotReady as exc:
                if running.stopping:
                    return None
                report = await self._not_ready(running, exc)
                port_taken = exc.port_taken or (launch.box is not None and PORT_TAKEN.search(report.why))
                if not port_taken or not tries_left or attempt.called_off:
                    return report
                continue
            unfit, why = await self._prepare_sleep(running)
            if running.stopping:
                return None
            running.ready = True
            return replace(await self._ready(running, began_at, unfit, why), phases=phases)
        raise AssertionError("unreachable")

    async def _prepare_sleep(self, running: Running) -> tuple[tuple[int, ...], str]:
        """What its later sleep needs to know of it as it is now: version, canary.  Levels it must not use, and why."""
        engine, levels = running.engine, self.stage.levels.get(running.model, ())
        if not levels and running.model not in self.stage.dozers:
            return (), ""
        readiness = engine.readiness()
        where = (running.host, running.port, readiness.base_path)
        line, control = Line(*where, readiness.headers), Line(*where, engine.control_headers())
        sleeper = running.sleeper = Sleeper(line, control, readiness, lambda: running.heard)
        await sleeper.learn_version(engine.version_call())
        recipes = [engine.sleep_recipe(level, sleeper.version) for level in levels]
        reasons = {recipe.level: recipe.unfit for recipe in recipes if recipe.unfit}
        if levels and (canaries := engine.canaries()):
            why = running.process.log.masked(await sleeper.record(canaries))
            if why:
                reasons |= {recipe.level: f"no canary could be recorded: {why}" for recipe in recipes if recipe.verify and not recipe.unfit}
        told = "; ".join(f"level {level} is not used, {why}" for level, why in sorted(reasons.items()))
        return tuple(sorted(reasons)), told

    async def _ready(self, running: Running, began_at: float, unfit: tuple[int, ...] = (), why: str = "") -> InstanceReported:
        """On host RAM the sampler measures it in a moment: somebody waits now, and looking costs as long as a tiny engine's whole start."""
        took_s = self._clock() - began_at
        measured, host_mib = dict[str, int](), None
        if not all(ref.kind == "ram" for ref in running.devices):
            measured, host_mib = await self.measure(running), await asyncio.to_thread(self._host_mib, running)
        return InstanceReported(
            self._clock(),
            running.model,
            running.generation,
            State.READY,
            took_s=took_s,
            measured_mib=measured,
            host_mib=host_mib,
            why=why,
            unfit_levels=unfit,
        )

    async def _prepare(self, action: Start, engine: Engine, attempt: Attempt) -> Launch:
        """Its command, and what that needs before it can run.  The port is taken from now on."""
        refs = tuple(self.stage.devices[name] for name in action.devices)
        port = self._choose_port(action.model, engine)
        launch = owned(engine.launch(port, refs, action.generation), self._docks.home)
        if launch.box is None:
            return launch
        self._ports.add(launch.port)
        ring = self._ring(action.model, engine, launch.secrets)
        preparing = attempt.preparing = asyncio.create_task(self._docks.prepare(launch.box, ring, supervisor=self._supervisor))
        try:
            if not attempt.called_off:
                await asyncio.wait({preparing})
            if attempt.called_off:
                raise BoxError("called off while its container was made ready")
            preparing.result()
        except BaseException:
            self._ports.discard(launch.port)
            preparing.cancel()
            await asyncio.wait({preparing}, timeout=END_ALL_GRACE_S)
            if preparing.done() and not preparing.cancelled():
                preparing.exception()  # known, or of no interest any more
            raise
        finally:
            attempt.preparing = None
        return launch

    async def _spawn(self, action: Start, engine: Engine, launch: Launch) -> Running:
        refs, port = tuple(self.stage.devices[name] for name in action.devices), launch.port
        ring = self._ring(action.model, engine, launch.secrets)
        ring.note(f"[greenroom: start {action.generation} on {', '.join(action.devices)}, port {launch.port}]")
        token = f"{action.generation}-{os.getpid()}-{port}-{int(self._clock() * 1e6):x}"
        self._ports.add(launch.port)  # before it is bound: another start must not choose it
        phases = Phases(ring, engine, self._clock)
        try:
            start = spawn if launch.box is None else spawn_contained
            process: Process = await start(launch, token=token, log=ring, supervisor=self._supervisor)
        except SpawnError:
            self._ports.discard(launch.port)
            if launch.box is not None:
                self._docks.over(launch.box.name)
            phases.close()
            raise
        phases.note("spawn")
        running = Running(action.model, action.generation, engine, launch, process, refs, launch.port, launch.host)
        running.phases = phases
        self.running[action.model] = running
        return running

    def _phases_of(self, running: Running) -> dict[str, float]:
        """Its start is over, one way or the other."""
        phases, running.phases = running.phases, None
        if phases is None:
            return {}
        phases.note("ready")
        return phases.close()

    def _choose_port(self, model: str, engine: Engine) -> int:
        wanted = self._last_port.get(model)
        if wanted is None:
            index = sorted(self.stage.engines).index(model)
            wanted = self.stage.start_port + index
        port = free_port(wanted, self._ports)
        self._last_port[model] = port
        return port

    def ring_of(self, model: str) -> LogRing:
        """The log of a model, also before its first start."""
        return self.logs.get(model) or self._ring(model, self.stage.engines[model], ())

    def _ring(self, model: str, engine: Engine, secrets: Sequence[str]) -> LogRing:
        ring = self.logs.get(model)
        if ring is None:
            file = self._log_dir / f"{safe_name(model)}.log" if self._log_dir is not None else None
            ring = self.logs[model] = LogRing(model, file=file)
            if self._echo is not None:
                echo = self._echo
                ring.listen(lambda lines: echo(model, lines))
        ring.hint = engine.is_ready_hint
        ring.mask((*secrets, *self.masked))
        return ring

    async def _until_ready(self, running: Running, began_at: float) -> None:
        config = running.engine.config
        learning = asyncio.create_task(_learn(running.process))
        try:
            ready = await wait_ready(
                (running.launch.host, running.port),
                running.engine.readiness(),
                process=running.process,
                timeout_s=config.start_s_max,
                progress_counts=config.progress_counts,
                clock=self._clock,
            )
        finally:
            learning.cancel()  # one that is ready was seen to run
        running.host = ready.host

    async def _not_ready(self, running: Running, exc: NotReady) -> InstanceReported:
        """The start failed: end what is left of it and say why."""
        config = self.config_of(running)
        ended_by_itself = running.process.exited
        code = running.process.exit.code if running.process.exit is not None else None
        running.stopping = True
        outcome = await self._stop(running, config.stop_s_max)
        cause, why, wanted = exc.cause, exc.why, None
        if ended_by_itself:
            ending = outcome.ending or running.engine.ending(code, last_words(running))
            cause, why, wanted = ending.cause, ending.summary, ending.wanted_mib
        return await self._gone(running, outcome, cause, why, code, wanted_mib=wanted)

    def _failed(self, action: Start, cause: Cause, why: str) -> InstanceReported:
        return InstanceReported(self._clock(), action.model, action.generation, State.STOPPED, cause=cause, why=why)

    # ------------------------------------------------------------------ stop

    async def stop(self, action: Stop) -> InstanceReported | None:
        """TERM (or cmdStop), grace, KILL, reap the whole tree, wait until the device shows the memory back."""
        began_at = self._clock()
        attempt = self._attempts.get(action.model)
        if attempt is not None and attempt.generation == action.generation:
            attempt.call_off()
            running = self._current(action.model, action.generation)
            if running is None or running.stopping:  # between two processes, or its failed one is being ended
                await attempt.over.wait()
                if attempt.report is not None:
                    return attempt.report
        running = self._current(action.model, action.generation)
        if running is None:
            return InstanceReported(self._clock(), action.model, action.generation, State.STOPPED)
        await self.measure(running)
        if running.stopping:
            return None  # it broke meanwhile: whoever ends it reports
        running.stopping = True
        config = self.config_of(running)
        outcome = await self._stop(running, config.stop_s_max, running.launch.stop_argv)
        code = outcome.exit.code if outcome.exit is not None else None
        return await self._gone(running, outcome, Cause.NONE, "", code, began_at=began_at)

    async def _stop(self, running: Running, grace_s: float, stop_argv: tuple[str, ...] = ()) -> StopOutcome:
        on_signal = self._note_signal(running)
        if isinstance(running.process, Contained):
            running.process.hurried = running.process.hurried or self._hurried
            kill_s_max = HURRY_KILL_S_MAX if self._hurried else KILL_S_MAX
            return await stop_contained(running.process, grace_s=grace_s, stop_argv=stop_argv, on_signal=on_signal, kill_s_max=kill_s_max)
        return await stop(running.process, grace_s=grace_s, stop_argv=stop_argv, on_signal=on_signal)

    async def _gone(
        self,
        running: Running,
        outcome: StopOutcome,
        cause: Cause,
        why: str,
        exit_code: int | None,
        *,
        wanted_mib: int | None = None,
        began_at: float | None = None,
    ) -> InstanceReported:
        """The one end of every engine: its memory back, its port free, its cards looked at without it."""
        if outcome.unkillable:
            self._forget(running)
            return self._unkillable(running, outcome)
        leaked = await self._wait_released(running)
        self._forget(running)
        if leaked and cause is Cause.NONE and not why:
            why = f"the device still showed it as used after {self._release_s_max:g} s"
        return InstanceReported(
            self._clock(),
            running.model,
            running.generation,
            State.STOPPED,
            took_s=None if began_at is None else self._clock() - began_at,
            cause=cause,
            why=why,
            exit_code=exit_code,
            leaked_mib=leaked,
            wanted_mib=wanted_mib,
            samples=await self._cards_of(running),
        )

    def _unkillable(self, running: Running, outcome: StopOutcome) -> InstanceReported:
        self._strays.append(running)
        why = f"pid {running.process.pid} does not end even after SIGKILL; its memory stays booked until it is gone"
        if outcome.ending is not None:
            why = outcome.ending.summary
        return InstanceReported(self._clock(), running.model, running.generation, State.STOPPED, cause=Cause.UNKILLABLE, why=why)

    async def wait_strays(self) -> list[InstanceReported]:
        """Engines that would not die, and have died after all."""
        reports = []
        for running in list(self._strays):
            if await running.process.gone() and running in self._strays:
                self._strays.remove(running)
                running.process.close()
                reports.append(InstanceReported(self._clock(), running.model, running.generation, State.STOPPED))
        return reports

    async def _wait_released(self, running: Running) -> int:
        """Until each measured device shows the memory back within 5 %; MiB still missing after the bounded wait.

        What other processes hold by the driver's own list is theirs, not ours to wait for.
        """
        deadline = self._clock() + self._release_s_max
        missing_mib = 0
        for ref in running.devices:
            held, rest_then = running.held_mib.get(ref.id, 0), running.rest_mib.get(ref.id)
            if ref.kind not in ("gpu", "mig") or not held or rest_then is None:
                continue
            slack = max(RELEASE_SLACK_MIB, int(held * RELEASE_SHARE))
            left = await self._unreleased_mib(ref, running.pids, rest_then)
            while left > slack and self._clock() < deadline:
                await asyncio.sleep(RELEASE_POLL_S)
                left = await self._unreleased_mib(ref, running.pids, rest_then)
            if left > slack:
                missing_mib += left
        return missing_mib

    async def _cards_of(self, running: Running) -> tuple[MemoryMeasured, ...]:
        """Its cards as they are without it."""
        return await self.look([ref for ref in running.devices if ref.kind in ("gpu", "mig")])

    async def _unreleased_mib(self, ref: DeviceRef, pids: frozenset[int], rest_then: int) -> int:
        try:
            sample = await asyncio.to_thread(self._gpus.sample, ref.uuid)
        except GpuError:
            return 0
        if sample.used_mib is None:
            return 0
        others = sum(mib for pid, mib in sample.processes.items() if pid not in pids)
        return sample.used_mib - others - rest_then

    # ------------------------------------------------------------------ sleep and wake

    async def sleep(self, action: Sleep) -> InstanceReported | None:
        """Nothing is in flight.  ASLEEP with what it still holds; or ended: an engine that is half asleep is no use to anybody."""
        running = self._current(action.model, action.generation)
        if running is None or running.sleeper is None:
            return await self.end(action.model, action.generation, Cause.SLEEP_FAILED, "it has no sleep calls")
        began_at = self._clock()
        running.turns += 1
        before = await self.measure(running)
        recipe, limit_s = running.engine.sleep_recipe(action.level, running.sleeper.version), self.config_of(running).sleep_s_max
        try:
            with self._listening(running):
                async with asyncio.timeout(limit_s):
                    await running.sleeper.fall_asleep(recipe, limit_s + LIMIT_SLACK_S)
        except TimeoutError:
            why = f"it was not asleep after {limit_s:g} s (sleep_timeout): {running.sleeper.awaited}"
            return await self.end(action.model, action.generation, Cause.SLEEP_FAILED, why)
        except Trouble as exc:
            return await self.end(action.model, action.generation, Cause.SLEEP_FAILED, exc.why)
        if running.stopping:
            return None
        running.asleep = action.level
        measured = await self._steady(running, before)
        return await self._fell_asleep(running, began_at, measured)

    async def _fell_asleep(
        self, running: Running, began_at: float | None, measured: dict[str, int], why: str = ""
    ) -> InstanceReported | None:
        elsewhere = (ref for ref in self.stage.devices.values() if ref.kind == "ram" and ref not in running.devices)
        refs = [*running.devices, *elsewhere]
        samples = await self.look(refs)
        host_mib = next((sample.own_mib.get(running.model) for sample in samples if self.stage.devices[sample.device].kind == "ram"), None)
        if host_mib is None:  # nobody looked at host RAM
            host_mib = await asyncio.to_thread(self._host_mib, running)
        if running.stopping:
            return None
        running.asleep_at = self._clock()
        return InstanceReported(
            running.asleep_at,
            running.model,
            running.generation,
            State.ASLEEP,
            took_s=None if began_at is None else self._clock() - began_at,
            measured_mib=measured,
            host_mib=host_mib,
            cause=Cause.OOM if why else Cause.NONE,
            why=running.process.log.masked(why),
            level=running.asleep,
            samples=samples,
        )

    async def wake(self, action: Wake) -> InstanceReported | None:
        """READY once it answers as before.  ASLEEP when there was no room for it; ended when anything else went wrong."""
        running = self._current(action.model, action.generation)
        if running is None or running.sleeper is None:
            return await self.end(action.model, action.generation, Cause.WAKE_FAILED, "it has no wake calls")
        began_at, sleeper, limit_s = self._clock(), running.sleeper, self.config_of(running).wake_s_max
        running.turns += 1
        recipe = running.engine.sleep_recipe(action.level, sleeper.version)
        try:
            with self._listening(running):
                async with asyncio.timeout(limit_s):
                    await sleeper.wake_up(recipe, limit_s + LIMIT_SLACK_S, compare=recipe.verify or running.compare_next)
                    sleeper.awaited = "its check was not answered"
                    if not await probe_once(running.host, running.port, running.engine.readiness(), limit_s + LIMIT_SLACK_S):
                        raise Trouble("it was woken, and does not answer its check")
                    if told := await sleeper.warm_up(limit_s + LIMIT_SLACK_S):
                        running.process.log.note(f"[greenroom: {told}]")
        except TimeoutError:
            why = f"it was not awake after {limit_s:g} s (wake_timeout): {sleeper.awaited}"
            cause = Cause.OOM if ran_out(running.heard) else Cause.WAKE_FAILED  # some say so, and then hang
            return await self.end(action.model, action.generation, cause, why)
        except Trouble as exc:
            repeatable = recipe.repeatable and sleeper.recorded is not None  # nobody may believe a second wake unseen
            if exc.no_room and repeatable and not running.stopping and await sleeper.says_asleep(recipe):
                running.compare_next = True
                return await self._fell_asleep(running, None, await self.measure(running), exc.why)
            return await self.end(action.model, action.generation, Cause.OOM if exc.no_room else Cause.WAKE_FAILED, exc.why)
        if running.stopping:
            return None
        running.asleep, running.compare_next = 0, False
        return await self._ready(running, began_at)

    async def dozes(self, running: Running) -> InstanceReported | None:
        """Ask an engine that may fall asleep by itself; ASLEEP when it has."""
        check = running.engine.dozes()
        if check is None or running.sleeper is None or running.stopping or running.asleep:
            return None
        if not await running.sleeper.is_dozing(check) or running.stopping:
            return None
        running.asleep = DOZE_LEVEL
        report = await self._fell_asleep(running, None, await self.measure(running))
        if await running.sleeper.is_dozing(check) and not running.stopping:
            return report
        running.asleep = 0  # a request came and went while it was measured, and has woken it
        return None

    @contextmanager
    def _listening(self, running: Running) -> Iterator[None]:
        """What it says meanwhile tells why a call failed."""
        running.heard.clear()
        undo = running.process.log.listen(running.heard.extend)
        try:
            yield
        finally:
            undo()

    async def _steady(self, running: Running, before: Mapping[str, int]) -> dict[str, int]:
        """MiB it keeps: looked at until it stays the same, and for a while where it gave nothing back."""
        began_at, last = self._clock(), await self.measure(running)
        pause_s = STEADY_POLL_S_MIN
        while any(ref.kind in ("gpu", "mig") for ref in running.devices) and self._clock() - began_at < self._release_s_max:
            await asyncio.sleep(pause_s)
            pause_s = min(RELEASE_POLL_S, 2 * pause_s)
            now = await self.measure(running)
            given_back = any(now.get(device, 0) < mib * (1 - RELEASE_SHARE) for device, mib in before.items())
            steady = all(abs(mib - last.get(device, 0)) <= max(1, STEADY_SHARE * mib) for device, mib in now.items())
            last = now
            if steady and (given_back or self._clock() - began_at >= STEADY_S_MAX):
                break
        return last

    # ------------------------------------------------------------------ looking after it

    async def verify(self, action: Verify) -> InstanceReported | None:
        """A request was lost: is it still there?  One that is only too busy to answer a probe must not be ended for that.

        None where it was put to sleep meanwhile: that sleep, or the wake after it, tells what became of it.
        """
        running = self._current(action.model, action.generation)
        if running is None:
            return None
        if not running.process.exited or running.process.detached:
            turns = running.turns
            answers = await probe_once(running.host, running.port, running.engine.readiness(), VERIFY_S_MAX)
            if running.turns != turns:
                return None
            if (answers or self._listens(running)) and not running.stopping:
                return InstanceReported(self._clock(), action.model, action.generation, State.READY)
        return await self.end(action.model, action.generation, Cause.EXITED, "")

    def _listens(self, running: Running) -> bool:
        """Whether its port is still held by a process of its own; of a container only the port is seen."""
        if running.launch.detached:
            return listening(running.port)
        return bool(owner_is(running.port, running.process.tree(), running.host))

    async def watch(self, model: str, generation: int) -> InstanceReported | None:
        """Until the engine ends by itself; its remains are ended too."""
        running = self._current(model, generation)
        if running is None:
            return None
        await running.process.ended()
        return await self.end(model, generation, Cause.NONE, "")

    async def end(self, model: str, generation: int, cause: Cause, why: str) -> InstanceReported | None:
        """End an engine that broke; None when somebody else is ending it already."""
        running = self._current(model, generation)
        if running is None or running.stopping:
            return None
        running.stopping = True
        grace_s = STALLED_GRACE_S if cause is Cause.STALLED else min(STALLED_GRACE_S, self.config_of(running).stop_s_max)
        code = running.process.exit.code if running.process.exit is not None else None
        lines = last_words(running)
        outcome = await self._stop(running, grace_s)
        if not why and not outcome.unkillable:
            exit_code = code if code is not None else (outcome.exit.code if outcome.exit is not None else None)
            signal_code = -outcome.exit.signal if exit_code is None and outcome.exit is not None and outcome.exit.signal else exit_code
            ending = outcome.ending or running.engine.ending(signal_code, last_words(running) or lines)
            cause, why, code = ending.cause, ending.summary, signal_code
        return await self._gone(running, outcome, cause, running.process.log.masked(why), code)  # it may quote an answer

    def hurry(self) -> None:
        """greenroom is to end: from now on a container runtime that hangs is waited for in seconds.

        What it then does not end is ended by the watcher, and looked for at the next start.
        """
        self._hurried = True
        for running in self.running.values():
            if isinstance(running.process, Contained):
                running.process.hurried = True

    async def end_all(self) -> None:
        """Shutdown: every engine that still runs is ended at once, and one that is just being spawned as soon as it is there."""
        attempts = list(self._attempts.values())
        for attempt in attempts:
            attempt.call_off()
        await self._end_now(list(self.running.values()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_ALL_GRACE_S):
                for attempt in attempts:
                    await attempt.over.wait()
        await self._end_now(list(self.running.values()))
        for running in self._strays:  # a scheduler that starts over counts from one again: their end must not be taken for that of another
            running.process.close()
        self._strays.clear()

    async def _end_now(self, everyone: Sequence[Running]) -> None:
        for running in everyone:
            running.stopping = True
        await asyncio.gather(*(self._stop(running, END_ALL_GRACE_S, running.launch.stop_argv) for running in everyone))
        for running in everyone:
            self._forget(running)

    # ------------------------------------------------------------------ measuring

    async def measure(self, running: Running) -> dict[str, int]:
        """MiB this engine holds on each of its measured devices now; remembered for when it goes."""
        found: dict[str, int] = {}
        pids = running.process.tree()
        for ref in running.devices:
            if ref.id in self.stage.booked_only:
                continue
            if ref.kind == "ram":
                found[ref.id] = await asyncio.to_thread(held_mib, running, pids)
            elif ref.kind in ("gpu", "mig") and ref.uuid:
                try:
                    sample = await asyncio.to_thread(self._gpus.sample, ref.uuid)  # a driver in trouble may take seconds
                except GpuError:
                    continue
                found[ref.id] = running.note(ref.id, sample, pids)
        return found

    def _host_mib(self, running: Running) -> int:
        return held_mib(running, running.process.tree())

    # ------------------------------------------------------------------ small things

    def config_of(self, running: Running) -> ModelConfig:
        """What holds now: a reload may have changed its limits without starting it anew."""
        return self.stage.engines.get(running.model, running.engine).config

    def _current(self, model: str, generation: int) -> Running | None:
        running = self.running.get(model)
        return running if running is not None and running.generation == generation else None

    def _forget(self, running: Running) -> None:
        self._phases_of(running)
        running.gone.set()
        self._ports.discard(running.port)
        if running.launch.box is not None:
            self._docks.over(running.launch.box.name)
        if self.running.get(running.model) is running:
            del self.running[running.model]

    def _note_signal(self, running: Running) -> Callable[[str], None]:
        def note(what: str) -> None:
            running.process.log.note(f"[greenroom: {what}]")
            if what == "KILL":
                log.warning("%s: did not end on TERM, killed", running.model)

        return note


def held_mib(running: Running, pids: frozenset[int]) -> int:
    """MiB of host RAM an engine holds; while it sleeps its copy may lie in memory that is in no process's address space."""
    return tree_mib(pids) + (unmapped_mib(pids) if running.asleep else 0)


async def _learn(process: Process) -> None:
    """Of a container: which processes are its own, while it starts; what they take is its, not a stranger's."""
    if isinstance(process, Contained):
        await process.learn()


async def _blind(refs: Sequence[DeviceRef]) -> tuple[MemoryMeasured, ...]:
    return ()


def last_words(running: Running) -> list[str]:
    """What the engine itself said last; not what we noted beside it."""
    return [line for line in running.process.log.tail(TAIL_LINES) if not line.startswith("[greenroom: ")]


def safe_name(model: str) -> str:
    """A file name for any model id: readable, unique, never a path."""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in model).strip(".-")[:80]
    return plain if plain == model else f"{plain or 'model'}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
