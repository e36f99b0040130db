"""`greenroom generate kube`: a kustomize tree, a Helm chart, or one file."""

from __future__ import annotations

from typing import Any

import click

from greenroom.cli.generate_options import emit, inputs, intent_of, output, shape

FORMS = ("kustomize", "helm", "plain")
MODELS = ("pvc", "image", "hostpath")
CONTROLLERS = ("deployment", "statefulset")
# What is handed on to the writer as it is.
WRITERS = (
    "models",
    "models_image",
    "models_image_path",
    "models_size",
    "state_size",
    "storage_class",
    "controller",
    "accelerator",
)


@click.command()
@inputs
@shape
@click.option("--format", "form", type=click.Choice(FORMS), default="kustomize", show_default=True, help="A tree, a chart, or one file.")
@click.option("--namespace", default="default", show_default=True, metavar="NAME", help="Where it goes.")
@click.option("--models", type=click.Choice(MODELS), default="pvc", show_default=True, help="What brings the model files.")
@click.option("--models-image", default="", metavar="IMAGE", help="The image that holds them, with --models image.")
@click.option("--models-image-path", default="models", show_default=True, metavar="PATH", help="The folder in it that holds them.")
@click.option("--models-size", default="100Gi", show_default=True, metavar="SIZE", help="Of the claim for models, and of caches.")
@click.option("--state-size", default="10Gi", show_default=True, metavar="SIZE", help="Of other claims.")
@click.option("--storage-class", default="", metavar="CLASS", help="Of all claims [default: the cluster's].")
@click.option("--controller", type=click.Choice(CONTROLLERS), default="deployment", show_default=True, help="What runs greenroom itself.")
@click.option(
    "--accelerator", default="", metavar="RESOURCE", help="What pods ask for [default: the vendor's], such as nvidia.com/gpu.shared."
)
@output
def kube(form: str, namespace: str, **given: Any) -> None:
    """Write Kubernetes objects: workloads, services, probes, devices, claims, network policies, budgets for disruption.

    Clients must show a key unless --no-auth is given: the port is open to the whole cluster.
    """
    from greenroom.deploy.kube import kube as written
    from greenroom.deploy.unfit import Unfit

    intent = intent_of(
        given,
        extra={name: given[name] for name in WRITERS if given[name]},
        namespace=namespace,
        require_key=not given["no_auth"],
    )
    try:
        files = written(intent, form)
    except Unfit as exc:
        raise click.ClickException(str(exc)) from exc
    emit(files, given)
