"""The server runs on uvloop: the same facts hold there."""

from __future__ import annotations

import time

import pytest
import uvloop

from greenroom.core.facts import Cause
from greenroom.engines.base import Readiness
from greenroom.host.probes import NotReady, probe_once, wait_ready
from greenroom.host.processes import Exit, stop
from tests.host.engines import a_launch, a_port, daemon_argv, engine_argv, python_argv, running


def test_an_engine_lives_and_ends_under_uvloop():
    """Start, ready, alive, TERM, gone; a detached one, one that is killed, and an early exit."""

    async def live(argv: tuple[str, ...], port: int, grace_s: float) -> tuple[bool, list[str]]:
        said: list[str] = []
        async with running(a_launch(argv, port)) as process:
            await wait_ready(
                ("127.0.0.1", port), Readiness("/health"), process=process, timeout_s=60, progress_counts=False, clock=time.monotonic
            )
            assert await probe_once("127.0.0.1", port, Readiness("/health"), 5.0)
            outcome = await stop(process, grace_s=grace_s, on_signal=said.append)
            assert process.tree() == frozenset()
        return outcome.killed, said

    async def fail() -> None:
        async with running(a_launch(python_argv("raise SystemExit(3)"))) as process:
            with pytest.raises(NotReady) as caught:
                await wait_ready(
                    ("127.0.0.1", a_port()),
                    Readiness("/health"),
                    process=process,
                    timeout_s=60,
                    progress_counts=False,
                    clock=time.monotonic,
                )
            assert (caught.value.cause, process.exit) == (Cause.EXITED, Exit(3, None))

    async def main() -> None:
        assert await live(engine_argv(port := a_port()), port, 20.0) == (False, ["TERM"])
        assert await live(daemon_argv(port := a_port()), port, 20.0) == (False, ["TERM"])
        assert await live(engine_argv(port := a_port(), "on_term=ignore"), port, 0.2) == (True, ["TERM", "KILL"])
        await fail()

    uvloop.run(main())
