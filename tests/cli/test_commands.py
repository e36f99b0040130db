"""The commands against a real HTTP server with a fake greenroom behind it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from aiohttp import web
from click.testing import CliRunner

from greenroom.cli import COMMANDS, GROUPS, main
from greenroom.cli.why import story
from greenroom.control.facade import Result as Outcome
from greenroom.core.facts import Operation, State
from greenroom.core.views import DeviceView, ModelView
from tests.cli.conftest import Served, run, served_app
from tests.control.fake import GPU, LEVELS, FakeFacade, a_model, a_resident, a_sleeper, an_event

# -------------------------------------------------------------------------------------------------------------------- ps


def test_ps_shows_every_state_and_what_comes_next(served: Served) -> None:
    """The whole page, word for word."""
    facade = served.facade
    facade.statics = {"chat": {"ttl_s": 600.0, "sleep_after_s": 120.0}, "nap": {"ttl_s": 600.0}}
    models = [
        a_resident("chat", in_flight=2, idle_s=None, model={"queued": 1}),
        a_resident("idler", idle_s=45.0, model={"sleep_levels": (1, 2), "sleep_costs": LEVELS}),
        a_resident("awake", idle_s=45.0),
        a_resident("embed", State.STARTING, since_s=4.96, expected_s=3.04, idle_s=None, measured_mib={}, reserved_mib={"gpu0": 512}),
        a_sleeper("nap", idle_s=540.0),
        a_sleeper("wanted", 2, model={"queued": 1, "eta_s": 9.0}),
        a_resident("tired", State.GOING_TO_SLEEP, level=1, since_s=0.3, idle_s=None),
        a_resident("rising", State.WAKING, level=2, since_s=3.0, expected_s=3.0, idle_s=None),
        a_resident("burnt", idle_s=45.0, host_mib=512, model={"sleep_costs": LEVELS, "sleep_off": "2 wakes went wrong\x1b[5m"}),
        a_resident("leaver", State.DRAINING, in_flight=1, idle_s=None),
        a_resident("fixed", idle_s=300.0, model={"pinned": True}),
        a_model("off"),
        a_model("quick", up_s=0.6),
        a_model("gone", blocked="gone: no file /m/g.gguf"),
        a_model("waits", queued=3, eta_s=40.0),
        a_model("broken", State.FAILED, backoff_s=8.0, last_error="exit 1\x1b[31m"),
        a_model("frail", failing=True, failures=3, last_error="no"),
        a_model("fell", failing=True, failures=1, last_error="exit 139"),
    ]
    facade.models = {one.id: one for one in models}
    facade.statics |= {name: {"ttl_s": 600.0, "sleep_after_s": 120.0} for name in ("idler", "awake")}
    facade.devices = (GPU, DeviceView("ram", "ram", "host RAM", 65_536, 6554, 20_480, 30_720, 0, "", ""))
    facade.queued = (4, 2.14)

    result = served.run("ps")

    assert result.output.splitlines() == [
        "MODEL   STATE               DEVICE  RESERVED  MEASURED       RAM  IN-FLIGHT  QUEUED   IDLE  NEXT",
        "chat    ready               gpu0     4.3 GiB   4.1 GiB         -          2       1      -",
        "idler   ready               gpu0     4.3 GiB   4.1 GiB         -          0       0   45 s  sleeps in 1 min",
        "awake   ready               gpu0     4.3 GiB   4.1 GiB         -          0       0   45 s  stops in 9 min",
        "embed   starting            gpu0     512 MiB         -         -          0       0      -  [██████░░░░] 62 % about 3 s",
        "nap     asleep (1)          gpu0     1.2 GiB   1.2 GiB  15.0 GiB          0       0  9 min  wakes in about 0.8 s, stops in 1 min",
        "wanted  asleep (2)          gpu0     1.2 GiB   1.2 GiB   3.0 GiB          0       1      -  waits for room, about 9 s",
        "tired   going to sleep (1)  gpu0     4.3 GiB   4.1 GiB         -          0       0      -  since 0.3 s",
        "rising  waking (2)          gpu0     4.3 GiB   4.1 GiB         -          0       0      -  [█████░░░░░] 50 % about 3 s",
        "burnt   ready !             gpu0     4.3 GiB   4.1 GiB   512 MiB          0       0   45 s",
        "leaver  draining            gpu0     4.3 GiB   4.1 GiB         -          1       0      -  leaves after 1 request",
        "fixed   ready               gpu0     4.3 GiB   4.1 GiB         -          0       0  5 min  stays (pinned)",
        "off     stopped             -              -         -         -          -       0      -  on request, about 12 s",
        "quick   stopped             -              -         -         -          -       0      -  on request, about 1 s",
        "gone    stopped             -              -         -         -          -       0      -  cannot start: no file /m/g.gguf",
        "waits   stopped             -              -         -         -          -       3      -  waits for room, about 40 s",
        r"broken  failed              -              -         -         -          -       0      -  tries again in 8 s: exit 1\x1b[31m",
        "frail   stopped             -              -         -         -          -       0      -  failed 3 times, last: no; on request",
        "fell    stopped             -              -         -         -          -       0      -  failed once: exit 139; on request",
        "",
        r"! burnt stops instead of sleeping: 2 wakes went wrong\x1b[5m",
        "",
        "gpu0  [█████████████░░░░░░░░░░░] 4.8 GiB of 9.0 GiB reserved, 5.1 GiB used, 307 MiB by others (pid 4711 (python)), H100",
        "ram   [████████░░░░░░░░░░░░░░░░] 20.0 GiB of 57.6 GiB reserved (18.0 GiB for sleepers), 37.6 GiB free, "
        "30.0 GiB used by all programs, host RAM",
        "",
        "4 requests wait, the oldest for 2.1 s",
    ]
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("static", "instance", "next"),
    [
        ({"ttl_auto": True, "ttl_auto_s": 540.0}, {"idle_s": 45.0}, "stops in 8 min, ttl: auto (≈ 9 min)"),
        ({"ttl_auto": True, "ttl_auto_s": 30.0}, {"idle_s": 45.0}, "stops when its room is wanted, ttl: auto (≈ 30 s)"),
        ({"ttl_auto": True, "ttl_auto_s": 540.0}, {"idle_s": None, "in_flight": 1}, "ttl: auto (≈ 9 min)"),
        ({"ttl_auto": True, "ttl_auto_s": None}, {"idle_s": 45.0}, "ttl: auto"),
        ({"ttl_auto": False, "ttl_auto_s": None, "ttl_s": 60.0}, {"idle_s": 45.0}, "stops in 15 s"),
    ],
)
def test_ps_tells_what_an_automatic_ttl_comes_to(static: dict[str, object], instance: dict[str, Any], next: str, served: Served) -> None:
    """As long as the server knows it."""
    served.facade.models = {"chat": a_resident("chat", **instance)}
    served.facade.statics = {"chat": static}
    assert served.run("ps").output.splitlines()[1].endswith(f"  {next}")


def test_ps_without_models_or_devices_is_an_empty_table(served: Served) -> None:
    """Nothing to show is not an error."""
    served.facade.devices = ()
    result = served.run("ps")
    assert (result.exit_code, result.output) == (0, "MODEL  STATE  DEVICE  RESERVED  MEASURED  RAM  IN-FLIGHT  QUEUED  IDLE  NEXT\n")


def test_ps_json_is_the_status_itself(served: Served) -> None:
    """Scripts get what GET /api/status says."""
    served.facade.models = {"chat": a_resident("chat")}
    result = served.run("ps", "--json")
    body = json.loads(result.output)
    assert (result.exit_code, body["version"], body["models"][0]["state"]) == (0, "1.2.3", "ready")


def test_names_from_outside_cannot_control_the_terminal(served: Served) -> None:
    """Model, device and holder names with escape sequences come out as visible text, in JSON as well."""
    evil = "\x1b]0;owned\x07\u202emodel\nrm -rf"
    served.facade.models = {evil: a_resident(evil, devices=("gpu0\r",), reserved_mib={"gpu0\r": 1}, measured_mib={})}
    served.facade.devices = (DeviceView("gpu0\r", "gpu", "\x1b[5m", 100, 0, 1, None, 5, "\x07", ""),)
    served.facade.stories[evil] = [(1.0, "\x1b[2J")]
    served.facade.past = [an_event(1, "\x1b[2J", model=evil)]
    for args in (["ps"], ["ps", "--json"], ["why", evil], ["load", evil], ["events"], ["unload", "\x1b[2J"], ["load", evil, "--json"]):
        result = served.run(*args)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", result.output), args


# ----------------------------------------------------------------------------------------------------------- operations


def test_load_waits_for_the_end_and_tells_where_it_is(served: Served) -> None:
    """Asked again while it is under way; one plain line per state when nobody watches."""
    facade = served.facade
    starting = a_resident("chat", State.STARTING, since_s=3.0, expected_s=9.0, idle_s=None)
    facade.models = {"chat": starting}
    facade.results["chat", Operation.LOAD] = [Outcome(202, ""), Outcome(202, ""), Outcome(200, "ready")]

    def progress(model: str, operation: Operation) -> None:
        if len(facade.asked) == 3:
            facade.models["chat"] = a_resident("chat")

    facade.on_operate = progress
    result = served.run("load", "chat")

    assert result.exit_code == 0
    assert re.fullmatch(r"chat is ready on gpu0 \(4\.3 GiB\)( after .*)?", result.output.splitlines()[-1])
    assert [one[:2] for one in facade.asked] == [("chat", Operation.LOAD)] * 3
    assert {one[4] for one in facade.asked} == {20.0}


@pytest.mark.parametrize(
    ("args", "asked", "said"),
    [
        (["unload", "chat"], ("chat", Operation.UNLOAD, False, None, 20.0), "chat is stopped"),
        (["unload", "chat", "--force"], ("chat", Operation.UNLOAD, True, None, 20.0), "chat is stopped"),
        (["sleep", "chat", "--level", "2"], ("chat", Operation.SLEEP, False, 2, 20.0), "chat was put to sleep"),
        (["wake", "chat"], ("chat", Operation.WAKE, False, None, 20.0), "chat is ready on gpu0 (4.3 GiB)"),
        (["pin", "chat"], ("chat", Operation.PIN, False, None, 20.0), "chat is pinned: it is never evicted"),
        (["unpin", "chat"], ("chat", Operation.UNPIN, False, None, 20.0), "chat is not pinned any more"),
        (["pin", "org/m 1"], ("org/m 1", Operation.PIN, False, None, 20.0), "org/m 1 is pinned: it is never evicted"),
    ],
)
def test_operations_ask_for_what_they_say(args: list[str], asked: tuple[object, ...], said: str, served: Served) -> None:
    """The right model, operation and options; one line about the end."""
    served.facade.models = {"chat": a_resident("chat"), "org/m 1": a_model("org/m 1")}
    result = served.run(*args)
    assert (result.exit_code, served.facade.asked) == (0, [asked])
    assert result.output.splitlines()[-1].startswith(said)


@pytest.mark.parametrize(
    ("sleeper", "said"),
    [
        (a_sleeper("m"), ": 1.2 GiB stay on gpu0, 15.0 GiB in host RAM, wakes in about 0.8 s"),
        (a_sleeper("m", 2), ": 1.2 GiB stay on gpu0, 3.0 GiB in host RAM, wakes in about 6.5 s"),
        (a_sleeper("m", reserved_mib={"gpu0": 1229}), ": 1.2 GiB stay on gpu0, wakes in about 0.8 s"),
        (
            a_sleeper("m", devices=("gpu0", "gpu1"), reserved_mib={"gpu0": 1024, "gpu1": 2048, "ram": 4096}),
            ": 3.0 GiB stay on gpu0,gpu1, 4.0 GiB in host RAM, wakes in about 0.8 s",
        ),
        (a_sleeper("m", devices=("ram",), reserved_mib={"ram": 38}, model={"sleep_costs": ()}), ": 38 MiB stay in host RAM"),
    ],
)
def test_sleep_tells_what_is_still_held_and_how_soon_it_is_back(sleeper: ModelView, said: str, served: Served) -> None:
    """The level it is at, what stays where, and the way back."""
    served.facade.models = {"m": a_resident("m")}
    served.facade.on_operate = lambda *_: served.facade.models.update(m=sleeper)
    result = served.run("sleep", "m")
    words = re.escape(f"m is asleep at level {sleeper.instances[0].level}") + "( after [^:]*)?" + re.escape(said)
    assert (result.exit_code, re.fullmatch(words, result.output.splitlines()[-1]) is not None) == (0, True), result.output


def test_sleep_json_holds_the_whole_model(served: Served) -> None:
    """Level, RAM and costs for scripts; nothing else is printed."""
    served.facade.models = {"m": a_sleeper("m")}
    body = json.loads(served.run("sleep", "m", "--json").output)
    assert (body["done"], body["operation"], body["state"], body["status"]["instances"][0]["level"]) == (True, "sleep", "asleep", 1)
    assert body["status"]["sleep"]["costs"][0]["wake_s"] == 0.83


def test_sleep_waits_for_requests_in_flight_and_says_so(served: Served) -> None:
    """While it drains the number of requests is told; the ending is one line."""
    facade = served.facade
    facade.models = {"m": a_resident("m", State.DRAINING, in_flight=2, idle_s=None)}

    async def slow(*asked: object, **options: object) -> Outcome:
        while facade.looks < 3:
            await facade.looked.wait()
            facade.looked.clear()
        facade.models["m"] = a_sleeper("m")
        return Outcome(200, "asleep")

    facade.operate = slow  # type: ignore[method-assign, assignment]
    first, last = served.run("sleep", "m").output.splitlines()
    assert first == "m  draining on gpu0  2 requests to finish"
    assert last.startswith("m is asleep at level 1")


@pytest.mark.parametrize(
    "refusal",
    [
        Outcome(409, "the engine of m cannot sleep: --enable-sleep-mode is not given; unload it instead", "cannot_sleep"),
        Outcome(409, "m would hold 15.0 GiB of host RAM at level 1, and 3.0 GiB can be given; unload it instead", "no_room"),
        Outcome(409, "m is starting; only a ready model can be put to sleep", "not_ready"),
        Outcome(409, "m cannot sleep: its sleep at level 1 gave back 3 MiB of 15.0 GiB", "sleep_failed"),
    ],
)
def test_a_refused_sleep_is_one_sentence_and_exit_1(refusal: Outcome, served: Served) -> None:
    """The reason as the scheduler gives it, with --json as well; nothing on standard output but the progress."""
    served.facade.models = {"m": a_model("m")}
    served.facade.results["m", Operation.SLEEP] = [refusal]
    for args in (["sleep", "m", "--no-wait"], ["sleep", "m", "--json"]):
        result = served.run(*args)
        assert (result.exit_code, result.stderr, result.stdout) == (1, f"{refusal.message}\n", "")


def test_a_model_that_is_woken_while_the_answer_is_read_is_told_as_it_is(served: Served) -> None:
    """It slept; nobody claims that it still does."""
    served.facade.models = {"m": a_resident("m", State.WAKING, level=1, expected_s=0.5)}
    assert served.run("sleep", "m").output.splitlines()[-1].endswith(", and is waking by now")


def test_a_wake_that_ended_in_a_cold_start_says_why(served: Served) -> None:
    """Ready all the same: exit 0, and the reason of the detour."""
    served.facade.models = {"m": a_sleeper("m")}
    anew = a_resident("m", generation=2, model={"last_error": "its canary answered otherwise"})
    served.facade.on_operate = lambda *_: served.facade.models.update(m=anew)
    result = served.run("wake", "m")
    assert (result.exit_code, "m is ready on gpu0 (4.3 GiB)" in result.output) == (0, True)
    assert result.output.splitlines()[-1].endswith(": it could not be woken and was started anew (its canary answered otherwise)")


def test_load_without_waiting_returns_at_once(served: Served) -> None:
    """--no-wait: asked for, told how to follow it."""
    served.facade.models = {"chat": a_model("chat", State.STARTING)}
    served.facade.results["chat", Operation.LOAD] = [Outcome(202, "")]
    result = served.run("load", "chat", "--no-wait")
    assert (result.exit_code, result.output) == (0, "chat: load is under way. `greenroom ps` shows how it goes\n")
    assert served.facade.asked == [("chat", Operation.LOAD, False, None, 0.0)]


def test_a_refusal_is_one_sentence_and_exit_1(served: Served) -> None:
    """The server's reason, and when to try again."""
    served.facade.models = {"chat": a_model("chat")}
    served.facade.results["chat", Operation.LOAD] = [Outcome(503, "chat needs 2.0 GiB more than is free", "no_room", 7.2)]
    result = served.run("load", "chat")
    assert (result.exit_code, result.stderr) == (1, "chat needs 2.0 GiB more than is free (try again in 8 s)\n")


