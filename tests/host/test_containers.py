"""Containers seen from the host: which processes are theirs, bounded questions, ends that are exact at every moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.config.model import ContainerConfig, ModelConfig
from greenroom.core.facts import Cause
from greenroom.engines.base import Launch
from greenroom.engines.container import owned
from greenroom.engines.detect import describe
from greenroom.host import watcher
from greenroom.host.containers import Contained, spawn_contained, stop_contained
from greenroom.host.docks import BoxError, Docks
from greenroom.host.logs import LogRing
from greenroom.host.memory import tree_mib
from greenroom.host.processes import SpawnError
from greenroom.host.runtimes import RuntimeSilent, ask, end_questions, state_of
from greenroom.host.supervisor import Supervisor
from tests.fakes.container_runtime import install
from tests.host.engines import a_port, engine_argv, lives, printed
from tests.stories.boxes import IMAGE, Dock

HOME = "0123456789abcdef"
HEAVY = "import os, time; keep = bytearray(os.urandom(4096) * 256 * 48); os.fork(); print('filled', flush=True); time.sleep(600)"


@pytest.fixture
def dock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dock]:
    made = Dock(tmp_path)
    monkeypatch.setenv("PATH", made.env["PATH"])
    yield made
    for box in made.boxes():
        if box["State"]["Pid"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(box["State"]["Pid"], signal.SIGKILL)


def a_launch(*argv: str, image: str = IMAGE, pull: str = "missing", pull_s_max: float = 60.0, generation: int = 1) -> Launch:
    config = ModelConfig("a", argv, container=ContainerConfig("podman", image, pull=pull, pull_s_max=pull_s_max))
    return owned(describe(config).launch(a_port(), [], generation), HOME)


def an_engine(*knobs: str, generation: int = 1) -> Launch:
    return a_launch(*engine_argv(a_port(), *knobs), generation=generation)


async def end(process: Contained, grace_s: float = 5.0) -> list[str]:
    """Stop it; the steps that were told."""
    steps: list[str] = []
    outcome = await stop_contained(process, grace_s=grace_s, on_signal=steps.append)
    assert not outcome.unkillable
    return steps


def is_gone(dock: Dock, process: Contained) -> bool:
    return (dock.boxes(), process.tree()) == ([], frozenset())


async def test_the_processes_inside_are_its_own_and_those_of_its_runtime_are_not(dock: Dock) -> None:
    """What they hold is measured; the monitor that the runtime leaves behind is nobody's engine."""
    log = LogRing("a")
    process = await spawn_contained(a_launch(sys.executable, "-c", HEAVY), token="t", log=log)
    await process.learn()
    await printed(log, "filled")
    inside = dock.boxes()[0]["State"]["Pid"]
    tree = process.tree()

    assert process.inside is not None
    assert process.inside[0] == inside
    assert {process.pid, inside} < tree
    assert len(tree) == 3
    assert 45 < tree_mib(tree) < 120
    await end(process, grace_s=0)
    assert is_gone(dock, process)


async def test_pids_of_another_machine_are_not_taken_for_ours(dock: Dock) -> None:
    """A process of that number that is older than the container is a stranger."""
    log = LogRing("a")
    process = await spawn_contained(an_engine(), token="t", log=log)
    await printed(log, "listening")
    box = dock.boxes()[0]
    real = box["State"]["Pid"]
    box["State"]["Pid"] = 1
    dock.plant(box)
    await process.learn()

    assert (process.up, process.inside) == (True, None)
    assert process.tree() == {process.pid}
    box["State"]["Pid"] = real
    dock.plant(box)
    await end(process)


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3])
async def test_a_stop_at_any_moment_of_its_making_leaves_nothing(dock: Dock, after_s: float) -> None:
    """The client may have asked for the container already, or be about to."""
    process = await spawn_contained(an_engine(), token="t", log=LogRing("a"))
    await asyncio.sleep(after_s)
    await end(process)

    assert is_gone(dock, process)
    assert not lives(process.pid)


