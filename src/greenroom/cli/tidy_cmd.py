"""`greenroom rm`, `greenroom gc` and `greenroom verify`: what the store holds is removed, tidied and checked."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from greenroom.cli import client, text
from greenroom.cli.list_cmd import found, opened, size, store_option, unfinished_reference
from greenroom.cli.pull_cmd import faults

if TYPE_CHECKING:
    from greenroom.store.facts import Reference, Stored
    from greenroom.store.library import Library, Swept

EXIT_REFUSED = 1


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@store_option
@click.option("--force", "-f", is_flag=True, help="Also a model that is being served.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def rm(models: tuple[str, ...], store: Path | None, force: bool, as_json: bool) -> None:
    """Remove models, and what is left of interrupted pulls of them.

    What another model needs stays.
    """
    from greenroom.store.facts import StoreError

    with faults():
        library = opened(store)
    gone: list[tuple[Reference, Swept]] = []
    for name in models:
        try:
            reference = named(library, name)
            gone.append((reference, library.remove(reference, force=force)))
        except StoreError as fault:
            click.echo(f"Error: {text.safe(str(fault))}", err=True)
            continue
        if not as_json:
            click.echo(f"{text.safe(str(reference))}: {gave_back(gone[-1][1])}")
    if as_json and gone:
        client.print_json(
            [{"name": str(one), "bytes": swept.bytes, "removed": list(swept.items), "kept": list(swept.kept)} for one, swept in gone]
        )
    if len(gone) < len(models):
        sys.exit(EXIT_REFUSED)


@click.command()
@store_option
@click.option("--dry-run", "dry", is_flag=True, help="Only tell what would go.")
@click.option("--parts", is_flag=True, help="Also what interrupted pulls left in the last days, which could be gone on with.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def gc(store: Path | None, dry: bool, parts: bool, as_json: bool) -> None:
    """Remove what no model needs any more.

    Blobs without a model, what killed processes left, parts of pulls that nobody went on with for a week.  What another process
    uses or fetches stays.
    """
    from greenroom.store.library import STALE_S

    with faults():
        library = opened(store)
        swept = library.gc(dry=dry, stale_s=-1.0 if parts else STALE_S)
    if as_json:
        client.print_json({"dry_run": dry, "bytes": swept.bytes, "removed": list(swept.items), "kept": list(swept.kept)})
        return
    for item in swept.items:
        click.echo(f"{'would remove' if dry else 'removed'} {text.safe(item)}")
    for item in swept.kept:
        click.echo(f"kept {text.safe(item)}: in use")
    click.echo(f"{size(swept.bytes)} {'would be' if dry else 'are'} free again" if swept.items else "There is nothing to remove.")


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL...]")
@store_option
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def verify(models: tuple[str, ...], store: Path | None, as_json: bool) -> None:
    """Read models (all, unless named) and compare every file with its digest.

    A damaged model is not served until it is pulled again.  Exit code 1: something is damaged.
    """
    with faults():
        library = opened(store)
        chosen = [found(library, name) for name in models] or list(library.all())
        results = [(stored, checked(library, stored)) for stored in chosen]
    if as_json:
        client.print_json(
            [
                {"name": str(stored.reference), "digest": stored.digest, "damaged": [{"path": path, "why": why} for path, why in bad]}
                for stored, bad in results
            ]
        )
    else:
        click.echo("\n".join(told(results)))
    if any(bad for _, bad in results):
        sys.exit(EXIT_REFUSED)


def named(library: Library, name: str) -> Reference:
    """The one reference that a name means, also of a pull that is not finished.  Raises StoreError."""
    from greenroom.store.facts import NotFound, StoreError
    from greenroom.store.references import parse

    try:
        stored = library.get(name)
    except NotFound:
        reference = unfinished_reference(library.partials(), name)
        if reference:
            return parse(reference)
        raise
    names = [other.reference for other in library.all() if other.digest == stored.digest]
    if len(names) > 1 and stored.digest.removeprefix("sha256:").startswith(name.removeprefix("sha256:")):
        raise StoreError(f"{name} has {len(names)} names, {', '.join(map(str, names))}: write the one to remove")
    return stored.reference


def gave_back(swept: Swept) -> str:
    kept = f"; {text.count(len(swept.kept), 'file')} kept, in use by another process" if swept.kept else ""
    return f"removed, {size(swept.bytes)} are free again{kept}"


def checked(library: Library, stored: Stored) -> list[tuple[str, str]]:
    """(file, what is wrong with it), with a bar where somebody looks."""
    if not sys.stderr.isatty():
        return [(fault.path, fault.why) for fault in library.verify(stored)]
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=stored.size)
        return [(fault.path, fault.why) for fault in library.verify(stored, lambda done: bar.advance(task, done))]


def told(results: Sequence[tuple[Stored, list[tuple[str, str]]]]) -> list[str]:
    if not results:
        return ["There are no models here."]
    lines = []
    for stored, bad in results:
        name = text.safe(str(stored.reference))
        if not bad:
            lines.append(f"{name}: {text.count(len(stored.files), 'file')}, {size(stored.size)}, as pulled")
        for path, why in bad:
            lines.append(f"{name}: {text.safe(path)} is damaged: {text.safe(why)}; `greenroom pull {shlex.quote(name)}` mends it")
    return lines
