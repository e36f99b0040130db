"""From the validated file to the plain values of `model.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checks import groups_of
from .model import (
    AsleepConfig,
    CallConfig,
    Config,
    ContainerConfig,
    DeviceConfig,
    FiltersConfig,
    GroupConfig,
    KeyConfig,
    LedgerConfig,
    ModelConfig,
    PeerConfig,
    PullConfig,
    SizeSpec,
    SleepConfig,
    TracingConfig,
    WarmupConfig,
)
from .schema import (
    CallSection,
    ConfigFile,
    ContainerSection,
    DeviceSection,
    FiltersSection,
    ModelSection,
    PeerSection,
    PullSection,
    SleepSection,
    key_name,
)

# What pages of an engine fetch, also behind their user's back once they are installed as an app; none of it is worth a start.
IGNORED_PATHS_DEFAULT = (r"\.(?:m?js|map|json|webmanifest|wasm|css|woff2?|ttf|png|gif|jpe?g|svg|webp|avif|ico|txt|html?)$",)
PROXY_DEFAULT = "http://127.0.0.1:${PORT}"
STOP_S_DEFAULT = 10.0
CONNECT_S_DEFAULT = 5.0  # to a peer


def lower_model(model_id: str, model: ModelSection, top: ConfigFile, line: int, misconfigured: str = "") -> ModelConfig:
    """One model with what it inherits from the top level filled in."""
    ttl = top.globalTTL if model.ttl is None else model.ttl
    start_s_max = model.healthCheckTimeout or top.healthCheckTimeout  # also of a sleep and a wake: large weights take long to move
    return ModelConfig(
        id=model_id,
        argv=model.cmd,
        line=line,
        reference=model.model or "",
        pull=model.pull if isinstance(model.pull, str) else model.pull.when,
        pull_options=_pull_options(model, top),
        aliases=_aliases(model_id, model),
        name=model.name,
        description=model.description,
        unlisted=model.unlisted,
        metadata=model.metadata,
        engine=model.engine,
        stop_argv=model.cmdStop or (),
        env=model.env,
        cwd=model.cwd,
        proxy=model.proxy or PROXY_DEFAULT,
        check_path=None if model.checkEndpoint == "none" else (model.checkEndpoint or "/health"),
        check_explicit=model.checkEndpoint is not None,
        start_s_max=start_s_max,
        stop_s_max=model.unloadTimeout or top.unloadTimeout or STOP_S_DEFAULT,
        ttl_s=None if ttl == "auto" else ttl or None,
        ttl_auto=ttl == "auto",
        sleep_after_s=model.sleep_after or None,
        sleep=str(model.sleep.level) if isinstance(model.sleep, SleepSection) else model.sleep,
        sleep_calls=_sleep_calls(model.sleep, model.wake) if isinstance(model.sleep, SleepSection) else None,
        sleep_s_max=model.sleep_timeout or start_s_max,
        wake_s_max=model.wake_timeout or start_s_max,
        canary=model.canary,
        memory_mib=model.memory,
        host_memory_mib=model.host_memory,
        devices=model.device,
        devices_count=model.devices_count,
        parallel=model.parallel or model.concurrencyLimit or None,
        queue_limit=model.queue_limit,
        pin=model.pin,
        on_conflict=model.on_conflict,
        priority=model.priority,
        use_model_name=model.useModelName or None,
        filters=_filters(model.filters),
        warmup=None if model.warmup is None else WarmupConfig(model.warmup.path, model.warmup.body),
        container=None if model.container is None else _container(model.container),
        stall_s_max=model.stall_timeout or None,
        busy_s_max=model.busy_timeout or None,
        progress_counts=model.progress_counts,
        keepalive=model.keepalive,
        misconfigured=misconfigured,
    )


def _pull_options(model: ModelSection, top: ConfigFile) -> PullConfig:
    """What is said for all models, and over it what is said for this one."""
    said: dict[str, Any] = {}
    for section in (top.pull, model.pull) if model.model is not None else ():
        if isinstance(section, PullSection):
            said |= {name: getattr(section, name) for name in PullSection.model_fields if name in section.model_fields_set}
    return PullConfig(size_max_bytes=said.pop("max_size", None), **said)


def _aliases(model_id: str, model: ModelSection) -> tuple[str, ...]:
    """Names of `setParamsByID` are aliases too; the model's own id is none."""
    names = dict.fromkeys([*model.aliases, *model.filters.setParamsByID])
    return tuple(name for name in names if name != model_id)


