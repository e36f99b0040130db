"""One engine in a container: following it, knowing what is inside, ending it exactly.

It is two things: the client that we start (`podman run`, `docker run`) and the container, which lives and dies apart
from it.  A `Contained` is both: it has ended when the container has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence

from greenroom.core.facts import Cause
from greenroom.engines import container as words
from greenroom.engines.base import Box, Ending, Launch
from greenroom.engines.container import BoxState
from greenroom.host.exits import wait_exited
from greenroom.host.logs import LogRing
from greenroom.host.processes import (
    KILL_S_MAX,
    Exit,
    Process,
    SpawnError,
    StopOutcome,
    reap_orphans,
    run_stop_command,
    spawn,
    spawn_as,
    stop,
)
from greenroom.host.proctable import Entry, Identity, descendants, read_entry, send_signal, snapshot
from greenroom.host.runtimes import ASK_S_MAX, RuntimeSilent, ask, askers, remove, run_now, state_in, state_of
from greenroom.host.seam import Seam
from greenroom.host.supervisor import Supervisor

STOP_SLACK_S = 5.0  # what a runtime needs for a stop beside the grace
CLIENT_S_MAX = 3.0  # for a client to see that its container has gone
SETTLE_S = 0.5  # a client that was killed while it made a container: what it asked for last may still come
LOOK_S_MIN, LOOK_S_MAX = 0.05, 0.5  # pauses between looks at a container that is to come or to go
OUTLIVED_S = 2.0  # a client that ended by itself is believed: its container goes within this time
SILENT_S_MAX = 20.0  # how long a runtime may be away (a restart of its service) while an engine of it runs
FOLLOW_PAUSE_S = 1.0
BACKLOG_S = 1.0  # of its log that is read again when its client was lost, so that no line falls between the two
SEAM_LINES_MAX = 1000
HURRY_ASK_S_MAX = 3.0  # one question, once greenroom itself is to end
STRAY_LOOK_S = 5.0


class Contained(Process):
    """A client in the foreground, and the container behind it.  Its tree is the client and what runs inside."""

    up = False
    inside: Identity | None = None  # its first process, where that is one of this host
    hurried = False  # greenroom itself is to end
    silent = False  # its runtime did not answer when it was last asked
    _outlives = False  # its client was lost, and it runs on
    _heard_at = 0.0  # when its last line came, or its client was lost
    _follower: Process | None = None
    _looked_at = 0.0
    _removing: asyncio.Future[bool] | None = None

    @property
    def box(self) -> Box:
        assert self.launch.box is not None
        return self.launch.box

    @property
    def ask_s_max(self) -> float:
        """One question about it."""
        return HURRY_ASK_S_MAX if self.hurried else ASK_S_MAX

    @property
    def exited(self) -> bool:
        return self.exit is not None and not self._outlives

    @property
    def detached(self) -> bool:
        return self.exit is not None and self._outlives

    async def learn(self) -> None:
        """Until it runs, and it is known which process of this host is its first."""
        pause_s = LOOK_S_MIN
        while self.exit is None and not self.up:
            with contextlib.suppress(RuntimeSilent):
                if (state := await state_of(self.box, self.ask_s_max)) is not None and state.running:
                    self._take(state)
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(LOOK_S_MAX, 2 * pause_s)

    def _take(self, state: BoxState) -> None:
        self.up = True
        entry = read_entry(state.pid) if state.pid else None
        # A runtime on another machine, or outside of the container we are in, counts its processes otherwise.
        if entry is not None and entry.started_ticks >= self.identity[1]:
            self.inside = entry.identity

    async def ended(self) -> Exit:
        """Until the container has ended, whatever becomes of its client."""
        result = await self.wait()
        self._heard_at = time.monotonic()
        try:
            while True:
                if not await self._runs_on(believe_client=result.signal is None and not self._outlives):
                    return result
                if not self._outlives:
                    self._outlives = True
                    self.log.note(f"[greenroom: its client ({self.box.runtime} run) {result}; the container runs on and is followed]")
                await self._follow()
        finally:
            self._outlives = False

    async def _runs_on(self, *, believe_client: bool) -> bool:
        """Whether the container runs although its client is gone."""
        deadline = time.monotonic() + (OUTLIVED_S if believe_client else SILENT_S_MAX)
        while True:
            try:
                state = await state_of(self.box, self.ask_s_max)
                if state is None or not state.running or (not believe_client and not self.inside_gone()):
                    return state is not None and state.running
                if state.running and not self.up:
                    self._take(state)
            except RuntimeSilent:
                state = None
            if time.monotonic() >= deadline:
                return (state is not None and not self.inside_gone()) or self.inside_lives()
            await asyncio.sleep(LOOK_S_MAX)

    def inside_lives(self) -> bool:
        entry = read_entry(self.inside[0]) if self.inside is not None else None
        return entry is not None and entry.identity == self.inside and entry.live

    def inside_gone(self) -> bool:
        return self.inside is not None and not self.inside_lives()

    async def _follow(self) -> None:
        """Its words since the last that was heard, until they end or it does."""
        since_s = time.monotonic() - self._heard_at + BACKLOG_S
        launch = Launch(words.follow_argv(self.box.runtime, self.box.name, since_s), {}, self.launch.host, self.launch.port)
        seam = Seam([line for line in self.log.tail(SEAM_LINES_MAX) if not line.startswith("[greenroom: ")])
        heard = LogRing(self.log.name, lines_max=1, mask=self.log.secrets)
        heard.listen(lambda lines: self._hear(seam.fresh(lines)))
        try:
            follower = self._follower = await spawn(launch, token=self.token, log=heard, supervisor=self._supervisor)
        except SpawnError as exc:
            self.log.note(f"[greenroom: {exc}]")
        else:
            try:
                await follower.wait()
            finally:
                self._follower = None
                await stop(follower, grace_s=0.0, on_signal=lambda _: None)
                self._hear(seam.rest())
        await asyncio.sleep(FOLLOW_PAUSE_S)

    def _hear(self, lines: Sequence[str]) -> None:
        if lines:
            self._heard_at = time.monotonic()
            self.log.feed("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))

    async def gone(self) -> bool:
        """Of one that would not go: removed at last.  Never waits: its runtime is asked every few seconds, beside everything else."""
        if self._removing is None:
            if time.monotonic() - self._looked_at >= STRAY_LOOK_S:
                self._removing = asyncio.get_running_loop().run_in_executor(askers, _removed, self.box)
            return False
        if not self._removing.done():
            return False
        removed, self._removing, self._looked_at = self._removing.result(), None, time.monotonic()
        if not removed and not self.inside_gone():  # what has visibly ended holds nothing, whatever its runtime does
            return False
        if self.tree():
            return False
        if removed:
            self.let_go()
        return True

    def let_go(self) -> None:
        """Its container is gone: nobody has to end it any more."""
        if self._supervisor is not None:
            self._supervisor.unguard(self.box.name)

    def kill_client(self) -> None:
        """With its group: a rootless podman works in a child of the process that we have started."""
        table = snapshot()
        leader = table.get(self.pid)
        if leader is not None and leader.identity != self.identity:
            return  # the number is another's by now, so the group is gone
        for entry in table.values():
            if entry.group == self.pid == entry.session:
                send_signal(entry.identity, signal.SIGKILL)

    def ask_inside(self) -> None:
        """TERM to its first process, past its runtime; only where we have the right to."""
        if self.inside is not None:
            send_signal(self.inside, signal.SIGTERM)

    def kill_inside(self) -> None:
        """Past its runtime; only where we have the right to."""
        for entry in self._scan():
            send_signal(entry.identity, signal.SIGKILL)

    async def drop_follower(self) -> None:
        if self._follower is not None:
            await stop(self._follower, grace_s=0.0, on_signal=lambda _: None)

    def _scan(self) -> list[Entry]:
        # Not by descent from the client: what a runtime leaves behind (its monitor, a pause process, name servers) is its own.
        self._check_exit()
        table = snapshot()
        reap_orphans(table)
        own = table.get(self.pid)
        members = [own] if own is not None and own.identity == self.identity else []
        if self.inside is not None and (first := table.get(self.inside[0])) is not None and first.identity == self.inside:
            members += [table[pid] for pid in descendants(table, [first.pid]) if pid in table]
        return [entry for entry in members if entry.live]


def _removed(box: Box) -> bool:
    """Kill and remove it; whether its runtime says that it does not run."""
    run_now(words.kill_argv(box.runtime, box.name), ASK_S_MAX)
    run_now(words.remove_argv(box.runtime, box.name), ASK_S_MAX)
    try:
        state = state_in(box, run_now(words.inspect_argv(box.runtime, box.name), ASK_S_MAX))
    except RuntimeSilent:
        return False
    return state is None or not state.running


async def spawn_contained(launch: Launch, *, token: str, log: LogRing, supervisor: Supervisor | None = None) -> Contained:
    """Start a container's client; see `spawn`.  From now on the watcher ends the container if we are killed."""
    if supervisor is not None and (box := launch.box) is not None and (runtime := shutil.which(box.runtime)):
        env = {name: value for name, value in os.environ.items() if words.CLIENT_VARIABLE.match(name)}
        supervisor.guard(box.name, (words.kill_argv(runtime, box.name), words.remove_argv(runtime, box.name)), env)
    try:
        return await spawn_as(Contained, launch, token=token, log=log, supervisor=supervisor)
    except SpawnError:
        if supervisor is not None and launch.box is not None:
            supervisor.unguard(launch.box.name)
        raise


