"""The client of a container was killed; the container went on unseen, or was forgotten with its memory."""

import os
import signal
import time
from pathlib import Path

import pytest

from .boxes import Dock
from .rig import Rig, until


@pytest.mark.parametrize("kind", ["podman", "docker"])
async def test_a_container_whose_client_was_killed_serves_on(tmp_path: Path, kind: str) -> None:
    """The stream under way comes to its end, its words come through another client, and its stop is as exact as before."""
    dock = Dock(tmp_path, kind)
    models = {"a": dock.engine(8000, stream="40x0.05"), "b": dock.engine(8000)}
    async with Rig(tmp_path, models, env=dock.env) as rig:
        await rig.warm("a")
        exchange = await rig.ask("a", stream=True)
        await exchange.events(2)
        dock.kill_client()
        reply = await exchange.rest()
        await until(lambda: bool(dock.calls("logs")), "its log is followed")

        assert reply.done
        assert (await rig.chat("a")).status == 200
        assert (rig.starts("a"), (await rig.model("a"))["state"]) == (1, "ready")
        lines = (await rig.api("GET", "/api/models/a/logs")).body.decode()
        assert f"its client ({kind} run) ended by SIGKILL; the container runs on and is followed" in lines

        assert (await rig.chat("b")).status == 200
        assert [box["Labels"]["dev.greenroom.model"] for box in dock.boxes()] == ["b"]
        assert rig.journal("a")[-1]["event"] == "exit"


async def test_the_end_of_a_followed_container_is_noticed(tmp_path: Path) -> None:
    """It is started anew for who asks next."""
    dock = Dock(tmp_path)
    async with Rig(tmp_path, {"a": dock.engine()}, env=dock.env) as rig:
        await rig.warm("a")
        dock.kill_client()
        await until(lambda: bool(dock.calls("logs")), "its log is followed")
        os.kill(rig.journal("a", "start")[0]["pid"], signal.SIGKILL)
        await rig.wait_state("a", "stopped", "failed")

        assert dock.boxes() == []
        assert (await rig.chat("a")).status == 200
        assert rig.starts("a") == 2


async def test_one_whose_log_cannot_be_read_is_watched_all_the_same(tmp_path: Path) -> None:
    """Its logging driver keeps nothing: the engine serves, and its end is noticed."""
    dock = Dock(tmp_path)
    dock.faults(silent_log=True)
    async with Rig(tmp_path, {"a": dock.engine()}, env=dock.env) as rig:
        await rig.warm("a")
        dock.kill_client()
        await until(lambda: len(dock.calls("logs")) >= 2, "it is tried again")
        assert (await rig.chat("a")).status == 200
        os.kill(rig.journal("a", "start")[0]["pid"], signal.SIGKILL)
        await rig.wait_state("a", "stopped", "failed")

        assert dock.boxes() == []


async def test_a_container_whose_client_is_killed_while_it_loads_is_ended(tmp_path: Path) -> None:
    """Nothing of it is left when the failure is told, and that tells what happened."""
    dock = Dock(tmp_path)
    async with Rig(tmp_path, {"a": dock.engine(start_1__ready_after=30)}, env=dock.env) as rig:
        asking = await rig.ask("a")
        await rig.wait_journal("a", "start")
        dock.kill_client()
        reply = await asking.rest()

        assert rig.journal("a", "start")[0]["pid"] not in [pid for pid, _ in rig.processes()]
        told = "its client (podman run) ended by SIGKILL while the container ran"
        await until(lambda: any(told in line for line in rig.output), "it is told")
        assert reply.status in (200, 503)  # its next start, or the refusal
        assert (await rig.load("a")).status == 200
        assert len(dock.boxes()) == 1


async def test_its_room_is_not_free_before_the_container_is_gone(tmp_path: Path) -> None:
    """A slow end after the client is lost: the next model waits for it (O1 of the rig)."""
    dock = Dock(tmp_path)
    models = {"a": dock.engine(8000, on_term="slow:1"), "b": dock.engine(8000)}
    async with Rig(tmp_path, models, env=dock.env) as rig:
        await rig.warm("a")
        dock.kill_client()
        began_at = time.monotonic()
        assert (await rig.chat("b")).status == 200
        assert time.monotonic() - began_at > 1
