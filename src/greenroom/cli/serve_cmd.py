"""`greenroom serve`: options only; the server is in greenroom.serve."""

from __future__ import annotations

import sys

import click

from greenroom.cli.check import explained


@click.command()
@click.option(
    "-c", "--config", "path", required=True, type=click.Path(), metavar="FILE", help="The configuration (a llama-swap one works as well)."
)
@click.option("--listen", metavar="HOST:PORT", help="Address to serve on [default: 127.0.0.1:8080].")
@click.option("--state-dir", type=click.Path(), metavar="DIR", help="Where logs and learned figures are kept.")
@click.option("--no-auth", is_flag=True, help="Serve a public address without API keys.")
@click.option("--lenient", is_flag=True, help="Serve the models that are configured well, and refuse the others by name.")
def serve(path: str, listen: str | None, state_dir: str | None, no_auth: bool, lenient: bool) -> None:
    """Serve the models of a configuration file."""
    with explained():
        from greenroom.serve import run

        code = run(path, listen, state_dir, no_auth, not lenient)
    sys.exit(code)
