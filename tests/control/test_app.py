"""The control plane over a real Unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from greenroom.control.app import make_app, start_control
from greenroom.control.facade import Result
from greenroom.control.sse import Readers, StreamLimits
from greenroom.core.facts import Operation, State
from tests.control.fake import LEVELS, FakeFacade, a_model, a_resident, a_sleeper, an_event


@asynccontextmanager
async def serving(facade: FakeFacade, folder: Path, limits: StreamLimits | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    path = folder / "run" / "control.sock"
    runner = await start_control(make_app(facade, limits), path)
    try:
        async with aiohttp.ClientSession("http://control", connector=aiohttp.UnixConnector(str(path))) as session:
            yield session
    finally:
        await runner.cleanup()


async def asked(session: aiohttp.ClientSession, method: str, path: str, **extra: Any) -> tuple[int, Any]:
    async with session.request(method, URL(path, encoded=True), **extra) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


# ---------------------------------------------------------------------------------------------------------------- status


async def test_status_has_the_fixed_shape(tmp_path: Path) -> None:
    """Every name of the public surface is there, with its unit, and an absent figure is null."""
    facade = FakeFacade(a_resident("chat", in_flight=2, idle_s=None, model={"starts": 3, "queued": 1}), a_model("embed"))
    facade.statics["chat"] = {"aliases": ["c"], "engine": "vllm", "ttl_s": 300.0, "env": {"HF_TOKEN": "***"}}
    facade.queued = (1, 0.25)
    async with serving(facade, tmp_path) as session:
        status, body = await asked(session, "GET", "/api/status")

    assert status == 200
    assert (body["version"], body["uptime_s"]) == ("1.2.3", 61.5)
    assert body["queue"] == {"length": 1, "oldest_s": 0.25, "models": []}
    gpu = body["devices"][0]
    wanted = {"id": "gpu0", "kind": "gpu", "name": "H100", "capacity_mib": 9728, "headroom_mib": 512}
    wanted |= {"reserved_mib": 4915, "used_mib": 5222, "outside_mib": 307}
    assert wanted.items() <= gpu.items()
    chat, embed = body["models"]
    assert {"id": "chat", "aliases": ["c"], "engine": "vllm", "pinned": False, "state": "ready"}.items() <= chat.items()
    assert {"queued": 1, "starts": 3, "wakes": 0, "last_error": "", "blocked": "", "ttl_s": 300.0}.items() <= chat.items()
    assert "env" not in chat
    instance = {"devices": ["gpu0"], "state": "ready", "generation": 1, "reserved_mib": 4403, "measured_mib": 4198, "host_mib": 0}
    instance |= {"in_flight": 2, "pid": 4242, "port": 5801, "since_s": 60.0, "idle_s": None}
    assert instance.items() <= chat["instances"][0].items()
    assert embed["instances"] == []


async def test_an_instance_on_two_devices_reports_totals_and_shares(tmp_path: Path) -> None:
    """Totals leave host RAM out; what nobody measured is null, not 0."""
    shares = {"gpu0": 4000, "gpu1": 4100, "ram": 900}
    facade = FakeFacade(a_resident("big", State.STARTING, devices=("gpu0", "gpu1"), reserved_mib=shares, measured_mib={}, host_mib=900))
    async with serving(facade, tmp_path) as session:
        _, body = await asked(session, "GET", "/api/status")

    one = body["models"][0]["instances"][0]
    assert (one["reserved_mib"], one["measured_mib"], one["host_mib"]) == (8100, None, 900)
    assert one["reserved_by_device_mib"] == shares


async def test_status_of_a_thousand_models_answers_within_250_ms(tmp_path: Path) -> None:
    """The status route stays quick however long the list."""
    facade = FakeFacade(*(a_resident(f"m{n}") for n in range(1000)))
    async with serving(facade, tmp_path) as session:
        took = []
        for _ in range(3):
            began = time.perf_counter()
            _, body = await asked(session, "GET", "/api/status")
            took.append(time.perf_counter() - began)
    assert len(body["models"]) == 1000
    assert min(took) < 0.25


async def test_one_model_tells_its_static_facts_too(tmp_path: Path) -> None:
    """GET /api/models/{id} takes aliases and adds what the status leaves out."""
    facade = FakeFacade(a_model("chat"))
    facade.statics["chat"] = {"aliases": ["gpt"], "command": "llama-server --api-key ***"}
    async with serving(facade, tmp_path) as session:
        status, body = await asked(session, "GET", "/api/models/gpt")
    assert (status, body["id"], body["command"]) == (200, "chat", "llama-server --api-key ***")


async def test_why_tells_the_story(tmp_path: Path) -> None:
    """Times and sentences, oldest first, and the present state."""
    facade = FakeFacade(a_model("chat"))
    facade.stories["chat"] = [(1.5, "asked for"), (2.25, "evicted: embed needed 300 MiB")]
    async with serving(facade, tmp_path) as session:
        _, body = await asked(session, "GET", "/api/models/chat/why")
    told = [(1.5, "asked for"), (2.25, "evicted: embed needed 300 MiB")]
    story = [{"at": at, "text": text, "cause": "told", "refs": []} for at, text in told]
    assert body == {"model": "chat", "state": "stopped", "level": 0, "sleep_off": "", "story": story}


async def test_what_a_sleeper_holds_and_costs_is_told(tmp_path: Path) -> None:
    """Level and RAM of the instance, how often and at what price the model sleeps, and why it does not any more."""
    off = "2 sleeps or wakes went wrong"
    facade = FakeFacade(
        a_sleeper("agent", model={"wakes": 3, "sleeps": 4, "wake_failures": 1}),
        a_model("burnt", sleep_costs=LEVELS, sleep_off=off),
        a_model("other", sleep_off="greenroom knows no sleep routes of this engine"),
    )
    async with serving(facade, tmp_path) as session:
        _, body = await asked(session, "GET", "/api/status")
        _, one = await asked(session, "GET", "/api/models/agent")
        stories = [(await asked(session, "GET", f"/api/models/{id}/why"))[1] for id in facade.models]

    agent, burnt, other = body["models"]
    assert {"sleeps": 4, "wakes": 3, "wake_failures": 1}.items() <= agent.items()
    costs = [
        {"level": 1, "residue_mib": 1229, "host_mib": 15360, "sleep_s": 0.41, "wake_s": 0.83},
        {"level": 2, "residue_mib": 1229, "host_mib": 3072, "sleep_s": 0.2, "wake_s": 6.5},
    ]
    assert agent["sleep"] == {"levels": [1, 2], "off": "", "costs": costs}
    instance = {"level": 1, "reserved_mib": 1229, "ram_mib": 15360, "host_mib": 15360}
    assert instance.items() <= agent["instances"][0].items()
    assert agent["instances"][0]["reserved_by_device_mib"] == {"gpu0": 1229, "ram": 15360}
    assert (one["sleep"], one["instances"]) == (agent["sleep"], agent["instances"])
    assert (burnt["sleep"]["levels"], burnt["sleep"]["off"]) == ([], off)
    assert other["sleep"]["costs"] == []
    assert [(told["level"], told["sleep_off"]) for told in stories] == [(1, ""), (0, off), (0, "")]


# ------------------------------------------------------------------------------------------------------------ operations


async def test_load_answers_202_at_once_with_a_status_url(tmp_path: Path) -> None:
    """B54(3): a load that takes minutes keeps no connection open."""
    facade = FakeFacade(a_model("org/chat", State.STARTING))
    facade.results["org/chat", Operation.LOAD] = [Result(202, "starting, about 150 s")]
    async with (
        serving(facade, tmp_path) as session,
        session.post(URL("/api/models/org%2Fchat/load", encoded=True)) as response,
    ):
        body = await response.json()
        assert (response.status, response.headers["Location"]) == (202, "/api/models/org%2Fchat")
        status, entry = await asked(session, "GET", body["status_url"])

    assert {"model": "org/chat", "operation": "load", "done": False, "state": "starting"}.items() <= body.items()
    assert (status, entry["state"]) == (200, "starting")
    assert facade.asked == [("org/chat", Operation.LOAD, False, None, 0.0)]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/api/models/a/load?wait=12.5", ("a", Operation.LOAD, False, None, 12.5)),
        ("/api/models/a/load?wait=1e9", ("a", Operation.LOAD, False, None, 600.0)),
        ("/api/models/a/unload", ("a", Operation.UNLOAD, False, None, 30.0)),
        ("/api/models/a/unload?force=1&wait=0", ("a", Operation.UNLOAD, True, None, 0.0)),
        ("/api/models/a/unload?force=0", ("a", Operation.UNLOAD, False, None, 30.0)),
        ("/api/models/a/sleep?level=2", ("a", Operation.SLEEP, False, 2, 30.0)),
        ("/api/models/a/sleep?level=1&wait=2.5", ("a", Operation.SLEEP, False, 1, 2.5)),
        ("/api/models/a/sleep", ("a", Operation.SLEEP, False, None, 30.0)),
        ("/api/models/a/wake", ("a", Operation.WAKE, False, None, 0.0)),
        ("/api/models/a/wake?wait=60", ("a", Operation.WAKE, False, None, 60.0)),
        ("/api/models/a/pin", ("a", Operation.PIN, False, None, 5.0)),
        ("/api/models/a/unpin", ("a", Operation.UNPIN, False, None, 5.0)),
        ("/api/models/org/sub/m:8b/load", ("org/sub/m:8b", Operation.LOAD, False, None, 0.0)),
        ("/api/models/org%2Fsub%2Fm%3A8b/load", ("org/sub/m:8b", Operation.LOAD, False, None, 0.0)),
        ("/api/models/odd%2Fload/load", ("odd/load", Operation.LOAD, False, None, 0.0)),
        ("/api/models/100%25%20m%C3%BC/load", ("100% mü", Operation.LOAD, False, None, 0.0)),
        ("/api/models/two%0Alines/load", ("two\nlines", Operation.LOAD, False, None, 0.0)),
        ("/api/models/unload/org/sub/m:8b", ("org/sub/m:8b", Operation.UNLOAD, False, None, 30.0)),
    ],
)
async def test_operations_reach_the_model_that_the_path_names(path: str, wanted: tuple[Any, ...], tmp_path: Path) -> None:
    """Slashes, percent-encoding and parameters arrive as they were meant."""
    facade = FakeFacade(*map(a_model, ["a", "org/sub/m:8b", "odd/load", "100% mü", "two\nlines"]))
    async with serving(facade, tmp_path) as session:
        status, _ = await asked(session, "POST", path)
    assert (status, facade.asked) == (200, [wanted])


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "part"),
    [
        ("POST", "/api/models/chatt/load", 404, "model_not_found", "did you mean 'chat'?"),
        ("GET", "/api/models/zzz/logs", 404, "model_not_found", "`greenroom ps` lists"),
        ("GET", "/api/models/zzz/why", 404, "model_not_found", "'zzz'"),
        ("GET", "/api/models/zzz", 404, "model_not_found", "'zzz'"),
        ("POST", "/api/models/unload/zzz", 404, "model_not_found", "'zzz'"),
        ("GET", "/logs/stream/zzz", 404, "model_not_found", "'zzz'"),
        ("POST", "/api/models/%1b%5B2J/load", 404, "model_not_found", r"'\x1b[2J'"),
        ("POST", "/api/models/chat/load?wait=soon", 400, "bad_parameter", "wait='soon'"),
        ("POST", "/api/models/chat/load?wait=-1", 400, "bad_parameter", "wait='-1'"),
        ("POST", "/api/models/chat/load?wait=nan", 400, "bad_parameter", "wait='nan'"),
        ("POST", "/api/models/chat/unload?force=maybe", 400, "bad_parameter", "force='maybe'"),
        ("POST", "/api/models/chat/sleep?level=3", 400, "bad_parameter", "level='3'"),
        ("GET", "/api/models/chat/load", 405, "method_not_allowed", "use POST"),
        ("GET", "/api/models/chatt/load", 404, "model_not_found", "'chatt/load'"),
        ("POST", "/api/models/chat/frobnicate", 404, "operation_not_found", "these are load, unload, sleep, wake, pin, unpin"),
        ("POST", "/api/models/chat/", 404, "operation_not_found", "'' is no operation"),
        ("POST", "/api/models/chat/logs", 405, "method_not_allowed", "use GET"),
        ("POST", "/api/models/chat", 405, "method_not_allowed", "use GET"),
        ("DELETE", "/api/models/chat/load", 405, "method_not_allowed", "use"),
        ("DELETE", "/api/status", 405, "method_not_allowed", "use GET"),
        ("HEAD", "/unload", 405, None, None),
        ("GET", "/api/nothing", 404, "not_found", "'/api/nothing'"),
        ("GET", "/metrics/x", 404, "not_found", "no route"),
        ("GET", "/metrics?engines=perhaps", 400, "bad_parameter", "engines"),
    ],
)
async def test_errors_are_json_in_openai_shape(
    method: str, path: str, status: int, code: str | None, part: str | None, tmp_path: Path
) -> None:
    """One sentence that says what is wrong; nothing was asked of any model."""
    facade = FakeFacade(a_model("chat"))
    async with serving(facade, tmp_path) as session:
        if code is None:
            async with session.request(method, path) as response:
                assert response.status == status
        else:
            got, body = await asked(session, method, path)
            assert (got, body["error"]["code"], body["error"]["type"]) == (status, code, "invalid_request_error")
            assert part is not None
            assert part in body["error"]["message"]
    assert facade.asked == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("llama", "the peers big (http://10.0.0.5:8080, up) and old (https://old.example, down)"),
        ("big/llama", "the peer big (http://10.0.0.5:8080, up)"),
        ("org/coder", "the peer big (http://10.0.0.5:8080, up)"),
    ],
)
async def test_a_model_of_a_peer_is_told_as_one(name: str, there: str, tmp_path: Path) -> None:
    """Whatever is asked of it; one of this machine goes first."""
    facade = FakeFacade(a_model("chat"))
    big = {"id": "big", "proxy": "http://10.0.0.5:8080", "healthy": True, "models": ["llama", "org/coder", "chat"]}
    facade.peers = [big, {"id": "old", "proxy": "https://old.example", "healthy": False, "models": ["llama"]}]
    async with serving(facade, tmp_path) as session:
        for method, path in (("GET", "/why"), ("GET", "/logs"), ("POST", "/load"), ("GET", "")):
            status, body = await asked(session, method, f"/api/models/{quote(name, safe='')}{path}")
            assert (status, body["error"]["code"]) == (404, "model_at_peer")
            assert body["error"]["message"] == f"'{name}' is served by {there}, and not here: ask there"
        assert (await asked(session, "GET", "/api/models/chat/why"))[0] == 200
        assert (await asked(session, "GET", "/api/models/old/chat"))[1]["error"]["code"] == "model_not_found"
    assert facade.asked == []


@pytest.mark.parametrize(("path", "text"), [("/metrics", "greenroom_engines 0\n"), ("/metrics?engines=1", "greenroom_engines 1\n")])
async def test_metrics_are_told_in_the_type_that_prometheus_asks_for(path: str, text: str, tmp_path: Path) -> None:
    """Engines' own only where they are wanted."""
    async with serving(FakeFacade(), tmp_path) as session, session.get(path) as response:
        assert (response.status, await response.text()) == (200, text)
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_a_refusal_carries_its_code_and_retry_after(tmp_path: Path) -> None:
    """The scheduler's own words reach the operator; Retry-After is rounded up to whole seconds."""
    facade = FakeFacade(a_model("chat"))
    facade.results["chat", Operation.LOAD] = [Result(503, "chat needs 2.0 GiB more than is free", "no_room", 7.2)]
    async with serving(facade, tmp_path) as session, session.post("/api/models/chat/load") as response:
        body = await response.json()
        assert (response.status, response.headers["Retry-After"]) == (503, "8")
    wanted = {"message": "chat needs 2.0 GiB more than is free", "type": "server_error", "param": "model", "code": "no_room"}
    assert body == {"error": wanted}


