"""B07: the bound of the queue was ignored for a model that was already resident, and overflow looked like a crash."""

import asyncio
from pathlib import Path

from .rig import Reply, Rig, codes, fake, together

AT_ONCE_S = 1.5  # 100 ms on a quiet machine; a request that waits takes 3 s


def check_refusals(replies: list[Reply]) -> None:
    refused = [reply for reply in replies if reply.status != 200]
    assert {reply.status for reply in refused} == {429}
    assert {reply.error["code"] for reply in refused} == {"queue_full"}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert max(reply.took_s for reply in refused) < AT_ONCE_S


async def test_four_wait_and_the_rest_is_refused_whether_the_model_is_warm_or_cold(tmp_path: Path) -> None:
    """parallel 1, queue 4: of ten at once five are served, one after the other, and five hear 429 at once."""
    model = fake(ready_after=0.3, delay=0.15, parallel=1, config={"parallel": 1, "queue_limit": 4})
    async with Rig(tmp_path, {"a": model}) as rig:
        cold = await together(*(rig.chat("a") for _ in range(10)))
        warm = await together(*(rig.chat("a") for _ in range(10)))

        assert sorted(codes(cold)) == sorted(codes(warm)) == [200] * 5 + [429] * 5
        check_refusals(cold)
        check_refusals(warm)
        assert max(line["at_once"] for line in rig.inferences("a")) == 1


async def test_a_waiting_client_that_hangs_up_frees_its_place(tmp_path: Path) -> None:
    """The place of one who left is taken by the next one who comes."""
    model = fake(delay=0.5, parallel=1, config={"parallel": 1, "queue_limit": 2})
    async with Rig(tmp_path, {"a": model}) as rig:
        await rig.warm("a")
        running = asyncio.create_task(rig.chat("a"))
        await rig.wait_journal("a", "begin", 2)
        waiting = [await rig.ask("a") for _ in range(2)]
        await rig.wait_queued("a", 2)
        assert (await rig.chat("a")).status == 429
        waiting[0].close()
        await rig.wait_queued("a", 1)

        replies = await together(running, rig.chat("a"), waiting[1].rest())

        assert codes(replies) == [200] * 3
        assert len(rig.inferences("a")) == 4  # the one who left was never served