async def test_one_that_may_lose_a_term_is_told_again(dock: Dock) -> None:
    """The first process of a container hears no signal before it has asked for it."""
    log = LogRing("a")
    process = await spawn_contained(replace(an_engine("on_term=ignore"), term_again_s=0.2), token="t", log=log)
    await printed(log, "listening")
    steps = await end(process, grace_s=2)

    assert steps[:2] == ["TERM", "TERM"]
    assert [line for line in log.tail(50) if line == "got TERM"][:2] == ["got TERM", "got TERM"]
    assert steps[-1] == "KILL"


async def test_an_engine_that_ends_by_itself_is_told_with_its_own_exit_code(dock: Dock) -> None:
    """Its container is removed, and no signal was sent."""
    process = await spawn_contained(an_engine("exit_after=0.2:7"), token="t", log=LogRing("a"))
    ended = await process.ended()
    outcome = await stop_contained(process, grace_s=5, on_signal=lambda _: pytest.fail("there was nothing to stop"))

    assert (ended.code, outcome.exit and outcome.exit.code, outcome.ending) == (7, 7, None)
    assert is_gone(dock, process)


async def test_its_exit_code_is_known_although_its_client_is_not_there(dock: Dock) -> None:
    """The runtime is asked before it is removed."""
    log = LogRing("a")
    process = await spawn_contained(an_engine("exit_after=2:7"), token="t", log=log)
    await process.learn()
    os.kill(process.pid, signal.SIGKILL)
    await process.ended()
    outcome = await stop_contained(process, grace_s=5, on_signal=lambda _: None)

    assert outcome.exit is not None
    assert (outcome.exit.code, process.detached, process.exited) == (7, False, True)
    assert is_gone(dock, process)


async def test_words_are_not_lost_with_the_client(dock: Dock) -> None:
    """Those that were printed meanwhile come through the next one."""
    log = LogRing("a")
    code = "import time\nfor number in range(60): print('word', number, flush=True); time.sleep(0.05)"
    process = await spawn_contained(a_launch(sys.executable, "-c", code), token="t", log=log)
    await printed(log, "word 5")
    os.kill(process.pid, signal.SIGKILL)
    await process.ended()
    await end(process)

    said = [line for line in log.tail(1000) if line.startswith("word ")]
    assert said == [f"word {number}" for number in range(60)]


async def test_one_killed_by_the_kernel_is_told_as_out_of_memory(dock: Dock) -> None:
    """What its log cannot tell."""
    dock.faults(oom=True)
    log = LogRing("a")
    process = await spawn_contained(an_engine(), token="t", log=log)
    await printed(log, "listening")
    os.kill(dock.boxes()[0]["State"]["Pid"], signal.SIGKILL)
    await process.ended()
    outcome = await stop_contained(process, grace_s=5, on_signal=lambda _: None)

    assert outcome.ending is not None
    assert outcome.ending.cause is Cause.OOM


async def test_a_container_that_others_have_removed_is_gone(dock: Dock) -> None:
    """No error, nothing to wait for."""
    log = LogRing("a")
    process = await spawn_contained(an_engine(), token="t", log=log)
    await printed(log, "listening")
    assert (await ask(("podman", "rm", "--force", process.box.name))).code == 0
    await process.ended()

    assert await end(process) == []
    assert is_gone(dock, process)


async def test_a_question_ends_in_time_and_leaves_no_process(dock: Dock) -> None:
    """Also one whose helper holds its output open for ever."""
    began_at = time.monotonic()
    hung = await ask(("sh", "-c", "echo partly >&2; sleep 600 & sleep 600"), 0.5)
    left = await ask(("sh", "-c", "sleep 2 & echo said"), 10)

    assert time.monotonic() - began_at < 5
    assert hung.code is None
    assert hung.said == "sh -c did not answer within 0.5 s"
    assert (left.code, left.out) == (0, "said\n")
    assert (await ask(("no-such-program", "ps"))).said == "no-such-program cannot be run: No such file or directory"