def test_an_unknown_model_gets_near_names(served: Served) -> None:
    """Did you mean; exit 1."""
    served.facade.models = {"chat": a_model("chat")}
    result = served.run("why", "chatt")
    assert (result.exit_code, result.output) == (1, "there is no model 'chatt': did you mean 'chat'?\n")


def test_load_json_tells_the_outcome_and_the_model(served: Served) -> None:
    """For scripts: done, how long, and the state it ended in."""
    served.facade.models = {"chat": a_resident("chat")}
    result = served.run("load", "chat", "--json")
    body = json.loads(result.output)
    assert (body["done"], body["status"]["state"], body["took_s"] >= 0) == (True, "ready", True)


# --------------------------------------------------------------------------------------------------- logs, events, why


def test_logs_are_shown_without_control_sequences(served: Served) -> None:
    """The last lines asked for; colours dropped, other escapes visible; JSON keeps them, escaped."""
    served.facade.models = {"chat": a_model("chat")}
    served.facade.logs = {"chat": ["one", "\x1b[32mgreen\x1b[0m", "bad \x1b[2J"], "": ["own"]}
    assert served.run("logs", "chat", "-n", "2").output == "green\nbad \\x1b[2J\n"
    assert served.run("logs").output == "own\n"
    lines = served.run("logs", "chat", "--json").output.splitlines()
    assert json.loads(lines[1]) == {"model": "chat", "line": "\x1b[32mgreen\x1b[0m"}


