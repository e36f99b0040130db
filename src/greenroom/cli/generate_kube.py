"""`greenroom generate kube`: a kustomize tree, a Helm chart, or one file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.generate_options import emit, inputs, intent_of, models, models_image, output, shape, storage_class

if TYPE_CHECKING:
    from greenroom.deploy.intent import Files, Intent

FORMS = ("kustomize", "helm", "plain")
CONTROLLERS = ("deployment", "statefulset")
SHARING = ("mig", "mps", "time-slicing")
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
@models
@models_image
@click.option("--models-image-path", default="models", show_default=True, metavar="PATH", help="The folder in it that holds them.")
@click.option("--models-size", default="100Gi", show_default=True, metavar="SIZE", help="Of the claim for models, and of caches.")
@click.option("--state-size", default="10Gi", show_default=True, metavar="SIZE", help="Of other claims.")
@storage_class
@click.option("--controller", type=click.Choice(CONTROLLERS), default="deployment", show_default=True, help="What runs greenroom itself.")
@click.option(
    "--accelerator", default="", metavar="RESOURCE", help="What pods ask for [default: the vendor's], such as nvidia.com/gpu.shared."
)
@click.option(
    "--share-by",
    type=click.Choice(SHARING),
    help="Plan slices or shares of NVIDIA GPUs, and ask for them; with --mode engines.",
)
@click.option("--gpu-type", default="", metavar="TYPE", help="The GPUs to plan for, such as H100-80GB.")
@click.option("--node-gpus", metavar="N", type=click.IntRange(1, 64), default=1, show_default=True, help="How many of them the node has.")
@output
def kube(form: str, namespace: str, **given: Any) -> None:
    """Write Kubernetes objects: workloads, services, probes, devices, claims, network policies, budgets for disruption.

    Clients must show a key unless --no-auth is given: the port is open to the whole cluster.
    """
    from greenroom.deploy.kube import kube as written
    from greenroom.deploy.unfit import Unfit

    if given["gpu_type"] and not given["share_by"]:
        raise click.UsageError("--gpu-type is what --share-by plans for; give both")
    if given["share_by"] and given["accelerator"]:
        raise click.UsageError("--share-by says what pods ask for, and so does --accelerator; give one")
    if given["share_by"] and given["target"] not in (None, "nvidia"):
        raise click.UsageError("--share-by is for NVIDIA GPUs")
    intent = intent_of(
        {**given, "target": "nvidia" if given["share_by"] else given["target"]},
        extra={name: given[name] for name in WRITERS if given[name]},
        namespace=namespace,
        require_key=not given["no_auth"],
        in_cluster=True,
        sliced=given["share_by"] is not None,
    )
    try:
        files = _shared(intent, form, given) if given["share_by"] else written(intent, form)
    except Unfit as exc:
        raise click.ClickException(str(exc)) from exc
    emit(files, given)


def _shared(intent: Intent, form: str, given: dict[str, Any]) -> Files:
    """With the plan's own files in a folder beside."""
    from greenroom.cli.generate_partition import OPERATOR, gpu_of, needs_of
    from greenroom.deploy import partition, partition_files
    from greenroom.deploy.kube import kube as written
    from greenroom.deploy.kube_pod import KubeOptions
    from greenroom.deploy.kube_shares import shared

    gpu = gpu_of({**given, "gpu_memory": ""})
    needs = needs_of({**given, "needs": (), "state_dir": None}, gpu)
    planners: dict[str, tuple[Any, Any]] = {
        "mig": (partition.plan_mig, partition_files.mig_files),
        "mps": (partition.plan_mps, partition_files.mps_files),
        "time-slicing": (partition.plan_turns, partition_files.time_slicing_files),
    }
    planner, writer = planners[given["share_by"]]
    plan = planner(needs, gpu, given["node_gpus"])
    intent, claims = shared(intent, plan)
    files = written(intent, form, replace(KubeOptions.of(intent.options), claims=claims))
    if form == "plain":
        return files
    beside = writer(plan, name=intent.name, namespace=OPERATOR, node="NODE", command=intent.options.get("command", ""))
    return {**files, **{f"gpus/{name}": text for name, text in beside.items()}}
