"""From what configuration says to what the core, the crew and the data plane work with."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import unquote

from greenroom.config.errors import ConfigError, Problem
from greenroom.config.model import Config, DeviceConfig, ModelConfig
from greenroom.core.facts import Device, Group, Model, Policy, Priority, Setup, SleepTier
from greenroom.engines.base import DeviceRef, Engine, Estimate
from greenroom.engines.detect import describe, devices_count, identity
from greenroom.host.gpus import GpuInfo
from greenroom.host.memory import total_mib
from greenroom.ledger import store as ledger
from greenroom.ledger.footprints import Footprints, Key, Learned
from greenroom.proxy.admission import Catalog, ModelRoute
from greenroom.proxy.limits import Limits
from greenroom.proxy.peer_door import Peer
from greenroom.shell.crew import Stage

from .peers import peers_of

log = logging.getLogger("greenroom")

GPU_HEADROOM_MIB = 512  # what a context or a desktop may take on a card found by itself
RAM_HEADROOM_SHARE = 0.1  # of host RAM found by itself
# What may change in a model's entry without its engine being started anew.
LIVE_FIELDS = frozenset(
    [
        "line",
        "pull",
        "pull_options",
        "aliases",
        "name",
        "description",
        "unlisted",
        "metadata",
        "start_s_max",
        "stop_s_max",
        "sleep_s_max",
        "wake_s_max",
        "ttl_s",
        "ttl_auto",
        "sleep_after_s",
        "parallel",
        "queue_limit",
        "pin",
        "on_conflict",
        "priority",
        "use_model_name",
        "filters",
        "stall_s_max",
        "busy_s_max",
        "progress_counts",
        "keepalive",
        "misconfigured",
    ]
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration, made ready: what each part works with."""

    config: Config
    setup: Setup
    stage: Stage
    catalog: Catalog
    estimates: Mapping[str, Estimate]
    keys: Mapping[str, Key]  # model -> key of its learned figures
    missing: Mapping[str, str]  # model -> what it lacks to start
    peers: tuple[Peer, ...] = ()


def make_plan(config: Config, gpus: Sequence[GpuInfo], learned: Footprints, *, strict: bool = True) -> Plan:
    """Raises ConfigError when devices cannot be as configured; with strict=False that is the fault of the models that need them."""
    config = on_this_machine(config, gpus, strict=strict)
    devices, refs = find_devices(config, gpus)
    engines = {model.id: describe(model) for model in config.models}
    models, estimates, keys, missing = [], {}, {}, {}
    for model in config.models:
        engine = engines[model.id]
        candidates = candidates_of(config, model, devices, engine, refs)
        estimate = engine.estimate([refs[name] for name in candidates[:1] if name in refs])
        key = footprint_key(model, candidates, devices)
        lacking = model.misconfigured or engine.missing()
        if lacking:
            missing[model.id] = lacking
        estimates[model.id], keys[model.id] = estimate, key
        models.append(lower_model(config, model, engine, estimate, candidates, learned.get(key), lacking))
    groups = tuple(Group(group.id, frozenset(group.members), group.swap, group.exclusive, group.persistent) for group in config.groups)
    setup = Setup(devices, tuple(models), groups, policy_of(config))
    levels = {model.id: tuple(tier.level for tier in model.sleep) for model in models if model.sleep}
    dozers = frozenset(model.id for model in models if model.doze is not None)
    booked_only = frozenset(device.id for device in devices if not device.measured)
    stage = Stage(engines, refs, config.start_port, levels, dozers, booked_only)
    return Plan(config, setup, stage, catalog_of(config, engines), estimates, keys, missing, peers_of(config))


# ------------------------------------------------------------------ devices