async def test_a_fault_inside_is_a_500_in_json_without_its_words(tmp_path: Path) -> None:
    """What broke is for the log, not for the client."""
    facade = FakeFacade(a_model("chat"))

    def breaks(*_: object) -> None:
        raise RuntimeError("secret thing")

    facade.on_operate = breaks
    async with serving(facade, tmp_path) as session:
        status, body = await asked(session, "POST", "/api/models/chat/load")
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(body)


async def test_a_slow_unload_keeps_no_other_call_waiting(tmp_path: Path) -> None:
    """O6: while an engine ignores TERM, status answers at once."""
    facade = FakeFacade(a_model("stubborn"))
    entered, gone = asyncio.Event(), asyncio.Event()

    async def slow(*_: object, **__: object) -> Result:
        entered.set()
        await gone.wait()
        return Result(200, "killed after 5 s")

    facade.operate = slow  # type: ignore[method-assign, assignment]
    async with serving(facade, tmp_path) as session, asyncio.TaskGroup() as group:
        unloading = group.create_task(asked(session, "POST", "/api/models/stubborn/unload"))
        await entered.wait()
        status, _ = await asked(session, "GET", "/api/status")
        assert (status, unloading.done()) == (200, False)
        gone.set()
        status, body = await unloading
        assert (status, body["message"]) == (200, "killed after 5 s")


