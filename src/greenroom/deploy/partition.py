"""Which models share which GPUs, and how: slices (MIG), equal shares (MPS), or turns (time-slicing).  Refused where it cannot hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from greenroom.deploy.gpu_types import SLICED, GpuType, Profile
from greenroom.deploy.unfit import Unfit

GPUS_TRIED_MAX = 64  # to tell how many would do
STEPS_MAX = 20_000  # of one search; the first try is right nearly always


@dataclass(frozen=True, slots=True)
class Need:
    """What one model wants on each of its GPUs."""

    model: str
    mib: int
    gpus: int = 1  # more: tensor parallel over whole GPUs
    processes: int = 1  # of one pod that use the GPU
    source: str = "declared"  # measured | declared | flags | estimated
    utilization: float | None = None  # share of the GPU that its flags ask for, where they do

    def __str__(self) -> str:
        return f"{self.model} {self.mib:,} MiB"


# ------------------------------------------------------------------------------------------------------------------- MIG


@dataclass(frozen=True, slots=True)
class Slice:
    """One model's place."""

    need: Need
    gpu: int
    profile: Profile
    start: int


@dataclass(frozen=True, slots=True)
class MigPlan:
    gpu: GpuType
    gpus: int
    slices: tuple[Slice, ...]  # by GPU and start
    whole: tuple[tuple[Need, tuple[int, ...]], ...] = ()  # models that keep GPUs to themselves, uncut

    @property
    def cut(self) -> tuple[int, ...]:
        return tuple(sorted({one.gpu for one in self.slices}))

    @property
    def unused(self) -> tuple[int, ...]:
        taken = {*self.cut, *(index for _, indices in self.whole for index in indices)}
        return tuple(index for index in range(self.gpus) if index not in taken)

    def free_width(self, gpu: int) -> int:
        """Memory slices of a cut GPU that nobody has."""
        return self.gpu.width - sum(one.profile.width for one in self.slices if one.gpu == gpu)


def plan_mig(needs: Sequence[Need], gpu: GpuType, gpus: int = 1) -> MigPlan:
    """The smallest slices that hold the models, on as few of the GPUs as it takes; Unfit with the nearest that would do."""
    if not gpu.width:
        raise Unfit(f"{gpu.name} cannot be cut into slices: it has no MIG; use `generate mps` or `generate time-slicing`")
    if not needs:
        raise Unfit("no model uses a GPU: there is nothing to cut slices for")
    for need in needs:
        if need.mib > max(gpu.memory_mib, gpu.profiles[-1].memory_mib):
            raise Unfit(_too_large(need, gpu))
    plan = _laid_out(needs, gpu, gpus)
    if plan is None:
        raise Unfit(_does_not_fit(needs, gpu, gpus))
    return plan


def smallest(need: Need, gpu: GpuType) -> Profile | None:
    """The smallest slice that holds it; None when it takes a whole GPU, or several."""
    if need.gpus > 1:
        return None
    return next((one for one in gpu.profiles[:-1] if one.memory_mib >= need.mib), None)


def _laid_out(needs: Sequence[Need], gpu: GpuType, gpus: int) -> MigPlan | None:
    if any(need.mib > gpu.memory_mib for need in needs):
        return None
    cut = [need for need in needs if smallest(need, gpu) is not None]
    kept: list[tuple[Need, tuple[int, ...]]] = []
    index = 0
    for need in (need for need in needs if smallest(need, gpu) is None):
        kept.append((need, tuple(range(index, index + need.gpus))))
        index += need.gpus
    if index > gpus:
        return None
    wanted = sorted(cut, key=lambda need: (-_profile(need, gpu).width, -_profile(need, gpu).compute, need.model))
    profiles = tuple(_profile(need, gpu) for need in wanted)
    for count in range(1 if wanted else 0, gpus - index + 1):
        places = _places(profiles, gpu, count)
        if places is not None:
            better = _more_compute(profiles, gpu, count)
            places = _places(better, gpu, count)
            assert places is not None
            found = [Slice(need, index + at, profile, start) for need, profile, (at, start) in zip(wanted, better, places, strict=True)]
            return MigPlan(gpu, gpus, tuple(sorted(found, key=lambda one: (one.gpu, one.start))), tuple(kept))
    return None


def _profile(need: Need, gpu: GpuType) -> Profile:
    found = smallest(need, gpu)
    assert found is not None
    return found


def _more_compute(profiles: tuple[Profile, ...], gpu: GpuType, count: int) -> tuple[Profile, ...]:
    """Slices of the same memory with more compute, where they cost no other its place."""
    for position, profile in enumerate(profiles):
        for other in reversed([one for one in gpu.profiles if one.width == profile.width and one.compute > profile.compute]):
            tried = (*profiles[:position], other, *profiles[position + 1 :])
            if _places(tried, gpu, count) is not None:
                profiles = tried
                break
    return profiles


