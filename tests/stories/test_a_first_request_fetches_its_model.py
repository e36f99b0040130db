"""A model whose files are not here yet is fetched once, by whoever asks first; everybody is told, nobody waits for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from greenroom.store.library import Library
from greenroom.store.pull import Puller
from greenroom.store.references import parse

from .rig import WAIT_S_MAX, Fake, Rig, fake


@dataclass(slots=True)
class Origin:
    """A web server that has a model, and gives the second half of it away only when told to."""

    body: bytes
    port: int = 0
    gets: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/tiny.gguf"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.broken:
            return web.Response(status=500)
        if request.method == "HEAD":
            return web.Response(headers={"Content-Length": str(len(self.body)), "ETag": '"1"'})
        self.gets.append(request.headers.get("Range", ""))
        span = request.http_range
        start, stop = span.start or 0, min(span.stop or len(self.body), len(self.body))
        ranged = request.headers.get("Range")
        headers = {"ETag": '"1"', **({"Content-Range": f"bytes {start}-{stop - 1}/{len(self.body)}"} if ranged else {})}
        response = web.StreamResponse(status=206 if ranged else 200, headers=headers)
        response.content_length = stop - start
        await response.prepare(request)
        middle = start + (stop - start) // 2
        await response.write(self.body[start:middle])
        await self.go.wait()
        await response.write(self.body[middle:stop])
        return response


@pytest.fixture
def model(tiny_chat: Path) -> bytes:
    return tiny_chat.read_bytes()


@asynccontextmanager
async def origin(model: bytes) -> AsyncIterator[Origin]:
    made = Origin(model)
    app = web.Application()
    app.router.add_route("*", "/tiny.gguf", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.port = runner.addresses[0][1]
    try:
        yield made
    finally:
        made.go.set()
        await runner.cleanup()


def from_there(url: str, **config: object) -> Fake:
    return fake(config={"model": url, "env": {"WEIGHTS": "${MODEL_PATH}"}, **config})


def rig(tmp_path: Path, **models: Fake) -> Rig:
    return Rig(tmp_path, models, env={"GREENROOM_MODELS": str(tmp_path / "models")})


async def fetching(stage: Rig, waiting: int | None = None) -> dict[str, object]:
    """What is told of a's fetch, once its size is known, and so many wait for it."""
    async with asyncio.timeout(WAIT_S_MAX):
        async for _ in looks():
            told = (await stage.model("a"))["fetch"]
            if told is not None and told["total_bytes"] and waiting in (None, told["waiting"]):
                return dict(told)
    raise AssertionError("looks never end")


async def looks() -> AsyncIterator[None]:
    while True:
        yield
        await asyncio.sleep(0.02)


async def test_all_who_ask_wait_for_one_fetch_and_are_answered(tmp_path: Path, model: bytes) -> None:
    """It is seen while it goes on, another model is served meanwhile, and the next start finds the files."""
    async with origin(model) as there:
        async with rig(tmp_path, a=from_there(there.url), b=fake()) as stage:
            asked = [asyncio.create_task(stage.chat("a")) for _ in range(3)]
            told = await fetching(stage)
            assert (told["total_bytes"], told["reference"]) == (len(there.body), there.url)
            assert (await stage.chat("b")).status == 200
            await fetching(stage, waiting=3)
            there.go.set()
            assert [reply.status for reply in await asyncio.gather(*asked)] == [200, 200, 200]
            kinds = await stage.kinds("a")
            assert [kinds.count(kind) for kind in ("fetching", "fetched")] == [1, 1]
            assert (await stage.model("a"))["fetch"] is None
            assert (await stage.model("a"))["starts"] == 1
        fetched = len(there.gets)
        (tmp_path / "again").mkdir()
        again = Rig(tmp_path / "again", {"a": from_there(there.url)}, env={"GREENROOM_MODELS": str(tmp_path / "models")})
        async with again:
            assert (await again.chat("a")).status == 200
            assert "fetching" not in await again.kinds("a")
        assert len(there.gets) == fetched


async def test_a_client_that_leaves_leaves_the_fetch_to_the_next(tmp_path: Path, model: bytes) -> None:
    """What was fetched for nobody serves whoever comes next."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url)) as stage:
        gone = await stage.ask("a")
        await fetching(stage)
        assert "1 request waits for it" in await stage.why("a")
        gone.close()
        await fetching(stage, waiting=0)
        there.go.set()
        assert (await stage.chat("a")).status == 200
        assert (await stage.kinds("a")).count("fetching") == 1


async def test_a_fetch_that_fails_is_told_and_tried_again_later(tmp_path: Path, model: bytes) -> None:
    """503 with the reason, at once for those who come right after, and the origin is not asked each time."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url)) as stage:
        there.broken = True
        first, second = await stage.chat("a"), await stage.chat("a")
        assert [(reply.status, reply.error["code"]) for reply in (first, second)] == [(503, "fetch_failed")] * 2
        assert "a could not be fetched" in first.error["message"]
        assert (await stage.kinds("a")).count("fetching") == 1
        assert int(second.headers["retry-after"]) >= 1
        assert "or later tries again" in await stage.why("a")


