"""`greenroom push`: bring a model to a registry."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from greenroom.cli import text
from greenroom.cli.pull_cmd import MIB, Shown, faults, options_of, run, web_options


@click.command()
@click.argument("model")
@click.argument("target")
@web_options
@click.option(
    "--layout", type=click.Choice(["modelpack", "docker", "image"]), help="How it is kept there; default: as it was pulled, else modelpack."
)
def push(model: str, target: str, store: Path | None, quiet: bool, as_json: bool, layout: str | None, **words: Any) -> None:
    """Bring MODEL to the registry place TARGET (oci://HOST/REPO:TAG).

    MODEL is one of `greenroom list`, or a .gguf file or folder; the other parts of a split file, and its projector, go with it.
    What the registry has is not sent again.
    """
    from greenroom.store.library import Library
    from greenroom.store.push import Pusher, loose
    from greenroom.store.references import parse

    with faults(), ExitStack() as stack:
        library = Library(store)
        path = Path(model).expanduser()
        is_path = os.path.exists(path) and (path.is_file() or "/" in model)
        stored = loose(path.resolve()) if is_path else library.get(model)
        shown = stack.enter_context(Shown(quiet or as_json))
        pushed = run(Pusher(library, options_of(words)).push(stored, parse(target), layout or "", shown.tell))
    if as_json:
        plain = {"reference": str(pushed.reference), "digest": pushed.digest, "layout": pushed.layout}
        click.echo(json.dumps({**plain, "size": pushed.size, "sent": pushed.sent, "seconds": round(shown.seconds, 3)}))
    elif quiet:
        click.echo(pushed.digest)
    else:
        there = "" if pushed.sent == pushed.size else f", {text.size((pushed.size - pushed.sent) / MIB)} of it were there"
        click.echo(f"{text.safe(str(pushed.reference))} ({pushed.layout}): {text.size(pushed.size / MIB)}{there}")
        click.echo(pushed.digest)
