"""`greenroom generate mig | mps | time-slicing`: how models share NVIDIA GPUs in a cluster, or on a host."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from greenroom.cli.generate_options import command_line, config_of, emit, inputs, output

if TYPE_CHECKING:
    from greenroom.config.model import ModelConfig
    from greenroom.deploy.gpu_types import GpuType
    from greenroom.deploy.intent import Files
    from greenroom.deploy.partition import Need

OPERATOR = "gpu-operator"
MEASURED_S = 30 * 86400.0  # looked back
_F = TypeVar("_F", bound=Callable[..., Any])


def hardware(function: _F) -> _F:
    """What is shared, and where."""
    for decorate in reversed(
        (
            click.option("--gpu-type", default="", metavar="TYPE", help="The GPUs, such as H100-80GB or 'NVIDIA H200'."),
            click.option("--gpu-memory", default="", metavar="SIZE", help="Of a GPU of another type; not for mig."),
            click.option("--gpus", metavar="N", type=click.IntRange(1, 64), default=1, show_default=True, help="How many the node has."),
            click.option("--node", default="NODE", show_default=True, metavar="NAME", help="The node, in the commands that are shown."),
            click.option("--name", default="greenroom", show_default=True, metavar="NAME", help="What the set is called."),
            click.option("--namespace", default=OPERATOR, show_default=True, metavar="NAME", help="Where the GPU operator is."),
            click.option("--need", "needs", multiple=True, metavar="MODEL=SIZE", help="GPU memory of a model, if not as configured."),
            click.option("--state-dir", type=click.Path(), metavar="DIR", help="Take what was measured from this state folder."),
        )
    ):
        function = decorate(function)
    return function


@click.command()
@inputs
@hardware
@output
def mig(**given: Any) -> None:
    """Cut NVIDIA GPUs into the smallest slices that hold the models: mig-manager's configuration, and the same by hand."""
    from greenroom.deploy.partition import plan_mig
    from greenroom.deploy.partition_files import mig_files

    gpu = gpu_of(given)
    _write(given, lambda: mig_files(plan_mig(needs_of(given, gpu), gpu, given["gpus"]), **_places(given)))


@click.command()
@inputs
@hardware
@click.option("--replicas", metavar="N", type=click.IntRange(1, 48), help="Shares of each GPU [default: as many as there are models].")
@click.option("--share", "shares", multiple=True, metavar="SIZE", help="What a share is wanted to be; all are equal.")
@click.option("--per-pod", type=int, default=1, show_default=True, metavar="N", help="Shares that a pod takes.")
@click.option("--processes", multiple=True, metavar="MODEL=N", help="Processes of a model that use the GPU [default: 1].")
@output
def mps(**given: Any) -> None:
    """Share NVIDIA GPUs equally by MPS: the device plugin's configuration, and a daemon for a host."""
    from greenroom.deploy.partition import plan_mps
    from greenroom.deploy.partition_files import mps_files

    gpu = gpu_of(given)
    wanted = {"replicas": given["replicas"] or 0, "per_pod": given["per_pod"], "shares_mib": [_size(one) for one in given["shares"]]}
    _write(given, lambda: mps_files(plan_mps(needs_of(given, gpu), gpu, given["gpus"], **wanted), **_places(given)))


@click.command("time-slicing")
@inputs
@hardware
@click.option("--replicas", metavar="N", type=click.IntRange(1, 48), help="Shares of each GPU [default: as many as there are models].")
@click.option("--per-pod", type=int, default=1, show_default=True, metavar="N", help="Shares that a pod takes.")
@output
def time_slicing(**given: Any) -> None:
    """Let models take turns on NVIDIA GPUs: the device plugin's configuration.  Memory is not divided."""
    from greenroom.deploy.partition import plan_turns
    from greenroom.deploy.partition_files import time_slicing_files

    gpu = gpu_of(given)
    wanted = {"replicas": given["replicas"] or 0, "per_pod": given["per_pod"]}
    _write(given, lambda: time_slicing_files(plan_turns(needs_of(given, gpu), gpu, given["gpus"], **wanted), **_places(given)))


def _write(given: Mapping[str, Any], make: Callable[[], Files]) -> None:
    from greenroom.deploy.unfit import Unfit

    try:
        files = make()
    except Unfit as exc:
        raise click.ClickException(str(exc)) from exc
    emit(files, given)


def _places(given: Mapping[str, Any]) -> dict[str, str]:
    return {"command": command_line(), **{name: given[name] for name in ("name", "namespace", "node")}}


