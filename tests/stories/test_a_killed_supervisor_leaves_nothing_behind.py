"""B24: the supervisor was killed hard; its engines stayed behind or were forgotten after the restart."""

import contextlib
import os
import signal
import socket
from pathlib import Path

from .rig import Rig, fake, parent_and_state, until


def watcher_of(pid: int) -> int:
    """The supervisor's watcher process: a child of it that runs greenroom's watcher."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and parent_and_state(int(name))[0] == pid and b"host.watcher" in Path("/proc", name, "cmdline").read_bytes():
                return int(name)
    raise AssertionError(f"{pid} has no watcher")


async def test_a_restart_after_sigkill_finds_the_room_free(tmp_path: Path) -> None:
    """Engine and helpers of the killed one are ended, and another model that needs the room is served at once."""
    model = fake(vram=8000, workers=1, setsid=1)
    async with Rig(tmp_path, {"a": model, "b": fake(vram=8000)}) as rig:
        await rig.warm("a")
        await rig.kill_server()
        await rig.start_server()
        reply = await rig.chat("b")

        assert reply.status == 200
        a = [line["pid"] for line in rig.journal("a") if line["event"] in ("start", "worker")]
        assert len(a) == 2
        assert [pid for pid, _ in rig.processes() if pid in a] == []
        assert (await rig.model("a"))["state"] == "stopped"


async def test_leftovers_are_ended_even_if_the_watcher_died_too(tmp_path: Path) -> None:
    """Supervisor and watcher gone: the next start ends what they left, before it serves; a stranger on the old port is no obstacle."""
    model = fake(vram=8000, workers=1, setsid=1, on_term="ignore", config={"unloadTimeout": "0.5s"})
    async with Rig(tmp_path, {"a": model, "b": fake(vram=8000)}) as rig:
        await rig.warm("a")
        os.kill(watcher_of(rig.pid), signal.SIGKILL)
        await rig.kill_server()
        worker = rig.journal("a", "worker")[0]["pid"]
        assert worker in [pid for pid, _ in rig.processes()]
        engine = rig.journal("a", "start")[0]
        await until(lambda: engine["pid"] not in [pid for pid, _ in rig.processes()], "the engine died with its parent", 3)
        with socket.create_server(("127.0.0.1", engine["port"])):
            await rig.start_server()
            assert worker not in [pid for pid, _ in rig.processes()]
            assert (await rig.chat("b")).status == 200
            assert (await rig.chat("a")).status == 200
            assert rig.journal("a", "start")[1]["port"] != engine["port"]
            assert any("ended" in line and "earlier run" in line for line in rig.output)
