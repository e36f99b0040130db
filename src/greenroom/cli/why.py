"""`greenroom why MODEL`: the chain of causes that led to its present state."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from typing import Any

import click

from greenroom.cli import client, text

LINE_CELLS_LEAST = 30  # in less, a terminal may break lines as it likes
LINES_MAX = 20


@click.command()
@click.argument("model")
@client.server_options
@click.option("--json", "as_json", is_flag=True, help="The story as JSON.")
def why(model: str, server: client.Server, as_json: bool) -> None:
    """Tell how MODEL came to its present state."""
    client.run(show(server, model, as_json))


async def show(server: client.Server, model: str, as_json: bool) -> None:
    async with client.Client(server) as asked:
        told = await asked.get(client.model_path(model, "why"))
    if as_json:
        client.print_json(told)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo("\n".join(story(told, time.time(), width)))


def story(told: dict[str, Any], now_unix_s: float, width: int | None = None) -> list[str]:
    """A heading with the present state, one line per cause, oldest first, and last what is now and what comes next.

    `width`: longer lines go on below their own beginning.
    """
    name = text.safe(told["model"])
    state = text.state(told["state"]) + (f" at level {told['level']}" if told["state"] == "asleep" and told["level"] else "")
    past = [one for one in told["story"] if not one.get("now")]
    present = [f"Now: {text.safe(one['text'])}" for one in told["story"] if one.get("now")]
    if told["sleep_off"]:
        again = text.safe(shlex.quote(told["model"]))
        present.insert(0, f"It stops instead of sleeping: {text.safe(told['sleep_off'])}. `greenroom sleep {again}` tries again.")
    if not past:
        return [f"{name} is {state}; nothing has happened to it since greenroom started.", *present]
    last_s = now_unix_s - past[-1]["at"]
    ago = "just now" if last_s < 1 else f"{text.duration(last_s)} ago"
    lines = [line for one in past for line in cause(text.clock(one["at"], now_unix_s), text.safe(one["text"]), width)]
    return [f"{name} is {state}; the last thing happened {ago}.", *lines, *present]


def cause(when: str, said: str, width: int | None) -> list[str]:
    begin = f"  {when}  "
    if width is None or width < len(begin) + LINE_CELLS_LEAST:
        return [begin + said]
    first, *rest = text.wrapped(said, width - len(begin), LINES_MAX)
    return [begin + first, *(" " * len(begin) + line for line in rest)]
