"""`greenroom list` and `greenroom inspect`: the models on this host, and all that is known of one."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli import client, text
from greenroom.cli.pull_cmd import faults

if TYPE_CHECKING:
    from greenroom.store.facts import ModelFile, Stored
    from greenroom.store.library import Library, Unfinished

HEADERS = ("NAME", "SIZE", "FORMAT", "PARAMS", "LAYOUT", "PULLED", "ID")
RIGHT = frozenset({1, 3})
FILE_HEADERS = ("FILE", "ROLE", "SIZE", "DIGEST")
NAME_CELLS_MAX = 72
ID_CHARS = 12
KIB, MIB = 1024, 1024 * 1024
DAMAGED = " !"
# What a GGUF header tells that people ask for: field of its architecture -> word
GGUF_FACTS = {
    "block_count": "layers",
    "embedding_length": "embedding_length",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "expert_count": "experts",
    "expert_used_count": "experts_used",
}


def store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    option = click.option("--store", type=click.Path(path_type=Path), metavar="DIR", help="The folder of the store (GREENROOM_MODELS).")
    return option(command)


@click.command("list")
@store_option
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Only the names.")
def list_(store: Path | None, as_json: bool, quiet: bool) -> None:
    """List the models on this host."""
    with faults():
        library = opened(store)
        models, unfinished = library.all(), library.partials()
    if as_json:
        client.print_json({"store": str(library.root), "models": [as_map(stored) for stored in models], "unfinished": parts_of(unfinished)})
    elif quiet:
        click.echo("".join(f"{text.safe(str(stored.reference))}\n" for stored in models), nl=False)
    else:
        click.echo("\n".join(page(models, unfinished, time.time())))


@click.command()
@click.argument("model")
@store_option
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def inspect(model: str, store: Path | None, as_json: bool) -> None:
    """Show what is known of MODEL: a reference, a short name or the beginning of an ID."""
    with faults():
        stored = found(opened(store), model)
        facts = gguf_facts(stored)
    if as_json:
        client.print_json({**as_map(stored), "gguf": facts})
    else:
        click.echo("\n".join(story(stored, facts, time.time())))


def opened(store: Path | None) -> Library:
    """The store; raises StoreError when it is there and cannot be read."""
    from greenroom.store.facts import StoreError
    from greenroom.store.library import Library

    library = Library(store)
    if library.root.exists() and not (library.root.is_dir() and os.access(library.root, os.R_OK | os.X_OK)):
        raise StoreError(f"the store {library.root} cannot be read: name another with --store, or ask who owns it")
    return library


def found(library: Library, name: str) -> Stored:
    """Raises NotFound, which tells of a pull that is not finished."""
    from greenroom.store.facts import NotFound

    try:
        return library.get(name)
    except NotFound as fault:
        reference = unfinished_reference(library.partials(), name)
        if reference:
            raise NotFound(f"{reference} is not wholly here: `greenroom pull {shlex.quote(reference)}` goes on with it") from None
        raise fault


def unfinished_reference(parts: Sequence[Unfinished], name: str) -> str:
    """The reference of an interrupted pull that goes by this name; "" when there is none."""
    from greenroom.store.facts import StoreError
    from greenroom.store.references import model_id, parse, parse_here

    try:
        name = str(parse_here(name))
    except StoreError:
        pass
    return next((part.reference for part in parts if name in (part.reference, model_id(parse(part.reference)))), "")


def page(models: Sequence[Stored], unfinished: Sequence[Unfinished], now: float) -> list[str]:
    """The lines of `list`."""
    lines = text.table(HEADERS, [row(stored, now) for stored in models], RIGHT)
    if not models and not unfinished:
        return ["There are no models here: `greenroom pull REFERENCE` fetches one."]
    for stored in models:
        if stored.damaged:
            name = text.safe(str(stored.reference))
            lines += ["", f"{name} is damaged and not served: `greenroom pull {shlex.quote(name)}` mends it"]
    for part in parts_of(unfinished):
        share = f"{size(part['done'])} of {size(part['size'])}"
        name = text.safe(part["reference"])
        told = "is being pulled" if part["active"] else f"was not pulled wholly; `greenroom pull {shlex.quote(name)}` goes on"
        lines += ["", f"{name}: {share}, {told}"]
    return lines


def row(stored: Stored, now: float) -> tuple[str, ...]:
    told = stored.description
    return (
        name_cell(str(stored.reference)) + (DAMAGED if stored.damaged else ""),
        size(stored.size),
        text.safe(" ".join(filter(None, (told.format, told.quantization)))) or "-",
        text.safe(told.parameters) or "-",
        stored.layout,
        f"{text.brief(max(0.0, now - stored.pulled_at))} ago",
        stored.digest.removeprefix("sha256:")[:ID_CHARS],
    )


def name_cell(name: str) -> str:
    """A name in the width of its column; of a long path the end, which tells more."""
    name = text.safe(name)
    if name.startswith("file://") and text.cells(name) > NAME_CELLS_MAX:
        return f"file://…{name[8 - NAME_CELLS_MAX :]}"
    return text.cut(name, NAME_CELLS_MAX)


def story(stored: Stored, facts: dict[str, Any], now: float) -> list[str]:
    """The lines of `inspect`."""
    told = stored.description
    pairs = [
        ("name", str(stored.reference)),
        ("serves as", short_name(stored)),
        ("digest", stored.digest),
        ("path", str(stored.entry)),
        ("size", f"{size(stored.size)} in {text.count(len(stored.files), 'file')}"),
        ("layout", stored.layout),
        ("pulled", f"{text.brief(max(0.0, now - stored.pulled_at))} ago"),
        ("signed by", stored.signed_by or "nobody"),
        ("model", told.name),
        ("format", " ".join(filter(None, (told.format, told.quantization)))),
        ("architecture", told.architecture),
        ("parameters", told.parameters),
        ("context", f"{told.context_length:,} tokens" if told.context_length else ""),
        ("license", ", ".join(told.licenses)),
        ("layers", str(facts.get("layers", ""))),
        ("chat", ("has a chat template" if facts["chat_template"] else "no chat template") if facts else ""),
        ("damaged", ", ".join(stored.damaged)),
    ]
    width = max(len(key) for key, _ in pairs)
    lines = [f"{key:<{width}}  {text.safe(value)}" for key, value in pairs if value]
    lines += [f"{'note':<{width}}  {text.safe(key)}: {text.safe(value)}" for key, value in sorted(told.annotations.items())]
    return [*lines, "", *text.table(FILE_HEADERS, [file_row(file) for file in stored.files], frozenset({2}))]


def file_row(file: ModelFile) -> tuple[str, ...]:
    return text.safe(file.path), file.role, size(file.size), file.digest


def short_name(stored: Stored) -> str:
    from greenroom.store.references import model_id

    return model_id(stored.reference)


def gguf_facts(stored: Stored) -> dict[str, Any]:
    """What the header of a GGUF model tells; {} for other models, and for a header that cannot be read."""
    from greenroom.engines.gguf import GgufError, read_header

    if stored.entry.suffix.lower() != ".gguf":
        return {}
    try:
        header = read_header(stored.entry)
    except (GgufError, OSError):
        return {}
    facts = {
        word: value for field, word in GGUF_FACTS.items() if isinstance(value := header.fields.get(f"{header.architecture}.{field}"), int)
    }
    template = "tokenizer.chat_template" in header.fields
    return {**facts, "tensors": len(header.tensors), "vocabulary": header.vocabulary, "chat_template": template}


def as_map(stored: Stored) -> dict[str, Any]:
    """A model as JSON."""
    told = stored.description
    return {
        "name": str(stored.reference),
        "short_name": short_name(stored),
        "digest": stored.digest,
        "path": str(stored.entry),
        "folder": str(stored.folder),
        "size": stored.size,
        "layout": stored.layout,
        "pulled_at": stored.pulled_at,
        "signed_by": stored.signed_by,
        "damaged": list(stored.damaged),
        "format": told.format,
        "quantization": told.quantization,
        "architecture": told.architecture,
        "parameters": told.parameters,
        "context_length": told.context_length,
        "model_name": told.name,
        "licenses": list(told.licenses),
        "annotations": dict(told.annotations),
        "files": [{"path": file.path, "role": file.role, "size": file.size, "digest": file.digest} for file in stored.files],
    }


def parts_of(unfinished: Sequence[Unfinished]) -> list[dict[str, Any]]:
    """Interrupted and running pulls, one each reference."""
    pulls: dict[str, dict[str, Any]] = {}
    for part in unfinished:
        pull = pulls.setdefault(part.reference, {"reference": part.reference, "done": 0, "size": 0, "active": False, "files": 0})
        pull["done"] += part.done
        pull["size"] += part.size
        pull["files"] += 1
        pull["active"] = pull["active"] or part.active
    return list(pulls.values())


def size(bytes_: int) -> str:
    if bytes_ >= MIB / 2:
        return text.size(bytes_ / MIB)
    return f"{bytes_ / KIB:.0f} KiB" if bytes_ >= KIB else f"{bytes_} B"
