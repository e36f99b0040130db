"""The configuration was read again while an image was fetched; the old start went on, or its container was left."""

import asyncio
from pathlib import Path

import pytest

from .boxes import IMAGE, Dock
from .rig import Rig, fake, until

NEW = "registry.example/new:2"


@pytest.mark.parametrize("step", ["pull", "run"])
async def test_a_model_that_is_taken_out_while_it_starts_leaves_nothing(tmp_path: Path, step: str) -> None:
    """Whatever its start was at; the room is another's at once."""
    dock = Dock(tmp_path)
    (dock.state / "registry").write_text(NEW + "\n")
    dock.faults(**{step: "slow:20"})
    async with Rig(tmp_path, {"a": dock.engine(8000, container={"image": NEW}), "b": fake(8000)}, env=dock.env) as rig:
        asking = await rig.ask("a")
        await until(lambda: bool(dock.calls(step)), "it is being made")
        rig.write_config({"b": fake(8000)})
        rig.reload()
        async with asyncio.timeout(15):
            assert (await asking.rest()).status >= 400
            assert (await rig.chat("b")).status == 200

        assert dock.boxes() == []


async def test_a_model_whose_image_changes_while_it_starts_runs_in_the_new_one(tmp_path: Path) -> None:
    """Who waits gets an answer of that; the pull of the old one is not waited for."""
    dock = Dock(tmp_path)
    dock.faults(pull="hang")
    async with Rig(tmp_path, {"a": dock.engine(8000, container={"image": NEW})}, env=dock.env) as rig:
        asking = await rig.ask("a")
        await until(lambda: bool(dock.calls("pull")), "it is being fetched")
        rig.write_config({"a": dock.engine(8000)})
        rig.reload()
        async with asyncio.timeout(15):
            reply = await asking.rest()
        again = await rig.chat("a")

        assert reply.status in (200, 503)
        assert again.status == 200
        assert [box["Image"] for box in dock.boxes()] == [IMAGE]
