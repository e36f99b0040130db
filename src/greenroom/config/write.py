"""The other way round: a loaded configuration as greenroom.yaml again, macros expanded, secrets left to the environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from .errors import SECRET_CHARS_MIN
from .lower import IGNORED_PATHS_DEFAULT, PROXY_DEFAULT
from .model import (
    SCOPES,
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
    SleepConfig,
    TracingConfig,
)
from .yaml_out import dump

_MACRO = re.compile(r"\$\{[A-Za-z0-9_.-]+\}", re.ASCII)
_FILLED_LATER = ("${PORT}", "${MODEL_PATH}", "${MODEL_DIR}", "${PID}")
_LATER_BY_KEY: Mapping[str, tuple[str, ...]] = {
    "cmd": _FILLED_LATER[:3],
    "cmdStop": _FILLED_LATER,
    "proxy": _FILLED_LATER[:1],
    "env": _FILLED_LATER[:3],
    "container": _FILLED_LATER[:3],
}
_DEFAULTS = {each.name: each.default for each in fields(ModelConfig)}
_CONTAINER_DEFAULTS = {each.name: each.default for each in fields(ContainerConfig)}
# ModelConfig's name -> the file's, where a value is written as it is and left out where it is the default
_PLAIN = {
    "reference": "model",
    "name": "name",
    "description": "description",
    "unlisted": "unlisted",
    "engine": "engine",
    "cwd": "cwd",
    "start_s_max": "healthCheckTimeout",
    "stop_s_max": "unloadTimeout",
    "sleep_after_s": "sleep_after",
    "canary": "canary",
    "devices_count": "devices_count",
    "parallel": "parallel",
    "queue_limit": "queue_limit",
    "pin": "pin",
    "on_conflict": "on_conflict",
    "priority": "priority",
    "use_model_name": "useModelName",
    "stall_s_max": "stall_timeout",
    "busy_s_max": "busy_timeout",
    "progress_counts": "progress_counts",
    "keepalive": "keepalive",
}


def text_of(config: Config, secrets: Mapping[str, str] | None = None, *, comments: Iterable[str] = ()) -> str:
    """greenroom.yaml that loads to the same configuration (`path`, lines and warnings aside).

    `secrets` maps a value that must not be written to the variable that holds it: `${env.NAME}` stands in its place.
    """
    return dump(_kept_as_text(document_of(config), dict(secrets or {})), comments=comments)


def document_of(config: Config) -> dict[str, Any]:
    """The same as plain values, before secrets are taken out and macros are escaped."""
    top: dict[str, Any] = {}
    _put(top, "startPort", config.start_port, 5800)
    _put(top, "logLevel", config.log_level, "info")
    _put(top, "logToStdout", config.log_to_stdout, "proxy")
    _put(top, "includeAliasesInList", config.include_aliases_in_list, False)
    _put(top, "default_model", config.default_model, None)
    _put(top, "allowed_hosts", list(config.allowed_hosts), [])
    _put(top, "cors_origins", list(config.cors_origins), ["*"])
    _put(top, "apiKeys", [_key(key, position) for position, key in enumerate(config.keys, start=1)], [])
    _put(top, "devices", {device.id: _device(device) for device in config.devices}, {})
    _put(top, "models", {model.id: _model(model) for model in config.models}, {})
    _put(top, "peers", {peer.id: _peer(peer) for peer in config.peers}, {})
    _put(top, "groups", {group.id: _group(group) for group in config.groups}, {})
    if config.preload:
        top["hooks"] = {"on_startup": {"preload": list(config.preload)}}
    if config.upstream_ignore_paths not in ((), IGNORED_PATHS_DEFAULT):  # an empty list would mean the default
        top["upstream"] = {"ignorePaths": list(config.upstream_ignore_paths)}
    _put(top, "scheduling", {name: "off" if value is None else value for name, value in config.policy.items()}, {})
    _put(top, "limits", dict(config.limits), {})
    _put(top, "ledger", _ledger(config.ledger), {})
    if config.tracing is not None:
        top["tracing"] = _tracing(config.tracing)
    return top


def _put(table: dict[str, Any], key: str, value: object, default: object) -> None:
    if value != default:
        table[key] = value


def _mib(value: int | None) -> str | None:
    return None if value is None else f"{value}MiB"


def _key(key: KeyConfig, position: int) -> dict[str, Any]:
    out: dict[str, Any] = {"key": key.key}
    _put(out, "name", key.name, f"key-{position}")
    _put(out, "scopes", list(key.scopes), list(SCOPES))
    _put(out, "models", None if key.models is None else list(key.models), None)
    _put(out, "limit", key.limit, None)
    return out


def _device(device: DeviceConfig) -> dict[str, Any]:
    out: dict[str, Any] = {}
    _put(out, "memory", _mib(device.size.memory_mib), None)
    _put(out, "headroom", _mib(device.size.headroom_mib), None)
    _put(out, "probe", device.size.probe, "auto")
    _put(out, "uuid", device.uuid, None)
    return out


def _group(group: GroupConfig) -> dict[str, Any]:
    return {"members": list(group.members), "swap": group.swap, "exclusive": group.exclusive, "persistent": group.persistent}


def _ledger(ledger: LedgerConfig) -> dict[str, Any]:
    out: dict[str, Any] = {}
    _put(out, "keep", ledger.keep_s, LedgerConfig().keep_s)
    _put(out, "max_size", f"{ledger.size_max_bytes}B", f"{LedgerConfig().size_max_bytes}B")
    return out


def _tracing(tracing: TracingConfig) -> dict[str, Any]:
    return {"endpoint": tracing.endpoint, "service_name": tracing.service_name, "sample": tracing.sample}


def _model(model: ModelConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"cmd": list(model.argv)}
    _put(out, "cmdStop", list(model.stop_argv), [])
    for attribute, key in _PLAIN.items():
        _put(out, key, getattr(model, attribute), _DEFAULTS[attribute])
    _put(out, "pull", _pull(model), "missing")
    _put(out, "aliases", list(model.aliases), [])
    _put(out, "env", [f"{name}={value}" for name, value in model.env], [])
    _put(out, "proxy", model.proxy, PROXY_DEFAULT)
    if model.check_explicit or model.check_path is None:
        out["checkEndpoint"] = model.check_path or "none"
    _put(out, "ttl", "auto" if model.ttl_auto else model.ttl_s, None)
    _put(out, "sleep_timeout", model.sleep_s_max, model.start_s_max)
    _put(out, "wake_timeout", model.wake_s_max, model.start_s_max)
    if model.sleep_calls is not None:
        out |= _sleep_routes(model.sleep_calls)
    else:
        _put(out, "sleep", model.sleep, "auto")
    _put(out, "memory", _mib(model.memory_mib), None)
    _put(out, "host_memory", _mib(model.host_memory_mib), None)
    _put(out, "device", list(model.devices), [])
    _put(out, "metadata", model.metadata, {})
    _put(out, "filters", _filters(model.filters), {})
    if model.warmup is not None:
        out["warmup"] = {"path": model.warmup.path, "body": model.warmup.body}
    if model.container is not None:
        out["container"] = _container(model.container)
    return out


def _pull(model: ModelConfig) -> str | dict[str, Any]:
    """Options stand with each model, also those that were said for all."""
    options, default = model.pull_options, PullConfig()
    if options == default:
        return model.pull
    out: dict[str, Any] = {"when": model.pull}
    for name in ("plain_http", "tls_ca", "tls_verify", "platform", "verify_key", "offline"):
        _put(out, name, getattr(options, name), getattr(default, name))
    _put(out, "allow_host", list(options.allow_host), [])
    _put(out, "max_size", None if options.size_max_bytes is None else f"{options.size_max_bytes}B", None)
    return out


def _container(container: ContainerConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"runtime": container.runtime, "image": container.image}
    _put(out, "args", list(container.args), [])
    _put(out, "volumes", list(container.volumes), [])
    _put(out, "pull", container.pull, "missing")
    _put(out, "pull_timeout", container.pull_s_max, _CONTAINER_DEFAULTS["pull_s_max"])
    _put(out, "gpus", container.gpus, "auto")
    _put(out, "shm_size", _mib(container.shm_mib), None)
    return out


def _peer(peer: PeerConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"proxy": peer.url, "models": [{here: there} if here != there else here for here, there in peer.models]}
    _put(out, "apiKey", peer.key, None)
    _put(out, "tls_ca", peer.tls_ca, None)
    _put(out, "filters", _filters(peer.filters), {})
    out["timeouts"] = {"connect": peer.connect_s, "responseHeader": peer.response_s or 0}
    out["stall_timeout"] = peer.stall_s or 0
    _put(out, "priority", peer.priority, 0)
    _put(out, "weight", peer.weight, 1.0)
    _put(out, "overflow", peer.overflow, False)
    _put(out, "prefer", peer.prefer, False)
    out["probe"] = peer.probe or "off"
    return out


def _filters(filters: FiltersConfig) -> dict[str, Any]:
    out: dict[str, Any] = {}
    _put(out, "stripParams", ",".join(filters.strip_params), "")
    _put(out, "setParams", filters.set_params, {})
    _put(out, "setParamsByID", filters.set_params_by_id, {})
    return out


def _sleep_routes(declared: SleepConfig) -> dict[str, Any]:
    sleep: dict[str, Any] = {"calls": [_call(call) for call in declared.sleep], "level": declared.level}
    if (asked := declared.asleep) is not None:
        sleep["asleep"] = {"path": asked.path, "field": asked.field, "value": asked.value}
    sleep["residue"] = _mib(declared.residue_mib)
    _put(sleep, "host_memory", _mib(declared.host_mib), None)
    return {"sleep": sleep, "wake": [_call(call) for call in declared.wake]}


def _call(call: CallConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"path": call.path, "method": call.method}
    _put(out, "body", call.body, None)
    return out


# ------------------------------------------------------------------------------------------------- macros and secrets


def _kept_as_text(document: dict[str, Any], secrets: Mapping[str, str]) -> dict[str, Any]:
    longest_first = sorted((value for value in secrets if value), key=len, reverse=True)
    cut = re.compile("|".join(map(_as_pattern, longest_first))) if longest_first else None

    def text(value: str, later: tuple[str, ...]) -> str:
        pieces, last = [], 0
        for match in cut.finditer(value) if cut is not None else ():
            pieces += [_escaped(value[last : match.start()], later), f"${{env.{secrets[match[0]]}}}"]
            last = match.end()
        return "".join([*pieces, _escaped(value[last:], later)])

    def walk(value: object, later: tuple[str, ...], keys_too: bool = False) -> object:
        if isinstance(value, str):
            return text(value, later)
        if isinstance(value, Mapping):
            return {text(key, later) if keys_too else key: walk(item, later, key == "setParamsByID") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(item, later) for item in value]
        return value

    done = {key: walk(value, ()) for key, value in document.items() if key != "models"}
    models = {
        name: {key: walk(value, _LATER_BY_KEY.get(key, ())) for key, value in model.items()}
        for name, model in document.get("models", {}).items()
    }
    return {key: models if key == "models" else done[key] for key in document}


def _as_pattern(secret: str) -> str:
    """A short one only where it stands alone: it would be found in half of all words."""
    pattern = re.escape(secret)
    return pattern if len(secret) >= SECRET_CHARS_MIN else f"(?:(?<=[=,])|(?<![\\s\\S])){pattern}(?=,|\\Z)"


def _escaped(text: str, later: tuple[str, ...]) -> str:
    """`${name}` as text is written `$${name}`, but for what is filled in when an engine starts or stops."""
    return _MACRO.sub(lambda match: match[0] if match[0] in later else f"${match[0]}", text)