def test_followed_logs_end_with_exit_1_when_the_server_goes(served: Served) -> None:
    """New lines appear; the end of the stream is told, as the reader expected none."""
    served.facade.models = {"chat": a_model("chat")}
    served.facade.logs["chat"] = ["old"]

    def speak() -> None:
        if not served.facade.subscribers:
            served.loop.call_later(0.01, speak)
            return
        served.facade.publish("new")
        served.facade.publish(None)

    served.call(speak)
    result = served.run("logs", "chat", "-f")
    assert (result.exit_code, result.stdout) == (1, "old\nnew\n")
    assert "ended the log" in result.stderr


def test_events_are_lines_with_clock_times(served: Served) -> None:
    """With their levels; a model-less event is greenroom's own; no colours for who is no terminal."""
    now = time.time()
    evicted = {"at": now, "level": "warning"}
    served.facade.past = [an_event(1, "evicted: embed needed 300 MiB", **evicted), an_event(2, "started", model="", at=now)]
    lines = served.run("events").output.splitlines()
    assert [re.sub(r"^(.* )?\d\d:\d\d:\d\d", "T", line) for line in lines] == [
        "T  warning  chat  evicted: embed needed 300 MiB",
        "T  info     greenroom  started",
    ]
    assert [json.loads(line)["id"] for line in served.run("events", "--json", "-n", "1").output.splitlines()] == [2]


