"""greenroom was killed; its containers went on with the memory, or those of another greenroom were ended for them."""

import os
import time
from pathlib import Path

from .boxes import Dock
from .rig import Rig, fake, until
from .test_a_killed_supervisor_leaves_nothing_behind import watcher_of


async def test_containers_of_a_killed_greenroom_are_ended_by_the_next(tmp_path: Path) -> None:
    """Before anything starts, and though nobody was left to do it at once; also one that ignores its stop signal."""
    dock = Dock(tmp_path)
    models = {"a": dock.engine(8000, on_term="ignore"), "b": dock.engine(8000)}
    async with Rig(tmp_path, models, env=dock.env) as rig:
        await rig.warm("a")
        os.kill(watcher_of(rig.pid), 9)
        await rig.kill_server()
        engine = rig.journal("a", "start")[0]["pid"]
        assert engine in [pid for pid, _ in rig.processes()]
        await rig.start_server()

        assert engine not in [pid for pid, _ in rig.processes()]
        assert dock.boxes() == []
        assert any("1 containers of an earlier run were ended" in line for line in rig.output)
        assert (await rig.chat("b")).status == 200


async def test_a_killed_greenroom_takes_its_containers_with_it(tmp_path: Path) -> None:
    """Its watcher removes them at once: the card is free without another start."""
    dock = Dock(tmp_path)
    async with Rig(tmp_path, {"a": dock.engine(8000)}, env=dock.env) as rig:
        await rig.warm("a")
        await rig.kill_server()
        await until(lambda: dock.boxes() == [] and not rig.processes(), "the container is gone")
        await rig.start_server()
        assert (await rig.chat("a")).status == 200


async def test_two_greenrooms_leave_each_others_containers_alone(tmp_path: Path) -> None:
    """The same model, the same generation, one runtime: different names, and a start ends only what is its own."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    dock = Dock(tmp_path)
    async with (
        Rig(tmp_path / "one", {"a": dock.engine()}, env=dock.env) as one,
        Rig(tmp_path / "two", {"a": dock.engine()}, env=dock.env) as two,
    ):
        await one.warm("a")
        await two.warm("a")
        assert len({box["Name"] for box in dock.boxes("running")}) == 2
        await two.kill_server()
        await two.start_server()

        assert (await one.chat("a")).status == 200
        assert (one.starts("a"), (await one.model("a"))["state"]) == (1, "ready")
        assert [box["State"]["Status"] for box in dock.boxes()] == ["running"]


async def test_a_runtime_that_is_no_longer_in_the_configuration_is_looked_at(tmp_path: Path) -> None:
    """What it was used for is remembered."""
    dock = Dock(tmp_path)
    async with Rig(tmp_path, {"a": dock.engine(8000)}, env=dock.env) as rig:
        await rig.warm("a")
        os.kill(watcher_of(rig.pid), 9)
        await rig.kill_server()
        rig.write_config({"b": fake()})
        await rig.start_server()

        assert (dock.boxes(), rig.processes()) == ([], [])


async def test_a_runtime_that_hangs_costs_a_bounded_time_and_a_warning(tmp_path: Path) -> None:
    """The server comes up, other models are served; a container starts when its runtime answers again."""
    dock = Dock(tmp_path)
    dock.faults(ps="hang")
    began_at = time.monotonic()
    async with Rig(tmp_path, {"a": dock.engine(), "b": fake()}, env=dock.env) as rig:
        assert 9 < time.monotonic() - began_at < 18
        told = [line for line in rig.output if "did not answer within 10 s" in line]
        assert len(told) == 1
        assert "containers of an earlier run may be left" in told[0]
        assert (await rig.chat("b")).status == 200
        dock.faults()
        assert (await rig.chat("a")).status == 200
