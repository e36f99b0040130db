"""Starts and stops that cross each other: no engine is left that nobody knows of."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import greenroom.shell.crew as crew_module
from greenroom.config.model import AsleepConfig, CallConfig, ModelConfig, SleepConfig
from greenroom.core.facts import Cause, InstanceReported, Sleep, Start, State, Stop, Verify, Wake
from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from greenroom.host.gpus import Gpus
from greenroom.host.processes import StopOutcome
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


async def test_the_end_of_a_stray_is_not_told_to_a_book_that_was_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts from one again: another engine has that number now."""
    crew, real = a_crew(tmp_path), crew_module.stop

    async def in_vain(process: Any, **more: Any) -> StopOutcome:
        return replace(await real(process, **more), unkillable=True)

    monkeypatch.setattr(crew_module, "stop", in_vain)
    await crew.start(START)
    stray = await crew.stop(STOP)
    assert stray is not None
    assert stray.cause is Cause.UNKILLABLE
    told = await crew.wait_strays()
    await crew.start(START)
    await crew.stop(STOP)
    await crew.end_all()

    assert [(one.model, one.generation, one.state) for one in told] == [("a", 1, State.STOPPED)]
    assert await crew.wait_strays() == []


async def test_a_stop_of_an_engine_that_is_not_there_is_done_at_once(tmp_path: Path) -> None:
    """It ended before: STOPPED."""
    report = await a_crew(tmp_path).stop(STOP)

    assert State.STOPPED is (report and report.state)


# ------------------------------------------------------------------------------------------------------------- sleepers

SLEEPER = """
import http.server, json, os, pathlib, sys, time

here, asleep = pathlib.Path(sys.argv[2]), []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health" and (here / "slow").exists():
            (here / "probed").touch()
            time.sleep(0.5)
        self.answer(200, {"is_sleeping": bool(asleep)})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        odd = here / self.path[1:].replace("/", "_")
        if odd.exists():
            text = odd.read_text()
            if text.startswith("hang"):
                print(text, flush=True)
                return time.sleep(60)
            return self.answer(500, {"detail": text})
        if self.path == "/sleep":
            asleep.append(1)
        elif self.path == "/wake_up":
            asleep.clear()
        elif self.path != "/v1/completions":
            return self.answer(404, {})
        self.answer(200, {"choices": [{"text": "one"}]})

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
KEY = "key-nobody-may-see"
LIMIT_S = 1.5
FULL = "CUDA out of memory. Tried to allocate 1.50 GiB"


async def a_sleeper(tmp_path: Path, **odd: str) -> HostCrew:
    """An engine that is ready and can sleep; `odd`: what its calls (sleep, wake_up) do instead, once it is ready."""
    calls = SleepConfig((CallConfig("/sleep"),), (CallConfig("/wake_up"),), asleep=AsleepConfig("/is_sleeping"))
    config = ModelConfig(
        "a",
        (sys.executable, "-c", SLEEPER, "${PORT}", str(tmp_path)),
        check_path="/health",
        env=(("API_KEY", KEY),),
        sleep_calls=calls,
        sleep="1",
        sleep_s_max=LIMIT_S,
        wake_s_max=LIMIT_S,
    )
    refs = {"bench0": DeviceRef("bench0", "declared", total_mib=1000)}
    stage = Stage({"a": describe(config)}, refs, 21_900, levels={"a": (1,)})
    crew = HostCrew(stage, gpus=Gpus(), supervisor=None, log_dir=tmp_path, release_s_max=0.1)
    if "canary" in odd:
        (tmp_path / "v1_completions").write_text(odd.pop("canary"))
    report = await crew.start(START)
    assert report is not None
    assert report.state is State.READY
    for name, text in odd.items():
        (tmp_path / name).write_text(text)
    return crew


async def slept_and_woken(crew: HostCrew) -> InstanceReported | None:
    asleep = await crew.sleep(Sleep("a", 1, 1))
    assert asleep is not None
    assert asleep.state is State.ASLEEP
    return await crew.wake(Wake("a", 1, 1))


async def test_a_look_that_a_sleep_overtook_says_nothing(tmp_path: Path) -> None:
    """Its READY would be taken for the end of a wake that has only begun."""
    crew = await a_sleeper(tmp_path, slow="")
    looking = asyncio.ensure_future(crew.verify(Verify("a", 1)))
    async with asyncio.timeout(10):
        while not (tmp_path / "probed").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
    (tmp_path / "slow").unlink()
    asleep = await crew.sleep(Sleep("a", 1, 1))
    looked = await looking
    again = await crew.verify(Verify("a", 1))
    await crew.end_all()

    assert (asleep and asleep.state, looked, again and again.state) == (State.ASLEEP, None, State.READY)


async def test_a_second_wake_that_could_not_be_compared_is_not_made(tmp_path: Path) -> None:
    """One that ran out of memory half-way may have dropped a part of its weights."""
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    known.mkdir()
    unknown.mkdir()
    crew = await a_sleeper(known, wake_up=FULL)
    kept = await slept_and_woken(crew)
    await crew.end_all()
    ended = await slept_and_woken(await a_sleeper(unknown, wake_up=FULL, canary="no such route"))

    assert (kept and (kept.state, kept.cause)) == (State.ASLEEP, Cause.OOM)
    assert (ended and (ended.state, ended.cause)) == (State.STOPPED, Cause.OOM)


async def test_an_answer_that_is_quoted_is_masked(tmp_path: Path) -> None:
    """What an engine answers may hold its key, and a reason is told to everybody."""
    crew = await a_sleeper(tmp_path, wake_up=f"bad key {KEY}")
    report = await slept_and_woken(crew)

    assert report is not None
    assert (report.state, report.why) == (State.STOPPED, 'POST /wake_up answered 500 {"detail": "bad key ***"}')


async def test_a_sleep_that_takes_too_long_names_its_limit(tmp_path: Path) -> None:
    """With the key that changes it."""
    crew = await a_sleeper(tmp_path, sleep="hang")
    report = await crew.sleep(Sleep("a", 1, 1))

    assert report is not None
    assert (report.cause, report.why) == (
        Cause.SLEEP_FAILED,
        "it was not asleep after 1.5 s (sleep_timeout): POST /sleep was not answered",
    )


@pytest.mark.parametrize(("text", "cause"), [("hang", Cause.WAKE_FAILED), (f"hang: {FULL}", Cause.OOM)])
async def test_a_wake_that_hangs_for_want_of_room_is_out_of_memory(tmp_path: Path, text: str, cause: Cause) -> None:
    """SGLang says so in its log, and may never answer then."""
    report = await slept_and_woken(await a_sleeper(tmp_path, wake_up=text))

    assert report is not None
    assert (report.cause, report.why) == (cause, "it was not awake after 1.5 s (wake_timeout): POST /wake_up was not answered")


@pytest.mark.parametrize(("model", "plain"), [("qwen3-32b", True), ("a/b", False), ("../x", False), ("ü", False)])
def test_log_files_have_safe_names(model: str, plain: bool) -> None:
    """Never a path; two models never share one."""
    name = safe_name(model)

    assert plain is (name == model)
    assert not set(name) & set("/\\\0")
    assert not name.startswith(".")