def test_followed_events_begin_with_the_recent_ones(served: Served) -> None:
    """History, then news, each once."""
    served.facade.past = [an_event(1, "first")]

    def speak() -> None:
        if not served.facade.subscribers:
            served.loop.call_later(0.01, speak)
            return
        served.facade.publish(an_event(2, "second"))
        served.facade.publish(None)

    served.call(speak)
    result = served.run("events", "-f", "--json")
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["first", "second"]
    assert result.exit_code == 1


def test_why_reads_like_a_story(served: Served) -> None:
    """State and how long ago, then one line per cause with its time."""
    now = time.time()
    served.facade.models = {"chat": a_model("chat")}
    served.facade.stories["chat"] = [(now - 200_000, "asked for by 10.0.0.5"), (now - 250, "evicted: embed needed 300 MiB")]
    first, second, third = served.run("why", "chat").output.splitlines()
    assert re.fullmatch(r"chat is stopped; the last thing happened 4 min 1\d s ago\.", first)
    assert re.fullmatch(r"  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  asked for by 10\.0\.0\.5", second)
    assert third.endswith("evicted: embed needed 300 MiB")
    assert json.loads(served.run("why", "chat", "--json").output)["story"][1]["text"] == "evicted: embed needed 300 MiB"


def test_why_of_a_sleeper_tells_its_level_and_of_a_burnt_one_that_it_stops(served: Served) -> None:
    """The heading says how deep it sleeps; the last line how sleep is tried again."""
    served.facade.models = {"nap": a_sleeper("nap"), "burnt": a_model("burnt", sleep_costs=LEVELS, sleep_off="2 wakes went wrong")}
    served.facade.stories = {name: [(time.time(), "asleep")] for name in served.facade.models}
    assert served.run("why", "nap").output.splitlines()[0] == "nap is asleep at level 1; the last thing happened just now."
    last = served.run("why", "burnt").output.splitlines()[-1]
    assert last == "It stops instead of sleeping: 2 wakes went wrong. `greenroom sleep burnt` tries again."