async def test_a_runtime_that_does_not_answer_is_not_taken_for_an_absent_container(dock: Dock) -> None:
    """Else its memory would be given away."""
    launch = an_engine()
    assert launch.box is not None
    assert await state_of(launch.box) is None
    for fault in ("down", "fail:125:Error: database is locked", "fail:0:", "hang"):
        dock.faults(inspect=fault)
        with pytest.raises(RuntimeSilent):
            await state_of(launch.box, 0.5)


async def prepared(launch: Launch, docks: Docks | None = None) -> None:
    assert launch.box is not None
    await (docks or Docks(HOME)).prepare(launch.box, LogRing("a"), supervisor=None)


async def test_starts_at_once_do_not_take_each_other_for_leftovers(dock: Dock, tmp_path: Path) -> None:
    """The runtime is cleared once, before the first of them."""
    docks, log = Docks(HOME, tmp_path / "runtimes"), LogRing("a")
    launches = [an_engine(generation=number) for number in (1, 2, 3)]

    async def start(launch: Launch) -> Contained:
        await prepared(launch, docks)
        return await spawn_contained(launch, token="t", log=log)

    processes = await asyncio.gather(*map(start, launches))
    await asyncio.gather(*(process.learn() for process in processes))
    await prepared(an_engine(generation=4), docks)

    assert len(dock.boxes("running")) == 3
    assert len(dock.calls("ps")) == 1
    assert (tmp_path / "runtimes").read_text() == "podman\n"
    await asyncio.gather(*map(end, processes))
    assert dock.boxes() == []


async def test_leftovers_are_ended_whatever_state_they_are_in(dock: Dock, tmp_path: Path) -> None:
    """Running, ended, made and never started; those of others stay."""
    log = LogRing("a")
    mine = await spawn_contained(an_engine("on_term=ignore"), token="t", log=log)
    other_launch = owned(
        describe(ModelConfig("a", engine_argv(a_port()), container=ContainerConfig("podman", IMAGE))).launch(1, []), "f" * 16
    )
    other = await spawn_contained(other_launch, token="u", log=log)
    await asyncio.gather(mine.learn(), other.learn())
    running = next(box for box in dock.boxes() if box["Labels"]["dev.greenroom.home"] == HOME)
    for number, status in enumerate(("exited", "created")):
        state = {**running["State"], "Status": status, "Running": False, "Pid": 0}
        dock.plant({**running, "Id": f"{number:064x}", "Name": f"left-{number}", "State": state})
    found = await Docks(HOME).end_leftovers(["podman"])

    assert found == (3, [])
    assert [box["Name"] for box in dock.boxes()] == [other.box.name]
    await end(mine)
    await end(other)


