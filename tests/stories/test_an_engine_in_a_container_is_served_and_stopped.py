"""A container is an engine like any other: started, served, stopped, and gone when that is said."""

from pathlib import Path

import pytest

from .boxes import Dock
from .rig import Rig


@pytest.mark.parametrize("kind", ["podman", "docker"])
async def test_it_is_served_and_its_container_is_gone_when_it_is_stopped(tmp_path: Path, kind: str) -> None:
    """Labels for finding it again, words in its log, and nothing left of it."""
    dock = Dock(tmp_path, kind)
    async with Rig(tmp_path, {"org/a:1": dock.engine(log="hello from inside"), "b": dock.engine(9500)}, env=dock.env) as rig:
        assert (await rig.chat("org/a:1")).status == 200
        (box,) = dock.boxes("running")
        assert box["Labels"]["dev.greenroom.model"] == "org/a:1"
        assert box["options"]["--cap-drop"] == ["ALL"]
        assert "hello from inside" in (await rig.api("GET", "/api/models/org%2Fa%3A1/logs")).body.decode()

        assert (await rig.chat("b")).status == 200, "the room is given back"
        assert [each["Labels"]["dev.greenroom.model"] for each in dock.boxes()] == ["b"]
        unloaded = await rig.unload("b")

        assert (unloaded.status, dock.boxes()) == (200, [])
        assert [line["event"] for line in rig.journal("b")][-2:] == ["term", "exit"]
    assert dock.boxes() == []


async def test_one_that_ignores_its_stop_signal_is_killed_after_its_grace(tmp_path: Path) -> None:
    """Its runtime does it; the log says so."""
    dock = Dock(tmp_path)
    stubborn = dock.engine(on_term="ignore", config={"unloadTimeout": "1s"})
    async with Rig(tmp_path, {"a": stubborn}, env=dock.env) as rig:
        await rig.warm("a")
        unloaded = await rig.unload("a")

        assert (unloaded.status, dock.boxes()) == (200, [])
        lines = (await rig.api("GET", "/api/models/a/logs")).body.decode()
        assert ("greenroom: TERM" in lines, "greenroom: KILL" in lines) == (True, True)
