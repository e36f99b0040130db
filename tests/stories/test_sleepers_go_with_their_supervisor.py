"""Sleeping engines hold memory and answer nobody: they must not outlive the server that knows how to wake them."""

import os
import signal
from pathlib import Path

from .rig import Rig, until, vllm
from .test_a_killed_supervisor_leaves_nothing_behind import watcher_of


async def test_after_sigterm_none_is_left(tmp_path: Path) -> None:
    """Two sleepers and one awake: exit code 0, and no process of any of them."""
    models = {name: vllm(8000, 1000, sleep=level) for name, level in (("a", 1), ("b", 2), ("c", 1))}
    async with Rig(tmp_path, models, budget_mib=11_500) as rig:
        await rig.warm("a", "b", "c")
        assert [(await rig.model(name))["state"] for name in "abc"] == ["asleep", "asleep", "ready"]
        assert await rig.stop_server() == 0
        assert rig.processes() == []


async def test_after_sigkill_they_are_ended_and_a_new_start_works(tmp_path: Path) -> None:
    """No engine of the killed server is taken over: each is ended, asleep or not, and its model starts anew."""
    models = {name: vllm(8000, 1000, sleep=1) for name in "ab"}
    async with Rig(tmp_path, models, budget_mib=10_000) as rig:
        await rig.warm("a", "b")
        old = [pid for pid, _ in rig.processes()]
        assert len(old) == 4
        await rig.kill_server()
        await rig.start_server()
        assert [pid for pid, _ in rig.processes() if pid in old] == []
        assert [(await rig.model(name))["state"] for name in "ab"] == ["stopped", "stopped"]
        replies = [await rig.chat(name) for name in "aba"]
        assert [reply.headers["x-greenroom-start"] for reply in replies] == ["cold", "cold", "wake"]


async def test_without_their_watcher_they_are_ended_by_the_next_start(tmp_path: Path) -> None:
    """Supervisor and watcher killed at once: whatever is left of sleepers is ended before the new one serves."""
    async with Rig(tmp_path, {"a": vllm(sleep=1), "b": vllm(sleep=1)}, budget_mib=10_000) as rig:
        await rig.warm("a", "b")
        old = [pid for pid, _ in rig.processes()]
        os.kill(watcher_of(rig.pid), signal.SIGKILL)
        await rig.kill_server()
        await rig.start_server()
        await until(lambda: not [pid for pid, _ in rig.processes() if pid in old], "the old engines are gone", 5)
        assert [reply.done for reply in [await rig.chat("b"), await rig.chat("a")]] == [True, True]
