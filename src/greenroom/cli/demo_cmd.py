"""`greenroom demo`: options only; the tour itself is in greenroom.cli.demo."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--once", is_flag=True, help="Take the tour and exit, instead of staying up.")
@click.option(
    "--port", metavar="PORT", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port to listen on; 0 takes a free one."
)
def demo(once: bool, port: int) -> None:
    """Show a chat model, an embedder and a reranker sharing memory for two."""
    from greenroom.cli.demo import run

    sys.exit(run(once=once, port=port))