def test_why_ends_with_what_is_now_and_what_comes_next() -> None:
    """As a server told it: clock times, causes with their figures, the present last; long lines go on below their beginning."""
    told = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))["why"]
    now = told["story"][-1]["at"]
    head, *causes, last = story(told, now)
    assert head.startswith("coder-14b is asleep at level 1; the last thing happened ")
    assert all(re.fullmatch(r"  \d\d:\d\d:\d\d  \S.*", line) for line in causes)
    assert any("put to sleep (level 1): agent-32b needed 43.0 GiB; idle " in line for line in causes)
    assert last.startswith("Now: ")
    assert last.endswith(told["story"][-1]["text"])
    narrow = story(told, now, 60)
    assert max(len(line) for line in narrow[1:-1]) <= 60
    assert " ".join(" ".join(narrow[1:-1]).split()) == " ".join(" ".join(causes).split())


def test_events_have_colours_on_a_terminal_only(served: Served) -> None:
    """By level, and none where NO_COLOR asks for that."""
    served.facade.past = [an_event(1, "evicted", level="warning"), an_event(2, "ready")]
    assert "\x1b[" not in served.run("events").output
    _, screen = on_a_terminal(served, "events")
    warning, info = screen.decode().splitlines()
    assert (warning[:5], info[:1].isdigit(), info.count("\x1b")) == ("\x1b[33m", True, 0)


