"""Fetch blobs: several at once, large ones by several connections, and after any interruption only what is still missing.

Each blob fills a `Partial`, whose holder alone fetches it; whoever wants the same blob meanwhile, in this process or another,
waits and sees it grow.  Its SHA-256 is taken beside the fetch, from the front on, so that little is left to do at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from .facts import Damaged, ModelFile, NoRoom, StoreError, Unreachable
from .partial import Filler, Partial
from .progress import Meter
from .ranges import Opener, Stretch

T = TypeVar("T")

STREAMS_MAX = 4  # connections of one pull
RAMP_S = 0.25  # between the first connection to a blob and the next one
FAST_BYTES_S = 100e6  # at which it is this machine that limits, and more connections only take its CPUs from each other
BLOBS_AT_ONCE_MAX = 8
SEGMENTS_WANTED = 8  # requests for a blob, where that gives stretches of a sensible length
SEGMENT_BYTES_MIN = 16 << 20
SEGMENT_BYTES_MAX = 128 << 20
TRIES_MAX = 6  # of one connection in a row, without a byte more
BACKOFF_S = 0.5
BACKOFF_S_MAX = 15.0
BATCH_BYTES_MIN = 1 << 20  # written by one call of a thread
HERE_BYTES_MIN = 256 << 10  # written by the event loop itself: more has left the processor's cache by the time that it is hashed
BATCH_BYTES_MAX = 8 << 20  # of one connection in memory, waiting for the disk
KEPT_BYTES = 31 << 20  # of freed memory, for the next pieces
CLOSINGS_MAX = 2  # stretches of a blob whose ends are still on their way to the disk
LOOK_S = 0.2  # at what somebody else fetches
HASH_S = 0.01  # between two looks at what can be hashed
THREADS = 6  # for the disk and for hashing


@dataclass(frozen=True, slots=True)
class Wanted:
    """A blob to fetch: `open` asks its source for a stretch of it."""

    file: ModelFile
    open: Opener
    key: str = ""  # of a file without a digest: tells its versions apart


class Shelf(Protocol):
    """Where blobs go: a `Pulling` of the library."""

    def here(self, file: ModelFile) -> bool: ...

    def begin(self, file: ModelFile, key: str = "") -> Partial | None: ...

    def fetched_by_others(self, file: ModelFile, key: str = "") -> int: ...

    def finish(self, partial: Partial, file: ModelFile) -> str: ...


@dataclass(slots=True)
class Transfer:
    """The downloads of one pull."""

    shelf: Shelf
    meter: Meter
    streams: int = STREAMS_MAX
    writes_here: bool = False  # the event loop has nothing else to do: writing in it spares two changes of threads for each batch
    ramp_s: float = RAMP_S
    backoff_s: float = BACKOFF_S
    slots: asyncio.Semaphore = field(init=False)
    _threads: ThreadPoolExecutor = field(init=False)

    async def run(self, wanted: Sequence[Wanted]) -> None:
        """Fetches all.  The first fault ends it; what is half here stays to go on with, unless the disk is full.

        Raises StoreError: NoRoom, Damaged, Unreachable, Refused, NotFound.
        """
        self.slots = asyncio.Semaphore(self.streams)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="greenroom-pull")
        at_once = asyncio.Semaphore(BLOBS_AT_ONCE_MAX)
        if self.writes_here:
            _keep_memory()

        async def one(item: Wanted) -> None:
            async with at_once:
                await self._one(item)

        try:
            async with asyncio.TaskGroup() as group:
                for item in {item.file.digest or item.file.path: item for item in wanted}.values():
                    group.create_task(one(item))
        except* StoreError as faults:
            fault = worst(faults)
            if isinstance(fault, NoRoom):
                for item in wanted:
                    await self.thread(self._drop, item)
            raise fault from None
        finally:
            self._threads.shutdown(wait=True)

    async def thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def _one(self, item: Wanted) -> None:
        partial = await self._begun(item)
        if partial is None:
            self.meter.report(now=True)
            return
        self.meter.done += partial.done
        filling = _Filling(self, item, partial)
        try:
            await filling.run()
            self.meter.at("verifying", item.file.path)
            await filling.job(self._finished(item, partial))
        except Damaged:
            await filling.settled()
            partial.discard()  # what is wrong is not gone on with
            raise
        finally:
            await filling.settled()
            partial.close()

    async def _finished(self, item: Wanted, partial: Partial) -> None:
        await self.thread(self.shelf.finish, partial, item.file)

    async def _begun(self, item: Wanted) -> Partial | None:
        """Its partial, held by us; None when it is here, be it that somebody else just brought it."""
        seen = 0
        while True:
            if await self.thread(self.shelf.here, item.file):
                self.meter.done += item.file.size - seen
                return None
            partial = await self.thread(self.shelf.begin, item.file, item.key)
            if partial is not None:
                self.meter.done -= seen  # what is here is counted from the partial itself
                return partial
            now = await self.thread(self.shelf.fetched_by_others, item.file, item.key)
            self.meter.done += now - seen
            seen = now
            self.meter.at("fetching", item.file.path)
            await asyncio.sleep(LOOK_S)

    def _drop(self, item: Wanted) -> None:
        """Takes away what is half here, unless somebody else is at it."""
        try:
            partial = self.shelf.begin(item.file, item.key)
        except StoreError:
            return  # the disk is so full that not even that could be written; then nothing is left of it
        if partial is not None:
            partial.discard()


class _Filling:
    """One blob being filled by one or more connections."""

    def __init__(self, transfer: Transfer, item: Wanted, partial: Partial) -> None:
        self.transfer, self.item, self.partial = transfer, item, partial
        length = max(SEGMENT_BYTES_MIN, min(SEGMENT_BYTES_MAX, item.file.size // SEGMENTS_WANTED))
        self.left = deque(partial.missing(length))
        self.answered = asyncio.Event()  # the server has shown whether it knows ranges
        self.one_stream = False
        self.came = 0  # bytes
        self._over = asyncio.Event()  # nothing is left to ask for
        self._closings: deque[asyncio.Task[None]] = deque()
        self._jobs: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Raises StoreError (the worst of what went wrong)."""
        hashing = asyncio.ensure_future(self._hashed())
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(self.transfer.streams, len(self.left))):
                    group.create_task(self._worker(number))
            while self._closings:
                await asyncio.shield(self._closings.popleft())
        except* StoreError as faults:
            raise worst(faults) from None
        finally:
            hashing.cancel()
            await self.settled()  # the hash is taken by one at a time

    async def job(self, job: Coroutine[None, None, None]) -> None:
        """Runs to its end, also when nobody waits for it any more."""
        await asyncio.shield(self.start(job))

    def start(self, job: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._ended)
        return task

    async def settled(self) -> None:
        """Nothing is read or written any more after this."""
        while self._jobs:
            await asyncio.wait(self._jobs)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits; nobody may

    async def _hashed(self) -> None:
        while True:
            await self.job(self._advanced())
            await asyncio.sleep(HASH_S)

    async def _advanced(self) -> None:
        await self.transfer.thread(self.partial.advance)

    async def closing(self, writer: _Writer) -> None:
        """The end of a stretch is written while the next one is asked for.  Raises what earlier ones failed with."""
        self._closings.append(self.start(writer.closed()))
        while len(self._closings) > CLOSINGS_MAX:
            await asyncio.shield(self._closings.popleft())

    async def _worker(self, number: int) -> None:
        if number and not await self._is_wanted(number):
            return
        tries = 0
        while self.left and not (self.one_stream and number):
            offset, length = self.left.popleft()
            try:
                async with self.transfer.slots, self.item.open(offset, length) as stretch:
                    await self._take(stretch, offset, length)
                tries = 0
            except Unreachable as exc:
                self.transfer.meter.at("retrying", self.item.file.path)
                rest = self._rest(offset, length)
                self.left.extendleft(reversed(rest))
                tries = 0 if sum(count for _, count in rest) < length else tries + 1
                if tries >= TRIES_MAX:
                    raise Unreachable(
                        f"{exc}; {self.partial.done:,} of {self.item.file.size:,} bytes are here: pull again to go on"
                    ) from None
                await asyncio.sleep(min(BACKOFF_S_MAX, self.transfer.backoff_s * 2 ** (tries - 1)) if tries else 0)

        self._over.set()

    async def _is_wanted(self, number: int) -> bool:
        """Whether another connection may bring more, once the earlier ones have shown what they bring."""
        await self.answered.wait()
        began, before = asyncio.get_running_loop().time(), self.came
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.transfer.ramp_s * number):
                await self._over.wait()
        taken_s = asyncio.get_running_loop().time() - began
        return not self._over.is_set() and self.came - before <= FAST_BYTES_S * taken_s

    def _rest(self, offset: int, length: int) -> list[tuple[int, int]]:
        """What is still missing of a stretch."""
        end = offset + length
        gaps = ((max(offset, at), min(end, at + count)) for at, count in self.partial.missing())
        return [(begin, stop - begin) for begin, stop in gaps if begin < stop]

    async def _take(self, stretch: Stretch, offset: int, length: int) -> None:
        pieces = _Pieces(self, stretch)
        if not stretch.whole or length == self.item.file.size:
            self.answered.set()
            await pieces.copy(offset, length)
            pieces.check_end()
            return
        if self.answered.is_set() and not self.one_stream:
            raise Unreachable(f"{self.item.file.path}: the server sends all of it where a part was asked for, and did not before")
        # It knows no ranges: all that is missing comes from this one stream, the rest of it is skipped.
        self.one_stream = True
        self.answered.set()
        self.left.clear()
        self.left.append((offset, length))  # for another try, should this one break
        at = 0
        for begin, count in self.partial.missing():
            await pieces.skip(begin - at)
            await pieces.copy(begin, count)
            at = begin + count
        pieces.check_end()
        self.left.clear()


