"""Engines start, are followed wherever they go, and end completely."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from greenroom.host import processes
from greenroom.host.logs import LogRing
from greenroom.host.processes import Exit, SpawnError, spawn, stop
from greenroom.host.proctable import read_entry, send_signal
from tests.host.engines import (
    FAKES,
    PATIENCE_S,
    PYTHON,
    a_launch,
    a_port,
    children_of_ours,
    daemon_argv,
    engine_argv,
    lives,
    printed,
    python_argv,
    running,
    until,
)


async def stopped(process: processes.Process, grace_s: float = 5.0, **rest: object) -> tuple[processes.StopOutcome, list[str]]:
    said: list[str] = []
    outcome = await stop(process, grace_s=grace_s, on_signal=said.append, **rest)  # type: ignore[arg-type]
    return outcome, said


# ----------------------------------------------------------------------------------------------------------- spawn


async def test_an_engine_runs_in_its_own_session_without_a_terminal_or_our_files():
    """Its session is its own, stdin is empty, and it holds no descriptor but the three standard ones."""
    code = (
        "import os, sys; files = sorted(map(int, os.listdir('/proc/self/fd')));"
        "print(os.getsid(0) == os.getpid(), sys.stdin.read() == '', files[:3], len(files))"
    )
    async with running(a_launch(python_argv(code))) as process:
        assert await process.wait() == Exit(0, None)
        assert process.log.tail(1) == ["True True [0, 1, 2] 4"]  # the fourth is the listing itself


async def test_an_engine_sees_its_token_and_the_launch_environment():
    """The launch's variables come on top of ours."""
    launch = processes.Launch(
        python_argv("import os; print(os.environ['GREENROOM_INSTANCE'], os.environ['X'], 'PATH' in os.environ)"), {"X": "1"}, "127.0.0.1", 0
    )
    process = await spawn(launch, token="t-1", log=LogRing("engine"))

    assert (await process.wait()).code == 0
    assert process.log.tail(1) == ["t-1 1 True"]
    process.close()


@pytest.mark.parametrize(
    ("argv", "cwd", "says"),
    [
        (("/nonexistent/llama-server",), None, "no such program"),
        (("no-such-llama-server",), None, "no such program"),
        ((str(FAKES / "fake_nvml.c"),), None, "may not be executed"),
        (("sh", "a\0b"), None, "embedded null byte in its arguments"),
        (("sh",), "/nonexistent", "its working directory /nonexistent cannot be entered"),
    ],
)
async def test_what_cannot_be_started_is_told_in_one_sentence(argv, cwd, says):
    """The sentence names the program and what to do; nothing is left open."""
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(SpawnError) as caught:
        await spawn(a_launch(argv, cwd=cwd), token="t", log=LogRing("engine"))

    assert str(caught.value).startswith(f"cannot start {argv[0]}: ")
    assert says in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_exit_is_seen_at_once_and_the_last_words_are_there_first():
    """Whoever waits for the exit can read the unfinished last line in the log."""
    async with running(a_launch(python_argv("import os; os.write(2, b'one\\nCUDA out of memory'); os._exit(7)"))) as process:
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == Exit(7, None)
        assert process.log.tail(2) == ["one", "CUDA out of memory"]
        assert process.exited


async def test_a_process_ended_by_a_signal_says_which():
    """A crash is told from an exit code."""
    async with running(a_launch(python_argv("import os; os.kill(os.getpid(), 11)"))) as process:
        result = await asyncio.wait_for(process.wait(), PATIENCE_S)
    assert result == Exit(None, signal.SIGSEGV)
    assert str(result) == "ended by SIGSEGV"


# ------------------------------------------------------------------------------------------------------- whole trees


async def test_a_polite_engine_ends_by_term():
    """TERM is enough, and the outcome says so."""
    async with running(a_launch(engine_argv(a_port()))) as process:
        await printed(process.log, "listening")
        outcome, said = await stopped(process)
    assert (outcome.killed, outcome.unkillable, outcome.exit, said) == (False, False, Exit(0, None), ["TERM"])


