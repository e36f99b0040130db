"""A reverse proxy that serves another server below a path prefix, as nginx does with `location /gr/`."""

from __future__ import annotations

from typing import Self

import aiohttp
from aiohttp import web

HOPS = frozenset({"transfer-encoding", "content-length", "connection", "content-encoding"})


class Front:
    """`async with Front(server_url, "/gr") as front: ... front.url`; remembers what was asked beside its prefix."""

    def __init__(self, behind: str, prefix: str) -> None:
        self._behind, self._prefix = behind, prefix
        self.stray: list[str] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._session = aiohttp.ClientSession(auto_decompress=False)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}{self._prefix}"  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if not request.raw_path.startswith(f"{self._prefix}/"):
            self.stray.append(request.raw_path)
            raise web.HTTPNotFound
        target = self._behind + request.raw_path[len(self._prefix) :]
        headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}  # Host is kept
        body = await request.read() or None
        async with self._session.request(request.method, target, headers=headers, data=body, allow_redirects=False) as answer:
            response = web.StreamResponse(
                status=answer.status, headers=[(name, value) for name, value in answer.headers.items() if name.lower() not in HOPS]
            )
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            except (ConnectionError, aiohttp.ClientError):
                pass
            return response