async def test_an_operator_stops_a_fetch_and_who_waits_is_told(tmp_path: Path, model: bytes) -> None:
    """`unload` ends it; `load` takes it up where it was, and waits for the engine too."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url)) as stage:
        asked = asyncio.create_task(stage.chat("a"))
        await fetching(stage)
        assert (await stage.unload("a")).status == 200
        reply = await asked
        assert (reply.status, reply.error["code"]) == (503, "fetch_failed")
        there.go.set()
        assert (await stage.load("a")).status == 200
        assert (await stage.model("a"))["state"] == "ready"


async def test_who_cannot_wait_is_refused_at_once(tmp_path: Path, model: bytes) -> None:
    """A deadline that a fetch cannot meet, a full queue, and a model that must not be fetched."""
    models = {"never": from_there("http://127.0.0.1:9/tiny.gguf", pull="never")}
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url, queue_limit=1), **models) as stage:
        body = b'{"model": "a", "messages": []}'
        hurried = await stage.send("POST", "/v1/chat/completions", body, {"X-Greenroom-Deadline-Ms": "50"})
        reply = await hurried.rest()
        assert (reply.status, reply.error["code"]) == (503, "deadline")
        asked = asyncio.create_task(stage.chat("a"))
        await fetching(stage, waiting=1)
        full = await stage.chat("a")
        assert (full.status, full.error["code"]) == (429, "queue_full")
        never = await stage.chat("never")
        assert (never.status, never.error["code"]) == (503, "misconfigured")
        assert "greenroom pull" in never.error["message"]
        pinned = await stage.api("POST", "/api/models/never/pin")
        assert "pinned, and cannot start: " in pinned.json["message"]
        assert "greenroom pull" in (await stage.api("GET", "/api/models/never")).json["missing"], "which the terminal goes by"
        there.go.set()
        assert (await asked).status == 200


@pytest.mark.parametrize("pinned", [True, False])
async def test_what_is_loaded_at_start_is_fetched_at_start(tmp_path: Path, model: bytes, pinned: bool) -> None:
    """A pinned model without being asked for; any other only then.  A shutdown ends a fetch at once."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url, pin=pinned)) as stage:
        if pinned:
            await fetching(stage)
        else:
            assert (await stage.model("a"))["fetch"] is None
            assert not there.gets


async def pin(stage: Rig, verb: str = "pin") -> str:
    reply = await stage.api("POST", f"/api/models/a/{verb}")
    assert reply.status == 200
    return str(reply.json["message"])


async def test_a_pin_brings_its_model_here_and_in(tmp_path: Path, model: bytes) -> None:
    """As one of the configuration does: nobody asks for it, and it stays pinned when its files tell what it is."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url)) as stage:
        assert await pin(stage) == "a is pinned, its files are fetched, and it is loaded when they are here"
        await fetching(stage)
        there.go.set()
        await stage.wait_kind("a", "ready")
        told = await stage.model("a")
        assert (told["state"], told["pinned"], told["fetch"]) == ("ready", True, None)
        assert (await stage.kinds("a")).count("fetching") == 1


async def test_a_pin_that_is_withdrawn_leaves_what_has_come(tmp_path: Path, model: bytes) -> None:
    """Its fetch ends, unless somebody asked for the model meanwhile; the next one goes on with it, and is not refused."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url)) as stage:
        await pin(stage)
        await fetching(stage)
        await pin(stage, "unpin")
        assert "what has come is kept" in await stage.wait_kind("a", "fetch_stopped")
        told = await stage.model("a")
        assert (told["fetch"], told["pinned"]) == (None, False)
        await pin(stage)
        asked = asyncio.create_task(stage.chat("a"))
        await fetching(stage, waiting=1)
        await pin(stage, "unpin")
        await fetching(stage, waiting=1)
        there.go.set()
        assert (await asked).status == 200
        assert not (await stage.model("a"))["pinned"]