class _Pieces:
    """The bytes of an answer, cut to where they go."""

    def __init__(self, filling: _Filling, stretch: Stretch) -> None:
        self._filling = filling
        self._read = stretch.read
        self._over = memoryview(b"")  # read, and belongs to what comes next

    async def skip(self, length: int) -> None:
        while length:
            piece = await self._next(length)
            length -= len(piece)
            self._filling.transfer.meter.fetched += len(piece)

    async def copy(self, offset: int, length: int) -> None:
        """The next `length` bytes to their place."""
        meter = self._filling.transfer.meter
        meter.file, meter.stage = self._filling.item.file.path, "fetching"
        writer = _Writer(self._filling, offset, length)
        try:
            while length:
                piece = await self._next(length)
                length -= len(piece)
                meter.add(len(piece))
                self._filling.came += len(piece)
                await writer.put(piece)
        except BaseException:
            await writer.close()  # what came in before it broke is kept
            raise
        await self._filling.closing(writer)

    def check_end(self) -> None:
        if self._over:
            raise Damaged(f"{self._filling.item.file.path}: more bytes come than were asked for; where it comes from is broken")

    async def _next(self, length_max: int) -> memoryview:
        if not self._over:
            data = await self._read()
            if not data:
                raise Unreachable(f"{self._filling.item.file.path} breaks off")
            self._over = memoryview(data)
        piece, self._over = self._over[:length_max], self._over[length_max:]
        return piece