# --------------------------------------------------------------------------------------------------------------- aliases


async def test_running_lists_what_is_up_without_the_command_line(tmp_path: Path) -> None:
    """llama-swap's words for the states, and no `cmd` that could hold a key."""
    states = [State.READY, State.STARTING, State.DRAINING, State.STOPPING, State.WAKING, State.GOING_TO_SLEEP]
    facade = FakeFacade(*(a_resident(one.value, one) for one in states), a_model("off"), a_resident("napping", State.ASLEEP))
    facade.statics["ready"] = {"ttl_s": 300, "name": "Ready", "description": "always"}
    async with serving(facade, tmp_path) as session:
        _, body = await asked(session, "GET", "/running")
    told = {one["model"]: one["state"] for one in body["running"]}
    wanted = {"ready": "ready", "starting": "starting", "draining": "ready", "stopping": "stopping", "waking": "starting"}
    assert told == {**wanted, "going_to_sleep": "stopping"}
    first = {"model": "ready", "state": "ready", "cmd": "", "proxy": "http://127.0.0.1:5801", "ttl": 300}
    assert body["running"][0] == {**first, "name": "Ready", "description": "always"}


@pytest.mark.parametrize(("method", "path"), [("GET", "/unload"), ("POST", "/unload"), ("POST", "/api/models/unload")])
async def test_unload_all_stops_everything_that_is_up(method: str, path: str, tmp_path: Path) -> None:
    """Stopped and failed models are left alone."""
    facade = FakeFacade(a_resident("a"), a_resident("b", State.ASLEEP), a_model("off"), a_model("bad", State.FAILED))
    async with serving(facade, tmp_path) as session:
        status, body = await asked(session, method, path)
    assert (status, body["msg"]) == (200, "ok")
    assert [(model, operation) for model, operation, *_ in facade.asked] == [("a", Operation.UNLOAD), ("b", Operation.UNLOAD)]


