"""B02: a second request slipped through while the first swap was still stopping the old model."""

import itertools
import random
from pathlib import Path

from .rig import Rig, fake, together

SEEDS = range(3)


async def test_twenty_requests_for_two_models_that_exclude_each_other_all_complete(tmp_path: Path) -> None:
    """Whatever their order: 20 whole streams, at most one start of each model, and never both engines at once."""
    model = fake(vram=8000, ready_after=0.3, on_term="slow:0.2", stream="20x0.01", config={"parallel": 16})
    async with Rig(tmp_path, {"a": model, "b": model}) as rig:
        await rig.warm("a")
        for seed in SEEDS:
            before = rig.starts("a"), rig.starts("b")
            names = ["a"] * 10 + ["b"] * 10
            random.Random(seed).shuffle(names)
            replies = await together(*(rig.chat(name, stream=True) for name in names))

            assert [(reply.status, reply.done, len(reply.tokens)) for reply in replies] == [(200, True, 20)] * 20, f"seed {seed}"
            assert rig.starts("a") - before[0] <= 1, f"seed {seed}"
            assert rig.starts("b") - before[1] <= 1, f"seed {seed}"
        lives = sorted(rig.lives("a") + rig.lives("b"))
        assert [(before, after) for before, after in itertools.pairwise(lives) if after[0] < before[1]] == []