# ---------------------------------------------------------------------------------------------------------------- stop


async def stop_contained(
    process: Contained,
    *,
    grace_s: float,
    stop_argv: Sequence[str] = (),
    on_signal: Callable[[str], None],
    kill_s_max: float = KILL_S_MAX,
) -> StopOutcome:
    """End a container: its stop signal (or `stop_argv`), `grace_s`, KILL; then remove it, and its client.

    Returns when it is gone, or `kill_s_max` after KILL.  `ending` of the outcome is what only its runtime knows.
    A runtime that hangs costs one `ask_s_max` where the engine is a process of this host, else one for each step.
    """
    began_at = time.monotonic()
    client, outlives = process.exit, False
    state, known = await _look(process)
    if process.exit is None and known and (state is None or not state.running):
        process.kill_client()  # it is about to make or to start it
        await wait_exited([process.identity], CLIENT_S_MAX)
        state, known = await _settled(process, True, SETTLE_S)
    elif client is not None and client.signal is None and not process.detached and state is not None and state.running:
        state, known = await _settled(process, False, OUTLIVED_S)  # a client that ended by itself has seen the end of its container
    killed = False
    if not known or (state is not None and state.running):
        outlives = client is not None
        state, known, killed = await _end(process, grace_s, stop_argv, on_signal, kill_s_max)
    over = known and (state is None or not state.running)
    if over and state is not None and (said := await remove(process.box.runtime, process.box.name, kill=False, limit_s=process.ask_s_max)):
        process.log.note(f"[greenroom: the container could not be removed: {said}]")
    await process.drop_follower()
    if over and not await wait_exited([process.identity], CLIENT_S_MAX):
        process.kill_client()
        await wait_exited([process.identity], CLIENT_S_MAX)
    if over and not process.silent:  # else its record may be there still: the watcher removes it in the end
        process.let_go()
    over = over and await process.tree_gone(kill_s_max if killed else CLIENT_S_MAX)
    process.close()
    ending = _ending(process, client, state, outlives) if over else Ending(Cause.UNKILLABLE, _stuck(process, state, known))
    exit_ = process.exit
    if state is not None and not state.running and (client is None or client.signal is not None):
        exit_ = Exit(state.exit_code, None)
    return StopOutcome(killed, not over, time.monotonic() - began_at, exit_, ending)