async def test_a_wrapper_shell_does_not_hide_the_engine():
    """`sh -c 'engine; echo after'`: both are in the tree, both are gone."""
    argv = ("sh", "-c", f"{' '.join(engine_argv(a_port()))}; echo after")
    async with running(a_launch(argv)) as process:
        engine = int((await printed(process.log, "started")).split()[1])
        assert process.tree() == {process.pid, engine}

        outcome, said = await stopped(process)

        assert not lives(engine)
        assert process.tree() == frozenset()
        assert (outcome.killed, said) == (False, ["TERM"])


async def test_a_wrapper_that_ignores_term_is_killed_with_its_engine():
    """After the grace everything in the tree gets KILL."""
    argv = ("sh", "-c", f"trap '' TERM; {' '.join(engine_argv(a_port(), 'on_term=ignore'))}; echo after; sleep 60")
    async with running(a_launch(argv)) as process:
        await printed(process.log, "listening")
        tree = process.tree()

        outcome, said = await stopped(process, grace_s=0.3)

        assert len(tree) == 2
        assert not any(lives(pid) for pid in tree)
        assert (outcome.killed, outcome.exit, said) == (True, Exit(None, signal.SIGKILL), ["TERM", "KILL"])
        assert outcome.took_s >= 0.3


@pytest.mark.parametrize("how", ["plain", "blank"])
async def test_a_double_fork_is_followed_to_the_end(how):
    """The command exits 0 at once; its engine is known, reachable and ended, even without our marker in its environment."""
    async with running(a_launch(daemon_argv(a_port(), how))) as process:
        engine = int((await printed(process.log, "started")).split()[1]) if how == "plain" else 0
        assert (await asyncio.wait_for(process.wait(), PATIENCE_S)).code == 0
        if how == "blank":
            engine = await orphan_of(process)
        assert process.detached
        assert engine in process.tree()

        outcome, said = await stopped(process)

        assert not lives(engine)
        assert read_entry(engine) is None  # reaped, not a zombie
        assert (outcome.unkillable, said) == (False, ["TERM"])


async def orphan_of(process: processes.Process) -> int:
    await until(lambda: any("started" in line for line in process.log.tail(10)), "the daemon's engine starts")
    return int(next(line for line in process.log.tail(10) if "started" in line).split()[1])


async def test_the_end_of_a_detached_engine_is_seen_with_its_exit_code():
    """`ended` waits for the tree, not for the command that exited 0."""
    async with running(a_launch(daemon_argv(a_port(), "plain", "exit_after=0.4:3"))) as process:
        assert (await asyncio.wait_for(process.wait(), PATIENCE_S)).code == 0
        assert await asyncio.wait_for(process.ended(), PATIENCE_S) == Exit(3, None)
        assert process.tree() == frozenset()


async def test_a_command_that_fails_has_ended_even_when_parts_linger():
    """A broken engine is broken; `stop` ends what lingers."""
    async with running(a_launch(("sh", "-c", "sleep 60 & echo $!; exit 3"))) as process:
        assert await asyncio.wait_for(process.ended(), PATIENCE_S) == Exit(3, None)
        lingering = int(process.log.tail(1)[0])
        assert process.tree() == {lingering}

        outcome, _ = await stopped(process, grace_s=0.0)

        assert not lives(lingering)
        assert outcome.exit == Exit(3, None)


async def test_a_child_that_leaves_the_session_is_ended_too():
    """A worker in a session of its own gets TERM like the rest."""
    async with running(a_launch(("sh", "-c", f"setsid {' '.join(engine_argv(a_port()))} & wait"))) as process:
        engine = int((await printed(process.log, "started")).split()[1])
        await printed(process.log, "listening")
        assert engine in process.tree()

        _, said = await stopped(process)

        assert not lives(engine)
        assert said == ["TERM"]


