"""B30: the copy of the weights in host RAM was not given back by the wake, and nobody knew."""

from pathlib import Path
from typing import Any

import pytest

from .card import Card, Slot
from .rig import vllm

COPY_MIB = 300
SLACK_MIB = 90  # interpreters of the fake
CARD = (Slot(0, "GPU-aaa", 10_000),)
CONFIG: dict[str, Any] = {"devices": {"gpu0": {"headroom": "0MiB"}}}  # host RAM is this machine's own, and is measured


@pytest.mark.parametrize(("kept", "least", "most"), [(1, COPY_MIB, COPY_MIB + SLACK_MIB), (0, 10, SLACK_MIB)])
async def test_host_ram_is_booked_as_what_is_really_held(tmp_path: Path, kept: int, least: int, most: int) -> None:
    """Asleep: the copy.  Awake again: the copy where the engine keeps it, and little where it does not."""
    config = {"device": "gpu0", "host_memory": "10MiB"}
    model = vllm(8000, 1000, weights=COPY_MIB, sleep=1, host_real=1, host_kept=kept, worker=0, config=config)
    async with Card(tmp_path, CARD).rig({"a": model}, budget_mib=10_000, config=CONFIG) as rig:
        await rig.warm("a")
        await rig.put_to_sleep("a")
        asleep = (await rig.model("a"))["instances"][0]
        assert COPY_MIB <= asleep["ram_mib"] <= COPY_MIB + SLACK_MIB
        assert f"{asleep['ram_mib']} MiB of host RAM" in await rig.why("a")

        assert (await rig.chat("a")).headers["x-greenroom-start"] == "wake"
        awake = (await rig.model("a"))["instances"][0]
        assert least <= awake["ram_mib"] <= most
