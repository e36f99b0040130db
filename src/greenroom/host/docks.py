"""Before a container starts: what earlier runs have left is ended, its name is free, its image is here."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from greenroom.engines import container as words
from greenroom.engines.base import Box, Launch
from greenroom.engines.container import Listed
from greenroom.host.logs import LogRing
from greenroom.host.processes import SpawnError, spawn, stop
from greenroom.host.runtimes import ASK_S_MAX, SAID_CHARS_MAX, RuntimeSilent, ask, remove, silent, state_of
from greenroom.host.supervisor import Supervisor

LEFTOVER_GRACE_S = 1
LEFTOVERS_S_MAX = 30.0
LOOK_S_MAX = 3.0  # for an image, while nobody waits for the answer yet


class BoxError(Exception):
    """A container cannot be started; one sentence.  `lacking`: not before somebody does something about it."""

    def __init__(self, why: str, *, lacking: bool = False) -> None:
        super().__init__(why)
        self.lacking = lacking


class Docks:
    """The container runtimes of one greenroom: what earlier runs left in them, and images.

    `home` is the mark of the state directory (`Supervisor.home`); `record` a file that names the runtimes ever used.
    """

    def __init__(self, home: str = "", record: Path | None = None) -> None:
        self.home = home
        self._record = record
        self._used = _read_record(record)
        self._clear: set[str] = set()
        self._clearing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ours: set[str] = set()  # names of what this run has made: it may be seen by another name of the same runtime

    async def end_leftovers(self, runtimes: Iterable[str]) -> tuple[int, list[str]]:
        """End the containers that earlier runs on this state directory left; how many, and sentences about what could not be done."""
        wanted = sorted({*runtimes, *self._used})
        told = await asyncio.gather(*(self._end_leftovers(runtime) for runtime in wanted))
        return sum(count for count, _ in told), [why for _, why in told if why]

    async def _end_leftovers(self, runtime: str) -> tuple[int, str]:
        if shutil.which(runtime) is None:
            why = f"{runtime} was not found on PATH, so containers of an earlier run may be left in it; they may still hold memory"
            return 0, why if runtime in self._used else ""
        try:
            async with asyncio.timeout(LEFTOVERS_S_MAX):
                count = await self._end_all(runtime)
        except (RuntimeSilent, TimeoutError) as exc:
            why = str(exc) or f"{runtime} did not end them within {LEFTOVERS_S_MAX:g} s"
            return 0, f"containers of an earlier run may be left, and may still hold memory: {why}"
        self._clear.add(runtime)
        return count, ""

    async def _end_all(self, runtime: str) -> int:
        found = await self._left(runtime)
        if not found:
            return 0
        ids = [each.id for each in found]
        await ask((runtime, "stop", "-t", str(LEFTOVER_GRACE_S), *ids), LEFTOVER_GRACE_S + ASK_S_MAX)
        said = await remove(runtime, *ids)
        if left := await self._left(runtime):
            raise RuntimeSilent(f"{runtime} does not remove {', '.join(each.name for each in left)}: {said or 'it did not say why'}")
        return len(found)

    async def _left(self, runtime: str) -> tuple[Listed, ...]:
        answer = await ask(words.list_argv(runtime, self.home))
        if answer.code != 0:
            raise RuntimeSilent(silent(runtime, answer))
        try:
            return tuple(each for each in words.parse_list(answer.out) if each.name not in self._ours)
        except (ValueError, AttributeError) as exc:
            raise RuntimeSilent(f"{runtime} ps answered what cannot be understood ({exc})") from exc

    async def prepare(self, box: Box, log: LogRing, *, supervisor: Supervisor | None) -> None:
        """Nothing of an earlier run is left there, the name is free, the image is here.  Raises BoxError.

        It may be cancelled at any moment; a pull ends with it.
        """
        self._remember(box.runtime)
        # One at a time: what the first has started since is no leftover.
        async with self._clearing[box.runtime]:
            if box.runtime not in self._clear and (why := (await self._end_leftovers(box.runtime))[1]):
                raise BoxError(why)
        try:
            _, here = await asyncio.gather(self._free_name(box), _has_image(box))
        except RuntimeSilent as exc:
            raise BoxError(str(exc)) from exc
        self._ours.add(box.name)
        if words.TRANSPORT.match(box.image) or (here and box.pull != "always"):
            return
        if box.pull == "never":
            raise BoxError(
                f"the image {box.image} is not here, and `pull: never` forbids to fetch it; `{box.runtime} pull {box.image}`", lacking=True
            )
        await _pull(box, log, supervisor)

    async def lacks(self, runtime: str, image: str) -> bool:
        """Whether an image is known not to be here; a runtime that does not say in time has it, as far as this goes."""
        try:
            async with asyncio.timeout(LOOK_S_MAX):
                return not await _has_image(Box(runtime, "", image))
        except (RuntimeSilent, TimeoutError):
            return False

    async def pull(self, runtime: str, image: str, limit_s: float, log: LogRing, *, supervisor: Supervisor | None) -> None:
        """Fetch an image, unless it has come meanwhile.  Raises BoxError; cancelled, the pull ends."""
        if await self.lacks(runtime, image):
            await _pull(Box(runtime, "image", image, pull_s_max=limit_s), log, supervisor)

    async def _free_name(self, box: Box) -> None:
        state = await state_of(box)
        if state is None:
            return
        if state.home != self.home:
            raise BoxError(
                f"the name {box.name} is taken by a container that is not greenroom's; remove it (`{box.runtime} rm --force {box.name}`)"
            )
        if (said := await remove(box.runtime, box.name)) and await state_of(box) is not None:
            raise BoxError(f"{box.name} is left from an earlier run and cannot be removed: {said}")

    def over(self, name: str) -> None:
        """That container is gone, or nobody of this run holds it any more."""
        self._ours.discard(name)

    def _remember(self, runtime: str) -> None:
        if runtime in self._used:
            return
        self._used.add(runtime)
        if self._record is not None:
            # A disk that is full must not keep an engine from starting; the configuration names the runtime too.
            with contextlib.suppress(OSError):
                self._record.write_text("".join(f"{each}\n" for each in sorted(self._used)))


def _read_record(record: Path | None) -> set[str]:
    try:
        return set(record.read_text().split()) if record is not None else set()
    except (OSError, UnicodeDecodeError):
        return set()


async def _has_image(box: Box) -> bool:
    if words.TRANSPORT.match(box.image):
        return True
    answer = await ask(words.image_argv(box.runtime, box.image))
    if answer.code is None or (answer.code != 0 and not words.ABSENT.search(answer.err)):
        raise RuntimeSilent(silent(box.runtime, answer))
    return answer.code == 0


async def _pull(box: Box, log: LogRing, supervisor: Supervisor | None) -> None:
    log.note(f"[greenroom: {box.runtime} pulls {box.image}]")
    heard: list[str] = []
    undo = log.listen(heard.extend)
    launch = Launch(words.pull_argv(box.runtime, box.image), {}, "127.0.0.1", 0)
    try:
        process = await spawn(launch, token=f"pull-{box.name}-{time.monotonic_ns():x}", log=log, supervisor=supervisor)
        try:
            async with asyncio.timeout(box.pull_s_max):
                result = await process.wait()
        finally:
            await stop(process, grace_s=0.0, on_signal=lambda _: None)
    except SpawnError as exc:
        raise BoxError(str(exc)) from exc
    except TimeoutError:
        raise BoxError(
            f"the image {box.image} was not pulled within {box.pull_s_max:g} s (container.pull_timeout); raise it, or pull it beforehand"
        ) from None
    finally:
        undo()
    if result.code != 0:
        said = words.telling(heard[-50:])[:SAID_CHARS_MAX] or str(result)
        raise BoxError(f"{box.runtime} cannot pull {box.image}: {said}{words.advice(box.runtime, said)}")
