"""B30: every sleeper put a copy of its weights into host RAM, until there was none left."""

from pathlib import Path
from typing import Any

import pytest

from .card import Card, Slot
from .rig import Fake, Rig, vllm

RAM_MIB = 48_000
PLACE: dict[str, Any] = {"devices": {"gpu0": {"headroom": "0MiB"}, "ram": {"memory": f"{RAM_MIB}MiB", "headroom": "0MiB", "probe": "none"}}}
CARD = (Slot(0, "GPU-aaa", 24_000),)
COPY_MIB = 17_000 + 3072  # the weights, and what the three processes of a vLLM take


def three(residue_mib: int, sleep: str | int) -> dict[str, Fake]:
    return {name: vllm(20_000, residue_mib, weights=17_000, sleep=sleep, config={"device": "gpu0"}) for name in "xyz"}


async def host_mib(rig: Rig) -> dict[str, tuple[str, int, int]]:
    """model -> (state, level, MiB of host RAM it is booked with)."""
    found = {}
    for one in (await rig.status())["models"]:
        instance = one["instances"][0] if one["instances"] else {"level": 0, "ram_mib": 0}
        found[one["id"]] = (one["state"], instance["level"], instance["ram_mib"])
    return found


@pytest.mark.parametrize(("sleep", "third"), [("auto", ("asleep", 2, 3072)), (1, ("stopped", 0, 0))])
async def test_the_third_copy_is_not_made(tmp_path: Path, sleep: str | int, third: tuple[str, int, int]) -> None:
    """Two copies fit: the third model drops its weights instead, or is stopped where that is all it can.  Status shows who holds what."""
    card = Card(tmp_path, CARD)
    async with card.rig(three(800, sleep), budget_mib=24_000, host_budget_mib=RAM_MIB, config=PLACE) as rig:
        await rig.warm("x", "y", "z")
        assert await host_mib(rig) == {"x": ("asleep", 1, COPY_MIB), "y": ("asleep", 1, COPY_MIB), "z": ("ready", 0, 3072)}
        residues = [one["instances"][0]["reserved_by_device_mib"]["gpu0"] for one in (await rig.status())["models"]]
        assert residues == [800, 800, 20_000]

        reply = await rig.chat("x")
        assert reply.headers["x-greenroom-start"] == "wake"
        assert await host_mib(rig) == {"x": ("ready", 0, 3072), "y": ("asleep", 1, COPY_MIB), "z": third}
        told = await rig.why("z")
        assert ("put to sleep (level 2): x needed" in told, "unloaded: x needed" in told) == (third[0] == "asleep", third[0] == "stopped")
        assert "host RAM has no room for the 19.6 GiB it would hold at level 1" in told
        assert max(line["total_host_mib"] for line in rig.journal(event="claim")) == 2 * 17_000
    assert card.over == []


async def test_large_residues_change_the_plan(tmp_path: Path) -> None:
    """What a sleeper keeps on the card is booked as measured: beside one that keeps 2500 MiB there is no room for a second."""
    card = Card(tmp_path, CARD)
    async with card.rig(three(2500, 1), budget_mib=24_000, host_budget_mib=RAM_MIB, config=PLACE) as rig:
        for name in "xyzxyz":
            reply = await rig.chat(name)
            assert reply.done
            states = [state for state, _, _ in (await host_mib(rig)).values()]
            assert states.count("asleep") <= 1
            for device in (await rig.status())["devices"]:
                assert device["reserved_mib"] <= device["capacity_mib"]
        learned = {one["id"]: one["sleep"]["costs"] for one in (await rig.status())["models"]}
        assert any(cost["residue_mib"] == 2500 for costs in learned.values() for cost in costs)
        assert len(rig.journal(event="sleep_end")) >= 1
    assert card.over == []
