"""The yardstick: a relay of a few lines with aiohttp on both sides, without keys, limits, queue or accounts.

    python -m bench.bare_relay --port P --engine-port E [--loop asyncio|uvloop]

Every answer is streamed: a relay that knows nothing of its engines cannot tell which one will be long.
"""

from __future__ import annotations

import argparse
import asyncio

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

SESSION = web.AppKey("session", ClientSession)
DROPPED = frozenset({"host", "content-length", "transfer-encoding", "connection", "keep-alive"})
BODY_BYTES_MAX = 64 * 1024 * 1024


async def relay(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    headers = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
    async with request.app[SESSION].request(request.method, request.rel_url, data=body, headers=headers) as answer:
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in DROPPED}
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        async for data in answer.content.iter_any():
            await response.write(data)
        await response.write_eof()
        return response


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine-port", type=int, required=True)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    options = parser.parse_args()

    async def session(app: web.Application):  # type: ignore[no-untyped-def]
        base = f"http://127.0.0.1:{options.engine_port}"
        timeout = ClientTimeout(total=None)
        async with ClientSession(base, connector=TCPConnector(limit=0), timeout=timeout, auto_decompress=False) as app[SESSION]:
            yield

    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", relay)
    loop = uvloop.new_event_loop() if options.loop == "uvloop" else asyncio.new_event_loop()
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None, loop=loop)


if __name__ == "__main__":
    main()