async def test_unload_all_says_who_stays(tmp_path: Path) -> None:
    """A refusal for one does not hide behind the success of the other."""
    facade = FakeFacade(a_resident("a"), a_resident("b"))
    facade.results["b", Operation.UNLOAD] = [Result(409, "it answers 2 requests", "busy")]
    async with serving(facade, tmp_path) as session:
        status, body = await asked(session, "POST", "/api/models/unload")
    assert (status, body["error"]["message"]) == (409, "1 of 2 models stay: b: it answers 2 requests")


async def test_version_is_told(tmp_path: Path) -> None:
    """GET /api/version."""
    async with serving(FakeFacade(), tmp_path) as session:
        assert await asked(session, "GET", "/api/version") == (200, {"version": "1.2.3", "name": "greenroom"})


# ------------------------------------------------------------------------------------------------------------------ logs


async def test_the_history_of_all_logs_together_is_bounded(tmp_path: Path) -> None:
    """Many models share what one may send."""
    facade = FakeFacade(*(a_model(f"m{n}") for n in range(499)))
    facade.logs = {name: [f"{name} {n}" for n in range(40)] for name in ("", *facade.models)}
    async with serving(facade, tmp_path) as session, session.get("/logs/stream?lines=10000") as response:
        async with asyncio.timeout(10):
            told = [await response.content.readline() for _ in range(500 * 20)]
        assert told[0] == b" 20\n"
        assert told[-1] == b"m498 39\n"


