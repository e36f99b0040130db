"""A start that gets ready is reported with when its phases ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from greenroom.config.model import ModelConfig
from greenroom.core.facts import InstanceReported, Start, State, Stop
from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from greenroom.host.gpus import Gpus
from greenroom.shell.crew import HostCrew, Stage

# Named as the real program is, so that its dialect is spoken.
ENGINE = """#!{python}
import http.server, sys, time
for line in ("Loading weights took 1.0 seconds", "Model loading took 1.0 GiB memory and 2 seconds",
             "torch.compile took 9.85 s in total", "Graph capturing finished in 12 secs, took 0.61 GiB", "Starting vLLM API server 0 on x"):
    time.sleep(0.02)
    print(line, flush=True)
time.sleep(0.02)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), http.server.SimpleHTTPRequestHandler)
print("Application startup complete.", flush=True)
server.serve_forever()
"""


def a_crew(tmp_path: Path, config: ModelConfig, port: int) -> HostCrew:
    stage = Stage({"a": describe(config)}, {"bench0": DeviceRef("bench0", "declared", total_mib=1000)}, port)
    return HostCrew(stage, gpus=Gpus(), supervisor=None, log_dir=tmp_path, release_s_max=0.1)


async def start_and_stop(crew: HostCrew) -> InstanceReported:
    started = await crew.start(Start("a", 1, ("bench0",), {"bench0": 1000}))
    listeners = len(crew.logs["a"]._listeners)
    await crew.stop(Stop("a", 1, "unloaded by an operator"))
    assert started is not None
    assert (started.state, listeners) == (State.READY, 0)
    return started


async def test_phases_are_heard_while_it_starts(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """In the order in which they ended, all before it was ready, the last word on its weights counting."""
    program = tmp_path / "vllm"
    program.write_text(ENGINE.format(python=sys.executable))
    program.chmod(0o755)
    config = ModelConfig("a", (str(program), "serve", "m", "--port", "${PORT}"), check_path=None, stop_s_max=2.0, start_s_max=20.0)
    phases = (await start_and_stop(a_crew(tmp_path, config, free_port()))).phases

    assert list(phases) == ["spawn", "weights", "compile", "graphs", "listen", "ready"]
    assert sorted(phases.values()) == list(phases.values())
    assert phases["weights"] >= phases["spawn"] + 0.03
    assert phases["listen"] < phases["ready"]


async def test_an_engine_that_says_nothing_has_the_phases_that_greenroom_sees(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Spawned, and ready."""
    code = "import http.server as h, sys; h.HTTPServer(('127.0.0.1', int(sys.argv[1])), h.SimpleHTTPRequestHandler).serve_forever()"
    config = ModelConfig("a", (sys.executable, "-c", code, "${PORT}"), check_path=None, stop_s_max=2.0, start_s_max=20.0)

    assert list((await start_and_stop(a_crew(tmp_path, config, free_port()))).phases) == ["spawn", "ready"]


async def test_a_start_that_fails_leaves_nobody_listening(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """To its log."""
    config = ModelConfig("a", (sys.executable, "-c", "print('listening on nothing')", "${PORT}"), check_path=None, start_s_max=20.0)
    crew = a_crew(tmp_path, config, free_port())
    report = await crew.start(Start("a", 1, ("bench0",), {"bench0": 1000}))

    assert report is not None
    assert (report.state, dict(report.phases), crew.logs["a"]._listeners) == (State.STOPPED, {}, [])


@pytest.mark.engine
async def test_phases_of_a_real_llama_server(llama_server: Path, tiny_chat: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Its words are those we know; a thread of its own writes them, perhaps after it is ready (tiny model, busy machine)."""
    config = ModelConfig("a", (str(llama_server), "-m", str(tiny_chat), "--port", "${PORT}"), stop_s_max=5.0, start_s_max=60.0)
    crew = a_crew(tmp_path, config, free_port())
    report = await crew.start(Start("a", 1, ("bench0",), {"bench0": 1000}))
    assert report is not None
    untold, engine = {"weights", "listen"}, describe(config)
    try:
        async with asyncio.timeout(60):
            async for line in crew.logs["a"].subscribe(tail=1000):
                untold.discard(engine.phase_of(line))
                if not untold:
                    break
    finally:
        await crew.stop(Stop("a", 1, "unloaded by an operator"))

    assert report.state is State.READY
    assert {"spawn", "ready"} <= set(report.phases) <= {"spawn", "weights", "listen", "ready"}
    assert report.took_s is not None
    assert max(report.phases.values()) == report.phases["ready"] <= report.took_s