# ------------------------------------------------------------------------------------------------------------- stop


async def test_an_engine_that_ignores_term_is_killed_after_its_grace():
    """TERM, then KILL at the end of the grace, no earlier."""
    async with running(a_launch(engine_argv(a_port(), "on_term=ignore"))) as process:
        await printed(process.log, "listening")
        outcome, said = await stopped(process, grace_s=0.4)
    assert (outcome.killed, outcome.exit, said) == (True, Exit(None, signal.SIGKILL), ["TERM", "KILL"])
    assert 0.4 <= outcome.took_s < 0.4 + PATIENCE_S


async def test_an_engine_that_needs_time_gets_it():
    """No KILL for one that ends within its grace; the stop ends when it does."""
    async with running(a_launch(engine_argv(a_port(), "on_term=slow:0.8"))) as process:
        await printed(process.log, "listening")
        outcome, said = await stopped(process, grace_s=60.0)
    assert (outcome.killed, outcome.exit, said) == (False, Exit(0, None), ["TERM"])
    assert process.log.tail(1) == ["cleaned up"]
    assert 0.8 <= outcome.took_s < 60.0


async def test_a_frozen_engine_dies_by_kill():
    """A process under SIGSTOP cannot handle TERM; KILL needs no cooperation."""
    async with running(a_launch(engine_argv(a_port()))) as process:
        await printed(process.log, "listening")
        os.kill(process.pid, signal.SIGSTOP)
        outcome, said = await stopped(process, grace_s=0.3)
    assert (outcome.killed, outcome.unkillable, said) == (True, False, ["TERM", "KILL"])


async def test_what_survives_kill_is_reported_as_unkillable(monkeypatch):
    """A process stuck in the kernel (here: one that no signal reaches) is not called stopped; the wait is bounded."""
    async with running(a_launch(engine_argv(a_port()))) as process:
        await printed(process.log, "listening")
        with monkeypatch.context() as patch:
            patch.setattr(process, "send", lambda signum: None)
            outcome, said = await stopped(process, grace_s=0.1, kill_s_max=0.3)
        assert (outcome.killed, outcome.unkillable, outcome.exit, said) == (True, True, None, ["TERM", "KILL"])
        assert process.tree() == {process.pid}  # still followed


async def test_a_stop_command_is_run_with_the_pid():
    """cmdStop replaces TERM; ${PID} is the process we started."""
    async with running(a_launch(engine_argv(a_port(), "on_term=ignore"))) as process:
        await printed(process.log, "listening")
        outcome, said = await stopped(process, stop_argv=("sh", "-c", "echo bye ${PID}; kill -9 ${PID}"))
    assert (outcome.killed, said) == (False, ["stop command"])
    assert f"bye {process.pid}" in process.log.tail(10)


@pytest.mark.parametrize("stop_argv", [("sh", "-c", "exit 4"), ("/nonexistent/stop",)])
async def test_a_stop_command_that_fails_is_followed_by_term(stop_argv):
    """It is noted in the log, and the engine is asked the usual way."""
    async with running(a_launch(engine_argv(a_port()))) as process:
        await printed(process.log, "listening")
        outcome, said = await stopped(process, stop_argv=stop_argv)
    assert (outcome.killed, said) == (False, ["stop command", "TERM"])
    assert any("stop command" in line for line in process.log.tail(10))


async def test_a_stop_command_that_hangs_is_killed_with_the_engine():
    """The grace covers the command too."""
    async with running(a_launch(engine_argv(a_port()))) as process:
        await printed(process.log, "listening")
        outcome, said = await stopped(process, grace_s=0.4, stop_argv=("sleep", "60"))
        assert process.tree() == frozenset()
    assert (outcome.killed, outcome.unkillable, said) == (True, False, ["stop command", "KILL"])
    await until(lambda: not children_of_ours(), "no child is left")


