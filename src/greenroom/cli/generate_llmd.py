"""`greenroom generate llm-d`: pools of replicas and endpoint pickers, on Kubernetes or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.generate_options import (
    config_of,
    emit,
    engine_image,
    engines_of,
    gpus_per_node,
    inputs,
    models,
    models_image,
    namespace,
    output,
    provider,
    storage_class,
    target,
)

if TYPE_CHECKING:
    from greenroom.deploy.llmd_local import Host


@click.command("llm-d")
@inputs
@target
@provider
@click.option("--gateway", default="inference-gateway", show_default=True, metavar="NAME", help="What the Gateway is called.")
@namespace
@click.option("--name", default="greenroom", show_default=True, metavar="NAME", help="What the set is called.")
@engine_image
@click.option("--replicas", multiple=True, metavar="MODEL=N", help="Copies of a model [default: 1]; may be repeated.")
@click.option("--zero", multiple=True, metavar="MODEL", help="A model that KEDA scales to none while nobody asks; may be repeated.")
@gpus_per_node
@click.option("--prometheus", metavar="URL", help="Where KEDA asks for figures.")
@models
@models_image
@storage_class
@click.option("--no-kubernetes", is_flag=True, help="Pickers and Envoys for replicas on one or a few hosts.")
@click.option(
    "--host", "hosts", multiple=True, metavar="IPV4[=N]", help="A host with N replicas, with --no-kubernetes [default: 127.0.0.1=1]."
)
@output
def llm_d(**given: Any) -> None:
    """Write what serves these models with llm-d: one pool and one endpoint picker for each base model, behind one gateway."""
    from greenroom.deploy import llmd, llmd_local
    from greenroom.deploy.unfit import Unfit

    intent = engines_of(config_of(given["path"], given["sources"], given["engine"] or ""), given)
    try:
        if given["no_kubernetes"]:
            files = llmd_local.local(intent, hosts_of(given["hosts"]))
        else:
            if given["hosts"]:
                raise click.UsageError("--host is for --no-kubernetes; in a cluster the scheduler chooses")
            files = llmd.llm_d(intent, options_of(given))
    except Unfit as fault:
        raise click.ClickException(str(fault)) from fault
    emit(files, given)


def options_of(given: Mapping[str, Any]) -> Any:
    from greenroom.deploy.llmd import PROMETHEUS, LlmdOptions

    return LlmdOptions(
        provider=given["provider"],
        gateway=given["gateway"],
        gpus_per_node=given["gpus_per_node"],
        replicas=counts(given["replicas"]),
        occasional=frozenset(given["zero"]),
        prometheus=given["prometheus"] or PROMETHEUS,
    )


def counts(pairs: Sequence[str]) -> dict[str, int]:
    found = {}
    for pair in pairs:
        name, equals, number = pair.rpartition("=")
        if not equals or not number.isdigit() or not int(number):
            raise click.UsageError(f"--replicas {pair!r}: write MODEL=N, such as chat=2")
        found[name] = int(number)
    return found


def hosts_of(texts: Sequence[str]) -> list[Host]:
    from greenroom.deploy.llmd_local import Host

    found = []
    for text in texts or ("127.0.0.1=1",):
        address, equals, number = text.partition("=")
        if equals and not number.isdigit():
            raise click.UsageError(f"--host {text!r}: write IPV4=N, such as 10.0.0.10=2")
        found.append(Host(address, int(number) if equals else 1))
    return found