async def test_a_pin_whose_fetch_fails_is_tried_again_by_itself(tmp_path: Path, model: bytes) -> None:
    """Said so; an unload holds it off, and the next pin begins at once."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url)) as stage:
        there.broken = True
        await pin(stage)
        await stage.wait_kind("a", "fetch_failed")
        assert "that is tried again" in await stage.why("a")
        assert (await stage.unload("a")).status == 200
        assert "or later tries again" in await stage.why("a")
        there.broken = False
        there.go.set()
        await pin(stage)
        await stage.wait_kind("a", "ready")


async def test_a_change_that_is_half_written_keeps_nobody_from_what_was_fetched(tmp_path: Path, model: bytes) -> None:
    """The file is read when an operator says so, not because files came."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url)) as stage:
        asked = asyncio.create_task(stage.chat("a"))
        await fetching(stage)
        whole = stage.config_path.read_text()
        stage.config_path.write_text(whole[: len(whole) // 2])
        there.go.set()
        assert (await asked).status == 200
        stage.config_path.write_text(whole)


async def test_a_model_that_is_taken_out_of_the_configuration_is_fetched_no_further(tmp_path: Path, model: bytes) -> None:
    """Who waited is told that there is none; its fetch ends."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url), b=fake()) as stage:
        asked = asyncio.create_task(stage.chat("a"))
        await fetching(stage)
        stage.write_config({"b": fake()})
        stage.reload()
        reply = await asked
        assert (reply.status, reply.error["code"]) == (404, "unknown_model")
        assert [one["id"] for one in (await stage.status())["models"]] == ["b"]


async def test_a_reference_that_changes_is_fetched_instead(tmp_path: Path, model: bytes) -> None:
    """Who waits goes on waiting, for the new one."""
    async with origin(model) as there, origin(model) as other, rig(tmp_path, a=from_there(there.url)) as stage:
        asked = asyncio.create_task(stage.chat("a"))
        await fetching(stage)
        other.go.set()
        stage.write_config({"a": from_there(other.url)})
        stage.reload()
        assert (await asked).status == 200
        assert other.gets


async def test_two_models_of_one_reference_are_fetched_once_and_both_served(tmp_path: Path, model: bytes) -> None:
    """As two sets of flags on the same weights are."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url), twin=from_there(there.url)) as stage:
        asked = [asyncio.create_task(stage.chat(name)) for name in ("a", "twin")]
        await fetching(stage)
        there.go.set()
        assert [reply.status for reply in await asyncio.gather(*asked)] == [200, 200]
        assert len(there.gets) == 1, there.gets


async def test_a_request_that_waits_for_files_can_be_ended_by_an_operator(tmp_path: Path, model: bytes) -> None:
    """It is listed like any other, and gets its answer; the fetch goes on."""
    async with origin(model) as there, rig(tmp_path, a=from_there(there.url)) as stage:
        asked = asyncio.create_task(stage.chat("a"))
        await fetching(stage, waiting=1)
        (listed,) = (await stage.api("GET", "/api/requests")).json["requests"]
        assert (await stage.api("DELETE", f"/api/requests/{listed['id']}")).status == 200
        reply = await asked
        assert (reply.status, reply.error["code"]) == (410, "cancelled")
        await fetching(stage, waiting=0)
        there.go.set()
        assert (await stage.chat("a")).status == 200


async def test_who_streams_is_told_how_far_the_fetch_is(tmp_path: Path, model: bytes) -> None:
    """In comments, which keep the connection alive as well."""
    async with origin(model) as there:
        stage = rig(tmp_path, a=from_there(there.url))
        stage.write_config({"a": from_there(there.url)}, limits={"keepalive_after_s": 0.1, "keepalive_every_s": 0.1})
        async with stage:
            asked = await stage.ask("a", stream=True)
            async with asyncio.timeout(WAIT_S_MAX):
                await asked.head()
                while not any(line.startswith(b":") and b"its files" in line for _, line in asked.reply.arrivals):
                    assert await asked._more()
            there.go.set()
            assert (await asked.rest()).done


async def test_what_comes_by_other_hands_is_seen_by_the_next_request(tmp_path: Path, model: bytes) -> None:
    """`greenroom pull` mends a model that must not be fetched, and saves the fetch of one that may."""
    async with origin(model) as there:
        there.go.set()
        models = {"never": from_there(there.url, pull="never"), "a": from_there(there.url)}
        async with rig(tmp_path, **models) as stage:
            assert (await stage.chat("never")).error["code"] == "misconfigured"
            await Puller(Library(tmp_path / "models")).pull(parse(there.url))
            assert (await stage.chat("never")).status == 200
            assert (await stage.chat("a")).status == 200
            assert "fetching" not in await stage.kinds("a")
