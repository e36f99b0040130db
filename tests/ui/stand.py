"""An invented server for the dashboard: its real files, and an API that says what a test wants said.

Every call is remembered; answers can be held back, refused or left out, and the server can go away and come back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

from greenroom.control import pages
from tests.ui import scenes
from tests.ui.scenes import Json


class Stand:
    """`async with Stand(scenes.turns) as stand: ... stand.url`"""

    def __init__(self, scene: Callable[[float], Json], **absent: bool) -> None:
        self.now = time.time()
        self.status = scene(self.now)
        self.me: Json | None = {"key_name": "ops", "scopes": ["inference", "view", "admin"]}
        self.timeline: Json | None = scenes.timeline(self.now)
        self.requests: list[Json] | None = scenes.requests(self.now)
        self.advice: Json | None = scenes.advice(self.now)
        self.events = scenes.events(self.now)
        self.calls: list[tuple[str, str, bytes]] = []
        self.refuse: tuple[int, str] | None = None  # what every operation is answered with
        self.hold_s = 0.0  # how long an operation takes
        self.may_tell = asyncio.Event()  # until it is set, nobody is told the state
        self.may_tell.set()
        self.denied: tuple[int, str] | None = None  # what /api answers
        self.key = ""  # "" = none is needed
        self.older = False
        self._readers: set[asyncio.Queue[Json]] = set()
        self.logs_open = 0
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tick(self) -> float:
        """The server's clock goes on."""
        passed = time.time() - self.now
        self.now += passed
        return self.now

    def asked(self, method: str, start: str = "") -> list[str]:
        return [target for one, target, _ in self.calls if one == method and target.startswith(start)]

    def plain(self) -> Self:
        """As before there were timelines, lists of requests, advice, and keys with scopes."""
        self.status = scenes.bare(self.now)
        self.me = self.timeline = self.requests = self.advice = None
        self.older = True
        return self

    def tell(self, model: str, kind: str, text: str) -> None:
        """Something happened; every open page hears of it."""
        event = {"id": len(self.events) + 1, "at": self.tick(), "kind": kind, "model": model, "level": "info", "text": text}
        self.events.append(event)
        for reader in self._readers:
            reader.put_nowait(event)

    def told(self, message: Json) -> None:
        """One message more of the stream, of whatever kind."""
        for reader in self._readers:
            reader.put_nowait(message)

    def entry(self, id: str) -> Json:
        return next(one for one in self.status["models"] if one["id"] == id)

    # ------------------------------------------------------------------------------------------------ serving

    async def __aenter__(self) -> Self:
        await self.come()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.go()

    async def come(self) -> None:
        app = web.Application(middlewares=[self._remember])
        pages.add_pages(app.router, pages.read_pages())
        app.router.add_get("/api/status", self._status)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/me", self._me)
        app.router.add_get("/api/timeline", self._timeline)
        app.router.add_get("/api/advice", self._advice)
        app.router.add_get("/api/requests", self._requests)
        app.router.add_delete("/api/requests/{id}", self._cancel)
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/embeddings", self._embed)
        app.router.add_post("/v1/rerank", self._rerank)
        app.router.add_post("/api/models/{id:(?s:.+)}/{verb:load|unload|sleep|wake|pin|unpin}", self._operate)
        app.router.add_get("/api/models/{id:(?s:.+)}/logs", self._logs)
        app.router.add_get("/api/models/{id:(?s:.+)}/why", self._why)
        app.router.add_get("/api/models/{id:(?s:.+)}", self._model)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def go(self) -> None:
        for reader in self._readers:
            reader.put_nowait({})
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _remember(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if not request.path.startswith("/ui/"):
            self.calls.append((request.method, request.raw_path, await request.read()))
            if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
                return refusal(401, "this server asks for a key: send Authorization: Bearer KEY")
            if self.denied and request.path.startswith("/api/") and request.path != "/api/me":
                return refusal(*self.denied)
        response: web.StreamResponse = await handler(request)
        return response

    async def _me(self, _: web.Request) -> web.Response:
        return told_or_404(self.me)

    async def _timeline(self, _: web.Request) -> web.Response:
        return told_or_404(self.timeline)

    async def _advice(self, _: web.Request) -> web.Response:
        return told_or_404(self.advice)

    async def _status(self, _: web.Request) -> web.Response:
        await self.may_tell.wait()
        if "now" in self.status:
            self.status["now"] = self.tick()
        return web.json_response(self.status)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("follow") == "0":
            return web.json_response({"events": self.events[-100:]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": events\n\n")
        mine: asyncio.Queue[Json] = asyncio.Queue()
        self._readers.add(mine)
        try:
            while event := await mine.get():
                head = f"id: {event['id']}\n" if "id" in event else ""
                await response.write(f"{head}data: {json.dumps(event)}\n\n".encode())
        except ConnectionError:
            pass
        finally:
            self._readers.discard(mine)
        return response

    async def _requests(self, request: web.Request) -> web.Response:
        if self.requests is None:
            return refusal(404, "there is no such route")
        wanted, outcome = request.query.get("model"), request.query.get("outcome")
        after, most = request.query.get("cursor") or "", int(request.query.get("limit") or 100)
        open_ = [one for one in self.requests if one["outcome"] in ("waiting", "running")] if not after else []
        ended = [one for one in self.requests if one["outcome"] not in ("waiting", "running")] if outcome != "open" else []
        begin = next(i for i, one in enumerate(ended) if one["id"] == after) + 1 if after else 0
        rows = ended[begin : begin + most]
        page = [one for one in (*open_, *rows) if not wanted or one["model"] == wanted]
        return web.json_response({"requests": page, "cursor": rows[-1]["id"] if len(ended) > begin + most else None})

    async def _cancel(self, request: web.Request) -> web.Response:
        for one in self.requests or ():
            if one["id"] == request.match_info["id"]:
                one["outcome"] = "cancelled"
        return web.json_response({"cancelled": request.match_info["id"]})

    async def _operate(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.hold_s)
        if self.refuse:
            return refusal(*self.refuse)
        id, verb = request.match_info["id"], request.match_info["verb"]
        return web.json_response({"model": id, "operation": verb, "done": True, "state": "ready", "message": f"{verb} of {id} is done"})

    async def _model(self, request: web.Request) -> web.Response:
        entry = self.entry(request.match_info["id"])
        return web.json_response(entry if self.older else scenes.details(self.tick(), entry))

    async def _why(self, request: web.Request) -> web.Response:
        entry = self.entry(request.match_info["id"])
        if entry.get("absent"):
            return web.json_response(scenes.why_absent(self.tick(), entry))
        story = scenes.why(self.tick(), entry["id"])
        return web.json_response(
            {"model": request.match_info["id"], "state": "ready", "story": story[:-1], "sleep_off": ""} if self.older else story
        )

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        lines = [
            "GET /health 200", "engine: 4 running, 0 waiting, KV cache 38 %", "POST /v1/chat/completions 200 in 3.8 s",
            "\x1b[31mgeneration throughput 237 tok/s\x1b[0m, prefix hits 64 %", "<b>not bold</b>",
        ]  # fmt: skip
        self.logs_open += 1
        try:
            for i in range(60):
                await response.write(f"data: {json.dumps({'line': f'12:03:{i:02} {lines[i % len(lines)]}'})}\n\n".encode())
            while self._runner is not None and not (request.transport is None or request.transport.is_closing()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # the log stays open until one of the two goes
        except ConnectionError:
            pass
        finally:
            self.logs_open -= 1
        return response

    # ------------------------------------------------------------------------------------------------ /v1

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": one["id"]} for one in self.status["models"]]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Greenroom-Start": "wake", "X-Greenroom-Wait-Ms": "6012"}
        )
        await response.prepare(request)
        await response.write(b": loading, about 6 s\n\n")
        for word in ("Put ", "requests that share a model ", "next to each other, ", "<i>then</i> ", "the swap between them disappears."):
            await response.write(f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n".encode())
            await asyncio.sleep(0.05)
        await response.write(b'data: {"choices":[],"usage":{"completion_tokens":48}}\n\ndata: [DONE]\n\n')
        return response

    async def _embed(self, request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        vectors = [[float(len(text)), 3.0 + i, 1.0] for i, text in enumerate(texts)]
        return web.json_response(
            {"data": [{"index": i, "embedding": one} for i, one in enumerate(vectors)]}, headers={"X-Greenroom-Start": "hot"}
        )

    async def _rerank(self, request: web.Request) -> web.Response:
        documents = (await request.json())["documents"]
        return web.json_response(
            {"results": [{"index": i, "relevance_score": 0.9 / (i + 1)} for i in range(len(documents))]},
            headers={"X-Greenroom-Start": "hot"},
        )


def told_or_404(value: Any) -> web.Response:
    return refusal(404, "there is no such route") if value is None else web.json_response(value)


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}, status=status)