async def test_a_runtime_that_was_used_and_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was only asked for is no matter here: its models say what they lack."""
    record = tmp_path / "runtimes"
    record.write_text("podman\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    count, troubles = await Docks(HOME, record).end_leftovers(["docker"])

    assert (count, len(troubles)) == (0, 1)
    assert troubles[0].startswith("podman was not found on PATH, so containers of an earlier run may be left in it")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b""])
async def test_a_record_that_cannot_be_read_is_no_obstacle(dock: Dock, tmp_path: Path, content: bytes) -> None:
    """Nor one that cannot be written."""
    (tmp_path / "runtimes").write_bytes(content)
    await prepared(an_engine(), Docks(HOME, tmp_path / "runtimes"))
    await prepared(an_engine(), Docks(HOME, tmp_path / "no" / "such" / "folder"))


@pytest.mark.parametrize("answer", ["what", "[1]", '{"Id": 1'])
async def test_a_list_that_cannot_be_understood_ends_nothing(dock: Dock, answer: str) -> None:
    """And is told."""
    odd = dock.bin / "podman"
    odd.write_text(f"#!/bin/sh\necho '{answer}'\n")
    count, troubles = await Docks(HOME).end_leftovers(["podman"])

    assert (count, len(troubles)) == (0, 1)
    assert "podman ps answered what cannot be understood" in troubles[0]


async def asked(dock: Dock, command: str, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not dock.calls(command):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


async def test_a_pull_that_is_called_off_is_over_at_once(dock: Dock) -> None:
    """And leaves no process."""
    dock.faults(pull="hang")
    preparing = asyncio.create_task(prepared(a_launch("x", image="new:1")))
    await asked(dock, "pull", 20)
    client = json.loads((dock.state / "calls.jsonl").read_text().splitlines()[-1])["pid"]
    began_at = time.monotonic()
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing

    assert time.monotonic() - began_at < 5
    assert not lives(client)


async def test_a_pull_that_fails_is_told_in_the_words_of_its_runtime(dock: Dock) -> None:
    """With the name of the image."""
    dock.faults(pull="fail:125:Error: manifest unknown")
    with pytest.raises(BoxError, match="podman cannot pull new:1: manifest unknown"):
        await prepared(a_launch("x", image="new:1"))


async def test_what_this_run_has_made_is_no_leftover_under_another_name_of_its_runtime(dock: Dock) -> None:
    """`docker` may be podman; `greenroom` finds one container through both."""
    (dock.bin / "docker").symlink_to(dock.program)
    docks, launch = Docks(HOME), an_engine()
    await prepared(launch, docks)
    process = await spawn_contained(launch, token="t", log=LogRing("a"))
    await process.learn()

    assert await docks.end_leftovers(["docker"]) == (0, [])
    assert len(dock.boxes("running")) == 1
    docks.over(process.box.name)
    assert (await docks.end_leftovers(["docker"]))[0] > 0
    await end(process)


async def test_a_runtime_that_hangs_keeps_no_other_waiting(dock: Dock) -> None:
    """Each is cleared by itself."""
    install(dock.bin, "docker", dock.state)
    dock.faults(ps="hang")
    docks = Docks(HOME)
    waiting = asyncio.create_task(prepared(an_engine(), docks))
    await asked(dock, "ps", 8)
    async with asyncio.timeout(8):  # shorter than one question
        dock.faults()
        other = describe(ModelConfig("b", engine_argv(a_port()), container=ContainerConfig("docker", IMAGE))).launch(1, [])
        await prepared(owned(other, HOME), docks)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    end_questions()


@pytest.mark.parametrize("knobs", [(), ("on_term=ignore",)])
async def test_a_runtime_that_hangs_keeps_no_engine_of_this_host_alive(dock: Dock, knobs: tuple[str, ...]) -> None:
    """It is ended past its runtime: TERM, grace, KILL; one question is all that is waited for."""
    log = LogRing("a")
    process = await spawn_contained(an_engine(*knobs), token="t", log=log)
    await process.learn()
    await printed(log, "listening")
    process.hurried = True
    dock.faults(**{"*": "hang"})
    steps: list[str] = []
    began_at = time.monotonic()
    outcome = await stop_contained(process, grace_s=1, on_signal=steps.append)

    assert (outcome.unkillable, steps) == (False, ["TERM", "KILL"] if knobs else ["TERM"])
    assert "got TERM" in log.tail(50) or not knobs
    assert time.monotonic() - began_at < 20 if knobs else 9
    assert process.tree() == frozenset()
    end_questions()


async def test_a_stray_that_has_visibly_ended_is_gone_whatever_its_runtime_says(dock: Dock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its memory were booked until the next start."""
    monkeypatch.setattr("greenroom.host.containers.STRAY_LOOK_S", 0.0)
    log = LogRing("a")
    process = await spawn_contained(an_engine(), token="t", log=log)
    await process.learn()
    await printed(log, "listening")
    process.kill_client()
    dock.faults(**{"*": "down"})
    assert not await gone_at_last(process, 1)
    process.kill_inside()

    assert await gone_at_last(process, 10)