class _Writer:
    """One stretch on its way to the disk: while some of it is written by a thread, more comes in."""

    def __init__(self, filling: _Filling, offset: int, length: int) -> None:
        self._filling = filling
        self._filler = Filler(filling.partial, offset, offset + length)
        self._held: list[memoryview] = []
        self._bytes = 0
        self._writing: asyncio.Task[None] | None = None

    async def put(self, piece: memoryview) -> None:
        """Raises what an earlier write failed with."""
        self._held.append(piece)
        self._bytes += len(piece)
        if self._filling.transfer.writes_here:
            if self._bytes >= HERE_BYTES_MIN:
                _write(self._filler, self._take())
            return
        if self._writing is not None and self._bytes >= BATCH_BYTES_MAX:
            await asyncio.shield(self._writing)
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        if self._writing is None and self._bytes >= BATCH_BYTES_MIN:
            self._writing = self._filling.start(self._written())

    async def close(self) -> None:
        """Whatever came in is written and noted, also when the connection broke."""
        await self._filling.job(self.closed())

    async def _written(self) -> None:
        while self._bytes >= BATCH_BYTES_MIN:
            await self._filling.transfer.thread(_write, self._filler, self._take())

    async def closed(self) -> None:
        if self._writing is not None:
            await self._writing
        if self._filling.transfer.writes_here:
            _write_last(self._filler, self._take())
        else:
            await self._filling.transfer.thread(_write_last, self._filler, self._take())

    def _take(self) -> list[memoryview]:
        taken, self._held, self._bytes = self._held, [], 0
        return taken


def worst(faults: BaseExceptionGroup[StoreError]) -> StoreError:
    """Of several things that went wrong at once, the one that says most: trying again helps against the others."""
    leaves: list[StoreError] = []
    for fault in faults.exceptions:
        leaves += [worst(fault)] if isinstance(fault, BaseExceptionGroup) else [fault]
    return min(leaves, key=lambda fault: (isinstance(fault, Unreachable), not isinstance(fault, NoRoom)))


def _keep_memory() -> None:
    """Pieces of the fetch are freed and made anew all the time; glibc would give their memory back, and get it page by page again.

    It keeps as much as the largest piece that has come and gone (mallopt(3), M_MMAP_THRESHOLD), and so does no harm elsewhere.
    """
    bytes(KEPT_BYTES)


def _write(filler: Filler, batch: Sequence[memoryview]) -> None:
    # Joined: a copy costs less than the change of threads that comes with each write.
    filler.write(b"".join(batch) if len(batch) > 1 else batch[0])


def _write_last(filler: Filler, batch: Sequence[memoryview]) -> None:
    try:
        if batch:
            _write(filler, batch)
    finally:
        filler.close()
