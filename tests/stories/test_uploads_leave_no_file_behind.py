"""B15: large uploads left temporary files until the disk (or the memory it was made of) was full."""

import asyncio
import json
import os
import re
import resource
from pathlib import Path

from .rig import Exchange, Rig, fake, until

MIB = 1 << 20
UPLOAD_MIB = 6
RSS_MIB_MAX = 20  # what the server may have grown by when all is done
BOUNDARY = "a-boundary"
PATH = "/v1/audio/transcriptions"


def form(model: str, mib: float) -> bytes:
    """A recording, and behind it the model's name."""
    recording = os.urandom(64 * 1024) * int(mib * 16)
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="film.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    tail = f'\r\n--{BOUNDARY}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--{BOUNDARY}--\r\n'
    return head.encode() + recording + tail.encode()


def typed(body: bytes) -> dict[str, str]:
    return {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", "Content-Length": str(len(body))}


def spooled_mib(rig: Rig) -> float:
    """What the server holds in temporary files now: they have no name, so only its open files tell."""
    total = 0
    for link in Path(f"/proc/{rig.pid}/fd").iterdir():
        try:
            if os.readlink(link).startswith(str(rig.tmp_dir)):
                total += link.stat().st_size
        except OSError:
            continue
    return total / MIB


def rss_mib(pid: int) -> float:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


class Watch:
    """The most that was spooled at once, and every name that ever stood in the temporary folder."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.most_mib, self.names = rig, 0.0, set[str]()
        self._task = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        while True:
            self.most_mib = max(self.most_mib, spooled_mib(self.rig))
            self.names |= set(os.listdir(self.rig.tmp_dir))
            await asyncio.sleep(0.005)

    def end(self) -> None:
        self._task.cancel()


async def upload(rig: Rig, model: str, mib: float = UPLOAD_MIB) -> Exchange:
    body = form(model, mib)
    return await rig.send("POST", PATH, body, typed(body))


async def hang_up_in_the_middle(rig: Rig) -> None:
    body = form("a", UPLOAD_MIB)
    exchange = await rig.send("POST", PATH, b"", typed(body))
    exchange.writer.write(body[: len(body) // 2])
    await exchange.writer.drain()
    await until(lambda: spooled_mib(rig) > 1, "part of the upload is there")
    exchange.close()


async def test_nothing_is_left_of_any_upload(tmp_path: Path) -> None:
    """Whole ones, hang-ups in the middle, unknown models, an engine that crashes over one: the folder is empty, and so is our hand."""
    models = {"a": fake(), "frail": fake(fail="die_before_byte")}
    async with Rig(tmp_path, models) as rig:
        await rig.warm("a")
        before_mib = rss_mib(rig.pid)
        watch = Watch(rig)
        at_once = 4
        for _ in range(3):
            exchanges = await asyncio.gather(*(upload(rig, "a") for _ in range(at_once)))
            replies = await asyncio.gather(*(exchange.rest() for exchange in exchanges))
            assert [reply.status for reply in replies] == [200] * at_once
        for _ in range(5):
            await hang_up_in_the_middle(rig)
            await until(lambda: spooled_mib(rig) == 0, "the half upload is gone")
        for _ in range(2):
            reply = await (await upload(rig, "nobody")).rest()
            assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        reply = await (await upload(rig, "frail")).rest()
        assert reply.status in (502, 503)
        watch.end()
        assert [line["bytes"] for line in rig.inferences("a")[1:]] == [len(form("a", UPLOAD_MIB))] * 12
        await until(lambda: spooled_mib(rig) == 0, "the last upload is gone")  # the answer may arrive a moment before
        assert watch.names == set()
        assert 1 < watch.most_mib <= at_once * (UPLOAD_MIB + 1)
        assert rss_mib(rig.pid) < before_mib + RSS_MIB_MAX


async def test_an_upload_that_cannot_be_kept_is_refused_and_the_next_request_works(tmp_path: Path) -> None:
    """413 for one above the limit, 507 while others fill the common room; small requests go on, and the others are served."""
    limits = {"upload_mib_max": 4, "spool_mib_max": 5}
    async with Rig(tmp_path, {"a": fake()}, config={"limits": limits}) as rig:
        await rig.warm("a")
        too_large = await (await upload(rig, "a")).rest()
        assert (too_large.status, "limit of 4,194,304 bytes" in too_large.error["message"]) == (413, True)
        await until(lambda: spooled_mib(rig) == 0, "what was kept of it is gone")

        body = form("a", 3)
        slow = await rig.send("POST", PATH, b"", typed(body))
        slow.writer.write(body[:-100])
        await until(lambda: spooled_mib(rig) > 2.9, "the slow upload is nearly there")
        crowded = await (await upload(rig, "a", 3)).rest()
        assert (crowded.status, "spool_mib_max" in crowded.error["message"]) == (507, True)
        await until(lambda: spooled_mib(rig) < 3.1, "what was kept of it is gone")
        assert (await rig.chat("a")).done
        assert (await (await upload(rig, "a", 1)).rest()).status == 200
        slow.writer.write(body[-100:])
        assert (await slow.rest()).status == 200
        assert [line["bytes"] for line in rig.inferences("a")][2:] == [len(form("a", 1)), len(body)]
        assert spooled_mib(rig) == 0


async def test_a_full_disk_is_told_and_does_no_harm(tmp_path: Path) -> None:
    """The temporary folder takes no more than a file of 1 MiB: 507, and what needs no file is served."""
    async with Rig(tmp_path, {"a": fake()}) as rig:
        await rig.warm("a")
        resource.prlimit(rig.pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        reply = await (await upload(rig, "a")).rest()
        assert (reply.status, reply.error["code"]) == (507, "spool_failed")
        await until(lambda: spooled_mib(rig) == 0, "what was kept of it is gone")
        assert (await rig.chat("a")).done


async def test_many_requests_in_parallel_leave_memory_as_it_was(tmp_path: Path) -> None:
    """Hundreds of embedding calls of 100 KiB, 16 at a time."""
    async with Rig(tmp_path, {"a": fake(config={"parallel": 16})}) as rig:
        await rig.warm("a")
        body = json.dumps({"model": "a", "input": "x" * 100 * 1024}).encode()
        turns = asyncio.Semaphore(16)

        async def embed() -> int:
            async with turns:
                exchange = await rig.send("POST", "/v1/embeddings", body)
                return (await exchange.rest()).status

        assert set(await asyncio.gather(*(embed() for _ in range(48)))) == {200}
        before_mib = rss_mib(rig.pid)
        assert set(await asyncio.gather(*(embed() for _ in range(250)))) == {200}
        assert rss_mib(rig.pid) < before_mib + RSS_MIB_MAX
        assert (spooled_mib(rig), os.listdir(rig.tmp_dir)) == (0, [])
