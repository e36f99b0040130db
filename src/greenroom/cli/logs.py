"""`greenroom logs`: what a model's engine printed."""

from __future__ import annotations

import click

from greenroom.cli import client, text

LINES_DEFAULT = 100
LINES_MAX = 10_000


@click.command()
@click.argument("model", required=False)
@client.server_options
@click.option("-f", "--follow", is_flag=True, help="Keep showing new lines until Ctrl-C.")
@click.option(
    "-n", "--lines", metavar="N", type=click.IntRange(0, LINES_MAX), default=LINES_DEFAULT, show_default=True, help="How many old lines."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def logs(model: str | None, server: client.Server, follow: bool, lines: int, as_json: bool) -> None:
    """Show the log of MODEL's engine; without MODEL, greenroom's own.

    Colours and control sequences are not passed on to the terminal.
    """
    client.run_while_read(show(server, model, follow, lines, as_json))


async def show(server: client.Server, model: str | None, follow: bool, lines: int, as_json: bool) -> None:
    path = client.model_path(model, "logs") if model is not None else "/api/logs"
    async with client.Client(server) as asked:
        async for line in asked.lines(path, lines=lines, follow=1 if follow else None):
            if as_json:
                client.print_json_line({"model": model or "", "line": line})
            else:
                click.echo(text.safe_line(line))
    if follow:
        raise client.Fault(f"{server.url} ended the log: the server stopped, or this reader was too slow")
