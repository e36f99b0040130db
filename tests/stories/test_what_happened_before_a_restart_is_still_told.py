"""greenroom was killed, and whoever then asked why found its memory empty: logs, stories and events all began anew."""

from __future__ import annotations

from pathlib import Path

from greenroom.ledger.schema import FILE
from greenroom.planner.past import Past

from .rig import Rig, fake, until


async def test_what_happened_before_a_restart_is_still_told(tmp_path: Path) -> None:
    """The engine's words, the model's story and the events are there after SIGKILL, and the start between them is told."""
    async with Rig(tmp_path, {"a": fake(vram=1000, log="hello"), "b": fake(vram=1000)}) as rig:
        await rig.warm("a")
        said = (await rig.api("GET", "/api/models/a/logs")).body.decode()
        assert "hello" in said
        past = Past.at(rig.state_dir / FILE)
        await until(lambda: any(one.kind == "ready" for one in past.told(0.0, 100)), "it is written down")
        await rig.kill_server()
        await rig.start_server()

        log = (await rig.api("GET", "/api/models/a/logs")).body.decode().splitlines()
        assert log[: len(said.splitlines())] == said.splitlines()
        assert log[-1].startswith("[greenroom: what is above was printed before greenroom started")
        assert (await rig.api("GET", "/api/models/b/logs")).body == b""
        story = await rig.why("a")
        assert "ready after" in story
        assert "started" in story
        assert "started" not in await rig.why("b")
        kinds = [event["kind"] for event in await rig.events()]
        assert kinds.count("began") == 2
        assert "ready" in kinds[: kinds.index("began", 1)]