def _ending(process: Contained, client: Exit | None, state: BoxState | None, outlives: bool) -> Ending | None:
    """What the log of the engine cannot tell."""
    if state is not None and state.oom_killed:
        why = (
            "ran out of host RAM: the kernel killed it inside its container (OOMKilled); raise --memory in container.args, or lower its use"
        )
        return Ending(Cause.OOM, why)
    if outlives and client is not None:
        return Ending(Cause.EXITED, f"its client ({process.box.runtime} run) {client} while the container ran; the container was ended too")
    return None


def _stuck(process: Contained, state: BoxState | None, known: bool) -> str:
    what = "is still there after KILL" if known else f"cannot be looked at, {process.box.runtime} does not answer"
    return f"its container {process.box.name} {what}; its memory stays booked until it is gone"


async def _look(process: Contained) -> tuple[BoxState | None, bool]:
    """The container, and whether its runtime answered."""
    if process.silent and process.inside_gone():
        return None, True
    try:
        state = await state_of(process.box, process.ask_s_max)
        process.silent = False
        return state, True
    except RuntimeSilent as exc:
        process.silent = True
        if process.inside_gone():
            return None, True  # whatever its runtime would say
        if f"[greenroom: {exc}]" not in process.log.tail(5):
            process.log.note(f"[greenroom: {exc}]")
        return None, False