def _places(profiles: tuple[Profile, ...], gpu: GpuType, count: int) -> tuple[tuple[int, int], ...] | None:
    """(GPU, start) of each profile on `count` equal GPUs; None when there is no way, or none was found in STEPS_MAX."""
    most = gpu.profiles[-1]
    if sum(one.width for one in profiles) > most.width * count or sum(one.compute for one in profiles) > most.compute * count:
        return None
    steps = itertools.count()
    dead: set[tuple[int, tuple[int, ...]]] = set()  # (how many are placed, what is taken) from which nothing leads on

    def search(position: int, taken: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
        if position == len(profiles):
            return ()
        state = (position, tuple(sorted(taken)))
        if state in dead or next(steps) > STEPS_MAX:
            return None
        profile = profiles[position]
        for index, start in _free(profile, taken):
            rest = search(position + 1, (*taken[:index], taken[index] | _mask(profile, start), *taken[index + 1 :]))
            if rest is not None:
                return ((index, start), *rest)
        dead.add(state)
        return None

    return search(0, (0,) * count)


def _free(profile: Profile, taken: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    seen: set[int] = set()
    for gpu, mask in enumerate(taken):
        if mask in seen:  # a GPU like one that was tried
            continue
        seen.add(mask)
        yield from ((gpu, start) for start in profile.starts if not mask & _mask(profile, start))


def _mask(profile: Profile, start: int) -> int:
    return ((1 << profile.width) - 1) << start


def _too_large(need: Need, gpu: GpuType) -> str:
    larger = _larger(need.mib, gpu)
    other = f"take {larger.name} ({larger.memory_mib:,} MiB), or " if larger else ""
    return (
        f"{need.model} needs {need.mib:,} MiB and one whole {gpu.name} has {gpu.memory_mib:,}: "
        f"{other}spread it over {-(-need.mib // gpu.memory_mib)} GPUs (devices_count)"
    )


def _does_not_fit(needs: Sequence[Need], gpu: GpuType, gpus: int) -> str:
    enough = next((count for count in range(gpus + 1, GPUS_TRIED_MAX + 1) if _laid_out(needs, gpu, count)), None)
    larger = next((one for one in SLICED if one.memory_mib > gpu.memory_mib and _laid_out(needs, one, gpus)), None)
    ways = [
        *((f"{enough} of them hold it",) if enough else ()),
        *((f"{gpus} × {larger.name} would hold it",) if larger else ()),
        *((f"without {fewer.model} the rest fits",) if (fewer := _one_too_many(needs, gpu, gpus)) else ()),
    ]
    width = sum(profile.width if (profile := smallest(need, gpu)) else need.gpus * gpu.width for need in needs)
    have = gpus * gpu.width
    what = f"{width} memory slices of {have}" if width > have else f"{width} memory slices of {have}, which no layout of the chip gives"
    asked = ", ".join(f"{need.model} {_asks(need, gpu)}" for need in needs)
    return f"{gpus} × {gpu.name} cannot hold {asked}: {what}; {'; '.join(ways) or 'nothing near would do'}"


def _one_too_many(needs: Sequence[Need], gpu: GpuType, gpus: int) -> Need | None:
    """The smallest model without which the others fit."""
    others = ((need, [one for one in needs if one is not need]) for need in sorted(needs, key=lambda one: one.mib))
    return next((need for need, rest in others if rest and _laid_out(rest, gpu, gpus)), None)


def _asks(need: Need, gpu: GpuType) -> str:
    profile = smallest(need, gpu)
    if profile is not None:
        return f"({need.mib:,} MiB: {profile.name})"
    return f"({need.mib:,} MiB: {'a whole GPU' if need.gpus == 1 else f'{need.gpus} whole GPUs'})"


# ------------------------------------------------------------------------------------------------------------ MPS, turns


@dataclass(frozen=True, slots=True)
class SharePlan:
    """Every GPU is offered `replicas` times; a pod takes one."""

    how: str  # mps | time-slicing
    gpu: GpuType
    gpus: int
    replicas: int
    needs: tuple[Need, ...]
    limit_mib: int | None = None  # of each client process, where there is one
    notes: tuple[str, ...] = field(default=())


def plan_mps(
    needs: Sequence[Need], gpu: GpuType, gpus: int = 1, *, replicas: int = 0, per_pod: int = 1, shares_mib: Sequence[int] = ()
) -> SharePlan:
    """Equal shares; `replicas` 0 = as many as it takes; `shares_mib` what somebody wants them to be.

    The limit is of each client process, not of the pod: two processes of one engine may take it twice.
    """
    replicas = _replicas(needs, gpus, replicas, per_pod, "MPS")
    limit = gpu.memory_mib // replicas
    if len(set(shares_mib)) > 1:
        wanted = ", ".join(f"{one:,}" for one in shares_mib)
        raise Unfit(
            f"MPS shares of {wanted} MiB cannot be had: the device plugin makes equal ones only, {replicas} of {limit:,} MiB each. "
            "Slices of different size are what `generate mig` makes"
        )
    if shares_mib and shares_mib[0] > limit:
        raise Unfit(
            f"{replicas} shares of {shares_mib[0]:,} MiB do not fit on {gpu.memory_mib:,}: "
            f"{gpu.memory_mib // shares_mib[0]} do, or each has at most {limit:,}"
        )
    _refuse_several_gpus(needs, "MPS")
    large = [need for need in needs if _each(need) > limit]
    if large:
        raise Unfit(_share_too_small(max(large, key=_each), needs, gpu, gpus, replicas))
    notes = _worst_case(needs, gpu, replicas, limit)
    return SharePlan("mps", gpu, gpus, replicas, tuple(needs), limit, notes)


def _each(need: Need) -> int:
    """What one of its processes needs."""
    return -(-need.mib // need.processes)


def _share_too_small(worst: Need, needs: Sequence[Need], gpu: GpuType, gpus: int, replicas: int) -> str:
    fewer = gpu.memory_mib // _each(worst)
    count = "1 share gives" if fewer == 1 else f"{fewer} shares give"
    ways = [f"{count} {gpu.memory_mib // fewer:,} MiB each" if fewer else f"no share of {gpu.name} is that large"]
    if fewer and fewer * gpus < len(needs):
        ways.append(f"{len(needs)} models at {fewer} a GPU take {-(-len(needs) // fewer)} GPUs")
    return (
        f"{worst.model} needs {_each(worst):,} MiB in one process, and {replicas} equal shares of {gpu.name} give "
        f"{gpu.memory_mib // replicas:,} each ({gpu.memory_mib:,} ÷ {replicas}): {'; '.join(ways)}; `generate mig` makes unequal slices"
    )


def _worst_case(needs: Sequence[Need], gpu: GpuType, replicas: int, limit: int) -> tuple[str, ...]:
    said = [
        f"{need.model} has {need.processes} processes on the GPU: together they may take {need.processes} × {limit:,} = "
        f"{need.processes * limit:,} MiB, though its pod has one share."
        for need in needs
        if need.processes > 1
    ]
    may = sum(sorted((need.processes for need in needs), reverse=True)[:replicas]) * limit
    if may > gpu.memory_mib:
        said.append(f"All limits together come to {may:,} MiB on a GPU of {gpu.memory_mib:,}: cap each engine by its own flags too.")
    return tuple(said)


def plan_turns(needs: Sequence[Need], gpu: GpuType, gpus: int = 1, *, replicas: int = 0, per_pod: int = 1) -> SharePlan:
    """Turns on the whole GPU: memory is nobody's, so any pods that may meet on one GPU must fit on it together."""
    replicas = _replicas(needs, gpus, replicas, per_pod, "time-slicing")
    _refuse_several_gpus(needs, "time-slicing")
    largest = sorted(needs, key=lambda need: -need.mib)[:replicas]
    total = sum(need.mib for need in largest)
    if total > gpu.memory_mib:
        meet = " + ".join(f"{need.model} {need.mib:,}" for need in largest)
        fewer = max((count for count in range(1, replicas) if sum(one.mib for one in largest[:count]) <= gpu.memory_mib), default=0)
        larger = _larger(total, gpu)
        ways = [
            f"{fewer} a GPU fit, on {-(-len(needs) // fewer)} GPUs" if fewer else f"not even {largest[0].model} fits alone",
            *((f"{larger.name} would do",) if larger else ()),
            f"{total - gpu.memory_mib:,} MiB less would do",
        ]
        raise Unfit(
            f"{meet} = {total:,} MiB is more than the {gpu.memory_mib:,} of {gpu.name}: time-slicing gives turns and no memory "
            f"isolation, the last to ask would end with out-of-memory; {'; '.join(ways)}"
        )
    spare = f"{total:,} of {gpu.memory_mib:,} MiB when the {len(largest)} largest meet on one GPU."
    return SharePlan("time-slicing", gpu, gpus, replicas, tuple(needs), None, (spare,))


def _larger(total: int, gpu: GpuType) -> GpuType | None:
    return next((one for one in SLICED if one.memory_mib >= total and one.memory_mib > gpu.memory_mib), None)


def _replicas(needs: Sequence[Need], gpus: int, replicas: int, per_pod: int, how: str) -> int:
    if not needs:
        raise Unfit("no model uses a GPU: there is nothing to share")
    if per_pod != 1:
        raise Unfit(
            f"a pod takes 1 share, not {per_pod}: with {how} {per_pod} shares give it no more memory and no more compute than 1, "
            "so more are refused (failRequestsGreaterThanOne)"
        )
    least = -(-len(needs) // gpus)
    if replicas and replicas < least:
        raise Unfit(f"{len(needs)} models on {gpus} GPU(s) take at least {least} shares of each, not {replicas}")
    return replicas or least


def _refuse_several_gpus(needs: Sequence[Need], how: str) -> None:
    if wide := [need for need in needs if need.gpus > 1]:
        one = wide[0]
        raise Unfit(f"{one.model} runs over {one.gpus} GPUs at once, and with {how} a pod has one share of one: give it whole GPUs")
