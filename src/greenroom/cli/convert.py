"""`greenroom config convert FILE`: a llama-swap configuration as a greenroom one."""

from __future__ import annotations

import click

from greenroom.cli import text
from greenroom.cli.check import explained


@click.group()
def config() -> None:
    """Convert configuration files."""


@config.command(short_help="A llama-swap configuration as a greenroom one.")
@click.argument("path", metavar="FILE", type=click.Path())
def convert(path: str) -> None:
    """Print FILE, a llama-swap configuration, as a greenroom one; redirect it to a file.

    llama-swap files also run as they are: this is for those who want to use what greenroom adds.
    """
    with explained():
        from greenroom.config.llama_swap import convert_with_notes

        converted, notes = convert_with_notes(path)
    click.echo(converted, nl=False)
    for note in notes:
        click.echo(text.safe(note), err=True)