def on_this_machine(config: Config, gpus: Sequence[GpuInfo], *, strict: bool) -> Config:
    """`config` as it can be here: with strict=False a model whose device is not here is kept, marked `misconfigured`.

    Raises ConfigError with all that is not here otherwise.
    """
    absent = absent_devices(config, gpus)
    names = [*gpu_names(config, gpus), "ram"]
    problems = [Problem(config.path, 1, 1, f"devices.{name}", text) for name, text in absent.items()]
    wrong = {
        model.id: Problem(config.path, model.line, 1, f"models.{model.id}.device", text)
        for model in config.models
        if (text := homeless(model, names, tuple(absent)))
    }
    if strict and (problems or wrong):
        raise ConfigError([*problems, *wrong.values()])
    if not problems and not wrong:
        return config
    marks = {id: f"{problem.where}: {problem.message}" for id, problem in wrong.items()}
    models = tuple(replace(one, misconfigured=one.misconfigured or marks[one.id]) if one.id in marks else one for one in config.models)
    return replace(config, models=models, warnings=(*config.warnings, *map(str, problems)))


def homeless(model: ModelConfig, names: Sequence[str], absent: tuple[str, ...]) -> str:
    """A sentence where a model can be on none of the devices, or not on each that it names."""
    for name in model.devices:
        if name not in names:
            return f"there is no device {name!r} here; known: {', '.join(names)}."
    if not model.devices and absent and all(name == "ram" for name in names):
        return f"no device for it is here: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not on this machine."
    return ""


def gpu_names(config: Config, gpus: Sequence[GpuInfo]) -> list[str]:
    """Every device but host RAM: those declared that can be had, or all that are found."""
    absent = absent_devices(config, gpus)
    declared = [device.id for device in config.devices if device.id != "ram"]
    return [name for name in declared if name not in absent] if declared else [name_of(gpu, gpus) for gpu in gpus]


def absent_devices(config: Config, gpus: Sequence[GpuInfo]) -> dict[str, str]:
    """Declared devices that can neither be found nor be booked, each with a sentence."""
    found = {name_of(gpu, gpus): gpu for gpu in gpus}
    text = "is not on this machine and has no `memory`. Write how much may be used, for example memory: 24GiB."
    unsized = (device for device in config.devices if device.id != "ram" and device.size.memory_mib is None)
    return {device.id: text for device in unsized if device.size.probe == "none" or gpu_for(device.id, device, found) is None}


def find_devices(config: Config, gpus: Sequence[GpuInfo]) -> tuple[tuple[Device, ...], dict[str, DeviceRef]]:
    """Declared devices over what the machine has; host RAM is always one.  What can neither be found nor be booked is left out."""
    found = {name_of(gpu, gpus): gpu for gpu in gpus}
    devices: list[Device] = []
    refs: dict[str, DeviceRef] = {}
    declared = {device.id: device for device in config.devices}
    for name in gpu_names(config, gpus):
        gpu = gpu_for(name, declared.get(name), found)
        if gpu is not None and (name not in declared or declared[name].size.probe != "none"):
            devices.append(gpu_device(name, gpu, declared.get(name)))
            refs[name] = DeviceRef(name, gpu.kind, "nvidia", gpu.uuid, gpu.index, gpu.total_mib)
        else:
            devices.append(booked_device(declared[name]))
            refs[name] = DeviceRef(name, "declared", total_mib=declared[name].size.memory_mib or 0)
    devices.append(ram_device(declared.get("ram")))
    refs["ram"] = DeviceRef("ram", "ram", total_mib=devices[-1].capacity_mib)
    return tuple(devices), refs


def name_of(gpu: GpuInfo, gpus: Sequence[GpuInfo]) -> str:
    if gpu.kind != "mig":
        return f"gpu{gpu.index}"
    siblings = [other for other in gpus if other.kind == "mig" and other.index == gpu.index]
    return f"gpu{gpu.index}.mig{siblings.index(gpu)}"


def gpu_for(name: str, declared: DeviceConfig | None, found: Mapping[str, GpuInfo]) -> GpuInfo | None:
    if declared is not None and declared.uuid:
        return next((gpu for gpu in found.values() if gpu.uuid == declared.uuid), None)
    return found.get(name)


def gpu_device(name: str, gpu: GpuInfo, declared: DeviceConfig | None) -> Device:
    total = gpu.total_mib
    capacity = total
    headroom = GPU_HEADROOM_MIB
    if declared is not None:
        capacity = min(total, declared.size.memory_mib) if declared.size.memory_mib is not None else total
        if declared.size.headroom_mib is not None:
            headroom = declared.size.headroom_mib
        elif capacity < total:
            headroom = 0
    return Device(name, gpu.kind, capacity, headroom, total, gpu.name)


