"""Starts and stops that cross each other: no engine is left that nobody knows of."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import greenroom.shell.crew as crew_module
from greenroom.config.model import ModelConfig
from greenroom.core.facts import Cause, Start, State, Stop
from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from greenroom.host.gpus import Gpus
from greenroom.shell.crew import HostCrew, Stage, safe_name

SERVER = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def a_crew(tmp_path: Path, code: str = SERVER) -> HostCrew:
    config = ModelConfig("a", (sys.executable, "-c", code, "${PORT}"), check_path=None, stop_s_max=2.0, start_s_max=20.0)
    stage = Stage({"a": describe(config)}, {"bench0": DeviceRef("bench0", "declared", total_mib=1000)}, 21_800)
    return HostCrew(stage, gpus=Gpus(), supervisor=None, log_dir=tmp_path, release_s_max=0.1)


START = Start("a", 1, ("bench0",), {"bench0": 1000})
STOP = Stop("a", 1, "unloaded by an operator")


async def test_an_engine_starts_and_stops(tmp_path: Path) -> None:
    """READY, then STOPPED, and nothing is left in the books of the crew."""
    crew = a_crew(tmp_path)
    started = await crew.start(START)
    process = crew.running["a"].process
    stopped = await crew.stop(STOP)

    assert (started and started.state, stopped and stopped.state) == (State.READY, State.STOPPED)
    assert ({}, set(), frozenset()) == (crew.running, crew._ports, frozenset(process.tree()))


async def test_a_stop_that_comes_while_its_engine_is_spawned_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """STOPPED is said when the process that was being made is gone, not before."""
    crew, go, spawned = a_crew(tmp_path), asyncio.Event(), []
    real = crew_module.spawn

    async def slow(*args: Any, **more: Any) -> Any:
        await go.wait()
        spawned.append(await real(*args, **more))
        return spawned[0]

    monkeypatch.setattr(crew_module, "spawn", slow)
    starting = asyncio.ensure_future(crew.start(START))
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(crew.stop(STOP))
    await asyncio.sleep(0)
    assert not stopping.done()
    go.set()
    started, stopped = await starting, await stopping

    assert (started, stopped and stopped.state) == (None, State.STOPPED)
    assert (frozenset(), {}) == (frozenset(spawned[0].tree()), crew.running)


async def test_end_all_ends_an_engine_that_is_just_being_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that was not there yet when it was called."""
    crew, go, spawned = a_crew(tmp_path), asyncio.Event(), []
    real = crew_module.spawn

    async def slow(*args: Any, **more: Any) -> Any:
        await go.wait()
        spawned.append(await real(*args, **more))
        return spawned[0]

    monkeypatch.setattr(crew_module, "spawn", slow)
    starting = asyncio.ensure_future(crew.start(START))
    await asyncio.sleep(0)
    ending = asyncio.ensure_future(crew.end_all())
    await asyncio.sleep(0)
    go.set()
    await ending

    assert (None, frozenset(), {}) == (await starting, frozenset(spawned[0].tree()), crew.running)


async def test_two_starts_at_once_do_not_choose_the_same_port(tmp_path: Path) -> None:
    """A port is taken from the moment it was chosen, not only once it is bound."""
    crew = a_crew(tmp_path)
    engine = crew.stage.engines["a"]
    crew.stage.engines = {"a": engine, "b": engine}
    crew._last_port = {"a": 21_850, "b": 21_850}
    both = await asyncio.gather(crew.start(START), crew.start(Start("b", 1, ("bench0",), {"bench0": 1000})))
    ports = {running.port for running in crew.running.values()}
    await crew.end_all()

    assert ([one.state for one in both if one], len(ports)) == ([State.READY] * 2, 2)


async def test_an_engine_that_ends_before_it_is_ready_is_reported_with_its_exit(tmp_path: Path) -> None:
    """STOPPED, its code, and its process gone."""
    report = await a_crew(tmp_path, "import sys; sys.exit(3)").start(START)

    assert report is not None
    assert (report.state, report.cause, report.exit_code) == (State.STOPPED, Cause.EXITED, 3)


async def test_a_stop_of_an_engine_that_is_not_there_is_done_at_once(tmp_path: Path) -> None:
    """It ended before: STOPPED."""
    report = await a_crew(tmp_path).stop(STOP)

    assert State.STOPPED is (report and report.state)


@pytest.mark.parametrize(("model", "plain"), [("qwen3-32b", True), ("a/b", False), ("../x", False), ("ü", False)])
def test_log_files_have_safe_names(model: str, plain: bool) -> None:
    """Never a path; two models never share one."""
    name = safe_name(model)

    assert plain is (name == model)
    assert not set(name) & set("/\\\0")
    assert not name.startswith(".")