# ------------------------------------------------------------------------------------------------------------ the GPUs


def gpu_of(given: Mapping[str, Any]) -> GpuType:
    from greenroom.deploy.gpu_types import TYPES, GpuType, find

    if given["gpu_memory"] and given["gpu_type"]:
        raise click.UsageError("give --gpu-type or --gpu-memory: a type that is known has a memory that is known")
    if given["gpu_memory"]:
        return GpuType(f"a GPU of {given['gpu_memory']}", _size(given["gpu_memory"]))
    if not given["gpu_type"]:
        raise click.UsageError(f"which GPUs? Give --gpu-type, one of {', '.join(TYPES)}")
    found = find(given["gpu_type"])
    if found is None:
        raise click.UsageError(f"{given['gpu_type']!r} is no GPU that is known, or not told enough; write one of {', '.join(TYPES)}")
    return found


def _size(text: str) -> int:
    from greenroom.config import units

    try:
        return int(units.size_mib_down(text))
    except units.UnitError as fault:
        raise click.UsageError(str(fault)) from fault


# --------------------------------------------------------------------------------------------------------- what they need


def needs_of(given: Mapping[str, Any], gpu: GpuType) -> list[Need]:
    """Of every model that uses a GPU: said here, else measured, declared, told by its flags, or estimated from its files."""
    config = config_of(given["path"], given["sources"], given.get("engine") or "")
    said = {name: _size(size) for name, size in _pairs(given["needs"], "--need")}
    processes = {name: _count(number) for name, number in _pairs(given.get("processes", ()), "--processes")}
    unknown = ({*said, *processes}) - {model.id for model in config.models}
    if unknown:
        known = ", ".join(model.id for model in config.models)
        raise click.UsageError(f"there is no model {min(unknown)!r} in the configuration; write one of {known}")
    measured = _measured(given["state_dir"])
    return [
        _need(model, gpu, said.get(model.id), measured.get(model.id), processes.get(model.id, 1))
        for model in config.models
        if model.devices != ("ram",)
    ]


def _need(model: ModelConfig, gpu: GpuType, said: int | None, measured: int | None, processes: int) -> Need:
    from greenroom.deploy.partition import Need
    from greenroom.engines.base import DeviceRef
    from greenroom.engines.detect import describe, devices_count
    from greenroom.engines.flags import unwrap

    engine = describe(model)
    gpus = devices_count(model)
    estimate = engine.estimate([DeviceRef(f"gpu{index}", "gpu", "nvidia", total_mib=gpu.memory_mib) for index in range(gpus)])
    sources = (
        (said, "said"),
        (measured, "from the ledger"),
        (model.memory_mib, "declared"),
        (estimate.device_mib, "from its flags" if estimate.source == "flags" else "estimated"),
    )
    mib, source = next(((value, source) for value, source in sources if value is not None), (None, ""))
    if mib is None:
        can_be_said = "needs" in click.get_current_context().params  # not where a partition is planned beside other files
        raise click.ClickException(
            f"{model.id}: what it needs is not known here (its files are not, or its engine tells nothing): "
            f"write `memory:` into the configuration{f', or give --need {shlex.quote(model.id)}=SIZE' if can_be_said else ''}"
        )
    return Need(model.id, mib, gpus, processes, source, utilization_of(unwrap(model.argv).argv))


def utilization_of(argv: Sequence[str]) -> float | None:
    """The share of a GPU that a vLLM is told to take."""
    for position, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == "--gpu-memory-utilization":
            text = value if equals else "".join(argv[position + 1 : position + 2])
            try:
                return float(text)
            except ValueError:
                return None
    return None


def _measured(state_dir: str | None) -> Mapping[str, int]:
    """Only where it was asked for: files made from a configuration are the same on every host."""
    if state_dir is None:
        return {}
    from greenroom.cli import past
    from greenroom.planner.sizes import needs_of as learned

    with past.told():
        seen = past.read(state_dir, None, MEASURED_S)
        measured = {row.model for row in seen.transitions if row.kind == "start" and row.ok}
        return {name: mib for name, mib in learned(seen.setup, seen.transitions).items() if name in measured and mib}


def _pairs(texts: Sequence[str], flag: str) -> list[tuple[str, str]]:
    found = []
    for text in texts:
        name, equals, value = text.rpartition("=")
        if not equals or not name or not value:
            raise click.UsageError(f"{flag} {text!r}: write MODEL=VALUE")
        found.append((name, value))
    return found


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise click.UsageError(f"--processes: {text!r} is no number of processes")
    return int(text)
