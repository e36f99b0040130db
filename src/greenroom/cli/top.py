"""`greenroom top`: what happens now, drawn anew whenever the server tells that something has changed.

The state comes from /api/events: a snapshot first, then changes.  Between two of them figures that only age are counted
on here; the server is asked for nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import click

from greenroom.cli import client, events, text, top_page

SENTENCES_KEPT = 50
SENTENCES_ASKED = 20
PLAIN_SENTENCES = 10  # where nobody watches
DRAW_S_LEAST = 0.15  # between two drawings
TICK_S = 1.0  # ages are counted on
SILENCE_S_MAX = 45.0  # three signs of life are missing
AGAIN_S = 2.0
PLAIN_COLUMNS = 120

GROWS = ("since_s", "idle_s", "oldest_s", "age_s", "served_s", "last_error_s")
SHRINKS = ("eta_s", "expected_s", "backoff_s", "retry_in_s", "in_s")


@click.command()
@client.server_options
@click.option("--json", "as_json", is_flag=True, help="One status object as JSON, and no more.")
def top(server: client.Server, as_json: bool) -> None:
    """Watch devices, models and the queue until Ctrl-C.

    Where the output is no terminal, one page is printed.
    """
    client.run(show(server, as_json))


async def show(server: client.Server, as_json: bool) -> None:
    async with client.Client(server) as asked:
        if not as_json and sys.stdout.isatty():
            await show_live(asked)
            return
        status = await asked.get("/api/status")
        if as_json:
            client.print_json(status)
            return
        told = (await asked.get("/api/events", follow=0, limit=PLAIN_SENTENCES))["events"]
    lines = top_page.page(status, told, width=columns(), now_unix_s=time.time(), ascii=text.is_ascii_terminal())
    click.echo("\n".join(line.plain for line in lines))


def columns() -> int:
    """What COLUMNS says; a file has no width of its own."""
    import os

    said = os.environ.get("COLUMNS", "")
    return int(said) if said.isdigit() and 20 <= int(said) <= 10_000 else PLAIN_COLUMNS


# ------------------------------------------------------------------ the state, as it is told


class State:
    """The status put together from messages; each part with the moment it was told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest: dict[str, Any] = {}
        self._devices: dict[str, Any] = {}
        self._models: dict[str, tuple[float, Any]] = {}
        self._queue: tuple[float, Any] = (0.0, {"length": 0, "oldest_s": 0.0, "models": []})
        self._peers: tuple[float, Any] = (0.0, [])
        self._seen: deque[tuple[Any, Any]] = deque(maxlen=2 * SENTENCES_KEPT)
        self.sentences: deque[dict[str, Any]] = deque(maxlen=SENTENCES_KEPT)
        self.is_known = False

    def take(self, message: dict[str, Any]) -> bool:
        """False: something is missing from here on, and only a new snapshot helps."""
        match message.get("kind"):
            case "snapshot":
                self._devices, self._models, self.is_known = {}, {}, True
                self._change(message)
            case "status":
                self._change(message)
            case kind:
                self._hear(message)
                return kind != "dropped"
        return True

    def _change(self, message: dict[str, Any]) -> None:
        now = self._clock()
        self._devices |= {one["id"]: one for one in message.get("devices", ())}
        self._models |= {one["id"]: (now, one) for one in message.get("models", ())}
        for id in message.get("removed", ()):
            self._models.pop(id, None)
        if "queue" in message:
            self._queue = (now, message["queue"])
        if "peers" in message:
            self._peers = (now, message["peers"])
        self._rest |= {name: message[name] for name in ("version", "advice") if name in message}
        self._rest["uptime"] = (now, message.get("uptime_s") or 0.0)

    def _hear(self, event: dict[str, Any]) -> None:
        name = (event.get("id"), event.get("at"))
        if name not in self._seen:  # told again after a new connection
            self._seen.append(name)
            self.sentences.append(event)

    def status(self) -> dict[str, Any]:
        """The whole, with ages as of now."""
        now = self._clock()
        told, uptime_s = self._rest.get("uptime", (now, 0.0))
        return {
            "version": self._rest.get("version", ""),
            "uptime_s": uptime_s + now - told,
            "devices": list(self._devices.values()),
            "models": [aged(one, now - at) for at, one in self._models.values()],
            "queue": aged(self._queue[1], now - self._queue[0]),
            "peers": aged(self._peers[1], now - self._peers[0]),
            "advice": self._rest.get("advice") or {},
        }


def aged(value: Any, seconds: float) -> Any:
    """The same after some time in which nothing was told of it."""
    if isinstance(value, list):
        return [aged(one, seconds) for one in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, one in value.items():
        if isinstance(one, float | int) and name in GROWS and one:
            found[name] = one + seconds
        elif isinstance(one, float | int) and name in SHRINKS:
            found[name] = max(0.0, one - seconds)
        else:
            found[name] = aged(one, seconds)
    return found


# ------------------------------------------------------------------ the screen


class Lost(Exception):
    """The events ended; its text says how."""


async def show_live(asked: client.Client) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    state, console, is_ascii = State(), Console(highlight=False), text.is_ascii_terminal()
    messages = follow(asked, state)
    await anext(messages)  # who gets no answer at all is told so on a clean screen
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:

        def draw(lost: str) -> None:
            width, height = console.size
            lines = top_page.page(
                state.status(),
                list(state.sentences),
                width=width,
                height=height,
                now_unix_s=time.time(),
                ascii=is_ascii,
                lost=lost,
                url=asked.server.url,
            )
            live.update(Text("\n", no_wrap=True, overflow="crop", end="").join(lines), refresh=True)

        draw("")
        async for lost in messages:
            draw(lost)


async def follow(asked: client.Client, state: State) -> AsyncIterator[str]:
    """Yields whenever it is time to draw: "" while connected, else since when and why not.  The first connection must succeed."""
    lost = ""
    while True:
        try:
            async for _ in connected(asked, state):
                lost = ""
                yield lost
        except client.Fault as fault:
            if not state.is_known:
                raise
            why = fault.format_message()
        except Lost as fault:
            why = str(fault)
        lost = lost or f"no connection since {text.clock(time.time(), time.time())}: {why}"
        yield lost
        await asyncio.sleep(AGAIN_S)


async def connected(asked: client.Client, state: State) -> AsyncIterator[None]:
    """One connection; yields when something was told, not too often, and when ages have to be counted on."""
    wake, ended = asyncio.Event(), asyncio.get_running_loop().create_future()
    heard_at = time.monotonic()

    async def lines() -> AsyncIterator[str]:
        nonlocal heard_at
        async for line in asked.lines("/api/events", accept="text/event-stream", limit=SENTENCES_ASKED):
            heard_at = time.monotonic()
            yield line

    async def read() -> None:
        try:
            async for message in events.parsed(lines()):
                if not state.take(message):
                    raise Lost("this reader was too slow")
                wake.set()
            raise Lost("the server stopped")
        except (client.Fault, Lost) as fault:
            ended.set_result(fault)
        except ValueError:
            ended.set_result(Lost("the server said what is no event"))
        finally:
            wake.set()

    is_fresh = False
    reading = asyncio.create_task(read())
    try:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), TICK_S)
            if ended.done():
                raise ended.result()
            if reading.done():
                reading.result()  # a fault of ours
            if time.monotonic() - heard_at > SILENCE_S_MAX:
                raise Lost("the server fell silent")
            is_fresh = is_fresh or (wake.is_set() and state.is_known)
            wake.clear()
            if is_fresh:
                yield
                await asyncio.sleep(DRAW_S_LEAST)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
