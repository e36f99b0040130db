"""A stop of a container hung, or did nothing; its model was told to be stopped while it held the card."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .boxes import Dock
from .rig import Rig, until

GRACE = {"unloadTimeout": "1s"}


@pytest.mark.parametrize("kind", ["podman", "docker"])
@pytest.mark.parametrize("fault", ["hang", "ignore", "fail:125:Error: timed out waiting for file"])
async def test_a_stop_that_does_not_come_to_its_end_is_followed_by_kill_and_removal(tmp_path: Path, kind: str, fault: str) -> None:
    """The unload says so when the container is gone, and the next model has the room."""
    dock = Dock(tmp_path, kind)
    async with Rig(tmp_path, {"a": dock.engine(8000, config=GRACE), "b": dock.engine(8000)}, env=dock.env) as rig:
        await rig.warm("a")
        dock.faults(stop=fault)
        unloaded = await rig.unload("a")

        assert (unloaded.status, dock.boxes()) == (200, [])
        assert [call[0] for call in dock.calls() if call[0] in ("stop", "kill", "rm")] == ["stop", "kill", "rm"]
        assert "greenroom: KILL" in (await rig.api("GET", "/api/models/a/logs")).body.decode()
        dock.faults()
        assert (await rig.chat("b")).status == 200


async def test_its_memory_stays_booked_while_its_runtime_cannot_say_that_it_is_gone(tmp_path: Path) -> None:
    """A runtime that does nothing and an engine that cannot be killed: nobody gets its room, until it is gone after all."""
    dock = Dock(tmp_path, "docker")
    async with Rig(tmp_path, {"a": dock.engine(8000, config=GRACE), "b": dock.engine(8000)}, env=dock.env) as rig:
        dock.faults(inspect="fail:1:Error response from daemon: dial unix docker.sock: connection refused")
        asking = await rig.ask("a")
        refused = await asking.rest()
        assert refused.status == 503
        assert "connection refused" in refused.error["message"]
        dock.faults(far=True)
        assert (await rig.load("a")).status == 200
        engine = rig.journal("a", "start")[0]["pid"]
        dock.faults(far=True, stop="ignore", kill="ignore", rm="ignore")
        unloading = await rig.unload("a", wait_s=30)

        assert engine in [pid for pid, _ in rig.processes()]
        assert unloading.status != 200 or (await rig.model("a"))["last_error"] != ""
        why = await rig.why("a")
        assert "its memory stays booked until it is gone" in why
        assert await booked_mib(rig) == 8000
        dock.faults()
        await until(lambda: dock.boxes() == [], "it is removed when its runtime does its work again")
        async with asyncio.timeout(20):
            async for booked in books(rig):
                if not booked:
                    break
        assert (await rig.chat("b")).status == 200


async def books(rig: Rig) -> AsyncIterator[int]:
    while True:
        yield await booked_mib(rig)
        await asyncio.sleep(0.05)


async def test_the_end_of_greenroom_takes_seconds_though_its_runtime_hangs(tmp_path: Path) -> None:
    """However many there are: their engines are ended past it, and what may be left in it is told by name."""
    dock = Dock(tmp_path, "docker")
    async with Rig(tmp_path, {name: dock.engine(1000) for name in "abcd"}, env=dock.env) as rig:
        await rig.warm(*"abcd")
        dock.faults(**{"*": "hang"})
        began_at = time.monotonic()
        assert await rig.stop_server() == 0

        assert time.monotonic() - began_at < 15
        told = [line for line in rig.output if "not known to be gone: " in line]
        assert len(told) == 1
        assert all(box["Name"] in told[0] for box in dock.boxes())
        assert rig.processes() == []
        dock.faults()


async def test_a_start_is_called_off_at_once_though_its_runtime_hangs(tmp_path: Path) -> None:
    """Whoever unloads it does not wait for the answers to its questions."""
    dock = Dock(tmp_path, "docker")
    dock.faults(image="hang")
    async with Rig(tmp_path, {"a": dock.engine(1000)}, env=dock.env) as rig:
        asking = await rig.ask("a")
        await until(lambda: bool(dock.calls("image")), "it was asked for the image")
        began_at = time.monotonic()
        unloaded = await rig.unload("a")

        assert time.monotonic() - began_at < 5
        assert unloaded.status == 200
        await asking.rest()
        dock.faults()
        assert (await rig.chat("a")).status == 200


async def booked_mib(rig: Rig) -> int:
    return next(int(device["reserved_mib"]) for device in (await rig.status())["devices"] if device["id"] == "bench0")


async def test_the_end_of_a_container_by_the_kernel_is_told_as_memory(tmp_path: Path) -> None:
    """Exit code 137 alone says nothing; its runtime knows."""
    dock = Dock(tmp_path)
    dock.faults(oom=True)
    async with Rig(tmp_path, {"a": dock.engine()}, env=dock.env) as rig:
        await rig.warm("a")
        os.kill(rig.journal("a", "start")[0]["pid"], signal.SIGKILL)
        await rig.wait_state("a", "stopped", "failed")

        assert "ran out of host RAM: the kernel killed it inside its container (OOMKilled)" in await rig.why("a")
        assert dock.boxes() == []
