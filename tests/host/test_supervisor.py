"""A supervisor that dies takes its engines along; the next one finds what was left, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from greenroom.host.logs import LogRing
from greenroom.host.memory import tree_mib
from greenroom.host.processes import spawn, stop
from greenroom.host.supervisor import Supervisor, end_leftovers, leftovers, start_watcher
from tests.host.engines import FAKES, PYTHON, a_launch, a_port, daemon_argv, engine_argv, lives, printed, running, until

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def a_supervisor(state_dir: Path, watched: bool = True) -> Iterator[tuple[subprocess.Popen[bytes], dict]]:
    argv = [sys.executable, "-m", "tests.host.supervising", str(state_dir), "watched" if watched else "alone"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            yield supervisor, json.loads(supervisor.stdout.readline())
        finally:
            supervisor.kill()


async def test_a_supervisor_killed_hard_leaves_nothing(tmp_path):
    """SIGKILL of the supervisor ends plain, wrapped and twice-forked engines, although they ignore TERM; the watcher goes too."""
    with a_supervisor(tmp_path) as (supervisor, told):
        pids = [pid for tree in told["pids"].values() for pid in tree]
        assert [len(told["pids"][name]) for name in ("plain", "wrapped", "daemon")] == [1, 2, 1]
        assert all(lives(pid) for pid in pids)

        killed_at = time.monotonic()
        supervisor.kill()
        supervisor.wait()

        await until(lambda: not any(lives(pid) for pid in pids), "all engines are gone")
        print(f"all engines gone {1000 * (time.monotonic() - killed_at):.0f} ms after SIGKILL of their supervisor")
        await until(lambda: not lives(told["watcher"]), "the watcher is gone")


async def test_a_killed_process_group_leaves_nothing_either(tmp_path):
    """SIGKILL of the supervisor's whole process group does not reach the watcher."""
    with a_supervisor(tmp_path) as (supervisor, told):
        os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
        await until(lambda: not any(lives(pid) for tree in told["pids"].values() for pid in tree), "all engines are gone")


async def test_leftovers_of_an_earlier_run_are_found_and_ended(tmp_path):
    """Without a watcher a twice-forked engine survives; the next run on the same state directory finds it by its mark."""
    with a_supervisor(tmp_path, watched=False) as (supervisor, told):
        supervisor.kill()
        supervisor.wait()
        (daemon,) = told["pids"]["daemon"]
        await until(lambda: not lives(told["pids"]["plain"][0]), "the direct child dies by its death signal")
        following = Supervisor(tmp_path)

        assert daemon in [each.pid for each in leftovers(following)]
        found, remaining = await end_leftovers(following, grace_s=0.2)

        assert [each.token for each in found if each.pid == daemon] == [f"daemon-{supervisor.pid}"]
        assert remaining == []
        assert not lives(daemon)


async def test_nobody_else_is_taken_for_a_leftover(tmp_path):
    """Engines of this run, of another state directory, and unrelated processes are not touched."""
    other_dir = tmp_path / "other"
    this, other = Supervisor(tmp_path), Supervisor(other_dir)
    async with (
        running(a_launch(engine_argv(a_port())), supervisor=this) as ours,
        running(a_launch(engine_argv(a_port())), supervisor=other) as theirs,
    ):
        await printed(ours.log, "listening")
        await printed(theirs.log, "listening")

        assert leftovers(this) == []
        assert await end_leftovers(this) == ([], [])

        assert lives(ours.pid)
        assert lives(theirs.pid)


async def test_a_greenroom_started_by_an_engine_does_not_end_itself(tmp_path):
    """A supervisor that carries the mark of an earlier run, as a child of its engine would, is no leftover."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
        "from greenroom.host.supervisor import Supervisor, leftovers; print(leftovers(Supervisor(Path(sys.argv[2]))))"
    )
    mark = f"{Supervisor(tmp_path).home}.1-1"
    environment = {**os.environ, "GREENROOM_SUPERVISOR": mark}
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code, str(ROOT / "src"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


async def test_a_watcher_that_was_ended_is_started_again(tmp_path):
    """The next engine gets a new watcher that knows the earlier ones too; closing it ends what is left."""
    supervisor = start_watcher(tmp_path)
    first = supervisor.watcher_pid
    assert first is not None
    engine = await spawn(a_launch(daemon_argv(a_port(), "blank")), token="first", log=LogRing("engine"), supervisor=supervisor)
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.watcher_pid is None, "the watcher is seen as gone")

    async with running(a_launch(("sleep", "60")), supervisor=supervisor) as other:
        assert supervisor.watcher_pid not in (None, first)
        await supervisor.close()
        assert supervisor.watcher_pid is None
        assert await asyncio.wait_for(other.wait(), 20) == (await other.wait())
    await stop(engine, grace_s=0.0, on_signal=lambda _: None)


async def test_a_watcher_costs_little(tmp_path):
    """It starts without making us wait, and holds a few MiB."""
    began_at = time.monotonic()
    supervisor = start_watcher(tmp_path)
    took_s = time.monotonic() - began_at
    assert supervisor.watcher_pid is not None
    async with running(a_launch((*PYTHON, str(FAKES / "host_engine.py"), str(a_port()))), supervisor=supervisor) as process:
        await printed(process.log, "listening")
        held_mib = tree_mib([supervisor.watcher_pid])
    print(f"watcher: {took_s * 1000:.1f} ms to start, {held_mib} MiB")
    assert held_mib < 30
    await supervisor.close()