def test_why_of_an_untouched_model_says_so(served: Served) -> None:
    """No story is an answer too."""
    served.facade.models = {"chat": a_model("chat")}
    assert served.run("why", "chat").output == "chat is stopped; nothing has happened to it since greenroom started.\n"


# ---------------------------------------------------------------------------------------------------- finding the server


def test_no_server_is_one_sentence_with_the_way_out() -> None:
    """Exit 1, and how to start one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for args in (["ps"], ["load", "chat"], ["logs", "chat"], ["events", "-f"], ["why", "chat"]):
            result = run(*args, "--url", url)
            assert (result.exit_code, result.output) == (
                1,
                f"no greenroom answers at {url}. Start one with `greenroom serve -c greenroom.yaml`\n",
            )


@pytest.mark.parametrize("url", ["ftp://here", "http://", "http://host:notaport", "http://[bad"])
def test_a_wrong_url_is_a_usage_error(url: str) -> None:
    """Exit 2 before anything is sent."""
    result = run("ps", "--url", url)
    assert (result.exit_code, "is not an address of a server" in result.output) == (2, True)


@pytest.fixture
def locked() -> Iterator[Served]:
    """A server that wants a key and remembers what it got."""
    keys: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization", ""))
        if keys[-1] != "Bearer s3cret-key":
            return web.json_response({"error": {"message": "this needs an API key"}}, status=401)
        return web.json_response({"version": "1", "uptime_s": 0, "devices": [], "models": [], "queue": {"length": 0, "oldest_s": 0}})

    app = web.Application()
    app.router.add_get("/api/status", answer)
    yield from served_app(app, FakeFacade())


def test_the_key_comes_from_the_environment_or_a_file(locked: Served, tmp_path: Path) -> None:
    """Without one: how to give it.  The file wins.  It is never printed."""
    (tmp_path / "key").write_text("s3cret-key\n")
    without = locked.run("ps")
    assert (without.exit_code, without.output) == (
        1,
        f"{locked.url} asks for an API key and none was given: set GREENROOM_API_KEY, or give --api-key-file FILE\n",
    )
    assert locked.run("ps", GREENROOM_API_KEY="s3cret-key").exit_code == 0
    assert locked.run("ps", "--api-key-file", str(tmp_path / "key"), GREENROOM_API_KEY="wrong").exit_code == 0
    wrong = locked.run("ps", GREENROOM_API_KEY="wr0ng-key")
    assert (wrong.exit_code, wrong.output) == (
        1,
        f"{locked.url} does not accept the API key from GREENROOM_API_KEY: put in one of `apiKeys` of its configuration\n",
    )
    (tmp_path / "other").write_text("wr0ng-key\n")
    assert f"from {tmp_path / 'other'}: " in locked.run("ps", "--api-key-file", str(tmp_path / "other")).output


@pytest.mark.parametrize("content", [None, b"", b"two words", b"line\nline", b"\xff\xfe"])
def test_an_unusable_key_file_is_a_usage_error(content: bytes | None, tmp_path: Path) -> None:
    """Missing, empty, or not one line of text: exit 2, and the content is not shown."""
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    result = run("ps", "--api-key-file", str(tmp_path / "key"))
    assert (result.exit_code, "API key" in result.output) == (2, True)
    assert "words" not in result.output


def test_there_is_no_option_that_takes_a_key() -> None:
    """Every user of a machine can read command lines."""
    assert run("ps", "--api-key", "x").exit_code == 2


@pytest.fixture
def stranger() -> Iterator[Served]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="<html>\x1b[2Jhello</html>", content_type="text/html")

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    yield from served_app(app, FakeFacade())


def test_a_stranger_at_the_address_is_recognised(stranger: Served) -> None:
    """Another web server there: said plainly, no traceback."""
    for args in (["ps"], ["load", "chat"], ["why", "chat"], ["events"]):
        result = stranger.run(*args)
        assert (result.exit_code, "not as greenroom does" in result.output) == (1, True), args


# ------------------------------------------------------------------------------------------------------- the main command


def test_version_and_help() -> None:
    """`--version` is one line; `--help` names every command once, under a heading, each on one line of 80 columns."""
    assert re.fullmatch(r"greenroom \d+\.\d+\.\d+\S*\n", run("--version").output)
    shown = CliRunner().invoke(main, ["--help"], env={"COLUMNS": "80"}).output
    headings = re.findall(r"^([A-Z]\w+):$", shown, re.MULTILINE)
    assert headings == ["Options", *GROUPS]
    assert re.findall(r"^  (\w[\w-]*)  ", shown, re.MULTILINE) == list(COMMANDS)
    assert len(COMMANDS) == sum(map(len, GROUPS.values()))


def all_commands(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        if (below := command.get_command(context, name)) is not None:
            yield from all_commands(below, (*path, name))


EVERY = dict(all_commands())
# What an option is called wherever it is there: parameter -> (its names, what stands for its value)
SAME = {
    "store": (["--store"], "DIR"),
    "state_dir": (["--state-dir"], "DIR"),
    "ledger": (["--ledger"], "FILE"),
    "as_json": (["--json"], None),
    "output": (["-o", "--output"], "DIR"),
    "since": (["--since"], "TIME"),
    "quiet": (["--quiet", "-q"], None),
    "force": (["--force"], None),
    "follow": (["--follow", "-f"], None),
    "offline": (["--offline"], None),
    "url": (["--url"], "URL"),
}
SILENT = frozenset({"serve", "demo", "run", "config", "generate"})  # they tell what they do, not what is


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_command_tells_what_it_does_and_calls_its_options_as_others_do(path: tuple[str, ...]) -> None:
    """A sentence, a word about each option, -h, one name for one thing; --json wherever something is told."""
    command = EVERY[path]
    assert command.help is not None
    assert re.match(r"[A-Z][^\n]*", command.help)
    long, short = run(*path, "--help"), run(*path, "-h")
    assert (long.exit_code, long.output) == (0, short.output)
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert [option.opts for option in options if not option.help] == []
    for option in options:
        names, metavar = SAME.get(option.name or "", (option.opts, option.metavar))
        assert set(names) <= set(option.opts), option.opts
        assert option.metavar == metavar, option.opts
        assert all(name.startswith("--") or len(name) == 2 for name in option.opts)
    assert not re.search(r"INTEGER|FLOAT", long.output)  # a word for what a value is, not for its type
    assert path[0] in SILENT or any("--json" in option.opts for option in options)


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_command_refuses_an_option_that_it_does_not_have(path: tuple[str, ...]) -> None:
    """Exit 2, nothing on standard output, the option named on standard error."""
    result = run(*path, "--no-such-option")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--no-such-option" in result.stderr
    assert len(result.stderr) < 500


WORDS = [
    "",
    " ",
    "x" * 5000,
    "a/" * 3000,
    "\udcff\udcfe",
    "\x1b[2J",
    "../../../etc/passwd",
    "oci://[::1",
    "hf://",
    "/dev/full",
    "nan",
    "a\nb",
    "٣",
]
STAYING = frozenset({"serve", "demo", "run"})


@pytest.mark.parametrize("path", [path for path in EVERY if path[0] not in STAYING], ids=" ".join)
def test_no_word_makes_a_command_end_in_a_traceback(path: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its argument: done, refused or wrong, with a sentence that cannot control the terminal."""
    monkeypatch.chdir(tmp_path)
    own = {"GREENROOM_URL": "http://127.0.0.1:9", "GREENROOM_MODELS": str(tmp_path / "store"), "GREENROOM_OFFLINE": "1"}
    for word in WORDS:
        result = run(*path, word, **own, HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path / "state"))
        assert result.exception is None or isinstance(result.exception, SystemExit), (word[:20], result.exc_info)
        assert result.exit_code in (0, 1, 2), word[:20]
        assert result.exit_code == 0 or result.stderr.strip(), word[:20]
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", result.output), word[:20]


