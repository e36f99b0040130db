"""`greenroom pull`: bring a model here, and show how far it is."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from greenroom.cli import text
from greenroom.cli.units import AsConfigured

if TYPE_CHECKING:
    from greenroom.store.facts import Progress, Stored
    from greenroom.store.pull import Options

PLAIN_S = 5.0  # between two lines where nobody looks at a bar
MIB = 1024 * 1024
SIZE = AsConfigured("SIZE", "limit_bytes")
HOST = AsConfigured("HOST[:PORT]", "host_of")
PLATFORM = AsConfigured("OS/ARCH", "platform_of")
T = TypeVar("T")


def web_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What pull and push share: how registries are talked to, and what is said of it."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(store_options(registry_options(command)))


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--quiet", "-q", is_flag=True, help="Print nothing but the result."),
        click.option("--store", type=click.Path(path_type=Path), metavar="DIR", help="The folder of the store (GREENROOM_MODELS)."),
    ):
        command = option(command)
    return command


def registry_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How registries are talked to; the same words stand under `pull:` in a configuration."""
    for option in (
        click.option(
            "--allow-host",
            multiple=True,
            type=HOST,
            metavar="HOST[:PORT]",
            help="A host inside your network that a registry may redirect to.",
        ),
        click.option("--tls-verify", type=bool, default=True, metavar="BOOL", help="false: believe any certificate of the registry."),
        click.option(
            "--tls-ca",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            metavar="FILE",
            help="Believe this authority, too (PEM).",
        ),
        click.option("--plain-http", is_flag=True, help="The registry has no TLS.  On this machine that is found out."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("reference")
@web_options
@click.option("--platform", type=PLATFORM, default="linux/amd64", show_default=True, metavar="OS/ARCH", help="Which manifest of a list.")
@click.option(
    "--verify-key", type=click.Path(path_type=Path), metavar="FILE", help="Refuse a model that this key (cosign.pub) has not signed."
)
@click.option("--max-size", type=SIZE, metavar="SIZE", help="Refuse a model that is larger than this (20GiB).")
@click.option("--offline", is_flag=True, help="Ask nobody; the model has to be here (GREENROOM_OFFLINE=1).")
def pull(reference: str, store: Path | None, quiet: bool, as_json: bool, **words: Any) -> None:
    """Bring the model REFERENCE here.

    oci://HOST/REPO:TAG, hf://ORG/REPO[:QUANT], ollama://NAME, https://HOST/FILE.gguf or a path.  A pull that was interrupted goes on
    where it was.
    """
    from greenroom.store.library import Library
    from greenroom.store.pull import Puller

    with faults():
        options = options_of(words)
        shown = Shown(quiet or as_json)
        puller = Puller(Library(store), options, shown.remark)
        with shown:
            stored = run(puller.pull(parsed(reference), shown.tell))
    told(stored, quiet, as_json, shown)


def told(stored: Stored, quiet: bool, as_json: bool, shown: Shown) -> None:
    path = str(stored.entry)
    if as_json:
        files = [{"path": file.path, "size": file.size, "digest": file.digest, "role": file.role} for file in stored.files]
        plain = {"reference": str(stored.reference), "digest": stored.digest, "layout": stored.layout, "size": stored.size}
        click.echo(json.dumps({**plain, "path": path, "signed_by": stored.signed_by, "files": files, "seconds": round(shown.seconds, 3)}))
    elif quiet:
        click.echo(path)
    else:
        signed = f", signed by {text.safe(stored.signed_by)}" if stored.signed_by else ""
        count = f"{len(stored.files)} files, " if len(stored.files) > 1 else ""
        click.echo(f"{text.safe(str(stored.reference))}: {count}{text.size(stored.size / MIB)}{signed}")
        click.echo(text.safe(path))


def parsed(reference: str) -> Any:
    from greenroom.store.references import parse_here

    return parse_here(reference)


def options_of(words: dict[str, Any]) -> Options:
    from greenroom.store.pull import Options

    options = Options(
        offline=words.get("offline", False),
        platform=words.get("platform", "linux/amd64"),
        verify_key=words.get("verify_key"),
        bytes_max=words.get("max_size"),
        plain_http=words["plain_http"],
        tls_verify=words["tls_verify"],
        tls_ca=words["tls_ca"],
        allowed=tuple(words["allow_host"]),
        alone=True,
    )
    return options.from_environment()


@contextmanager
def faults() -> Iterator[None]:
    """What goes wrong with a store, as one line and exit status 1."""
    from greenroom.store.facts import StoreError

    try:
        yield
    except StoreError as fault:
        raise click.ClickException(text.safe(str(fault))) from None


def run(job: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own; Ctrl-C cancels it, so that what has come is kept."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(job)


class Shown:
    """Progress on stderr: a bar where somebody looks, now and then a line elsewhere, nothing when quiet."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._line_at = 0.0
        self._stage = ""
        self._began = time.monotonic()
        self.seconds = 0.0
        self._remarks: list[str] = []

    def __enter__(self) -> Shown:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("", total=None, what="resolving", rate="", eta="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds = time.monotonic() - self._began
        if self._bar is not None:
            self._bar.stop()
        if fault is None and not self._quiet:
            for words in self._remarks:
                click.echo(words, err=True)

    def remark(self, words: str) -> None:
        self._remarks.append(words)

    def tell(self, progress: Progress) -> None:
        what = (
            f"{progress.stage} {text.cut(text.safe(progress.file.rsplit('/', 1)[-1]), 40)}".strip() if progress.stage != "done" else "done"
        )
        if self._bar is not None:
            self._bar.update(
                self._task, completed=progress.done, total=progress.total or None, what=what, rate=rate(progress), eta=eta(progress)
            )
            return
        now = time.monotonic()
        if self._quiet or (progress.stage == self._stage and now - self._line_at < PLAIN_S) or progress.stage in ("resolving", "done"):
            return
        self._line_at, self._stage = now, progress.stage
        share = f"{progress.done / progress.total:.0%} of {text.size(progress.total / MIB)}" if progress.total else ""
        words = ", ".join(part for part in (share, rate(progress), eta(progress)) if part)
        click.echo(f"{what}: {words}" if words else what, err=True)


def rate(progress: Progress) -> str:
    return f"{text.size(progress.rate / MIB)}/s" if progress.rate >= MIB else ""


def eta(progress: Progress) -> str:
    return f"{text.about(progress.eta_s)} left" if progress.eta_s is not None and progress.done < progress.total else ""


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.fields[what]}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}", markup=False),
        TextColumn("{task.fields[eta]}", markup=False),
    )
    return Bar(*columns, console=Console(stderr=True), transient=True)