async def _settled(process: Contained, running: bool, within_s: float) -> tuple[BoxState | None, bool]:
    """As it is once it runs or does not run as told, or after that time."""
    deadline = time.monotonic() + within_s
    while True:
        state, known = await _look(process)
        if not known or (state is not None and state.running) is running or time.monotonic() >= deadline:
            return state, known
        await asyncio.sleep(LOOK_S_MIN)


async def _ask_to_stop(process: Contained, grace_s: float, on_signal: Callable[[str], None]) -> None:
    """Until its runtime says that it has stopped; an engine known to lose a TERM is told again meanwhile."""
    runtime, name, again_s = process.box.runtime, process.box.name, process.launch.term_again_s
    on_signal("TERM")
    argv, limit_s = words.stop_argv(runtime, name, grace_s), grace_s + min(STOP_SLACK_S, process.ask_s_max)
    if process.silent:
        process.ask_inside()
        if await _leaves(process, grace_s):
            return
        if process.hurried:
            limit_s = process.ask_s_max  # it may as well not hear this either
    stopping = asyncio.get_running_loop().run_in_executor(askers, run_now, argv, limit_s)
    until = time.monotonic() + grace_s
    while not (await asyncio.wait({stopping}, timeout=again_s))[0]:
        if time.monotonic() < until:
            on_signal("TERM")
            await ask(words.signal_argv(runtime, name, "TERM"), process.ask_s_max)


async def _leaves(process: Contained, grace_s: float) -> bool:
    """Whether what runs inside has ended within that time; at once False where that cannot be seen."""
    deadline = time.monotonic() + grace_s
    while process.inside is not None and time.monotonic() < deadline and process.inside_lives():
        await wait_exited([process.inside], deadline - time.monotonic())
    return process.inside_gone()


async def _end(
    process: Contained, grace_s: float, stop_argv: Sequence[str], on_signal: Callable[[str], None], kill_s_max: float
) -> tuple[BoxState | None, bool, bool]:
    """A container that runs, or of which nothing is known.  Its last state, whether that is known, whether it was killed."""
    runtime, name = process.box.runtime, process.box.name
    began_at = time.monotonic()
    if not (stop_argv and await run_stop_command(process, stop_argv, grace_s, on_signal)):
        await _ask_to_stop(process, grace_s, on_signal)
    # A stop command may return before the engine has ended.
    deadline = began_at + grace_s if stop_argv else time.monotonic()
    while True:
        state, known = await _look(process)
        if known and (state is None or not state.running):
            in_time = time.monotonic() - began_at < grace_s or state is None or state.exit_code != 128 + signal.SIGKILL
            if not in_time:
                on_signal("KILL")  # its runtime did
            return state, True, not in_time
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(LOOK_S_MIN)
    on_signal("KILL")
    deadline = time.monotonic() + kill_s_max
    while True:
        left_s = max(0.5, deadline - time.monotonic())
        if process.silent:
            process.kill_inside()  # whatever comes of asking
            if await _leaves(process, min(left_s, CLIENT_S_MAX)):
                return None, True, True
        await ask(words.kill_argv(runtime, name), min(process.ask_s_max / 2, left_s))
        state, known = await _look(process)
        if known and (state is None or not state.running):
            return state, True, True
        process.kill_inside()
        await ask(words.remove_argv(runtime, name), min(process.ask_s_max / 2, left_s))
        if time.monotonic() >= deadline:
            return state, known, True
        await asyncio.sleep(LOOK_S_MAX)
