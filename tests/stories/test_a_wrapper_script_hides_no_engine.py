"""B22: a wrapper script hid the real engine from the one who stops it."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from .rig import Rig, fake, until

WRAPPERS = {
    "a shell that does not exec": '"$@"; echo after',
    "a shell that ignores TERM": 'trap "" TERM; "$@"; sleep 60',
    "a shell that waits in the background": '"$@" & wait',
}


def wrapped(script: str) -> object:
    def wrap(command: Sequence[str]) -> list[str]:
        return ["sh", "-c", script, "sh", *command]

    return wrap


@pytest.mark.parametrize("how", WRAPPERS)
async def test_the_whole_tree_goes_with_its_model(tmp_path: Path, how: str) -> None:
    """After an unload nothing of it is alive; nor after a SIGINT to the supervisor."""
    model = fake(vram=8000, ready_after=0.1, workers=1, wrap=wrapped(WRAPPERS[how]), config={"unloadTimeout": "0.5s"})  # type: ignore[arg-type]
    async with Rig(tmp_path, {"a": model}) as rig:
        assert (await rig.load("a")).status == 200
        assert (await rig.chat("a")).status == 200
        unloaded = await rig.unload("a")
        left = rig.processes()

        assert (unloaded.status, left) == (200, [])
        assert unloaded.took_s < 0.5 + 2
        assert (await rig.load("a")).status == 200
        assert await rig.stop_server(signal.SIGINT) == 0
        assert rig.processes() == []


async def test_a_command_that_detaches_its_engine_never_looks_stopped_while_it_lives(tmp_path: Path) -> None:
    """The shell ends at once, its engine goes on in a session of its own: refused and ended, or followed to its end."""
    detach = 'setsid "$@" >/dev/null 2>&1 & exit 0'
    model = fake(vram=8000, ready_after=0.2, wrap=wrapped(detach), config={"unloadTimeout": "0.5s"})  # type: ignore[arg-type]
    async with Rig(tmp_path, {"a": model}) as rig:
        reply = await rig.chat("a")
        if reply.status == 200:
            assert (await rig.unload("a")).status == 200
        else:
            assert reply.status == 503
            assert "exit" in reply.error["message"] or "ended" in reply.error["message"] or "detach" in reply.error["message"]
        state = (await rig.model("a"))["state"]
        left = rig.processes()

        assert state in ("stopped", "failed")
        assert left == []
        await until(lambda: rig.processes() == [], "nothing appears later", 1)