def booked_device(declared: DeviceConfig) -> Device:
    """A device nobody can read: its memory is booked, never measured."""
    assert declared.size.memory_mib is not None, f"{declared.id} can neither be found nor be booked"
    if declared.size.probe != "none":
        log.warning(
            "device %s is not on this machine or cannot be read: its %d MiB are booked, not measured", declared.id, declared.size.memory_mib
        )
    return Device(declared.id, "declared", declared.size.memory_mib, declared.size.headroom_mib or 0, measured=False)


def ram_device(declared: DeviceConfig | None) -> Device:
    total = total_mib()
    if declared is None or declared.size.memory_mib is None:
        headroom = declared.size.headroom_mib if declared is not None else None
        return Device("ram", "ram", total, int(total * RAM_HEADROOM_SHARE) if headroom is None else headroom, total, "host RAM")
    measured = declared.size.probe != "none"
    return Device(
        "ram", "ram", declared.size.memory_mib, declared.size.headroom_mib or 0, max(total, declared.size.memory_mib), "host RAM", measured
    )


def candidates_of(
    config: Config, model: ModelConfig, devices: Sequence[Device], engine: Engine, refs: Mapping[str, DeviceRef]
) -> tuple[str, ...]:
    """Where a model may go: as configured, as the operator's own environment pins it, or any GPU, or host RAM.

    Never elsewhere than to declared GPUs, though none of them is here: such a model is misconfigured, and takes nobody's room.
    """
    if model.devices:
        return model.devices
    pinned = engine.pinned_devices()
    by_hand = tuple(name for name, ref in refs.items() if ref.uuid in pinned or (ref.index is not None and str(ref.index) in pinned))
    if by_hand:
        return by_hand
    others = tuple(device.id for device in devices if device.id != "ram")
    return others or tuple(device.id for device in config.devices if device.id != "ram") or ("ram",)


# ------------------------------------------------------------------ models


def lower_model(
    config: Config,
    model: ModelConfig,
    engine: Engine,
    estimate: Estimate,
    candidates: tuple[str, ...],
    learned: Learned | None,
    lacking: str = "",
) -> Model:
    """`lacking`: what keeps it from being started."""
    costs = engine.costs(estimate)
    need, source = need_of(model, estimate, learned, is_least=candidates == ("ram",))
    floor = floor_of(model, estimate, candidates)
    tiers = tuple(tier_of(tier, learned) for tier in costs.tiers)
    doze = tier_of(costs.doze, learned) if costs.doze is not None and model.sleep != "off" else None
    return Model(
        id=model.id,
        devices=candidates,
        need_mib=need,
        base_mib=model.memory_mib if model.memory_mib is not None else estimate.device_mib,
        need_floor_mib=min(floor, need or floor),
        need_source=source,
        host_mib=model.host_memory_mib or (estimate.host_mib if candidates != ("ram",) else 0),
        devices_count=devices_count(model) if candidates != ("ram",) else 1,
        parallel=model.parallel or engine.parallel(),
        queue_limit=model.queue_limit,
        pinned=model.pin,
        preload=model.id in config.preload,
        on_conflict=model.on_conflict,
        priority=Priority(model.priority),
        sleep=tiers,
        doze=doze,
        no_sleep="" if tiers else engine.no_sleep(),
        sleep_after_s=model.sleep_after_s,
        ttl_s=model.ttl_s,
        ttl_auto=model.ttl_auto,
        up_s=learned.up_s if learned is not None and learned.up_s is not None else costs.up_s,
        down_s=learned.down_s if learned is not None and learned.down_s is not None else costs.down_s,
        lone_start=engine.lone_start(),
        misconfigured=lacking,
        digest=digest_of(model),
        aliases=(*model.aliases, *model.filters.set_params_by_id),
    )


def floor_of(model: ModelConfig, estimate: Estimate, candidates: tuple[str, ...]) -> int:
    """What measuring never lowers its need below.

    Untouched pages of host RAM, and a share an engine was told to take, are not free because they were not seen in use:
    an engine may take its memory only while it works, and give it back.
    """
    if candidates == ("ram",):
        return model.memory_mib or estimate.device_mib or 0
    return (estimate.device_mib or 0) if estimate.source == "flags" else 0


