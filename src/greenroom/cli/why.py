"""`greenroom why MODEL`: the chain of causes that led to its present state."""

from __future__ import annotations

import time
from typing import Any

import click

from greenroom.cli import client, text


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
    else:
        click.echo("\n".join(story(told, time.time())))


def story(told: dict[str, Any], now_unix_s: float) -> list[str]:
    """A heading with the present state, then one line per cause, oldest first."""
    name = text.safe(told["model"])
    state = text.state(told["state"]) + (f" at level {told['level']}" if told["state"] == "asleep" and told["level"] else "")
    past = [one for one in told["story"] if not one.get("now")]
    present = [text.safe(one["text"]) for one in told["story"] if one.get("now")]
    if not past:
        return [f"{name} is {state}; nothing has happened to it since greenroom started.", *present]
    last_s = now_unix_s - past[-1]["at"]
    ago = "just now" if last_s < 1 else f"{text.duration(last_s)} ago"
    lines = [f"  {text.clock(one['at'], now_unix_s)}  {text.safe(one['text'])}" for one in past]
    lines += [f"Now: {one}" for one in present]
    if told["sleep_off"]:
        lines.append(f"It stops instead of sleeping: {text.safe(told['sleep_off'])}. `greenroom sleep {name}` tries again.")
    return [f"{name} is {state}; the last thing happened {ago}.", *lines]
