"""Asking podman and docker: every question is bounded, and no answer is not taken for a no."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from greenroom.engines import container as words
from greenroom.engines.base import Box
from greenroom.engines.container import BoxState

ASK_S_MAX = 10.0  # one question
ASKERS_MAX = 64  # at once; threads are made when they are needed, and one that hangs keeps its own for as long
ANSWER_BYTES_MAX = 4 * 1024 * 1024
SAID_CHARS_MAX = 400

askers = ThreadPoolExecutor(ASKERS_MAX, thread_name_prefix="runtime")
_asked: set[subprocess.Popen[bytes]] = set()  # questions without an answer yet


class RuntimeSilent(Exception):
    """A runtime does not answer, or not in a way that can be understood; one sentence."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a short command said.  `code` None: it had to be ended, or could not be run (then `err` says why)."""

    code: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        return words.telling([*self.out.splitlines(), *self.err.splitlines()])[:SAID_CHARS_MAX]


async def ask(argv: Sequence[str], limit_s: float = ASK_S_MAX) -> Answer:
    """Run a command that ends soon; it is killed after `limit_s`."""
    return await asyncio.get_running_loop().run_in_executor(askers, run_now, tuple(argv), limit_s)


def run_now(argv: tuple[str, ...], limit_s: float) -> Answer:
    # Memory files and no pipes: a helper that a runtime leaves behind may hold its output open for ever.
    out, err = os.memfd_create("out", os.MFD_CLOEXEC), os.memfd_create("err", os.MFD_CLOEXEC)
    try:
        try:
            # A group of its own, so that Ctrl-C in the terminal does not hit it; our session, so that nobody else reaps it.
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0)
        except OSError as exc:
            return Answer(None, "", f"{argv[0]} cannot be run: {exc.strerror}")
        code: int | None
        _asked.add(child)
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(child)
            child.wait()
            code = None
        finally:
            _asked.discard(child)
        said = _read(err)
        return Answer(code, _read(out), said if code is not None else f"{said}\n{' '.join(argv[:2])} did not answer within {limit_s:g} s")
    finally:
        os.close(out)
        os.close(err)


def end_questions() -> None:
    """Nobody wants to know any more: without this the end of the program would wait for what hangs."""
    for child in list(_asked):
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _read(handle: int) -> str:
    return os.pread(handle, ANSWER_BYTES_MAX, 0).decode("utf-8", "replace")


async def state_of(box: Box, limit_s: float = ASK_S_MAX) -> BoxState | None:
    """The container now; None when there is none of that name.  Raises RuntimeSilent."""
    return state_in(box, await ask(words.inspect_argv(box.runtime, box.name), limit_s))


def state_in(box: Box, answer: Answer) -> BoxState | None:
    if answer.code == 0:
        try:
            return words.parse_state(answer.out)
        except (ValueError, TypeError, AttributeError) as exc:
            raise RuntimeSilent(f"{box.runtime} inspect answered what cannot be understood ({exc})") from exc
    if answer.code is not None and words.ABSENT.search(answer.err):
        return None
    raise RuntimeSilent(silent(box.runtime, answer))


def silent(runtime: str, answer: Answer) -> str:
    said = answer.said or f"exit code {answer.code}"
    return f"{runtime} does not do its work: {said}{words.advice(runtime, said)}"


async def remove(runtime: str, *names: str, kill: bool = True, limit_s: float = ASK_S_MAX) -> str:
    """Remove containers, killed before; what the runtime had against it, or "".  `limit_s`: for each of the two."""
    if kill:
        await ask(words.kill_argv(runtime, *names), limit_s)
    answer = await ask(words.remove_argv(runtime, *names), limit_s)
    return "" if answer.code == 0 or words.ABSENT.search(answer.err) else answer.said or f"exit code {answer.code}"
