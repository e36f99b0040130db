"""The sleep call answers 200 and the card shows the memory in use as before."""

from pathlib import Path
from typing import Any

import pytest

from .card import Card, Slot
from .rig import vllm

CARD = (Slot(0, "GPU-aaa", 10_000),)
CONFIG: dict[str, Any] = {"devices": {"gpu0": {"headroom": "0MiB"}}}
ON_CARD = {"device": "gpu0"}


@pytest.mark.parametrize("level", [1, 2])
async def test_it_is_stopped_instead_and_sleep_is_switched_off(tmp_path: Path, level: int) -> None:
    """Who needs the room gets it, by a stop; status says that sleep is off and how much it gave back.  From then on it is stopped."""
    models = {"a": vllm(weights=500, sleep=level, on_sleep="no_free", config=ON_CARD), "b": vllm(weights=500, sleep=level, config=ON_CARD)}
    card = Card(tmp_path, CARD)
    async with card.rig(models, budget_mib=10_000, config=CONFIG) as rig:
        await rig.warm("a")
        assert (await rig.chat("b")).done
        now = await rig.model("a")
        assert (now["state"], now["sleep"]["levels"]) == ("stopped", [])
        assert f"its sleep at level {level} gave back 0 MiB of 7.8 GiB" in now["sleep"]["off"]
        assert "sleep is switched off" in await rig.why("a")

        await rig.warm("a", "b")
        assert (len(rig.journal("a", "sleep_begin")), rig.starts("a"), rig.starts("b")) == (1, 2, 1)
    assert card.over == []


async def test_an_operator_who_asks_for_it_is_told(tmp_path: Path) -> None:
    """409 with both sizes, instead of a sleeper that holds everything."""
    card = Card(tmp_path, CARD)
    async with card.rig({"a": vllm(weights=500, sleep=1, on_sleep="no_free", config=ON_CARD)}, budget_mib=10_000, config=CONFIG) as rig:
        await rig.warm("a")
        told = await rig.put_to_sleep("a")
        assert (told.status, "gave back 0 MiB of 7.8 GiB" in told.error["message"]) == (409, True)
        await rig.wait_state("a", "stopped")
        assert (await rig.chat("a")).done