@pytest.mark.parametrize("args", [["--help"], ["list"], ["check", "--schema"]])
def test_a_full_disk_behind_standard_output_is_one_sentence(args: list[str], tmp_path: Path) -> None:
    """Exit 1; nothing more on the way out."""
    env = {**os.environ, "GREENROOM_MODELS": str(tmp_path)}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", "from greenroom.cli import main; main()", *args]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
def test_a_file_without_an_end_is_refused(device: str, served: Served) -> None:
    """As a key, and as arrivals: read in part, and told."""
    assert served.run("ps", "--api-key-file", device).exit_code == 2
    refused = run("replay", "--trace", device)
    assert (refused.exit_code, "is larger than 64 MiB" in refused.stderr) == (1, True)


@pytest.mark.parametrize("args", [[], ["nothing"], ["ps", "--nope"], ["load"], ["sleep", "m", "--level", "3"], ["check"], ["serve"]])
def test_wrong_usage_is_exit_2(args: list[str]) -> None:
    """Including no command at all."""
    assert run(*args).exit_code == 2


def test_a_mistyped_command_gets_a_suggestion() -> None:
    """Did you mean."""
    assert "there is no command 'unlaod'. Did you mean 'unload'?" in run("unlaod").output
    assert "`greenroom --help` lists them" in run("bogus").output


