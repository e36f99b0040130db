"""What every format of `generate` shares: where the models come from, what they run on, where the files go."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from greenroom.cli.check import explained, loaded
from greenroom.deploy.intent import TARGETS

if TYPE_CHECKING:
    from greenroom.config.model import Config
    from greenroom.deploy.intent import Files, Intent
    from greenroom.store.facts import Stored

CONFIG_DEFAULT = "greenroom.yaml"
CONFIG_ENDINGS = (".yaml", ".yml")
EXIT_DIFFERENT = 1
AMD_DEVICE = Path("/dev/kfd")
DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]*")
# Options that change where files go, not what is in them: left out of the command that files carry.
PLACES = ("output", "force", "diff")

# What several commands ask alike; each places them where its help has them.
engine_image = click.option(
    "--engine-image", "engine_images", multiple=True, metavar="ENGINE|MODEL=IMAGE", help="An engine's image; may be repeated."
)
models = click.option(
    "--models", type=click.Choice(["pvc", "image", "hostpath"]), default="pvc", show_default=True, help="What brings the model files."
)
models_image = click.option("--models-image", default="", metavar="IMAGE", help="The image that holds them, with --models image.")
storage_class = click.option("--storage-class", default="", metavar="CLASS", help="Of all claims [default: the cluster's].")

# What `generate llm-d` and `graduate` ask alike.
target = click.option("--target", type=click.Choice(TARGETS), help="The accelerator [default: by the configuration, else nvidia].")
provider = click.option(
    "--provider",
    type=click.Choice(["istio", "gke", "agentgateway", "none"]),
    default="istio",
    show_default=True,
    help="The gateway.",
)
namespace = click.option("--namespace", default="llm-d", show_default=True, metavar="NAME", help="Where everything goes.")
gpus_per_node = click.option(
    "--gpus-per-node",
    metavar="N",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="A model that wants more is spread over nodes.",
)

_F = TypeVar("_F", bound=Callable[..., Any])


def inputs(function: _F) -> _F:
    """The models: a configuration, or references."""
    return _with(
        function,
        click.argument("sources", nargs=-1, metavar="[FILE | REFERENCE...]"),
        click.option("-c", "--config", "path", type=click.Path(), metavar="FILE", help=f"The configuration [default: {CONFIG_DEFAULT}]."),
        click.option("--engine", type=click.Choice(["llama_server", "vllm"]), help="What serves references [default: told from each]."),
    )


def shape(function: _F) -> _F:
    """What runs where."""
    return _with(
        function,
        click.option(
            "--mode",
            type=click.Choice(["greenroom", "engines"]),
            default="greenroom",
            show_default=True,
            help="greenroom with the engines as its processes, or one workload a model without it.",
        ),
        click.option("--target", type=click.Choice(TARGETS), help="The accelerator [default: by the configuration, else this host's]."),
        click.option(
            "--gpu", "gpus", multiple=True, metavar="UUID|INDEX", help="A device to use; may be repeated, or several with commas."
        ),
        click.option("--mig", default="", metavar="PROFILE", help="A MIG slice, such as 3g.40gb."),
        click.option("--image", default="", metavar="IMAGE", help="greenroom's own image [default: built from a Containerfile]."),
        engine_image,
        click.option("--name", default="greenroom", show_default=True, metavar="NAME", help="What the set is called."),
        click.option("--listen", default="", metavar="HOST:PORT", help="Where a host publishes it [default: 127.0.0.1:8080]."),
        click.option("--no-auth", is_flag=True, help="Publish on a public address without API keys."),
    )


def output(function: _F) -> _F:
    """Where the files go."""
    return _with(
        function,
        click.option("-o", "--output", type=click.Path(), metavar="DIR", help="Write the files there [default: print them]."),
        click.option("--force", is_flag=True, help="Overwrite files that are there."),
        click.option("--diff", is_flag=True, help="Show what would change in DIR; exit code 1 when something would."),
    )


def _with(function: _F, *decorators: Callable[[_F], _F]) -> _F:
    return functools.reduce(lambda made, decorate: decorate(made), reversed(decorators), function)


def intent_of(given: Mapping[str, Any], *, extra: Mapping[str, str] | None = None, **more: Any) -> Intent:
    """What is to be deployed, from the values of `inputs` and `shape`; `more` are further fields of build.Options."""
    from greenroom.deploy.build import guess_target

    config = config_of(given["path"], given["sources"], given.get("engine") or "")
    target = given["target"] or ("nvidia" if given["mig"] else guess_target(config, found_vendor()))
    return _built(config, target, given, extra=extra, **more)


def engines_of(config: Config, given: Mapping[str, Any], *, chosen: Config | None = None, **more: Any) -> Intent:
    """One workload a model for llm-d: of `chosen` where that is a part of the configuration, which tells the target as a whole.

    What this host has does not count: files for a cluster are the same on every host.
    """
    from greenroom.deploy.build import guess_target

    told = {"mode": "engines", "gpus": (), "mig": "", "image": "", "listen": "", "no_auth": True, **given}
    extra = {name: given[name] for name in ("models", "models_image", "storage_class") if given[name]}
    target = given["target"] or guess_target(config, "nvidia")
    more |= {"namespace": given["namespace"], "in_cluster": not given.get("no_kubernetes")}
    return _built(chosen or config, target, told, extra=extra, **more)


def _built(config: Config, target: str, given: Mapping[str, Any], *, extra: Mapping[str, str] | None = None, **more: Any) -> Intent:
    from greenroom.deploy.build import Options, build
    from greenroom.deploy.unfit import Unfit

    options = Options(
        **{
            "name": given["name"],
            "listen": given["listen"],
            "image": given["image"],
            "engine_images": _images(given["engine_images"]),
            "gpus": _devices(given["gpus"]),
            "mig": given["mig"],
            "no_auth": given["no_auth"],
            "stored": stored_of(config),
            "command": command_line(),
            "extra": dict(extra or {}),
            **more,
        }
    )
    try:
        return build(config, mode=given["mode"], target=target, options=options)
    except Unfit as exc:
        raise click.ClickException(str(exc)) from exc


def config_of(path: str | None, sources: Sequence[str], engine: str = "") -> Config:
    """From a configuration file, else from references, else from ./greenroom.yaml."""
    files = [source for source in sources if "://" not in source and source.endswith(CONFIG_ENDINGS)]
    references = [source for source in sources if source not in files]
    if len(files) + (path is not None) > 1:
        raise click.UsageError("there is more than one configuration; name one")
    if references and (files or path is not None):
        raise click.UsageError("give a configuration or references, not both: a reference can stand in the configuration as `model:`")
    if references:
        return _of_references(references, engine)
    if engine:
        raise click.UsageError("--engine is for references; in a configuration the command says what serves a model")
    chosen = path or (files[0] if files else CONFIG_DEFAULT)
    if not files and path is None and not Path(chosen).exists():
        raise click.UsageError(f"there is no {CONFIG_DEFAULT} here; name a configuration, or references such as oci://HOST/REPO:TAG")
    with explained():
        return loaded(chosen, lenient=False)


def stored_of(config: Config) -> Mapping[str, Stored]:
    """What the store of this host has of the models that are references."""
    from greenroom.store.library import Library
    from greenroom.store.resolve import resolve

    return resolve(config, Library()).stored


def _of_references(texts: Sequence[str], engine: str) -> Config:
    from greenroom.deploy import references
    from greenroom.deploy.unfit import Unfit
    from greenroom.store.facts import StoreError
    from greenroom.store.references import parse_here

    try:
        return references.config_of([parse_here(text) for text in texts], engine=engine)
    except (StoreError, Unfit) as exc:
        raise click.ClickException(str(exc)) from exc


def _devices(texts: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for text in texts for name in text.split(","))
    for name in names:
        if name == "all" or not DEVICE.fullmatch(name):
            raise click.UsageError(f"--gpu {name!r} names no device; write an index or a UUID, such as 0 or GPU-…, or leave it out for all")
    return names


def _images(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, image = pair.rpartition("=")
        if not equals or not name or not image:
            raise click.UsageError(f"--engine-image {pair!r}: write ENGINE=IMAGE or MODEL=IMAGE, such as vllm=registry.example/vllm:1")
        found["llama_server" if name == "llama-server" else name] = image
    return found


def found_vendor() -> str:
    """The accelerators of this host; "" = none.  Asked only where nobody has named a target."""
    from greenroom.host.gpus import here

    if here():
        return "nvidia"
    return "amd" if AMD_DEVICE.exists() else ""


def command_line() -> str:
    """The command that makes the same files: arguments as given, without those that only say where files go."""
    ctx = click.get_current_context()
    words = ["greenroom", "generate", ctx.info_name or ""]
    for parameter in ctx.command.params:
        name, value = parameter.name or "", ctx.params.get(parameter.name or "")
        if name in PLACES or value in (None, (), "", False) or value == parameter.get_default(ctx):
            continue
        if isinstance(parameter, click.Argument):
            words += map(str, value)
            continue
        flag = max(parameter.opts, key=len)
        if value is True:
            words.append(flag)
        else:
            words += [part for one in (value if isinstance(value, tuple) else (value,)) for part in (flag, str(one))]
    return shlex.join(words)


def emit(files: Files, given: Mapping[str, Any]) -> None:
    """Print the files, show how they differ, or write them.  ClickException, and nothing written, when that cannot be."""
    from greenroom.deploy import files as placing

    folder = given["output"]
    if folder is None:
        if given["diff"] or given["force"]:
            raise click.UsageError("--diff and --force are about files in a folder; name it with -o DIR")
        _print(placing.stream(files))
        return
    try:
        if given["diff"]:
            changes = placing.diff(files, folder)
            _print(changes)
            if changes:
                raise click.exceptions.Exit(EXIT_DIFFERENT)
            return
        written = placing.write(files, folder, force=given["force"])
    except placing.FilesError as exc:
        raise click.ClickException(str(exc)) from exc
    for path in written:
        click.echo(str(path))


def _print(text: str) -> None:
    try:
        click.echo(text, nl=False)
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise click.ClickException(f"standard output cannot be written: {(exc.strerror or str(exc)).lower()}") from exc
