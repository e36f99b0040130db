"""Everything at once: clients that ask, stream and hang up, operators, reloads, and kill -9 at random, over engines with faults.

GREENROOM_WILD_S and GREENROOM_WILD_SEED make it longer and other; the rig's oracles judge.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path

from .rig import Rig, fake, until

SECONDS = float(os.environ.get("GREENROOM_WILD_S", "5"))
SEED = int(os.environ.get("GREENROOM_WILD_SEED", "1"))
CLIENTS = 12
ANSWER_S_MAX = 60.0
EXPECTED = {200, 429, 502, 503}
FDS_MORE_MAX = 5
RSS_MORE_MIB_MAX = 20
MODELS = {
    "a": fake(vram=6000, ready_after=0.2, on_term="slow:0.1", stream="10x0.03", config={"ttl": "0.8s", "parallel": 3, "queue_limit": 6}),
    "b": fake(vram=5000, ready_after=0.3, on_term="deaf", stream="10x0.02", config={"parallel": 2}),
    "c": fake(vram=4000, ready_after=0.1, on_term="ignore", config={"unloadTimeout": "0.3s"}),
    "d": fake(vram=9000, ready_after=0.4, start_2__fail="exit_at_start:3", start_4__fail="die_before_byte", stream="5x0.05"),
    "e": fake(vram=1000, ready_after=0.1, delay=0.1, start_3__fail="exit_after:3"),
    "f": fake(vram=500, ready_after=0.05, workers=2, setsid=1, config={"pin": True}),
}


async def test_oracles_hold_whatever_happens(tmp_path: Path) -> None:
    """No answer is cut without a word, nothing is overbooked or started twice, nothing hangs, leaks or is left behind."""
    quick = {"scheduling": {"backoff_first_s": 0.2, "backoff_max_s": 0.5}}
    async with Rig(tmp_path, MODELS, config=quick, may_abort=True) as rig:
        await rig.warm("a", "f")
        before = handles(rig.pid), rss_mib(rig.pid)
        until_at = time.monotonic() + SECONDS
        await asyncio.gather(*(client(rig, random.Random(f"{SEED} {number}"), until_at) for number in range(CLIENTS)))

        assert {reply.status for reply in rig.replies if reply.status} <= EXPECTED | {202, 409}
        assert sum(reply.done for reply in rig.replies) > CLIENTS
        for name in MODELS:
            unloaded = await rig.unload(name, force=True)
            assert (name, unloaded.status) == (name, 200)
        assert rig.processes() == []
        await until(lambda: handles(rig.pid) <= before[0] + FDS_MORE_MAX, "O5: file handles came back", 10)
        assert rss_mib(rig.pid) <= before[1] + RSS_MORE_MIB_MAX + SECONDS / 10, "O5: memory"


async def client(rig: Rig, rng: random.Random, until_at: float) -> None:
    """Does one thing after the other until its time is over."""
    while time.monotonic() < until_at:
        model, what = rng.choice("aabbcdef"), rng.random()
        if what < 0.75:
            await asyncio.wait_for(rig.chat(model, stream=rng.random() < 0.6), ANSWER_S_MAX)
        elif what < 0.9:
            exchange = await rig.ask(model, stream=True)
            await asyncio.sleep(rng.random() / 2)
            exchange.close()
        elif what < 0.93:
            await rig.unload(model, force=rng.random() < 0.5, wait_s=5)
        elif what < 0.95:
            await rig.load(model, wait_s=3)
        elif what < 0.97 and (alive := rig.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(alive)[0], signal.SIGKILL)
        else:
            rig.reload()


def handles(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
