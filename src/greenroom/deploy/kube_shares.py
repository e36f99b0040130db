"""Pods that ask for the slices or shares that a plan gives their models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from greenroom.deploy.commands import takes_words
from greenroom.deploy.intent import Intent, Workload
from greenroom.deploy.partition import MigPlan, SharePlan, Slice
from greenroom.deploy.partition_files import RESOURCE, UTILIZATION_FLAG, resource_of, shared_resource, utilization_on
from greenroom.deploy.unfit import Unfit
from greenroom.engines.flags import unwrap

Claims = Mapping[str, Mapping[str, str]]  # workload -> resource -> how many


def shared(intent: Intent, plan: MigPlan | SharePlan) -> tuple[Intent, Claims]:
    """The intent with flags that are right on a slice, and what each of its pods asks for.  Models without a GPU ask for none."""
    if intent.mode != "engines":
        raise Unfit("greenroom shares GPUs among its engines itself: slices and shares are for --mode engines, one pod a model")
    claims: dict[str, Mapping[str, str]] = {}
    workloads = []
    slices = {one.need.model: one for one in plan.slices} if isinstance(plan, MigPlan) else {}
    whole = {need.model: len(gpus) for need, gpus in plan.whole} if isinstance(plan, MigPlan) else {}
    sharing = {need.model for need in plan.needs} if isinstance(plan, SharePlan) else set()
    notes = list(intent.notes)
    for workload in intent.workloads:
        if (place := slices.get(workload.model)) is not None:
            claims[workload.name] = {resource_of(place.profile.name): "1"}
            workload, said = _on_slice(workload, place)
            notes += said
        elif workload.model in whole:
            claims[workload.name] = {RESOURCE: str(whole[workload.model])}
        elif workload.model in sharing:
            claims[workload.name] = {shared_resource(): "1"}
        workloads.append(workload)
    return replace(intent, workloads=tuple(workloads), notes=tuple(notes)), claims


def _on_slice(workload: Workload, place: Slice) -> tuple[Workload, list[str]]:
    """A share of the whole GPU is another share of a slice."""
    if place.need.utilization is None:
        return workload, []
    share = f"{utilization_on(place.need, place.profile.memory_mib):.2f}"
    argv = list(workload.argv)
    if unwrap(argv).shell:
        if not takes_words(argv):
            raise Unfit(
                f"{workload.model}: {UTILIZATION_FLAG} is another on {place.profile.name}, and its `cmd` is a shell script, in which "
                "nobody changes words; write the engine's own command"
            )
        argv += [UTILIZATION_FLAG, share]  # behind what the script says: the last mention counts
    for position, word in enumerate(argv):
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") == UTILIZATION_FLAG:
            if equals:
                argv[position] = f"{flag}={share}"
            elif position + 1 < len(argv):
                argv[position + 1] = share
    said = f"{workload.model}: {UTILIZATION_FLAG} {place.need.utilization:g} of a whole GPU is {share} of {place.profile.name}."
    return replace(workload, argv=tuple(argv)), [said]
