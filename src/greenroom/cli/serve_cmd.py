"""`greenroom serve`: options only; the server is in greenroom.serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from greenroom.cli import text
from greenroom.cli.check import explained
from greenroom.cli.pull_cmd import registry_options

DEFAULT = "greenroom.yaml"
REGISTRY: Mapping[str, Any] = {"plain_http": False, "tls_verify": True, "tls_ca": None, "allow_host": ()}  # unless something is said
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
@registry_options
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
    **words: Any,
) -> None:
    """Serve the models of a configuration file, or the models that REFERENCES name.

    References (oci://HOST/REPO:TAG, hf://ORG/REPO:QUANT, ollama://NAME, https://HOST/FILE.gguf, a path) are fetched first, and get
    an engine and flags that fit this machine; the configuration made for them can be kept and changed.
    """
    if references and path:
        raise click.UsageError(
            "give a configuration or references, not both: what references name can stand in the configuration as `model:`"
        )
    told = {name: value for name, value in words.items() if value != REGISTRY[name]}
    if told and not references:
        flags = ", ".join("--" + name.replace("_", "-") for name in told)
        raise click.UsageError(f"{flags} is about REFERENCES; in a configuration the same words stand under `pull:`")
    if store is not None:
        os.environ["GREENROOM_MODELS"] = str(store.absolute())
    if offline:
        os.environ["GREENROOM_OFFLINE"] = "1"
    chosen = made(list(references), state_dir, llama_server, told) if references else path or found()
    with explained():
        from greenroom.serve import run

        code = run(chosen, listen, state_dir, no_auth, not lenient)
    sys.exit(code)


def found() -> str:
    """./greenroom.yaml, when nothing was said."""
    if not Path(DEFAULT).exists():
        raise click.UsageError(f"name a configuration (-c FILE), or models such as oci://HOST/REPO:TAG; there is no {DEFAULT} here")
    return DEFAULT


def made(references: list[str], state_dir: str | None, llama_server: str | None, told: Mapping[str, Any]) -> str:
    """The configuration for models that were named, each of them here.  `told`: of their registries, what is not as usual."""
    from greenroom.cli.pull_cmd import faults
    from greenroom.cli.run_cmd import fetch, write
    from greenroom.engines.gguf import GgufError
    from greenroom.serve.instant import NoEngine, check_engines
    from greenroom.serve.server import Refused, lock_home, prepare_state_dir

    pull = {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in told.items()}
    if "allow_host" in pull:
        pull["allow_host"] = list(pull["allow_host"])
    try:
        check_engines(llama_server)
        home = prepare_state_dir(state_dir)
        path = home / MADE
        os.close(lock_home(home))  # before anything is fetched; and what another one made for itself is not written over
        with faults():
            names = write(path, fetch(references, None, False, {**REGISTRY, **told}), llama_server, pull=pull)
    except (NoEngine, Refused, GgufError) as fault:
        raise click.ClickException(text.safe(str(fault))) from None
    click.echo(f"{', '.join(map(text.safe, names))}: the configuration is {text.safe(str(path))}", err=True)
    return str(path)
