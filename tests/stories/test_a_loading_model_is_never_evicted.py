"""B03: a model that was still loading was chosen as the one to evict."""

import asyncio
from pathlib import Path

from .rig import Rig, fake


async def test_a_load_under_way_ends_and_serves_before_its_model_leaves(tmp_path: Path) -> None:
    """Two models for one place, asked for in turns while the first loads: both are served, nobody is killed, two starts."""
    model = fake(vram=8000, ready_after=1.2, on_term="deaf", config={"unloadTimeout": "0.5s"})
    async with Rig(tmp_path, {"a": model, "b": model}) as rig:
        first = asyncio.create_task(rig.chat("a"))
        await rig.wait_journal("a", "start")
        other = asyncio.create_task(rig.chat("b"))
        again = asyncio.create_task(rig.chat("a"))
        replies = await asyncio.gather(first, other, again)

        assert [reply.status for reply in replies] == [200, 200, 200]
        assert (rig.starts("a"), rig.starts("b")) == (1, 1)
        assert [line["why"] for line in rig.journal("a", "exit")] == ["term"]  # a killed one could not say so
        assert len(rig.inferences("a")) == 2
        assert rig.journal("a", "exit")[0]["at"] < rig.journal("b", "start")[0]["at"]


async def test_an_unload_during_the_load_leaves_no_client_without_an_answer(tmp_path: Path) -> None:
    """The one who waits hears an explicit error; nothing is left behind; the next request brings the model back."""
    model = fake(vram=8000, ready_after=0.8, on_term="deaf", config={"unloadTimeout": "2s"})
    async with Rig(tmp_path, {"a": model}) as rig:
        waiting = asyncio.create_task(rig.chat("a"))
        await rig.wait_journal("a", "start")
        unloaded = await rig.unload("a")
        waited = await waiting

        assert (unloaded.status, waited.status) in [(200, 503), (200, 409), (200, 200), (409, 200)]
        if unloaded.status == 200:
            assert (await rig.model("a"))["state"] == "stopped"
            assert rig.processes() == []
        assert (await rig.chat("a")).status == 200