async def test_logs_are_text_and_the_number_of_lines_is_asked_for(tmp_path: Path) -> None:
    """Newest lines, oldest first; `/logs` is greenroom's own."""
    facade = FakeFacade(a_model("chat"))
    facade.logs = {"chat": ["one", "two", "thrée"], "": ["own"]}
    async with serving(facade, tmp_path) as session:
        async with session.get("/api/models/chat/logs?lines=2") as response:
            assert (response.status, response.content_type, await response.text()) == (200, "text/plain", "two\nthrée\n")
        for path in ("/api/logs", "/logs"):
            async with session.get(path) as response:
                assert await response.text() == "own\n"
        async with session.get("/api/models/chat/logs?lines=0") as response:
            assert await response.text() == ""


async def test_followed_logs_come_as_text_lines_after_the_history(tmp_path: Path) -> None:
    """Chunked text, each line as it is printed, a clean end when the source ends."""
    facade = FakeFacade(a_model("chat"))
    facade.logs["chat"] = ["old"]
    async with serving(facade, tmp_path) as session, session.get("/api/models/chat/logs?follow=1") as response:
        assert await response.content.readline() == b"old\n"
        facade.publish("new")
        assert await response.content.readline() == b"new\n"
        facade.publish(None)
        assert await response.content.read() == b""
        assert "Content-Length" not in response.headers


