"""B06: requests for a resident model stalled behind somebody else's load."""

import asyncio
import statistics
from pathlib import Path

from .rig import Reply, Rig, fake

ADDED_S_MAX = 0.5  # a busy machine is no fault; the fault took the whole load


async def test_embeddings_do_not_wait_for_a_chat_model_that_loads(tmp_path: Path) -> None:
    """A pinned small model goes on answering at its own pace while a large one is swapped for another."""
    models = {
        "emb": fake(vram=2000, ready_after=0.1, config={"pin": True}),
        "a": fake(vram=15_000, ready_after=0.2),
        "b": fake(vram=15_000, ready_after=3),
    }
    async with Rig(tmp_path, models, budget_mib=20_000) as rig:
        await rig.warm("emb", "a")
        alone = [await rig.embed("emb") for _ in range(20)]
        loading = asyncio.create_task(rig.chat("b"))
        await rig.wait_journal("b", "start")
        beside: list[Reply] = []
        while not rig.journal("b", "ready"):
            beside.append(await rig.embed("emb"))
            await asyncio.sleep(0.03)

        assert (await loading).status == 200
        assert {reply.status for reply in beside} == {200}
        assert len(beside) > 15
        usual_s = statistics.median(reply.took_s for reply in alone)
        late = [reply.took_s for reply in beside if reply.took_s > usual_s + ADDED_S_MAX]
        assert len(late) <= len(beside) // 20, late
        assert max(reply.took_s for reply in beside) < 2  # of the 3 s that b takes
        assert rig.starts("emb") == 1
