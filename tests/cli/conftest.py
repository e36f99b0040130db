"""A control plane on a TCP port, in its own thread, for commands run in this one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from greenroom.cli import main
from greenroom.control.app import make_app
from tests.control.fake import FakeFacade


class Served:
    """A running server: `call` runs something on its loop, `run` a command against it."""

    def __init__(self, facade: FakeFacade, loop: asyncio.AbstractEventLoop, url: str, runner: web.AppRunner) -> None:
        self.facade, self.loop, self.url, self.runner = facade, loop, url, runner

    def call(self, work: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(work)

    def run(self, *args: str, **env: str) -> Result:
        return run(*args, GREENROOM_URL=self.url, **env)


def run(*args: str, **env: str) -> Result:
    clean: dict[str, str | None] = {"GREENROOM_URL": None, "GREENROOM_API_KEY": None, "COLUMNS": "200"}
    return CliRunner().invoke(main, list(args), env={**clean, **env})


def serve_in_thread(app: web.Application, ready: Future[tuple[asyncio.AbstractEventLoop, int, web.AppRunner]]) -> None:
    async def start() -> tuple[int, web.AppRunner]:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        return port, runner

    loop = asyncio.new_event_loop()
    port, runner = loop.run_until_complete(start())
    ready.set_result((loop, port, runner))
    loop.run_forever()
    loop.run_until_complete(runner.cleanup())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def served_app(app: web.Application, facade: FakeFacade) -> Iterator[Served]:
    ready: Future[tuple[asyncio.AbstractEventLoop, int, web.AppRunner]] = Future()
    thread = threading.Thread(target=serve_in_thread, args=(app, ready))
    thread.start()
    loop, port, runner = ready.result(timeout=20)
    try:
        yield Served(facade, loop, f"http://127.0.0.1:{port}", runner)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=20)


@pytest.fixture
def served() -> Iterator[Served]:
    facade = FakeFacade()
    yield from served_app(make_app(facade), facade)