async def test_followed_logs_are_events_for_a_client_that_wants_events(tmp_path: Path) -> None:
    """Accept: text/event-stream gives one JSON line per event."""
    facade = FakeFacade(a_model("chat"))
    facade.logs["chat"] = ["old"]
    headers = {"Accept": "text/event-stream"}
    async with serving(facade, tmp_path) as session, session.get("/api/models/chat/logs?follow=1", headers=headers) as response:
        assert response.content_type == "text/event-stream"
        assert await response.content.readuntil(b"}\n\n") == b'retry: 2000\n\ndata: {"line":"old"}\n\n'


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/logs/stream", b"own\nchat 1\nembed 1\n"),
        ("/logs/stream/proxy", b"own\n"),
        ("/logs/stream/upstream", b"chat 1\nembed 1\n"),
        ("/logs/stream/embed", b"embed 1\n"),
        ("/logs/stream/embed?no-history", b""),
    ],
)
async def test_log_stream_aliases(path: str, wanted: bytes, tmp_path: Path) -> None:
    """llama-swap's four streams, with and without history."""
    facade = FakeFacade(a_model("chat"), a_model("embed"))
    facade.logs = {"": ["own"], "chat": ["chat 1"], "embed": ["embed 1"]}
    async with serving(facade, tmp_path) as session, session.get(path) as response:
        facade.publish("news")
        facade.publish(None)
        got = await response.content.read()
    assert got.startswith(wanted)
    assert set(got[len(wanted) :].split()) == {b"news"}


# ---------------------------------------------------------------------------------------------------------------- events


async def test_events_stream_with_ids_and_the_headers_that_stop_buffering(tmp_path: Path) -> None:
    """B10: first bytes at once, X-Accel-Buffering, no-cache, no length; each event as it happens."""
    facade = FakeFacade()
    began = time.perf_counter()
    async with serving(facade, tmp_path) as session, session.get("/api/events?state=0") as response:
        assert await response.content.readuntil(b"\n\n") == b"retry: 2000\n: events of greenroom\n\n"
        assert time.perf_counter() - began < 2.0
        assert response.content_type == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Cache-Control"] == "no-cache"
        assert "Content-Length" not in response.headers
        facade.publish(an_event(7, "two\nlines"))
        assert await response.content.readline() == b"id: 7\n"
        data = await response.content.readline()
        assert json.loads(data.removeprefix(b"data: ")) == an_event(7, "two\nlines")
        assert await response.content.readline() == b"\n"


