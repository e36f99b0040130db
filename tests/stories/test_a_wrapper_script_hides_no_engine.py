"""B22: a wrapper script hid the real engine from the one who stops it."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from .rig import Rig, codes, fake, together

GRACE_S = 0.5
WRAPPERS = {
    "does-not-exec": '"$@"; echo after',
    "ignores-term": 'trap "" TERM; "$@"; sleep 60',
    "waits": '"$@" & wait',
}
DETACHES = 'setsid "$@" >/dev/null 2>&1 & exit 0'


def wrapped(script: str) -> Callable[[Sequence[str]], Sequence[str]]:
    return lambda command: ["sh", "-c", script, "sh", *command]


async def test_the_whole_tree_goes_with_its_model(tmp_path: Path) -> None:
    """Shells that do not exec, that ignore TERM, that wait: nothing is alive after an unload, nor after a SIGINT to the supervisor."""
    config = {"unloadTimeout": f"{GRACE_S}s"}
    models = {name: fake(workers=1, wrap=wrapped(script), config=config) for name, script in WRAPPERS.items()}
    async with Rig(tmp_path, models) as rig:
        assert codes(await together(*(rig.load(name) for name in WRAPPERS))) == [200] * 3
        assert len(rig.processes()) >= 9  # a shell, an engine and a worker each
        for name in WRAPPERS:
            unloaded = await rig.unload(name)
            assert (name, unloaded.status, [words for _, words in rig.processes() if f"model={name} " in words]) == (name, 200, [])
            assert unloaded.took_s < GRACE_S + 2
        assert rig.processes() == []

        assert codes(await together(*(rig.load(name) for name in WRAPPERS))) == [200] * 3
        assert await rig.stop_server(signal.SIGINT) == 0
        assert rig.processes() == []


async def test_a_command_that_detaches_its_engine_never_looks_stopped_while_it_lives(tmp_path: Path) -> None:
    """The shell ends at once, its engine goes on in a session of its own: refused and ended, or followed to its end."""
    model = fake(ready_after=0.2, wrap=wrapped(DETACHES), config={"unloadTimeout": f"{GRACE_S}s"})
    async with Rig(tmp_path, {"a": model}) as rig:
        reply = await rig.chat("a")
        if reply.status == 200:
            assert (await rig.unload("a")).status == 200
        state = (await rig.model("a"))["state"]
        left = rig.processes()

        assert (state in ("stopped", "failed"), left) == (True, [])
        if reply.status != 200:
            assert (reply.status, "detach" in reply.error["message"]) == (503, True)