def need_of(model: ModelConfig, estimate: Estimate, learned: Learned | None, *, is_least: bool = False) -> tuple[int | None, str]:
    """What was measured before, else declared, else told by flags or files; None = unknown, the whole device.

    `is_least`: what is declared is the least, whatever was measured (see `floor_of`).
    """
    declared, measured = model.memory_mib, learned.device_mib if learned is not None else None
    if measured is not None and not (is_least and declared is not None and measured < declared):
        return measured, "measured"
    if declared is not None:
        return declared, "declared"
    return estimate.device_mib, estimate.source


def tier_of(tier: SleepTier, learned: Learned | None) -> SleepTier:
    """A sleep level with what was measured of it in earlier runs in place of the priors."""
    known = next((known for known in learned.tiers if known.level == tier.level), None) if learned is not None else None
    return tier if known is None else SleepTier(known.level, known.residue_mib, known.host_mib, known.sleep_s, known.wake_s)


def digest_of(model: ModelConfig) -> str:
    """Identity of what is executed: a reload starts the engine anew only when this changes."""
    kept = {each.name: getattr(model, each.name) for each in fields(model) if each.name not in LIVE_FIELDS}
    return hashlib.sha256(repr(sorted(kept.items())).encode()).hexdigest()[:16]


def footprint_key(model: ModelConfig, candidates: tuple[str, ...], devices: Sequence[Device]) -> Key:
    """What makes two launches comparable: files, command, kind of device."""
    same = identity(model)
    files = hashlib.sha256(repr(same.files).encode()).hexdigest()[:16]
    kind = next((device.name or device.kind for device in devices if device.id in candidates[:1]), "")
    return Key(files, "", same.argv_digest[:16], kind)


def policy_of(config: Config) -> Policy:
    kinds = {each.name: type(getattr(Policy(), each.name)) for each in fields(Policy)}
    values: dict[str, Any] = {name: int(value) if kinds.get(name) is int else value for name, value in config.policy.items()}
    return replace(Policy(), **values)


# ------------------------------------------------------------------ the data plane


def catalog_of(config: Config, engines: Mapping[str, Engine]) -> Catalog:
    routes = {model.id: route_of(model, engines[model.id].kind) for model in config.models}
    names = {alias: model.id for model in config.models for alias in (*model.aliases, *model.filters.set_params_by_id)}
    names.update({model.id: model.id for model in config.models})
    return Catalog(
        models=routes,
        names=names,
        default_model=config.default_model,
        include_aliases_in_list=config.include_aliases_in_list,
        upstream_ignore_paths=config.upstream_ignore_paths,
        control_words=control_words(config.models),
        created=int(time.time()),
    )


def control_words(models: Sequence[ModelConfig]) -> frozenset[str]:
    """No client may reach what puts an engine to sleep, also where only the configuration knows which path that is."""
    calls = [call for model in models if model.sleep_calls for call in (*model.sleep_calls.sleep, *model.sleep_calls.wake)]
    words = (unquote(call.path.partition("?")[0]).lower().rstrip("/").rpartition("/")[2] for call in calls)
    return frozenset(word for word in words if word)


def route_of(model: ModelConfig, kind: str) -> ModelRoute:
    return ModelRoute(
        id=model.id,
        aliases=model.aliases,
        engine=kind,
        use_model_name=model.use_model_name,
        strip_params=model.filters.strip_params,
        set_params=model.filters.set_params,
        set_params_by_id=model.filters.set_params_by_id,
        unlisted=model.unlisted,
        name=model.name,
        description=model.description,
        metadata=model.metadata,
        keepalive=model.keepalive,
    )


def ledger_limits_of(config: Config) -> ledger.Limits:
    return ledger.Limits(days=config.ledger.keep_s / 86400, size_bytes=config.ledger.size_max_bytes)


def limits_of(config: Config) -> Limits:
    try:
        return Limits.from_mapping(config.limits)
    except ValueError as exc:
        raise ConfigError([Problem(config.path, 1, 1, "limits", str(exc))]) from exc