async def test_a_returning_reader_gets_what_it_missed_once(tmp_path: Path) -> None:
    """Last-Event-ID: later events of the past, then news; none twice."""
    facade = FakeFacade()
    facade.past = [an_event(n) for n in range(1, 6)]
    headers = {"Last-Event-ID": "3"}
    async with serving(facade, tmp_path) as session, session.get("/api/events?state=0", headers=headers) as response:
        await response.content.readuntil(b"\n\n")
        for event in (an_event(5), an_event(6), None):
            facade.publish(event)
        got = (await response.content.read()).decode()
    assert [line for line in got.splitlines() if line.startswith("id:")] == ["id: 4", "id: 5", "id: 6"]


async def test_recent_events_are_json_without_follow(tmp_path: Path) -> None:
    """`?follow=0&limit=2`: the newest two, oldest first."""
    facade = FakeFacade()
    facade.past = [an_event(n) for n in range(1, 6)]
    async with serving(facade, tmp_path) as session:
        assert await asked(session, "GET", "/api/events?follow=0&limit=2") == (200, {"events": [an_event(4), an_event(5)]})


async def test_a_silent_stream_says_that_it_is_alive(tmp_path: Path) -> None:
    """A comment at least every heartbeat (15 s by default) keeps middle boxes from cutting it."""
    assert StreamLimits().heartbeat_s == 15.0
    async with serving(FakeFacade(), tmp_path, StreamLimits(heartbeat_s=0.05)) as session, session.get("/api/events?state=0") as response:
        await response.content.readuntil(b"\n\n")
        assert await response.content.readuntil(b"\n\n") == b": still here\n\n"
        assert await response.content.readuntil(b"\n\n") == b": still here\n\n"


async def test_a_source_that_breaks_is_not_a_clean_end(tmp_path: Path) -> None:
    """The connection is reset, so that no client takes the rest for the whole."""
    facade = FakeFacade()
    async with serving(facade, tmp_path) as session, session.get("/api/events?state=0") as response:
        await response.content.readuntil(b"\n\n")
        facade.publish(RuntimeError("broken"))
        with pytest.raises(aiohttp.ClientError):
            await response.content.read()


async def test_a_reader_that_never_reads_is_cut_and_costs_no_memory(tmp_path: Path) -> None:
    """B45: the backlog stays bounded, the others read on, the dead one is cut after the stall limit."""
    facade = FakeFacade()
    limits = StreamLimits(backlog_len_max=10, stall_s_max=0.3, look_s=0.05)
    async with serving(facade, tmp_path, limits) as session:
        dead = await open_and_read_nothing(tmp_path / "run" / "control.sock")
        await facade.subscribed.wait()
        async with session.get("/api/events?state=0") as good:
            await good.content.readuntil(b"\n\n")
            assert len(facade.subscribers) == 2
            number = 0
            while len(facade.subscribers) == 2:
                number += 1
                facade.publish(an_event(number, "x" * 8192))
                assert await good.content.readuntil(b"\n\n")
            facade.publish(an_event(number + 1, "last"))
            assert b'"last"' in await good.content.readuntil(b"\n\n")
        dead.close()


class Trickle:
    """A request, its transport and its answer: at each look less is left unsent, down to what the reader never takes."""

    def __init__(self, *left: int) -> None:
        self.transport, self._left, self._done = self, list(left), asyncio.Event()

    def get_write_buffer_size(self) -> int:
        if len(self._left) == 1:
            self._done.set()
        return self._left.pop(0)

    async def write(self, piece: bytes) -> None:
        await self._done.wait()


async def test_a_reader_that_takes_a_little_at_a_time_is_not_cut() -> None:
    """However much longer than the stall limit the whole takes; one that takes nothing any more is."""
    readers = Readers(StreamLimits(stall_s_max=0.02))
    slow: Any = Trickle(*range(9, -1, -1))
    await readers._send(slow, slow, b"snapshot")
    assert not slow._left
    dead: Any = Trickle(9, 8, 8, 7)
    with pytest.raises(TimeoutError):
        await readers._send(dead, dead, b"snapshot")
    assert dead._left == [7]


