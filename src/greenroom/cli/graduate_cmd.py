"""`greenroom graduate`: is it time for a cluster, what would each model become there, what would it cost; and the files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli import client, past, text
from greenroom.cli.generate_options import (
    config_of,
    emit,
    engine_image,
    engines_of,
    gpus_per_node,
    models,
    models_image,
    namespace,
    provider,
    storage_class,
    target,
)
from greenroom.cli.units import AsConfigured

if TYPE_CHECKING:
    from greenroom.config.model import Config, ModelConfig
    from greenroom.planner.graduate import Future, Graduation

HEADERS = ("MODEL", "BECOMES", "REPLICAS", "GPUS", "NEEDS", "IN FLIGHT", "BUSY", "WHY")
RIGHT = frozenset({2, 3, 4, 5, 6})
BECOMES = {"pool": "a pool", "zero": "a pool, none while idle", "stay": "stays with greenroom"}
NAME = "greenroom"  # of the set
POOLABLE = ("vllm", "sglang")
PARALLEL_FLAGS = {"vllm": ("--tensor-parallel-size", "-tp"), "sglang": ("--tp", "--tp-size", "--tensor-parallel-size")}
WHY_CELLS_MAX = 80


@click.command()
@past.past_options("7d")
@click.option("-c", "--config", "path", type=click.Path(), metavar="FILE", help="The configuration [default: greenroom.yaml].")
@click.option(
    "--gpu-memory",
    type=AsConfigured("size", "size_mib_down"),
    metavar="SIZE",
    help="Of the cluster's GPUs, such as 80GiB [default: the largest here].",
)
@target
@provider
@namespace
@engine_image
@gpus_per_node
@models
@models_image
@storage_class
@click.option("-o", "--output", type=click.Path(), metavar="DIR", help="Write the files for llm-d there.")
@click.option("--anyway", is_flag=True, help="Write them though nothing calls for it.")
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
@click.option("--diff", is_flag=True, help="Show what would change in DIR; exit code 1 when something would.")
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON.")
def graduate(**given: Any) -> None:
    """Tell whether this box is outgrown, and what its models would become on Kubernetes with llm-d.

    It reads what was measured: nothing is asked of the engines, nothing is started.  With -o DIR the files are written, if
    the time has come.
    """
    from greenroom.planner.advice import advice
    from greenroom.planner.graduate import graduation

    config = config_of(given["path"], ())
    kinds = kinds_of(config)
    with past.told():
        seen = past.read(given["state_dir"], given["ledger"], given["since"])
        said = advice(seen.setup, seen.requests, seen.transitions, seen.samples, within=seen.within)
        poolable = frozenset(model for model, kind in kinds.items() if kind in POOLABLE)
        setup = replace(seen.setup, models=tuple(model for model in seen.setup.models if model.id in kinds))
        plan = graduation(setup, seen.requests, seen.within, said["outgrown"], gpu_mib=given["gpu_memory"], poolable=poolable)
    if as_json := given["as_json"]:
        client.print_json({**plan.plain(), "outgrown": said["outgrown"]})
    else:
        left = strangers([model.id for model in seen.setup.models], list(kinds))
        click.echo("\n".join([*page(plan), *left, "", past.looked_at(seen.within, len(seen.requests))]))
    if given["output"] is None:
        return
    if not plan.ready and not given["anyway"]:
        raise click.ClickException("no files were written: nothing calls for a cluster yet; give --anyway to have them all the same")
    emit(files(plan, config, kinds, given), {**given, "quiet": as_json})


def kinds_of(config: Config) -> dict[str, str]:
    from greenroom.engines.detect import describe

    return {model.id: describe(model).kind for model in config.models}


def strangers(seen: Sequence[str], configured: Sequence[str]) -> list[str]:
    """Models that only the ledger knows, and those it does not know."""
    gone, new = [name for name in seen if name not in configured], [name for name in configured if name not in seen]
    lines = [f"Left out, for the configuration does not name them any more: {text.safe(', '.join(gone))}."] if gone else []
    lines += [f"Left out, for greenroom has not run with them yet: {text.safe(', '.join(new))}."] if new else []
    return ["", *lines] if lines else []


def page(plan: Graduation) -> list[str]:
    rows = [row(one) for one in plan.futures]
    lines = [text.safe(plan.text), *(["", *text.table(HEADERS, rows, RIGHT)] if rows else [])]
    stay = [one.model for one in plan.futures if one.becomes == "stay"]
    if stay and len(stay) < len(plan.futures):
        lines += [
            "",
            f"{text.safe(', '.join(stay))} can stay: greenroom serves them and passes the others on (`peers`), behind the same address.",
        ]
    return lines


def row(one: Future) -> tuple[str, ...]:
    needs = "?" if one.need_mib is None else text.size(one.need_mib)
    stays = one.becomes == "stay"
    copies = "" if stays else (f"0-{one.replicas}" if one.becomes == "zero" else str(one.replicas))
    return (
        text.safe(one.model),
        BECOMES[one.becomes],
        copies,
        "" if stays else str(one.at_most),
        needs,
        f"{one.mean:.1f}/{one.peak:.1f}",
        f"{one.busy_share:.0%}",
        text.cut(text.safe(one.why), WHY_CELLS_MAX),
    )


def files(plan: Graduation, config: Config, kinds: dict[str, str], given: dict[str, Any]) -> dict[str, str]:
    """llm-d's, of the models that go."""
    from greenroom.config.yaml_out import dump
    from greenroom.deploy.llmd import HEAD, LlmdOptions, llm_d
    from greenroom.deploy.llmd_local import keys_told, peer
    from greenroom.deploy.names import label
    from greenroom.deploy.unfit import Unfit

    going = {one.model: one for one in plan.futures if one.becomes != "stay"}
    moving = tuple(sized(model, going[model.id].gpus, kinds[model.id]) for model in config.models if model.id in going)
    if not moving:
        raise click.ClickException("no model would go: all of them are small, unused, or served by engines that a cluster does not pool")
    options = LlmdOptions(
        provider=given["provider"],
        gpus_per_node=given["gpus_per_node"],
        replicas={model: one.replicas for model, one in going.items() if one.becomes == "pool"},
        replicas_max={model: one.replicas for model, one in going.items()},
        occasional=frozenset(model for model, one in going.items() if one.becomes == "zero"),
    )
    chosen = replace(config, models=moving, groups=(), preload=(), default_model=None)
    try:
        intent = engines_of(config, {**given, "name": NAME}, chosen=chosen, command="")
        made = dict(llm_d(intent, options))
    except Unfit as fault:
        raise click.ClickException(str(fault)) from fault
    names: defaultdict[str, list[str]] = defaultdict(list)  # by the variable that holds their key
    for one in intent.workloads:
        names[one.key] += [one.model, *one.aliases]
    peers = {"cluster" + (f"-{label(key)}" if key else ""): peer("http://GATEWAY-ADDRESS", named, key) for key, named in names.items()}
    made["peers.yaml"] = dump(
        {"peers": peers},
        comments=[
            HEAD,
            "One model at a time: add it here with the address of your gateway, take it out of `models`, reload (SIGHUP).",
            "Clients keep their address and their keys.",
            *keys_told(intent.workloads),
        ],
    )
    return made


def sized(model: ModelConfig, gpus: int, kind: str) -> ModelConfig:
    """The model on so many GPUs: its command says what its share is made of."""
    from greenroom.deploy.llmd import without

    flags = PARALLEL_FLAGS.get(kind, ())
    if not flags:
        return replace(model, devices_count=gpus, devices=())
    argv = without(model.argv, (*flags, *(flag.replace("-", "_").replace("__", "--", 1) for flag in flags if flag.startswith("--"))))
    return replace(model, argv=(*argv, flags[0], str(gpus)) if gpus > 1 else argv, devices_count=gpus, devices=())
