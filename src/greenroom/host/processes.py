"""Starting an engine, following everything it starts, and ending all of it.

An engine is more than the process we start: wrapper shells, workers, daemons that fork twice.  A `Process` knows
its whole tree by these signs: the session it was started in, descent, a marker in the environment, our pipe as its
output, and having been seen before.  Orphans come to us (this process is made their reaper), so nothing is left as a zombie either.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from greenroom.engines.base import Ending, Launch
from greenroom.host.exits import open_pidfd, wait_exited
from greenroom.host.logs import LogRing
from greenroom.host.proctable import (
    INSTANCE_KEY,
    SUPERVISOR_KEY,
    Entry,
    Identity,
    descendants,
    environ_value,
    read_entry,
    send_signal,
    snapshot,
)
from greenroom.host.supervisor import Supervisor

PIPE_BYTES = 1024 * 1024  # what an engine can print while we are busy; the kernel's usual limit for one pipe
READ_BYTES_MAX = 1024 * 1024
KEEP_BYTES_MAX = 512 * 1024  # of one such read; more than that at once is a flood, and only its end is kept
DRAIN_BYTES_MAX = 4 * 1024 * 1024
KILL_S_MAX = 10.0
ORPHAN_EXITS_MAX = 256
FOLLOW_S = 3600.0  # one look at least, at an engine that has detached
EXIT_POLL_S = 0.02  # only where there are no pidfds

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# Facts about this operating-system process, not about one engine: whom we started, and how adopted orphans ended.
_started: set[int] = set()
_orphan_exits: dict[Identity, Exit] = {}


class SpawnError(Exception):
    """The engine could not be started; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: an exit code, or the signal that ended it.  Both None: it was not our child to ask."""

    code: int | None
    signal: int | None

    @classmethod
    def of(cls, returncode: int) -> Exit:
        return cls(returncode, None) if returncode >= 0 else cls(None, -returncode)

    def __str__(self) -> str:
        if self.signal is not None:
            name = signal.Signals(self.signal).name if self.signal in set(signal.Signals) else str(self.signal)
            return f"ended by {name}"
        return "ended" if self.code is None else f"exited with code {self.code}"


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """`unkillable`: something still runs after SIGKILL (it hangs in the kernel); its memory is not free."""

    killed: bool
    unkillable: bool
    took_s: float
    exit: Exit | None
    ending: Ending | None = None  # what is known beside its log: of a container, by its runtime


class Process:
    """One running engine and all its descendants.  Always `stop` it in the end, even after it ended by itself."""

    up = True  # False: a container that was not seen to run yet; who answers on its port may be a stranger

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        output: int,
        *,
        launch: Launch,
        token: str,
        log: LogRing,
        supervisor: Supervisor | None,
        started_at: float,
    ) -> None:
        entry = read_entry(child.pid)
        self.pid = child.pid
        self.launch = launch
        self.token = token
        self.log = log
        self.started_at = started_at
        self.identity: Identity = entry.identity if entry is not None else (child.pid, 0)
        self.exit: Exit | None = None
        self._child = child
        self._supervisor = supervisor
        self._seen: set[Identity] = set()
        self._strangers: set[Identity] = set()
        self._session_over = False
        self._orphan_exit: Exit | None = None  # of the last part of it that ended as our adopted child
        self._ended = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()
        self._output: int | None = output
        self._pipe = f"pipe:[{os.fstat(output).st_ino}]"
        self._handle = open_pidfd(self.identity)
        self._watch()

    @property
    def exited(self) -> bool:
        """Whether the process we started has ended; others of its tree may live."""
        return self.exit is not None

    async def wait(self) -> Exit:
        """Until the process we started ends.  Its last words are in the log then."""
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    async def ended(self) -> Exit:
        """Until the engine as a whole has ended.

        A command that exits 0 and leaves a descendant running has detached; then the engine lives as long as its tree.
        After any other exit the engine is broken even if parts of it linger (`stop` ends those).
        """
        result = await self.wait()
        if result.code != 0 or not self.tree():
            return result
        while not await self.tree_gone(FOLLOW_S):
            pass
        return self._orphan_exit or Exit(None, None)

    @property
    def detached(self) -> bool:
        """The command exited 0 and the engine runs on without it."""
        return self.exit is not None and self.exit.code == 0 and bool(self.tree())

    def on_exit(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once when the process we started ends; returns what takes that back."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def tree(self) -> frozenset[int]:
        """Every live pid of this engine.  Reaps its orphans on the way.  One pass over /proc (about 1 ms for 100 processes)."""
        return frozenset(entry.pid for entry in self._scan())

    async def gone(self) -> bool:
        """Whether one that would not die has died after all."""
        return not self.tree()

    async def tree_gone(self, timeout_s: float) -> bool:
        """True as soon as nothing of the engine runs and nothing is left to reap; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while members := self._scan():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await wait_exited([entry.identity for entry in members], left_s)
        return True

    def send(self, signum: int) -> None:
        """Signal the whole tree: the group we started as one, and whoever left it one by one."""
        members = self._scan()
        if any(entry.group == self.pid for entry in members):
            try:
                os.killpg(self.pid, signum)
            except (ProcessLookupError, PermissionError):
                pass  # gone meanwhile, or it runs as another user: the outcome tells
        for entry in members:
            if entry.group != self.pid:
                send_signal(entry.identity, signum)

    def close(self) -> None:
        """Let go of pipes and handles.  `stop` does it."""
        self._check_exit()
        if self._output is not None:
            self._drain()
        self._close_output()
        self._close_handle()
        if self._supervisor is not None and not self._scan():
            self._supervisor.remove(self.pid)

    # ------------------------------------------------------------------------------------------------ the tree

    def _scan(self) -> list[Entry]:
        self._check_exit()
        table = snapshot()
        reap_orphans(table)
        if self.exit is not None and not any(entry.session == self.pid for entry in table.values()):
            self._session_over = True  # from here on its number may be given to a stranger
        self._orphan_exit = next((_orphan_exits[each] for each in self._seen if each in _orphan_exits), self._orphan_exit)
        roots = [pid for pid, entry in table.items() if self._is_root(entry)]
        members = [table[pid] for pid in descendants(table, roots) if pid in table]
        self._seen = {entry.identity for entry in members}
        self._strangers.intersection_update({entry.identity for entry in table.values()})
        return [entry for entry in members if entry.live]

    def _is_root(self, entry: Entry) -> bool:
        if entry.identity in self._seen or entry.identity == self.identity:
            return True
        if entry.started_ticks < self.identity[1] or entry.identity in self._strangers:
            return False
        if entry.session == self.pid and not self._session_over:
            return True
        if environ_value(entry.pid, INSTANCE_KEY) == self.token.encode():
            return True
        if entry.ppid == os.getpid() and entry.pid not in _started:
            return _prints_to(entry.pid, self._pipe)  # an orphan without its environment; not remembered, its files may change
        self._strangers.add(entry.identity)
        return False

    # ------------------------------------------------------------------------------------------------ exit and output

    def _watch(self) -> None:
        assert self._output is not None
        self._loop.add_reader(self._output, self._read)
        if self._handle is not None:
            self._loop.add_reader(self._handle, self._check_exit)
        else:
            self._poll_exit()

    def _poll_exit(self) -> None:
        self._check_exit()
        if self.exit is None:
            self._loop.call_later(EXIT_POLL_S, self._poll_exit)

    def _check_exit(self) -> None:
        if self.exit is not None or (returncode := self._child.poll()) is None:
            return
        self._drain()  # its last words first: whoever waits for the exit wants to read them
        self.exit = Exit.of(returncode)
        _started.discard(self.pid)
        self._close_handle()
        self._ended.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _read(self) -> bool:
        """Take what is there; False when there is nothing more now."""
        if self._output is None:
            return False
        try:
            chunk = os.read(self._output, READ_BYTES_MAX)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self._close_output()
            return False
        if len(chunk) > KEEP_BYTES_MAX:
            cut = chunk.find(b"\n", len(chunk) - KEEP_BYTES_MAX) + 1 or len(chunk) - KEEP_BYTES_MAX
            self.log.leave_out(chunk.count(b"\n", 0, cut))
            chunk = chunk[cut:]
        self.log.feed(chunk)
        return True

    def _drain(self) -> None:
        for _ in range(DRAIN_BYTES_MAX // READ_BYTES_MAX):
            if not self._read():
                break
        self.log.flush()

    def _close_output(self) -> None:
        if self._output is not None:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = None
            self.log.flush()

    def _close_handle(self) -> None:
        if self._handle is not None:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None


# ---------------------------------------------------------------------------------------------------------- spawn


SomeProcess = TypeVar("SomeProcess", bound=Process)


async def spawn(launch: Launch, *, token: str, log: LogRing, supervisor: Supervisor | None = None) -> Process:
    """Start an engine in its own session; it dies with this process.  `token` must be unique: its descendants are found by it.

    Call it on the thread that lives as long as the program (the event loop's): the kernel ties the death signal to the thread.
    Raises SpawnError.
    """
    return await spawn_as(Process, launch, token=token, log=log, supervisor=supervisor)


async def spawn_as(kind: type[SomeProcess], launch: Launch, *, token: str, log: LogRing, supervisor: Supervisor | None) -> SomeProcess:
    """`spawn` for another kind of process."""
    _become_reaper()
    output, inlet = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(output, False)
        _widen(output)
        started_at = time.monotonic()  # before it runs: on a busy machine it may be far by the time that we go on
        child = _start(launch, inlet, _environment(launch, token, supervisor))
    except (OSError, ValueError) as exc:  # ValueError: a NUL inside an argument
        os.close(output)
        raise SpawnError(_why(exc, launch)) from exc
    finally:
        os.close(inlet)
    _started.add(child.pid)
    if supervisor is not None:
        supervisor.add(child.pid)
    return kind(child, output, launch=launch, token=token, log=log, supervisor=supervisor, started_at=started_at)


def _start(launch: Launch, inlet: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with warnings.catch_warnings():
        # Newer Pythons warn of any code between fork and exec in a program with threads; ours is two system calls.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            launch.argv,
            stdin=subprocess.DEVNULL,
            stdout=inlet,
            stderr=inlet,
            cwd=launch.cwd,
            env=environment,
            close_fds=True,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 - it takes no lock and allocates next to nothing
        )


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could say so
            os._exit(127)

    return prepare


def _environment(launch: Launch, token: str, supervisor: Supervisor | None) -> dict[str, str]:
    environment = {**os.environ, **launch.env, INSTANCE_KEY.decode(): token}
    environment.pop(SUPERVISOR_KEY.decode(), None)
    if launch.box is not None:
        # What a runtime leaves running for all its containers must not look like a part of this engine.
        del environment[INSTANCE_KEY.decode()]
        return environment
    if supervisor is not None:
        environment[SUPERVISOR_KEY.decode()] = supervisor.marker
    return environment


def _widen(pipe: int) -> None:
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass  # over this user's share of pipe memory: the usual 64 KiB must do


def _why(exc: OSError | ValueError, launch: Launch) -> str:
    program = launch.argv[0]
    if isinstance(exc, ValueError):
        return f"cannot start {program}: {exc} in its arguments, environment or `cwd`."
    if launch.cwd is not None and exc.filename == launch.cwd:
        return f"cannot start {program}: its working directory {launch.cwd} cannot be entered ({exc.strerror}). Create it or correct `cwd`."
    if exc.errno == errno.ENOENT:
        return f"cannot start {program}: no such program (or the interpreter it names). Install it or write its full path in `cmd`."
    if exc.errno == errno.EACCES:
        return f"cannot start {program}: it may not be executed. Check that it is a program and `chmod +x` it."
    if exc.errno == errno.ENOEXEC:
        return f"cannot start {program}: the system cannot execute it. Is it built for this machine, or a script without a #! line?"
    return f"cannot start {program}: {exc.strerror or exc}."


def _become_reaper() -> None:
    # Orphans of engines come to us instead of to init: they stay visible as ours and can be reaped.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _prints_to(pid: int, pipe: str) -> bool:
    for descriptor in (1, 2):
        try:
            if os.readlink(f"/proc/{pid}/fd/{descriptor}") == pipe:
                return True
        except OSError:
            pass  # closed, or not ours to look at
    return False


def reap_orphans(table: dict[int, Entry]) -> None:
    """Reap dead children we did not start.  Those of other libraries in this process live in our own session: not touched."""
    own = os.getpid()
    own_session = os.getsid(0)
    for entry in tuple(table.values()):
        if entry.ppid != own or entry.live or entry.session == own_session or entry.pid in _started:
            continue
        try:
            pid, status = os.waitpid(entry.pid, os.WNOHANG)
        except ChildProcessError:
            continue
        if pid:
            _orphan_exits[entry.identity] = Exit.of(os.waitstatus_to_exitcode(status))
            while len(_orphan_exits) > ORPHAN_EXITS_MAX:
                del _orphan_exits[next(iter(_orphan_exits))]


# ----------------------------------------------------------------------------------------------------------- stop


async def stop(
    process: Process,
    *,
    grace_s: float,
    stop_argv: Sequence[str] = (),
    on_signal: Callable[[str], None],
    kill_s_max: float = KILL_S_MAX,
) -> StopOutcome:
    """End the engine with its whole tree: TERM (or `stop_argv` with ${PID}), `grace_s`, then KILL for whatever is left, and reap.

    `on_signal` hears each step ("stop command", "TERM", "KILL").  Returns when nothing of it lives, or `kill_s_max` after KILL.
    """
    began_at = time.monotonic()
    killed = unkillable = False
    if process.tree():
        if not (stop_argv and await run_stop_command(process, stop_argv, grace_s, on_signal)):
            on_signal("TERM")
            process.send(signal.SIGTERM)
        if not await _gone_in_time(process, began_at + grace_s, on_signal):
            killed = True
            on_signal("KILL")
            unkillable = not await _kill(process, kill_s_max)
    process.close()
    return StopOutcome(killed, unkillable, time.monotonic() - began_at, process.exit)


async def _gone_in_time(process: Process, deadline: float, on_signal: Callable[[str], None]) -> bool:
    """Wait for the tree to go; an engine known to lose a TERM is told again."""
    again_s = process.launch.term_again_s
    while (left_s := deadline - time.monotonic()) > 0:
        if await process.tree_gone(left_s if again_s is None else min(again_s, left_s)):
            return True
        if again_s is not None and time.monotonic() < deadline:
            on_signal("TERM")
            process.send(signal.SIGTERM)
    return await process.tree_gone(0.0)


async def run_stop_command(process: Process, stop_argv: Sequence[str], grace_s: float, on_signal: Callable[[str], None]) -> bool:
    """False when it could not be run or failed: then TERM is next.  It belongs to the tree, so a hanging one is killed with it."""
    argv = tuple(item.replace("${PID}", str(process.pid)) for item in stop_argv)
    on_signal("stop command")
    command = Launch(argv, process.launch.env, process.launch.host, process.launch.port, cwd=process.launch.cwd)
    try:
        running = await spawn(command, token=process.token, log=process.log)
    except SpawnError as exc:
        process.log.note(f"[stop command: {exc}]")
        return False
    try:
        async with asyncio.timeout(grace_s):
            result = await running.wait()
    except TimeoutError:
        return True  # the grace is over anyway
    finally:
        _follow(process, running)
    if result.code != 0:
        process.log.note(f"[stop command {result}]")
    return result.code == 0


def _follow(process: Process, running: Process) -> None:
    """Hand the stop command's own process over to the tree it belongs to."""
    running.on_exit(running.close)
    if running.exited:
        running.close()


async def _kill(process: Process, kill_s_max: float) -> bool:
    deadline = time.monotonic() + kill_s_max
    while (left_s := deadline - time.monotonic()) > 0:
        process.send(signal.SIGKILL)  # again and again: it may fork faster than we look
        if await process.tree_gone(min(left_s, 0.2)):
            return True
    return not process.tree()
