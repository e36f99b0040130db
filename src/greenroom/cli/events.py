"""`greenroom events`: what happened and what happens, one line each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import click

from greenroom.cli import client, past, text

EVENTS_DEFAULT = 50
EVENTS_MAX = 5_000
STYLES = {"warning": "yellow", "error": "red"}  # of a level, on a terminal


@click.command()
@client.server_options
@past.past_options(None)
@click.option("-f", "--follow", is_flag=True, help="Keep showing new events until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    metavar="N",
    type=click.IntRange(0, EVENTS_MAX),
    help=f"How many old events.  [default: {EVENTS_DEFAULT}; with --since {EVENTS_MAX}]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def events(
    server: client.Server,
    since: float | None,
    state_dir: str | None,
    ledger: str | None,
    follow: bool,
    lines: int | None,
    as_json: bool,
) -> None:
    """Show what happened, and with -f what happens: starts, evictions and their reasons, failures.

    With --since it is read from the ledger, as far back as that goes, whether a server runs or not.
    """
    if since is None:
        if state_dir is not None or ledger is not None:
            raise click.UsageError("a ledger is read with --since TIME only; without it a running server is asked")
        client.run_while_read(show(server, follow, EVENTS_DEFAULT if lines is None else lines, as_json))
        return
    if follow:
        raise click.UsageError("--since looks back and -f ahead: give one of them")
    with past.told():
        for row in past.open_past(state_dir, ledger).told(time.time() - since, EVENTS_MAX if lines is None else lines):
            tell({"at": row.at, "kind": row.kind, "model": row.model, "level": row.level, "text": row.text}, as_json)


async def show(server: client.Server, follow: bool, lines: int, as_json: bool) -> None:
    async with client.Client(server) as asked:
        if not follow:
            for event in (await asked.get("/api/events", follow=0, limit=lines))["events"]:
                tell(event, as_json)
            return
        async for event in parsed(asked.lines("/api/events", accept="text/event-stream", limit=lines, state=0)):
            tell(event, as_json)
    raise client.Fault(f"{server.url} ended the events: the server stopped, or this reader was too slow")


async def parsed(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of an event stream; comments and other fields are skipped."""
    data: list[str] = []
    async for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield json.loads("\n".join(data))
            data = []


def tell(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        client.print_json_line(event)
    else:
        told = sentence(event, time.time(), with_level=True)
        style = None if os.environ.get("NO_COLOR") else STYLES.get(str(event.get("level")))
        click.echo(click.style(told, fg=style) if style else told)  # colours go no further than to a terminal


def sentence(event: dict[str, Any], now_unix_s: float, *, with_level: bool = False) -> str:
    """`14:02:11  warning  qwen  evicted: ...`; without levels `14:02:11  qwen  ! evicted: ...`."""
    when = text.clock(event["at"], now_unix_s) if "at" in event else "-"
    model = text.safe(str(event.get("model") or "greenroom"))
    level = text.safe(str(event.get("level") or "info"))
    said = text.safe(str(event.get("text") or event.get("kind", "")))
    if with_level:
        return f"{when}  {level:<7}  {model}  {said}"
    return f"{when}  {model}  {'' if level == 'info' else '! '}{said}"
