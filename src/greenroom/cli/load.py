"""`greenroom load|unload|sleep|wake|pin|unpin`: ask for it, show how it goes, tell how it ended."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import click

from greenroom.cli import client, text
from greenroom.cli.client import Client, Fault, Server
from greenroom.cli.ps import fetched

# Long waits are asked for in pieces: middle boxes cut a call that is silent for a minute.
WAIT_PIECE_S = 20.0
LOOK_S = 0.2
BAR_CELLS = 24
ERROR_CELLS_MAX = 400

END = {"load": "ready", "wake": "ready", "sleep": "asleep", "unload": "stopped"}  # the state that each leads to
DONE = {
    "load": "is ready",
    "unload": "is stopped",
    "sleep": "was put to sleep",
    "wake": "is ready",
    "pin": "is pinned: it is never evicted",
    "unpin": "is not pinned any more",
}
Show = Callable[[str], None]


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--json", "as_json", is_flag=True, help="Print how it ended as JSON.")(command)
    command = client.server_options(command)
    return click.argument("model")(command)


def waiting(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--no-wait", is_flag=True, help="Ask for it and return at once.")(command)


@click.command()
@common
@waiting
def load(model: str, server: Server, as_json: bool, no_wait: bool) -> None:
    """Bring MODEL up and wait until it is ready.

    One that failed and backs off is tried again at once.
    """
    client.run(operate(server, model, "load", as_json, no_wait))


@click.command()
@common
@waiting
@click.option("--force", is_flag=True, help="Also while it answers requests; their clients get an error.")
def unload(model: str, server: Server, as_json: bool, no_wait: bool, force: bool) -> None:
    """Stop MODEL and give its memory back."""
    client.run(operate(server, model, "unload", as_json, no_wait, force=1 if force else None))


@click.command()
@common
@waiting
@click.option(
    "--level", metavar="N", type=click.IntRange(1, 2), help="1: weights wait in host memory. 2: weights are dropped and read again."
)
def sleep(model: str, server: Server, as_json: bool, no_wait: bool, level: int | None) -> None:
    """Put MODEL to sleep: quick to wake, little GPU memory held.

    Requests in flight finish first.  Without --level it is the quickest to wake that host memory has room for.  Where
    sleep had been switched off because it went wrong, it is tried again.  `greenroom check` tells which engines can.
    """
    client.run(operate(server, model, "sleep", as_json, no_wait, level=level))


@click.command()
@common
@waiting
def wake(model: str, server: Server, as_json: bool, no_wait: bool) -> None:
    """Wake MODEL and wait until it is ready.

    A request for it does the same.  One that is stopped is not started: that is `greenroom load`.
    """
    client.run(operate(server, model, "wake", as_json, no_wait))


@click.command()
@common
def pin(model: str, server: Server, as_json: bool) -> None:
    """Never evict MODEL."""
    client.run(operate(server, model, "pin", as_json, False))


@click.command()
@common
def unpin(model: str, server: Server, as_json: bool) -> None:
    """Let MODEL be evicted again."""
    client.run(operate(server, model, "unpin", as_json, False))


async def operate(server: Server, model: str, operation: str, as_json: bool, no_wait: bool, **query: Any) -> None:
    began_s = time.monotonic()
    async with Client(server) as asked:
        before = await asked.get(client.model_path(model)) if operation == "wake" else None
        if no_wait:
            _, value = await asked.ask("POST", client.model_path(model, operation), wait=0, **query)
        else:
            with shower(as_json, END.get(operation, "")) as show:
                value = await until_done(asked, model, operation, query, show)
        took_s = time.monotonic() - began_s
        now = await asked.get(client.model_path(model))
    if as_json:
        client.print_json({**value, "took_s": round(took_s, 3), "status": now})
    else:
        click.echo(ending(value, now, operation, took_s) + (started_anew(before, now) if before is not None else ""))


async def until_done(asked: Client, model: str, operation: str, query: dict[str, Any], show: Show) -> dict[str, Any]:
    """Ask, and ask again while it is under way; the progress is shown meanwhile."""
    fault: Fault | None = None
    value: dict[str, Any] = {}
    path = client.model_path(model, operation)
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch(asked, model, show))
        try:
            status, value = await asked.ask("POST", path, wait_s=WAIT_PIECE_S, wait=WAIT_PIECE_S, **query)
            while status == 202:
                await asyncio.sleep(LOOK_S)  # a server that does not wait is not hammered
                status, value = await asked.ask("POST", path, wait_s=WAIT_PIECE_S, wait=WAIT_PIECE_S, **query)
        except Fault as found:  # carried out of the group, which would wrap it
            fault = found
        watcher.cancel()
    if fault is not None:
        raise fault
    return value


async def watch(asked: Client, model: str, show: Show) -> None:
    """Show the progress of `model` until cancelled.  A failing look is not worth a word: the question itself tells."""
    while True:
        try:
            show(progress(await asked.get(client.model_path(model)), ascii=text.is_ascii_terminal()))
        except Fault:
            pass
        await asyncio.sleep(LOOK_S)


def progress(model: dict[str, Any], *, ascii: bool = False) -> str:
    """One line: `qwen  starting on gpu0  [████░░] 62 % about 3 s`."""
    name = text.safe(model["id"])
    moving = [one for one in model["instances"] if one["state"] not in ("ready", "asleep", "stopped", "failed")]
    if not moving and model.get("fetch") is not None:
        return f"{name}  {fetched(model['fetch'])}"
    if not moving:
        eta_s = model.get("eta_s")
        return f"{name}  {text.state(model['state'])}" + ("" if eta_s is None else f", {text.about(eta_s)}")
    one = moving[0]
    where = ",".join(text.safe(id) for id in one["devices"])
    on = f" on {where}" if where else ""
    if one["state"] == "draining":
        return f"{name}  draining{on}  {text.count(one['in_flight'], 'request')} to finish"
    bar = text.loading(one["since_s"], one.get("expected_s"), BAR_CELLS, ascii=ascii)
    return f"{name}  {text.state(one['state'], one['level'])}{on}  {bar}"


def ending(value: dict[str, Any], model: dict[str, Any], operation: str, took_s: float) -> str:
    name = text.safe(model["id"])
    if not value.get("done", True):
        return f"{name}: {operation} is under way. `greenroom ps` shows how it goes"
    if operation == "sleep" and model["state"] == "asleep":
        return asleep(model, took_s)
    if operation in ("unload", "pin") and model.get("absent"):
        return text.safe(value["message"])  # it was done to a fetch, if to anything
    if operation == "pin" and model.get("missing"):
        return text.safe(value["message"])  # that it cannot start belongs to it
    said = f"{name} {DONE[operation]}"
    if operation in ("load", "wake") and model["instances"]:
        one = model["instances"][0]
        said += f" on {','.join(text.safe(id) for id in one['devices'])} ({text.size(one['reserved_mib'])})"
    if operation not in ("pin", "unpin"):
        said += after(took_s)
    if operation == "sleep":
        said += f", and is {text.state(model['state'])} by now"
    return said


def after(took_s: float) -> str:
    return f" after {text.duration(took_s)}" if took_s >= 0.05 else ""


def asleep(model: dict[str, Any], took_s: float) -> str:
    """`agent is asleep at level 1 after 0.4 s: 1.2 GiB stay on gpu0, 15.0 GiB in host RAM, wakes in about 0.8 s`."""
    one = model["instances"][0]
    said = f"{text.safe(model['id'])} is asleep at level {one['level']}{after(took_s)}"
    on_devices = [id for id in one["devices"] if id != "ram"]
    held = []
    if on_devices:
        held.append(f"{text.size(one['reserved_mib'])} stay on {','.join(map(text.safe, on_devices))}")
    if one["ram_mib"]:
        held.append(f"{text.size(one['ram_mib'])}{'' if held else ' stay'} in host RAM")
    wake_s = next((cost["wake_s"] for cost in model["sleep"]["costs"] if cost["level"] == one["level"]), None)
    if wake_s is not None:
        held.append(f"wakes in about {text.duration(wake_s)}")
    return f"{said}: {', '.join(held)}" if held else said


def started_anew(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What to add when the wake went wrong and a cold start helped."""
    if not (before["instances"] and now["instances"]) or before["instances"][0]["generation"] == now["instances"][0]["generation"]:
        return ""
    return f": it could not be woken and was started anew ({text.safe(text.cut(now['last_error'], ERROR_CELLS_MAX))})"


def shower(as_json: bool, end: str) -> AbstractContextManager[Show]:
    """A bar that moves on a terminal; elsewhere one line for each change of state."""
    if as_json or not end:
        return nullcontext(say_nothing)
    if sys.stdout.isatty():
        return LiveLine()
    return nullcontext(PlainLines(end))


def say_nothing(_: str) -> None:
    """For --json, and for what is done at once: only the end is printed."""


class PlainLines:
    """For logs and pipes: says each state once, but the last one, which the ending tells."""

    def __init__(self, end: str) -> None:
        self._end, self._said = f"  {end}", set[str]()

    def __call__(self, line: str) -> None:
        state = line.split("  [")[0].split("  since")[0].split(", ")[0]
        if state not in self._said and not state.endswith(self._end):
            self._said.add(state)
            click.echo(line)


class LiveLine:
    def __enter__(self) -> Show:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._live = Live(
            console=Console(highlight=False), auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()
        return lambda line: self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def __exit__(self, *_: object) -> None:
        self._live.stop()
