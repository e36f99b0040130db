"""The benchmarks' own parts do what their figures rest on; no figure is judged here."""

from __future__ import annotations

import inspect
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench import drive, make_traces, sleep_report, sleep_soak, timed, traces_run
from bench.harness import ENGINE, ask, get_status, percentile
from bench.sim.picture import bars

from greenroom.config.load import load_config_text
from greenroom.core.facts import Wake
from greenroom.engines.base import Call
from greenroom.shell.crew import HostCrew

from .stories.rig import Reply

UP_S_MAX = 30.0


@contextmanager
def engine(port: int, work: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fake engine, ready or gone."""
    argv = [*ENGINE, "--port", str(port), "--model", "m1", "--ledger", str(work / "ledger"), "--events", str(work / "events"), *options]
    child = subprocess.Popen(argv, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + UP_S_MAX
        while child.poll() is None and get_status(port, "/health") != 200:
            assert time.monotonic() < end
            time.sleep(0.01)
        yield child
    finally:
        child.terminate()
        child.communicate(timeout=UP_S_MAX)


@pytest.mark.parametrize("name", sorted(make_traces.TRACES))
def test_traces_are_what_their_maker_writes(name: str, tmp_path: Path) -> None:
    """The files that were measured with are the ones that anybody can make again."""
    make_traces.write(tmp_path / "trace.csv", make_traces.TRACES[name]())

    assert (make_traces.FOLDER / f"{name}.csv").read_text(encoding="utf-8") == (tmp_path / "trace.csv").read_text(encoding="utf-8")


def test_the_fake_device_refuses_what_does_not_fit(free_port: Callable[[], int], tmp_path: Path) -> None:
    """A second engine of 1,000 MiB on a device of 1,500 ends with an out-of-memory error, as a real one would."""
    sizes = ("--vram", "1000", "--vram-total", "1500")
    with engine(free_port(), tmp_path, *sizes), engine(free_port(), tmp_path, *sizes) as second:
        code = second.wait(UP_S_MAX)

    assert code == 1
    events = [json.loads(line)["event"] for line in (tmp_path / "events").read_text(encoding="utf-8").splitlines()]
    assert events.count("oom") == 1


def test_a_start_takes_the_time_it_was_given(free_port: Callable[[], int], tmp_path: Path) -> None:
    """Ready is told at the drawn start time after exec, not before; the same seed draws the same."""
    drawn = []
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        with engine(free_port(), tmp_path / run, "--startup", "0.4", "--startup-jitter", "0.2", "--jitter-seed", "3"):
            pass
        events = [json.loads(line) for line in (tmp_path / run / "events").read_text(encoding="utf-8").splitlines()]
        (begun,) = [event for event in events if event["event"] == "exec"]
        (ready,) = [event for event in events if event["event"] == "ready"]
        drawn.append(ready["startup_s"])
        assert ready["at"] - begun["exec_at"] >= ready["startup_s"] - 0.02

    assert drawn[0] == drawn[1]
    assert 0.2 <= drawn[0] <= 0.6


def test_a_replayed_trace_reports_what_clients_saw(free_port: Callable[[], int], tmp_path: Path) -> None:
    """Streams count as complete with [DONE] only, and chains follow one another."""
    port = free_port()
    trace = tmp_path / "small.csv"
    make_traces.write(
        trace,
        [(0, "m1", "embed", 8, 0, "c"), (0, "m1", "rerank", 200, 0, "c"), (0, "m1", "chat", 8, 3, "c"), (0, "m1", "chat_json", 8, 3, "")],
    )
    with engine(port, tmp_path):
        report = drive.run(trace, port, tmp_path / "events")

    assert report.failed == {}
    assert len(report.latencies()) == 4
    assert report.starts == 1
    assert len(report.ready_to_first_request_s) == 1
    assert len(report.chains()) == 1


def test_the_configurations_of_the_traces_load(tmp_path: Path) -> None:
    """What greenroom is started with is a valid file for every case."""
    for case in traces_run.CASES:
        config = load_config_text(traces_run.configuration(case, 1, tmp_path), str(tmp_path / "greenroom.yaml"))

        assert [device.id for device in config.devices] == ["bench0"]


def test_percentiles_interpolate() -> None:
    """Half way between two values is their mean."""
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([3.0], 0.99) == 3.0


def test_the_load_generator_counts_errors(free_port: Callable[[], int], tmp_path: Path) -> None:
    """It prints one JSON object, and every answer is a 200."""
    port = free_port()
    with engine(port, tmp_path):
        argv = [sys.executable, "-m", "bench.load", "json", f"--port={port}", "--clients=2", "--seconds=0.2"]
        done = subprocess.run(argv, cwd=Path(__file__).parent.parent, check=True, capture_output=True, text=True, timeout=60)
        status, _ = ask(port, "/nowhere", {})

    result = json.loads(done.stdout)
    assert result["errors"] == 0
    assert result["requests"] >= 2
    assert status == 404


# --------------------------------------------------------------------------------------------------------- the sleep soak


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_short_sleep_soak_finds_nothing(tmp_path: Path) -> None:
    """Twenty seconds of everything that sleep can do wrong: every answer right or an explicit error, the book true, nothing left."""
    findings = await sleep_soak.run(tmp_path, 20.0, seed=1)

    assert findings.violations == {}, findings.told()
    assert findings.moves["wake"] > 0
    assert findings.hazards.total() > 0
    assert findings.compared["asleep"] > 0


@pytest.mark.parametrize(
    ("text", "ended", "is_fault"),
    [
        (" dark lamp", "length", False),
        (" ! !", "length", True),  # what an engine without its weights says
        (" dark", "length", True),
        (" dark lamp", "abort", True),
        ("", "abort", True),
    ],
)
def test_the_sleep_soak_knows_a_wrong_answer(text: str, ended: str, is_fault: bool) -> None:
    """Nonsense, a part, and an abort that looks like an answer."""
    question = sleep_soak.Question("chat", "big", "/v1/chat/completions", {}, " dark lamp")
    value = {"choices": [{"message": {"content": text}, "finish_reason": ended}]}
    reply = Reply(200, {}, body=json.dumps(value).encode(), complete=True)

    assert bool(sleep_soak.fault_of(reply, question)) == is_fault


READY = {"state": "ready", "booked": 2400, "ram": 3072}
ASLEEP = {"state": "asleep", "booked": 270, "ram": 4672}


@pytest.mark.parametrize(
    ("told", "held", "is_fault"),
    [
        (READY, (2400, 0), False),
        (READY | {"booked": 2399}, (2400, 0), True),
        (READY, (2400, 1600), True),  # it kept its copy, and nobody booked that
        (READY | {"reserved": 3537}, (2400, 0), True),  # more than the card has beside its headroom
        (ASLEEP, (270, 1600), False),
        (ASLEEP | {"ram": 3072}, (270, 1600), True),
        (ASLEEP | {"ram": 4673}, (270, 1600), True),
    ],
)
def test_the_sleep_soak_knows_a_false_book(tmp_path: Path, told: dict[str, Any], held: tuple[int, int], is_fault: bool) -> None:
    """Too little is booked for what is held, or more than there is."""
    findings = sleep_soak.Findings()
    rig = sleep_soak.Rig(tmp_path, {})
    observer = sleep_soak.Observer(rig, sleep_soak.Card(tmp_path, (sleep_soak.CARD_SLOT,)), findings)
    by_device = {"gpu0": told["booked"], "ram": told["ram"]}
    instance = {"reserved_by_device_mib": by_device, "measured_by_device_mib": {"gpu0": held[0]}, "level": 1}
    gpu = {"id": "gpu0", "capacity_mib": 3600, "headroom_mib": 64, "outside_mib": 0, "used_mib": held[0]}
    status = {
        "models": [{"id": "big", "state": told["state"], "instances": [instance]}],
        "devices": [gpu | {"reserved_mib": told.get("reserved", told["booked"])}],
    }
    for at in (0.0, 1.0):
        observer._look(status, {"big": held}, 0, at, True)

    assert bool(findings.violations) == is_fault


def test_the_sleep_soak_knows_what_was_not_measured(tmp_path: Path) -> None:
    """A sleeper that still holds half of what it had, an hour later."""
    findings = sleep_soak.Findings()
    observer = sleep_soak.Observer(sleep_soak.Rig(tmp_path, {}), sleep_soak.Card(tmp_path, (sleep_soak.CARD_SLOT,)), findings)
    instance = {"reserved_by_device_mib": {"gpu0": 270, "ram": 4672}, "measured_by_device_mib": {"gpu0": 270}, "level": 1}
    gpu = {"id": "gpu0", "capacity_mib": 3600, "headroom_mib": 64, "outside_mib": 0, "used_mib": 270, "reserved_mib": 270}
    for at in (0.0, 3600.0):
        observer._look(
            {"models": [{"id": "big", "state": "asleep", "instances": [instance]}], "devices": [gpu]}, {"big": (1200, 1600)}, 0, at, True
        )

    assert findings.violations


# ------------------------------------------------------------------------------------------------------------- the sleep bench


def slept(wake_1_s: float = 0.5, alike: int = 9) -> dict[str, Any]:
    """What bench.sleep might have measured."""

    def move(ready_s: float) -> dict[str, list[float]]:
        return {"ready": [ready_s] * 3, "cpu": [ready_s] * 3, "first": [0.1] * 3, "answer": [0.5] * 3, "asked": [ready_s + 0.1] * 3}

    def turns(switch_s: float) -> dict[str, Any]:
        return {
            "starts": [15.0, 16.0],
            "switches": [switch_s] * 5,
            "first": [switch_s] * 5,
            "leave": [0.5] * 5,
            "come": [1.0] * 5,
            "served": 21,
        }

    plain = {"start": move(10.0), "wake 1": move(wake_1_s), "wake 2": move(1.0), "hot": {"first": [0.1], "answer": [0.5]}}
    wake = {"s": 0.5, "around_s": 0.01, "parts": [["POST /wake_up", 0.4], ["GET /is_sleeping", 0.01], ["look at the device", 0.03]]}
    machine = {"cpus": 2, "load": [0.1, 2.0], "engine": "vLLM 0.0", "device": "a <pretend> GPU", "pretend": True, "weights_mib": 800}
    return {
        "machine": machine,
        "moves": {"plain": plain, "small": {"start": move(8.0), "wake 1": move(0.1)}},
        "parts": {"wake 1": [wake] * 3},
        "memory": [["stopped", 0, 0, 0, 0, 0], ["asleep at level 1", 100, 1600, 800, 2400, 2500]],
        "copies": {"host RAM to device": [2000.0, 1600.0, 1900.0], "page cache to device": [800.0]},
        "cycle": {"off": turns(20.0), "1": turns(2.0), "2": turns(3.0)},
        "answers": {"asked": 9, "ok": 9, "alike": alike},
    }


def test_the_sleep_bench_predicts_from_bytes() -> None:
    """Bytes over bandwidth, and what a model without weights takes; nothing for what was not measured."""
    ways = {way.name: way for way in sleep_report.ways_of(slept())}

    wake = ways["wake from level 1: host RAM to device"]
    assert wake.predicted_s == pytest.approx(800 / 1900 + 0.1)
    assert wake.ratio == pytest.approx(0.5 / (800 / 1900 + 0.1))
    assert ways["cold start: page cache to device"].predicted_s == pytest.approx(9.0)
    assert ways["wake from level 2: page cache to device"].fixed_s == 0.0
    assert len(ways) == 3


def test_the_sleep_bench_sorts_parts_by_who_takes_the_time() -> None:
    """The engine's calls are its own; everything else but the canary is greenroom's."""
    ((_, *wake),) = sleep_report.parts_rows(slept())[1:]
    heading = sleep_report.parts_rows(slept())[0][1:]
    told = dict(zip(heading, wake, strict=True))

    assert (told["engine's calls"], told["is it asleep?"], told["device"], told["pauses, rest"]) == ("400", "10", "30", "60")
    assert told["greenroom's own"] == "100"
    assert sleep_report.kind_of("POST /v1/completions") == "canary"
    assert sleep_report.kind_of("POST /wake_up?tags=weights") == "engine's calls"


def test_the_sleep_bench_tells_what_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """A slow wake, an answer in other words; its tables print, and the picture is well-formed."""
    assert all(promise.kept for promise in sleep_report.promises_of(slept()))
    assert [promise.kept for promise in sleep_report.promises_of(slept(wake_1_s=1.0))] == [False, True, True, True]
    assert [promise.kept for promise in sleep_report.promises_of(slept(alike=8))] == [True, True, True, False]

    sleep_report.print_report(slept())
    picture = bars(sleep_report.title_of(slept()), sleep_report.bars_of(slept()))

    assert "sleep at level 2" in capsys.readouterr().out
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_the_sleep_bench_times_what_is_there() -> None:
    """The names that it wraps exist, and are what it takes them for."""
    assert all(inspect.iscoroutinefunction(getattr(HostCrew, move)) for move in timed.MOVES)
    assert all(callable(getattr(owner, name)) for owner, name, _ in timed.PARTS)


async def test_a_timed_move_tells_its_parts() -> None:
    """One line a move; a call that is made outside of any is left out."""

    async def ask(line: object, call: Call) -> None: ...

    asked = timed.timed_part(ask, None)

    async def wake(crew: object, action: Wake) -> str:
        await asked(None, Call("/wake_up"))
        return "awake"

    journal = io.StringIO()
    await asked(None, Call("/is_sleeping", "GET"))
    result = await timed.timed_move("wake", wake, journal)(None, Wake("a", 1, 2))

    (line,) = map(json.loads, journal.getvalue().splitlines())
    assert result == "awake"
    assert (line["move"], line["model"], line["level"]) == ("wake", "a", 2)
    assert [name for name, _ in line["parts"]] == ["POST /wake_up"]
    assert line["s"] >= line["parts"][0][1]