def test_what_the_watcher_asks_in_vain_is_ended_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next of its commands is tried all the same, and nothing is left that asks for ever."""
    monkeypatch.setattr(watcher, "COMMAND_S_MAX", 0.5)
    hang = f"echo $$ >> {tmp_path}/pids; sh -c 'echo $$ >> {tmp_path}/pids; sleep 600' & wait"
    word = json.dumps({"name": "x", "commands": [["sh", "-c", hang], ["touch", f"{tmp_path}/next"]], "env": {"PATH": os.environ["PATH"]}})
    watcher.end_containers([watcher.Guarded(word.encode())])

    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert (len(pids), (tmp_path / "next").exists()) == (2, True)
    deadline = time.monotonic() + 10
    while any(lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(lives(pid) for pid in pids)


async def test_a_client_that_cannot_be_started_leaves_the_watcher_nothing_to_do(dock: Dock, tmp_path: Path) -> None:
    """A name that was never made is not to be ended."""
    supervisor = Supervisor(tmp_path)
    with pytest.raises(SpawnError):
        await spawn_contained(replace(an_engine(), cwd=str(tmp_path / "none")), token="t", log=LogRing("a"), supervisor=supervisor)

    assert supervisor.guarded == frozenset()


async def test_an_image_of_another_transport_is_the_runtimes_own_to_fetch(dock: Dock) -> None:
    """An archive or a folder has no registry to be pulled from."""
    launch = a_launch("x", image="oci-archive:/srv/engine.tar")
    await prepared(launch)

    assert launch.argv[launch.argv.index("--pull") + 1] == "missing"
    assert (dock.calls("pull"), dock.calls("image")) == ([], [])
    assert a_launch("x", image="dir:5000/engine:1").argv[5] == "never", "a registry of that name"


async def test_a_stray_is_gone_when_its_runtime_says_so(dock: Dock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, and removes it."""
    monkeypatch.setattr("greenroom.host.containers.STRAY_LOOK_S", 0.0)
    dock.faults(far=True, stop="ignore", kill="ignore", rm="ignore")
    log = LogRing("a")
    process = await spawn_contained(an_engine(), token="t", log=log)
    await process.learn()
    outcome = await stop_contained(process, grace_s=0.2, on_signal=lambda _: None, kill_s_max=0.5)
    assert (outcome.unkillable, outcome.ending and outcome.ending.cause) == (True, Cause.UNKILLABLE)
    assert not await gone_at_last(process, 1)
    dock.faults()

    assert await gone_at_last(process, 10)
    assert dock.boxes() == []


async def gone_at_last(process: Contained, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not (gone := await process.gone()) and time.monotonic() < deadline:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.02)
    return gone


async def test_a_stray_is_asked_for_without_waiting(dock: Dock) -> None:
    """Memory is measured on the same round."""
    dock.faults(far=True, stop="ignore", kill="ignore", rm="ignore")
    process = await spawn_contained(an_engine(), token="t", log=LogRing("a"))
    await process.learn()
    await stop_contained(process, grace_s=0.2, on_signal=lambda _: None, kill_s_max=0.5)
    dock.faults(**{"*": "slow:3"})
    began_at = time.monotonic()
    for _ in range(3):
        assert not await process.gone()

    assert time.monotonic() - began_at < 2
    dock.faults()
    assert await gone_at_last(process, 20)


async def test_a_client_that_works_in_a_child_is_killed_whole(dock: Dock) -> None:
    """As a rootless podman does: the child would make the container after all."""
    real = dock.bin / "real"
    (dock.bin / "podman").rename(real)
    (dock.bin / "podman").write_text(f'#!/bin/sh\n[ "$1" = run ] && sleep 0.5\n"{real}" "$@"\nexit $?\n')
    (dock.bin / "podman").chmod(0o755)
    process = await spawn_contained(an_engine(), token="t", log=LogRing("a"))
    await end(process)
    await asyncio.sleep(1)  # long enough for what must not come

    assert is_gone(dock, process)
    assert dock.calls("run") == []


async def test_the_client_bears_no_mark(dock: Dock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a runtime leaves behind for all its containers would inherit it, and be ended with this one."""
    for name in [name for name in os.environ if name.startswith("GREENROOM")]:  # what the run of the tests was told
        monkeypatch.delenv(name)
    code = "import os; print([name for name in os.environ if name.startswith('GREENROOM')], flush=True)"
    (dock.bin / "podman").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    log = LogRing("a")
    process = await spawn_contained(an_engine(), token="t", log=log)
    await process.wait()
    process.close()

    assert log.tail(1) == ["[]"]