def test_help_imports_nothing_heavy() -> None:
    """`greenroom --help` must be quick: no HTTP, no terminal, no schema library."""
    code = (
        "import sys, greenroom.cli\n"
        "try: greenroom.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'aiohttp', 'rich', 'pydantic', 'ruamel', 'uvloop', 'msgspec', 'asyncio', 'sqlite3'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_is_quiet_and_exits_130(served: Served) -> None:
    """No traceback, no `Aborted!`."""
    command = [sys.executable, "-c", "from greenroom.cli import main; main()", "events", "-f", "--url", served.url]
    served.facade.past = [an_event(1, "first")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "first" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.strip()) == (130, "")


def test_a_reader_that_closes_the_pipe_is_no_error(served: Served) -> None:
    """`greenroom ps | head -1`: nothing on standard error."""
    served.facade.models = {f"m{n}": a_resident(f"m{n}") for n in range(2000)}
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", "from greenroom.cli import main; main()", "ps", "--url", served.url]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("command", [["events", "-f"], ["logs", "-f"]])
def test_a_follower_ends_when_nobody_reads_it_any_more(command: list[str], served: Served) -> None:
    """`greenroom events -f | head -1` does not hang until something happens."""
    served.facade.past = [an_event(1, "first")]
    served.facade.logs[""] = ["first"]
    argv = [sys.executable, "-c", "from greenroom.cli import main; main()", *command, "--url", served.url]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"first" in process.stdout.readline()
        process.stdout.close()
        assert (process.wait(timeout=60), process.stderr.read()) == (1, b"")


def on_a_terminal(served: Served, *args: str, until: bytes = b"", then: int = 0) -> tuple[int, bytes]:
    """Run a command on a pseudo-terminal; once `until` is on the screen, send the signal `then`."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "GREENROOM_URL": served.url, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", "from greenroom.cli import main; main()", *args]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            seen += piece
            if until and until in seen:
                until = b""
                process.send_signal(then)
        process.wait(timeout=30)
    os.close(ours)
    return process.returncode, seen


def test_load_on_a_terminal_draws_a_bar_and_leaves_one_line(served: Served) -> None:
    """The bar with its estimate while it loads, the ending after it, the cursor visible again."""
    facade = served.facade
    facade.models = {"chat": a_resident("chat", State.STARTING, since_s=4.96, expected_s=3.04, idle_s=None)}

    async def slow(*_: object, **__: object) -> Outcome:
        while facade.looks < 3:
            await facade.looked.wait()
            facade.looked.clear()
        facade.models["chat"] = a_resident("chat")
        return Outcome(200, "ready")

    facade.operate = slow  # type: ignore[method-assign, assignment]
    code, screen = on_a_terminal(served, "load", "chat")
    words = screen.decode()
    assert code == 0
    assert "chat  starting on gpu0  [███████████████░░░░░░░░░] 62 % about 3 s" in words
    assert re.search(r"chat is ready on gpu0 \(4\.3 GiB\) after [\d.]+ s\r\n", words)
    assert words.rindex("\x1b[?25h") > words.rindex("\x1b[?25l")


def test_ps_watch_redraws_until_ctrl_c(served: Served) -> None:
    """Exit 130, no traceback, the cursor visible again."""
    served.facade.models = {"chat": a_resident("chat", idle_s=45.0)}
    code, screen = on_a_terminal(served, "ps", "--watch", "--every", "0.1", until=b"gpu0", then=signal.SIGINT)
    words = screen.decode()
    assert code == 130
    assert "chat" in words
    assert "Traceback" not in words
    assert "Aborted" not in words
    assert words.rindex("\x1b[?25h") > words.rindex("\x1b[?25l")
