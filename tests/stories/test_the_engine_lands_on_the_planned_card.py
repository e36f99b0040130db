"""B35: card numbering differs between the probe and the engine."""

from pathlib import Path
from typing import Any

from .card import Card, Slot
from .rig import Rig, fake

SLOW, FAST = Slot(0, "GPU-slow", 8192, name="Slow 8G"), Slot(1, "GPU-fast", 24_576, name="Fast 24G")
NO_HEADROOM = {"devices": {"gpu0": {"headroom": "0MiB"}, "gpu1": {"headroom": "0MiB"}}}
BUDGET_MIB = SLOW.total_mib + FAST.total_mib


def needs(vram_mib: int, **config: Any) -> Any:
    return fake(vram=vram_mib, ready_after=0.1, env="CUDA_DEVICE_ORDER", config={"device": "any", **config})


def environment(rig: Rig, model: str) -> dict[str, str]:
    return dict(rig.journal(model, "start")[-1]["env"])


async def home_of(rig: Rig, model: str) -> list[str]:
    return list((await rig.model(model))["instances"][0]["devices"])


def claimed(card: Card) -> dict[str, str]:
    """model -> UUID of the card its memory shows up on."""
    return {each.model: each.where.uuid for each in card.held.values() if each.ended_at is None}


async def test_engines_are_pinned_by_uuid_to_the_card_they_are_booked_on(tmp_path: Path) -> None:
    """The large one goes to the large card, whatever number that card has for the runtime; the small one beside it on the other."""
    card = Card(tmp_path, (SLOW, FAST))
    models = {"large": needs(20_000), "small": needs(7000)}
    async with card.rig(models, budget_mib=BUDGET_MIB, config=NO_HEADROOM) as rig:
        await rig.warm("large", "small")
        assert [environment(rig, name)["CUDA_VISIBLE_DEVICES"] for name in models] == ["GPU-fast", "GPU-slow"]
        assert [await home_of(rig, name) for name in models] == [["gpu1"], ["gpu0"]]
        assert claimed(card) == {"large": "GPU-fast", "small": "GPU-slow"}
    assert card.over == []


async def test_the_operators_own_setting_wins_and_is_what_is_booked(tmp_path: Path) -> None:
    """By index (made to mean bus order) or by UUID: the engine gets it untouched, and the book shows that card."""
    card = Card(tmp_path, (SLOW, FAST))
    models = {
        "by-index": needs(3000, env=["CUDA_VISIBLE_DEVICES=0"]),
        "by-uuid": needs(3000, env=["CUDA_VISIBLE_DEVICES=GPU-slow"]),
        "other": needs(3000, env=["CUDA_VISIBLE_DEVICES=1"]),
    }
    async with card.rig(models, budget_mib=BUDGET_MIB, config=NO_HEADROOM) as rig:
        await rig.warm(*models)
        assert [environment(rig, name)["CUDA_VISIBLE_DEVICES"] for name in models] == ["0", "GPU-slow", "1"]
        assert {environment(rig, name)["CUDA_DEVICE_ORDER"] for name in models} == {"PCI_BUS_ID"}
        assert [await home_of(rig, name) for name in models] == [["gpu0"], ["gpu0"], ["gpu1"]]
        assert claimed(card) == {"by-index": "GPU-slow", "by-uuid": "GPU-slow", "other": "GPU-fast"}
        reserved = {device["id"]: device["reserved_mib"] for device in (await rig.status())["devices"]}
        assert (reserved["gpu0"], reserved["gpu1"]) == (6000, 3000)


async def test_parts_of_a_split_card_are_pinned_by_their_own_uuid(tmp_path: Path) -> None:
    """A MIG instance is a device of its own."""
    parts = (Slot(0, "MIG-111", 40_000, slot=0), Slot(0, "MIG-222", 20_000, slot=3))
    card = Card(tmp_path, parts)
    models = {"large": needs(30_000), "small": needs(12_000)}
    async with card.rig(models, budget_mib=60_000, config={"devices": {}}) as rig:
        await rig.warm("large", "small")
        assert [environment(rig, name)["CUDA_VISIBLE_DEVICES"] for name in models] == ["MIG-111", "MIG-222"]
        assert claimed(card) == {"large": "MIG-111", "small": "MIG-222"}
        assert {device["kind"] for device in (await rig.status())["devices"]} == {"mig", "ram"}