def _filters(filters: FiltersSection) -> FiltersConfig:
    return FiltersConfig(filters.stripParams, filters.setParams, filters.setParamsByID)


def _sleep_calls(sleep: SleepSection, wake: CallSection | tuple[CallSection, ...] | None) -> SleepConfig | None:
    """None when a half is missing: such a model is misconfigured."""
    one = () if sleep.path is None else (CallConfig(sleep.path, sleep.method, sleep.body),)
    calls = one if sleep.calls is None else tuple(map(_call, sleep.calls))
    wakes = (wake,) if isinstance(wake, CallSection) else wake
    if not calls or not wakes:
        return None
    host_mib = 0 if sleep.host_memory is None and sleep.level == 2 else sleep.host_memory  # dropped weights wait nowhere
    return SleepConfig(
        sleep=calls,
        wake=tuple(map(_call, wakes)),
        level=sleep.level,
        asleep=None if sleep.asleep is None else AsleepConfig(sleep.asleep.path, sleep.asleep.field, sleep.asleep.value),
        residue_mib=sleep.residue,
        host_mib=host_mib,
    )


def _call(call: CallSection) -> CallConfig:
    return CallConfig(call.path, call.method, call.body)


def _container(container: ContainerSection) -> ContainerConfig:
    return ContainerConfig(
        container.runtime,
        container.image,
        container.args,
        container.volumes,
        pull=container.pull,
        pull_s_max=container.pull_timeout,
        gpus=container.gpus,
        shm_mib=container.shm_size,
    )


def _device(device_id: str, device: DeviceSection) -> DeviceConfig:
    return DeviceConfig(device_id, SizeSpec(device.memory, device.headroom, device.probe), device.uuid)


def _keys(top: ConfigFile) -> tuple[KeyConfig, ...]:
    """A key that is listed twice (as plain text, else it is a problem) counts once, under its first name."""
    found: dict[str, KeyConfig] = {}
    for position, each in enumerate(top.apiKeys, start=1):
        found.setdefault(each.key, KeyConfig(each.key, key_name(each, position), each.scopes, each.models, each.limit))
    return tuple(found.values())


def lower_peer(peer_id: str, peer: PeerSection, line: int) -> PeerConfig:
    timeouts = peer.timeouts
    return PeerConfig(
        id=peer_id,
        url=peer.proxy,
        models=peer.models,
        key=peer.apiKey,
        line=line,
        tls_ca=peer.tls_ca,
        filters=_filters(peer.filters),
        connect_s=timeouts.connect or CONNECT_S_DEFAULT,
        response_s=timeouts.responseHeader or None,
        stall_s=peer.stall_timeout or None,
        priority=peer.priority,
        weight=peer.weight,
        overflow=peer.overflow,
        prefer=peer.prefer,
        probe=None if peer.probe == "off" else peer.probe,
    )


def lower(
    path: str,
    top: ConfigFile,
    models: tuple[ModelConfig, ...],
    names: Mapping[str, str],
    warnings: tuple[str, ...],
    peers: tuple[PeerConfig, ...] = (),
) -> Config:
    """The whole file; `names` maps every id and alias to its model id."""
    groups, _ = groups_of(top)
    return Config(
        path=path,
        models=models,
        devices=tuple(_device(device_id, device) for device_id, device in top.devices.items()),
        groups=tuple(
            GroupConfig(group_id, tuple(names[member] for member in group.members), group.swap, group.exclusive, group.persistent)
            for group_id, group in groups.items()
        ),
        preload=tuple(dict.fromkeys(names[name] for name in top.hooks.on_startup.preload)),
        keys=_keys(top),
        start_port=top.startPort,
        log_level=top.logLevel,
        log_to_stdout=top.logToStdout,
        include_aliases_in_list=top.includeAliasesInList,
        upstream_ignore_paths=top.upstream.ignorePaths or IGNORED_PATHS_DEFAULT,
        default_model=None if top.default_model is None else names.get(top.default_model, top.default_model),  # else a peer's
        allowed_hosts=top.allowed_hosts,
        cors_origins=top.cors_origins,
        policy=top.scheduling,
        limits=top.limits,
        ledger=LedgerConfig(top.ledger.keep, top.ledger.max_size),
        tracing=None if top.tracing is None else TracingConfig(top.tracing.endpoint, top.tracing.service_name, top.tracing.sample),
        peers=peers,
        warnings=warnings,
    )