async def test_a_slow_reader_is_told_how_much_it_missed(tmp_path: Path) -> None:
    """The newest events stay; the dropped ones are counted in the stream itself."""
    facade = FakeFacade()
    async with serving(facade, tmp_path, StreamLimits(backlog_len_max=3)) as session, session.get("/api/events?state=0") as response:
        await response.content.readuntil(b"\n\n")
        for number in range(1, 11):  # before the writer runs again
            facade.publish(an_event(number))
        facade.publish(None)
        events = [json.loads(line[6:]) for line in (await response.content.read()).splitlines() if line.startswith(b"data: ")]
    assert [(one["kind"], one.get("count")) for one in events[:1]] == [("dropped", 7)]
    assert [one["id"] for one in events[1:]] == [8, 9, 10]


async def test_readers_that_hang_up_are_noticed_soon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A silent stream looks for its reader; fifty that leave, early or late, leave no subscriber and no log line behind."""
    facade = FakeFacade()
    path = tmp_path / "run" / "control.sock"
    loop = asyncio.get_running_loop()
    async with serving(facade, tmp_path, StreamLimits(look_s=0.05)):
        for _ in range(25):
            (await open_and_read_nothing(path)).close()
        late = [await open_and_read_nothing(path) for _ in range(25)]
        for one in late:
            assert (await loop.sock_recv(one, 4096)).startswith(b"HTTP/1.1 200")
        assert facade.subscribers
        for one in late:
            one.close()
        async with asyncio.timeout(20):
            await facade.deserted.wait()
    assert [one.getMessage() for one in caplog.records if one.levelname != "DEBUG"] == []


async def test_streams_are_bounded_in_number(tmp_path: Path) -> None:
    """One more than the limit is refused with Retry-After; status still answers."""
    facade = FakeFacade()
    async with serving(facade, tmp_path, StreamLimits(readers_max=1)) as session, session.get("/api/events?state=0") as first:
        await first.content.readuntil(b"\n\n")
        async with session.get("/api/events?state=0") as second:
            assert (second.status, second.headers["Retry-After"]) == (503, "5")
            assert (await second.json())["error"]["code"] == "too_many_streams"
        assert (await asked(session, "GET", "/api/status"))[0] == 200


async def test_shutdown_ends_open_streams_at_once(tmp_path: Path) -> None:
    """A reader does not hold the server up, and its subscription is given back."""
    facade = FakeFacade()
    path = tmp_path / "run" / "control.sock"
    runner = await start_control(make_app(facade), path)
    async with (
        aiohttp.ClientSession("http://control", connector=aiohttp.UnixConnector(str(path))) as session,
        session.get("/api/events?state=0") as response,
    ):
        await response.content.readuntil(b"\n\n")
        began = time.perf_counter()
        await runner.cleanup()
        assert time.perf_counter() - began < 1.5
        assert await response.content.read() == b""
    assert not facade.subscribers
    assert not path.exists()


async def open_and_read_nothing(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, str(path))
    await loop.sock_sendall(connection, b"GET /api/events?state=0 HTTP/1.1\r\nHost: control\r\n\r\n")
    return connection


# ---------------------------------------------------------------------------------------------------------------- socket


async def test_the_socket_is_private(tmp_path: Path) -> None:
    """0600 in a 0700 folder: no other user of the machine reaches the control plane."""
    path = tmp_path / "run" / "control.sock"
    runner = await start_control(make_app(FakeFacade()), path)
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    await runner.cleanup()
    assert list(path.parent.iterdir()) == []


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    """What a killed supervisor left is cleaned up; a running one is not robbed."""
    path = tmp_path / "run" / "control.sock"
    path.parent.mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    runner = await start_control(make_app(FakeFacade()), path)
    with pytest.raises(OSError, match="another greenroom already answers"):
        await start_control(make_app(FakeFacade()), path)
    assert path.exists()
    await runner.cleanup()


async def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    """The socket is never put where others could replace it."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        await start_control(make_app(FakeFacade()), folder / "control.sock")


async def test_a_path_too_long_for_a_socket_is_one_sentence(tmp_path: Path) -> None:
    """Not a bare `AF_UNIX path too long`."""
    with pytest.raises(OSError, match="107 bytes at most"):
        await start_control(make_app(FakeFacade()), tmp_path / ("d" * 120) / "control.sock")
    assert os.umask(0o022) is not None
