"""Ready is seen when it is true, of the right engine, and soon."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from typing import Any

import pytest

from greenroom.core.facts import Cause
from greenroom.engines.base import Readiness
from greenroom.host.logs import LogRing
from greenroom.host.probes import NotReady, Ready, probe_once, wait_ready
from greenroom.host.processes import Process, stop
from tests.host.engines import FAKES, PYTHON, a_launch, a_port, daemon_argv, engine_argv, printed, python_argv, running

HEALTH = Readiness("/health")


async def ready(process: Process, port: int, readiness: Readiness = HEALTH, timeout_s: float = 60.0, **rest: Any) -> Ready:
    rest = {"progress_counts": False, "clock": time.monotonic, **rest}
    return await wait_ready(("127.0.0.1", port), readiness, process=process, timeout_s=timeout_s, **rest)


async def since_listening(process: Process) -> float:
    """Seconds since the engine began to listen, by its own word, which may be read a moment later."""
    now = time.monotonic()
    line = await printed(process.log, "listening ")
    assert line.startswith("listening ")
    return now - float(line.split()[1])


async def test_an_engine_that_is_ready_at_once_is_seen_at_once():
    """Median over ten starts: ready is seen within one poll of the truth."""
    late_s = []
    for _ in range(10):
        async with running(a_launch(engine_argv(port := a_port()), port)) as process:
            result = await ready(process, port)
            late_s.append(await since_listening(process))
            assert (result.how, result.host) == ("health /health", "127.0.0.1")
    print(f"ready seen {1000 * statistics.median(late_s):.1f} ms after the truth (median), {1000 * max(late_s):.1f} ms at worst")
    assert statistics.median(late_s) < 0.5


async def test_a_loading_engine_is_not_ready():
    """503 while it loads; ready when it says 200, not before."""
    async with running(a_launch(engine_argv(port := a_port(), "ready_after=0.7"), port)) as process:
        result = await ready(process, port)
        assert time.monotonic() - process.started_at >= 0.7
        assert result.how == "health /health"


async def test_a_model_list_that_answers_too_early_is_not_believed():
    """/v1/models at once, /health 503 while loading: the health route counts."""
    knobs = ("check=/v1/models", "ready_after=0")
    async with running(a_launch(engine_argv(port := a_port(), *knobs), port)) as process:
        await printed(process.log, "listening")
        strict = Readiness("/health", fallback_paths=())
        with pytest.raises(NotReady, match="GET /health answers 404") as caught:
            await ready(process, port, strict, timeout_s=0.5)
        assert caught.value.cause == Cause.TIMEOUT


async def test_a_closed_port_is_waited_for():
    """Nothing listens for a while, then it is ready."""
    async with running(a_launch(engine_argv(port := a_port(), "listen_after=0.5"), port)) as process:
        await ready(process, port)
        assert time.monotonic() - process.started_at >= 0.5


async def test_an_engine_without_the_check_is_ready_by_another_path():
    """404 leads to the fallback, which answers only when ready."""
    knobs = ("check=/none", "models=1", "ready_after=0.4")
    async with running(a_launch(engine_argv(port := a_port(), *knobs), port)) as process:
        result = await ready(process, port)
        assert time.monotonic() - process.started_at >= 0.4
        assert result.how == "fallback /v1/models"


async def test_an_engine_that_knows_none_of_our_paths_is_ready_by_its_port():
    """404 on everything for a second is an engine of another kind, not a broken one."""
    async with running(a_launch(engine_argv(port := a_port(), "check=/none"), port)) as process:
        assert (await ready(process, port)).how == "port (no such path: /v1/models)"


async def test_without_a_check_an_open_port_is_enough():
    """`checkEndpoint: none`."""
    async with running(a_launch(engine_argv(port := a_port(), "listen_after=0.2"), port)) as process:
        assert (await ready(process, port, Readiness(None))).how == "port"


async def test_the_first_request_is_a_warm_up_when_wanted():
    """Health is good at once, the first completion takes long: ready after it."""
    readiness = Readiness("/health", warmup_path="/v1/completions", warmup_body=b'{"prompt":"x"}')
    async with running(a_launch(engine_argv(port := a_port(), "post_s=0.5"), port)) as process:
        result = await ready(process, port, readiness)
        assert result.how == "health /health + warm-up"
        assert result.took_s >= 0.5
        await printed(process.log, "post /v1/completions")
        assert "post /v1/completions" in process.log.tail(10)


async def test_a_warm_up_that_never_ends_is_a_timeout():
    """It counts as starting."""
    readiness = Readiness("/health", warmup_path="/v1/completions", warmup_body=b"{}")
    async with running(a_launch(engine_argv(port := a_port(), "post_s=60"), port)) as process:
        with pytest.raises(NotReady, match="warm-up request POST /v1/completions") as caught:
            await ready(process, port, readiness, timeout_s=0.8)
        assert caught.value.cause == Cause.TIMEOUT


async def test_a_stranger_on_the_port_is_not_our_engine():
    """Its 200 is not believed; the error names its pid and that another port would do, within a moment."""
    async with running(a_launch(engine_argv(port := a_port()), port)) as stranger:
        await printed(stranger.log, "listening")
        async with running(a_launch(engine_argv(port, "listen_after=60"), port)) as process:
            with pytest.raises(NotReady) as caught:
                await ready(process, port)
        assert (caught.value.port_taken, caught.value.foreign_pids) == (True, {stranger.pid})
        assert caught.value.why.startswith(f"port {port} on 127.0.0.1 belongs to another program (pid {stranger.pid})")


async def test_a_container_port_needs_no_proof():
    """It is held by the container runtime, which is not in our tree."""
    async with running(a_launch(engine_argv(port := a_port()), port)) as runtime:
        await printed(runtime.log, "listening")
        async with running(a_launch(("sleep", "60"), port, detached=True)) as client:
            assert (await ready(client, port)).how == "health /health"


async def test_an_engine_on_ipv6_only_is_found():
    """The address that answered is reported."""
    async with running(a_launch(engine_argv(port := a_port(), "host=::1"), port)) as process:
        assert (await ready(process, port)).host == "::1"
        assert await probe_once("::1", port, HEALTH, 5.0)


async def test_an_engine_behind_a_wrapper_or_a_double_fork_gets_ready():
    """The proof of ownership looks at the whole tree."""
    for argv_of in (daemon_argv, lambda port: ("sh", "-c", f"{' '.join(engine_argv(port))}; echo after")):
        async with running(a_launch(argv_of(port := a_port()), port)) as process:
            assert (await ready(process, port)).how == "health /health"


async def test_an_early_exit_is_seen_at_once():
    """The error says the code and the last words; nobody waits for the time-out."""
    code = "import sys, time; print('loading'); sys.stdout.flush(); sys.stderr.write('failed to open GGUF file'); sys.exit(1)"
    async with running(a_launch(python_argv(code))) as process:
        with pytest.raises(NotReady) as caught:
            await ready(process, a_port(), timeout_s=600)
    assert caught.value.cause == Cause.EXITED
    assert "it exited with code 1" in caught.value.why
    assert caught.value.why.endswith("last log lines: loading | failed to open GGUF file")


async def test_an_exit_during_a_silent_poll_is_seen_at_once():
    """It accepts, says nothing and dies: the poll under way is cut."""
    code = (
        "import socket, time, sys, os; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); c = s.accept();"
        "os.write(1, b'polled\\n'); time.sleep(60)"
    )
    async with running(a_launch((*python_argv(code), str(port := a_port())), port)) as process:

        async def end_it() -> float:
            await printed(process.log, "polled")
            os.kill(process.pid, signal.SIGKILL)
            return time.monotonic()

        async def wait() -> float:
            with pytest.raises(NotReady, match="it ended by SIGKILL"):
                await ready(process, port, timeout_s=600)
            return time.monotonic()

        ended_at, seen_at = await asyncio.gather(end_it(), wait())
    print(f"exit during a silent poll seen after {1000 * (seen_at - ended_at):.1f} ms")
    assert seen_at - ended_at < 4.0  # less than a poll may take


async def test_a_detached_engine_that_dies_is_seen():
    """The command exited 0 long before; its tree is empty now."""
    async with running(a_launch(daemon_argv(port := a_port(), "plain", "ready_after=60", "exit_after=0.6:1"), port)) as process:
        with pytest.raises(NotReady, match="it exited with code 0") as caught:
            await ready(process, port)
    assert caught.value.cause == Cause.EXITED


async def test_a_slow_start_times_out_with_the_last_lines():
    """One sentence: how long, what it answered, what it printed."""
    async with running(a_launch(engine_argv(port := a_port(), "ready_after=60", "say=compiling kernels"), port)) as process:
        await printed(process.log, "compiling")
        with pytest.raises(NotReady) as caught:
            await ready(process, port, timeout_s=0.3)
    assert caught.value.cause == Cause.TIMEOUT
    assert "GET /health answers 503; last log lines: " in caught.value.why
    assert caught.value.why.endswith("compiling kernels")


async def test_progress_in_the_log_extends_the_start_when_it_counts():
    """An engine that prints every 0.1 s outlives a time-out of 0.8 s; a silent one does not."""
    talk = "i=0; while [ $i -lt 15 ]; do echo step $i; i=$((i+1)); sleep 0.1; done; exec "
    async with running(a_launch(("sh", "-c", talk + " ".join(engine_argv(port := a_port()))), port)) as process:
        assert (await ready(process, port, timeout_s=0.8, progress_counts=True)).took_s > 0.8
    async with running(a_launch(("sh", "-c", talk + " ".join(engine_argv(port := a_port()))), port)) as process:
        with pytest.raises(NotReady, match="it was not ready after"):
            await ready(process, port, timeout_s=0.8, progress_counts=False)


async def test_a_telling_line_is_acted_on_at_once():
    """Late in a slow start, when polls are 100 ms apart, the line shortens the wait.  The clock here runs 100 times too fast."""
    late_s = []
    for hint in (None, lambda line: line == "server is listening"):
        log = LogRing("engine", hint=hint)
        async with running(
            a_launch(engine_argv(port := a_port(), "listen_after=0.45", "say=server is listening"), port), log=log
        ) as process:
            await ready(process, port, timeout_s=1e6, clock=lambda: 100 * time.monotonic())
            late_s.append(await since_listening(process))
    print(f"ready seen {1000 * late_s[0]:.1f} ms late without a telling line, {1000 * late_s[1]:.1f} ms with one")


async def test_liveness_is_one_short_question():
    """True for a serving engine; false for a loading one, a frozen one, and a closed port."""
    async with running(a_launch(engine_argv(port := a_port()), port)) as process:
        await ready(process, port)
        assert await probe_once("127.0.0.1", port, HEALTH, 5.0) is True
        os.kill(process.pid, signal.SIGSTOP)
        assert await probe_once("127.0.0.1", port, HEALTH, 0.2) is False
        await stop(process, grace_s=0.0, on_signal=lambda _: None)
        assert await probe_once("127.0.0.1", port, HEALTH, 5.0) is False
    async with running(a_launch(engine_argv(port := a_port(), "ready_after=60"), port)) as process:
        await printed(process.log, "listening")
        assert await probe_once("127.0.0.1", port, HEALTH, 5.0) is False


async def test_the_engine_key_is_sent():
    """Headers of the readiness reach the engine, framed as HTTP."""
    code = (
        "import socket, sys, os; s = socket.create_server(('127.0.0.1', int(sys.argv[1])));\n"
        "while True:\n"
        "  c, _ = s.accept(); d = c.recv(9999); d and os.write(1, d) and c.sendall(b'HTTP/1.1 200 OK\\r\\n\\r\\n'); c.close()"
    )
    async with running(a_launch((*python_argv(code), str(port := a_port())), port)) as process:
        await ready(process, port, Readiness("/health", base_path="/base", headers=(("Authorization", "Bearer k"),)))
        await printed(process.log, "Authorization: Bearer k")  # its answer may be here before what it printed is read
        assert process.log.tail(20)[:3] == ["GET /base/health HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: close"]
        assert "Authorization: Bearer k" in process.log.tail(20)


async def test_starting_costs_little_beyond_the_engine_itself():
    """Spawn and wait_ready next to the engine's own start to listening, by hand; printed, loosely bound."""
    ours_s, by_hand_s = [], []
    for _ in range(10):
        began_at = time.monotonic()
        async with running(a_launch(engine_argv(port := a_port()), port)) as process:
            spawned_s = time.monotonic() - began_at
            await ready(process, port)
            ours_s.append(time.monotonic() - began_at)
        began_at = time.monotonic()
        by_hand = await asyncio.create_subprocess_exec(
            *PYTHON, str(FAKES / "host_engine.py"), str(a_port()), stdout=asyncio.subprocess.PIPE
        )
        assert by_hand.stdout is not None
        while not (await by_hand.stdout.readline()).startswith(b"listening"):
            pass
        by_hand_s.append(time.monotonic() - began_at)
        by_hand.kill()
        await by_hand.communicate()
    overhead_ms = 1000 * (statistics.median(ours_s) - statistics.median(by_hand_s))
    print(f"spawn {1000 * spawned_s:.1f} ms")
    print(f"start to ready {1000 * statistics.median(ours_s):.1f} ms, overhead {overhead_ms:.1f} ms (medians)")
    assert overhead_ms < 500
