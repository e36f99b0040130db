"""B34: estimates far from reality evicted models that would have fitted, and CPU models were charged to the GPU."""

import asyncio
import time
from pathlib import Path
from typing import Any

from .card import Card, Slot
from .rig import Rig, fake

CARD = (Slot(0, "GPU-aaa", 64_000),)
CONFIG: dict[str, Any] = {
    "devices": {"gpu0": {"headroom": "0MiB"}, "ram": {"memory": "100GiB", "probe": "none"}},
    "scheduling": {"learn_stable_s": 0.5},
}


def on_card(declared_mib: int, real_mib: int) -> Any:
    return fake(vram=real_mib, ready_after=0.05, config={"device": "gpu0", "memory": f"{declared_mib}MiB"})


def on_cpu() -> Any:
    return fake(vram=0, config={"device": "ram", "memory": "4000MiB"})


async def wait_need(rig: Rig, model: str, low_mib: int, high_mib: int) -> dict[str, Any]:
    """The model's status once its booked need is in this range."""
    deadline = time.monotonic() + 15
    while not low_mib <= (now := await rig.model(model))["need_mib"] <= high_mib or now["need_source"] != "measured":
        assert time.monotonic() < deadline, f"{now['need_mib']} MiB, {now['need_source']}"
        await asyncio.sleep(0.05)
    return now


async def test_what_was_measured_is_booked_and_kept(tmp_path: Path) -> None:
    """59,000 MiB declared, 30,000 at the peak: b fits beside it, also after a restart, and models on the CPU evict nobody."""
    models = {"a": on_card(59_000, 26_000), "b": on_card(20_000, 20_000), "c": on_cpu(), "d": on_cpu()}
    card = Card(tmp_path, CARD)
    async with card.rig(models, budget_mib=64_000, config=CONFIG) as rig:
        await rig.warm("a")
        card.grown["a"] = 30_000  # a long prompt
        await rig.warm("a", "a")
        learned = await wait_need(rig, "a", 30_000, 33_000)
        assert learned["instances"][0]["measured_mib"] == 30_000
        await rig.warm("b", "a", "c", "d", "c")
        states = {each["id"]: (each["state"], each["starts"]) for each in (await rig.status())["models"]}
        assert states == dict.fromkeys("abcd", ("ready", 1))
        assert sum(each["evictions"] for each in (await rig.status())["models"]) == 0

        assert await rig.stop_server() == 0
        card.grown.clear()
        await rig.start_server()
        again = await rig.model("a")
        assert (again["need_source"], again["need_mib"]) == ("measured", learned["need_mib"])
        await rig.warm("a", "b")
        assert [(await rig.model(name))["state"] for name in "ab"] == ["ready", "ready"]


async def test_a_model_that_takes_more_than_it_declared_is_booked_with_what_it_takes(tmp_path: Path) -> None:
    """10,000 declared, 30,000 real: the book follows at once and the event says so."""
    card = Card(tmp_path, CARD)
    async with card.rig({"a": on_card(10_000, 30_000)}, budget_mib=64_000, config=CONFIG) as rig:
        await rig.warm("a")
        deadline = time.monotonic() + 10
        while (await rig.model("a"))["instances"][0]["reserved_mib"] < 30_000:
            assert time.monotonic() < deadline, await rig.model("a")
            await asyncio.sleep(0.02)
        said = [event["text"] for event in await rig.events("a") if event["kind"] == "raised"]
        assert [("29.3 GiB" in text, "9.8 GiB" in text) for text in said][:1] == [(True, True)]
