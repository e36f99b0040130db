"""`greenroom serve`: options only; the server is in greenroom.serve."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from greenroom.cli import text
from greenroom.cli.check import explained

DEFAULT = "greenroom.yaml"
MADE = "references.yaml"  # in the state directory: the configuration made from references


@click.command()
@click.argument("references", nargs=-1, metavar="[REFERENCE...]")
@click.option("-c", "--config", "path", type=click.Path(), metavar="FILE", help="The configuration (a llama-swap one works as well).")
@click.option("--listen", metavar="HOST:PORT", help="Address to serve on [default: 127.0.0.1:8080].")
@click.option("--state-dir", type=click.Path(), metavar="DIR", help="Where logs and learned figures are kept.")
@click.option("--no-auth", is_flag=True, help="Serve a public address without API keys.")
@click.option("--lenient", is_flag=True, help="Serve the models that are configured well, and refuse the others by name.")
@click.option("--store", type=click.Path(path_type=Path), metavar="DIR", help="Where models are kept (GREENROOM_MODELS).")
@click.option("--llama-server", metavar="PATH", envvar="GREENROOM_LLAMA_SERVER", help="The llama-server to use, for references.")
@click.option("--offline", is_flag=True, help="Fetch nothing (GREENROOM_OFFLINE=1).")
def serve(
    references: tuple[str, ...],
    path: str | None,
    listen: str | None,
    state_dir: str | None,
    no_auth: bool,
    lenient: bool,
    store: Path | None,
    llama_server: str | None,
    offline: bool,
) -> None:
    """Serve the models of a configuration file, or the models that REFERENCES name.

    References (oci://HOST/REPO:TAG, hf://ORG/REPO:QUANT, ollama://NAME, https://HOST/FILE.gguf, a path) are fetched first, and get
    an engine and flags that fit this machine; the configuration made for them can be kept and changed.
    """
    if references and path:
        raise click.UsageError(
            "give a configuration or references, not both: what references name can stand in the configuration as `model:`"
        )
    if store is not None:
        os.environ["GREENROOM_MODELS"] = str(store.absolute())
    if offline:
        os.environ["GREENROOM_OFFLINE"] = "1"
    chosen = made(list(references), state_dir, llama_server) if references else path or found()
    with explained():
        from greenroom.serve import run

        code = run(chosen, listen, state_dir, no_auth, not lenient)
    sys.exit(code)


def found() -> str:
    """./greenroom.yaml, when nothing was said."""
    if not Path(DEFAULT).exists():
        raise click.UsageError(f"name a configuration (-c FILE), or models such as oci://HOST/REPO:TAG; there is no {DEFAULT} here")
    return DEFAULT


def made(references: list[str], state_dir: str | None, llama_server: str | None) -> str:
    """The configuration for models that were named, each of them here."""
    from greenroom.cli.pull_cmd import faults
    from greenroom.cli.run_cmd import fetch, write
    from greenroom.engines.gguf import GgufError
    from greenroom.serve.instant import NoEngine, check_engines
    from greenroom.serve.server import Refused, lock_home, prepare_state_dir

    words: dict[str, Any] = {"plain_http": False, "tls_verify": True, "tls_ca": None, "allow_host": ()}
    try:
        check_engines(llama_server)
        home = prepare_state_dir(state_dir)
        path = home / MADE
        os.close(lock_home(home))  # before anything is fetched; and what another one made for itself is not written over
        with faults():
            names = write(path, fetch(references, None, False, words), llama_server)
    except (NoEngine, Refused, GgufError) as fault:
        raise click.ClickException(text.safe(str(fault))) from None
    click.echo(f"{', '.join(map(text.safe, names))}: the configuration is {text.safe(str(path))}", err=True)
    return str(path)