async def test_stopping_what_has_ended_signals_nobody():
    """The pid may belong to a stranger by now."""
    async with running(a_launch(("true",))) as process:
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        outcome, said = await stopped(process)
    assert (outcome.killed, outcome.exit, said) == (False, Exit(0, None), [])


async def test_a_reused_pid_is_not_signalled():
    """Same number, other start time: nobody is hit."""
    async with running(a_launch(("sleep", "60"))) as process:
        pid, started_ticks = process.identity
        assert send_signal((pid, started_ticks - 1), signal.SIGKILL) is False
        assert lives(pid)
        assert send_signal((pid, started_ticks), signal.SIGKILL) is True
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == Exit(None, signal.SIGKILL)


async def test_two_engines_of_the_same_kind_are_told_apart():
    """Stopping one leaves the other alone."""
    async with running(a_launch(daemon_argv(a_port()))) as first, running(a_launch(daemon_argv(a_port()))) as second:
        await printed(first.log, "listening")
        await printed(second.log, "listening")
        kept = second.tree()

        await stopped(first)

        assert first.tree() == frozenset()
        assert second.tree() == kept
        assert all(lives(pid) for pid in kept)


async def test_nothing_is_left_behind():
    """After many starts and stops of every shape: no child, no zombie, no descriptor."""
    shapes = [engine_argv, daemon_argv, lambda port: ("sh", "-c", f"{' '.join(engine_argv(port))} & sleep 60 & wait")]
    before = len(os.listdir("/proc/self/fd"))
    for shape in shapes * 2:
        async with running(a_launch(shape(a_port()))) as process:
            await printed(process.log, "listening")

    assert children_of_ours() == []
    assert len(os.listdir("/proc/self/fd")) == before


# -------------------------------------------------------------------------------------------------------------- logs


async def test_a_flood_blocks_neither_the_engine_nor_us():
    """A million lines (100 MB) with odd bytes in a few seconds: the engine never waits, memory stays, the newest lines are there."""
    before_kib = resident_kib()
    pace_s = 4.0
    async with running(
        a_launch((*PYTHON, str(FAKES / "host_flood.py"), "1000000", str(pace_s))), log=LogRing("flood", lines_max=500)
    ) as process:
        slow = process.log.subscribe(lines_max=100)
        began_at = time.monotonic()
        assert (await asyncio.wait_for(process.wait(), 90)).code == 0
        took_s = time.monotonic() - began_at
        engine_s = float(process.log.tail(1)[0].removeprefix("took "))
        grown_mib = (resident_kib() - before_kib) / 1024
        print(
            f"flood: engine {engine_s:.2f} s at a pace of {pace_s} s, seen in {took_s:.2f} s, "
            f"grown {grown_mib:.1f} MiB, left out {process.log.left_out}"
        )
        assert process.log.tail(2)[0].startswith("0999999 aaa")
        assert process.log.lines_seen + process.log.left_out >= 1_000_000
        assert slow.dropped > 900_000 - process.log.left_out
        assert grown_mib < 50
        assert engine_s < pace_s * 3  # a blocked pipe would not end at all; a loaded machine only slows it


def resident_kib() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * 4


async def test_a_flood_faster_than_we_read_loses_lines_but_not_the_newest():
    """With the loop held up, a full pipe is read at once; only its end is kept, and the loss is told."""
    code = "import os,time\nfor i in range(9000): os.write(1, b'%06d ' % i + b'x'*92 + b'\\n')\nprint('end')"
    async with running(a_launch(python_argv(code)), log=LogRing("flood", lines_max=10_000)) as process:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            pass  # hold the loop up
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        assert process.log.tail(1) == ["end"]
        kept = [line for line in process.log.tail(10_000) if line.endswith("x" * 92)]
        assert process.log.left_out > 0
        assert process.log.left_out + len(kept) == 9000
        assert any(f"[{process.log.left_out} lines left out" in line for line in process.log.tail(10_000))
