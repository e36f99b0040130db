"""B57: a pinned model was thrown out by a stray request; exclusivity depended on the order of loads."""

import itertools
from pathlib import Path

from .rig import Rig, fake


async def test_a_stray_request_is_refused_rather_than_taking_a_pinned_models_room(tmp_path: Path) -> None:
    """What cannot fit beside it hears so at once, what fits joins it, and an operator may unload it all the same."""
    models = {"main": fake(vram=8000, config={"pin": True}), "x": fake(vram=4000), "y": fake(vram=1500)}
    async with Rig(tmp_path, models) as rig:
        await rig.wait_state("main", "ready")  # pinned: brought in at start
        x = await rig.chat("x")
        y = await rig.chat("y")

        assert x.status == 503
        assert x.took_s < 5
        assert x.error["code"] not in ("", None, "queue_full")
        assert "main" in x.error["message"]
        assert y.status == 200
        assert (rig.starts("main"), rig.journal("main", "term")) == (1, [])
        assert {name for name in models if (await rig.model(name))["state"] == "ready"} == {"main", "y"}

        assert (await rig.unload("main")).status == 200
        assert (await rig.chat("x")).status == 200
        assert (await rig.model("main"))["state"] == "stopped"


async def test_who_stays_depends_on_the_last_request_and_not_on_the_path(tmp_path: Path) -> None:
    """An exclusive group and another one, loaded in every order: only the last one's model is there in the end."""
    models = {name: fake(vram=1000) for name in ("main", "p", "q")}
    groups = {"solo": {"members": ["main"], "exclusive": True}, "rest": {"members": ["p", "q"]}}
    async with Rig(tmp_path, models, config={"groups": groups}) as rig:
        for order in itertools.permutations(models):
            for name in order:
                assert (await rig.chat(name)).status == 200
            status = await rig.status()
            assert [one["id"] for one in status["models"] if one["state"] != "stopped"] == [order[-1]], order
