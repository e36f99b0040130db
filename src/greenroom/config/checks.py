"""What must hold across keys: names, references, ports, groups.  Works on what validation left standing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from . import secrets
from .errors import SECRET_CHARS_MIN, Path, Report, did_you_mean, quoted
from .model import is_pattern
from .schema import CallSection, ConfigFile, GroupSection, KeySection, ModelSection, PullSection, SleepSection, key_name, name_error

PORT = "${PORT}"
PEM_BYTES_MAX = 4 << 20  # of a file of certificates
STORED = ("${MODEL_PATH}", "${MODEL_DIR}")
DEVICE_IDS_KNOWN = re.compile(r"gpu\d{1,3}|ram|(?:GPU|MIG)-[0-9A-Za-z/-]+")
_DEVICE_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SLEEPERS = frozenset({"vllm", "sglang"})  # engines whose sleep routes are known
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def check_names(models: Mapping[str, ModelSection], ids: Mapping[str, object], report: Report) -> dict[str, str]:
    """Every name clients may use -> model id; problems for ids that cannot be used and for names with two meanings."""
    for model_id in ids:
        if message := name_error(model_id):
            report.add(("models", model_id), message)
    names = {model_id: model_id for model_id in ids}
    for model_id, model in models.items():
        for index, alias in enumerate(model.aliases):
            _claim(alias, model_id, ("models", model_id, "aliases", index), names, report)
        for alias in model.filters.setParamsByID:
            _claim(alias, model_id, ("models", model_id, "filters", "setParamsByID", alias), names, report, again=True)
    return names


def _claim(alias: str, model_id: str, path: Path, names: dict[str, str], report: Report, again: bool = False) -> None:
    """`again`: the name may already be this model's own."""
    owner = names.get(alias)
    if owner is None:
        names[alias] = model_id
    elif alias == owner and owner != model_id:
        report.add(path, f"{quoted(alias)} is the id of another model. Choose another name.")
    elif owner != model_id:
        report.add(path, f"{quoted(alias)} is already a name of model {quoted(owner)}. Choose another name.")
    elif not again:
        report.add(path, f"{quoted(alias)} is already a name of this model. Remove it.")


def check_model(model_id: str, model: ModelSection, raw: Mapping[str, object], devices: Mapping[str, object], report: Report) -> None:
    """What must hold inside one model."""
    path: Path = ("models", model_id)
    if not model.cmd and "cmd" not in raw:
        report.add(path, "has no cmd. Add the engine's command, such as cmd: llama-server --model /models/x.gguf --port ${PORT}")
    _check_port(model, path, report)
    _check_reference(model, path, report)
    _check_devices(model, devices, path, report)
    if model.concurrencyLimit and model.parallel is None:
        meaning = f"is read as parallel: {model.concurrencyLimit}; further requests wait (up to queue_limit) where llama-swap refuses them."
        report.warn((*path, "concurrencyLimit"), meaning)
    for word in model.cmd:
        if flag := secrets.FLAG.fullmatch(word):
            report.warn((*path, "cmd"), _secret_sentence(word.removesuffix(flag["value"] or "")))
    if any(map(secrets.is_told, secrets.in_arguments(model.cmd))):
        report.warn((*path, "cmd"), _secret_sentence("a password in a URL, or an Authorization header,"))


def check_sleep(model_id: str, model: ModelSection, top: ConfigFile, report: Report) -> None:
    """Both halves of an engine's own sleep are there and can be sent, and nothing is written that can never happen."""
    path: Path = ("models", model_id)
    if isinstance(model.sleep, SleepSection):
        _check_sleep_section(model, model.sleep, (*path, "sleep"), report)
    elif model.wake is not None and not report.has((*path, "sleep")):
        report.add((*path, "wake"), "means something only beside sleep routes. Write sleep: {path: /sleep} or the like too, or remove it.")
    for place, call in _calls_of(model):
        if call.method == "GET" and call.body is not None:
            report.add((*path, *place, "body"), "a GET has no body. Write method: POST, or remove the body.")
    _warn_about_sleep(model, top, path, report)


def _calls_of(model: ModelSection) -> Iterator[tuple[Path, CallSection | SleepSection]]:
    if isinstance(model.sleep, SleepSection):
        yield ("sleep",), model.sleep
        yield from ((("sleep", "calls", index), call) for index, call in enumerate(model.sleep.calls or ()))
    if isinstance(model.wake, CallSection):
        yield ("wake",), model.wake
    else:
        yield from ((("wake", index), call) for index, call in enumerate(model.wake or ()))


def _check_sleep_section(model: ModelSection, sleep: SleepSection, path: Path, report: Report) -> None:
    if model.wake is None and not report.has((*path[:-1], "wake")):
        report.add(path, "has no wake beside it, so the engine could never be woken. Add wake: {path: /wake_up} or the like.")
    if sleep.calls is None and sleep.path is None and not report.has((*path, "path")) and not report.has((*path, "calls")):
        report.add(path, "has no path. Add the route that puts the engine to sleep, such as path: /sleep, or several under calls.")
    for key in ("path", "method", "body") if sleep.calls is not None else ():
        if key in sleep.model_fields_set:
            report.add((*path, key), "is written beside calls. Move it into one of the calls, or remove calls.")
    if model.engine in _SLEEPERS:
        known = f"greenroom knows how {model.engine} sleeps, and these calls are made instead."
        report.warn(path, f"{known} Write sleep: auto, 1 or 2 and no wake, unless that is what you want.")


def _warn_about_sleep(model: ModelSection, top: ConfigFile, path: Path, report: Report) -> None:
    if model.sleep == "off":
        written = {"sleep_after": model.sleep_after, "sleep_timeout": model.sleep_timeout, "wake_timeout": model.wake_timeout}
        for key in (*(key for key, value in written.items() if value), *(["canary"] if model.canary == "always" else [])):
            report.warn((*path, key), "has no effect with sleep: off.")
        return
    if model.pin:
        for key in (*(["sleep"] if model.sleep != "auto" else []), *(["sleep_after"] if model.sleep_after else [])):
            report.warn((*path, key), "has no effect with pin: true, because a pinned model never sleeps.")
        return
    ttl_s, name = (top.globalTTL, "globalTTL") if model.ttl is None else (model.ttl, "ttl")
    if model.sleep_after and ttl_s and ttl_s != "auto" and model.sleep_after >= ttl_s:
        said = f"is not shorter than {name} ({ttl_s:g} s), so the engine is stopped before it sleeps."
        report.warn((*path, "sleep_after"), f"{said} Make it shorter, or {name} longer.")


def _secret_sentence(flag: str) -> str:
    return f"{flag} puts a secret on the command line, where every user of this machine can read it. Put it in env instead."


def _check_port(model: ModelSection, path: Path, report: Report) -> None:
    if not model.cmd:
        return
    told = [*model.cmd, *(text for _, text in model.env), *(model.container.args if model.container else ())]
    if any(PORT in word for word in told):
        return
    if model.proxy is None:
        report.add(
            (*path, "cmd"),
            "has no ${PORT}, so the engine cannot be told where to listen. Add --port ${PORT}, or set proxy to its own address.",
        )
    elif PORT in model.proxy:
        report.add((*path, "proxy"), "uses ${PORT}, but cmd does not. Add --port ${PORT} to cmd, or write the engine's own port here.")


def _check_reference(model: ModelSection, path: Path, report: Report) -> None:
    if model.model is None:
        if "pull" in model.model_fields_set:
            report.warn((*path, "pull"), "has no effect without model. Add model: oci://… or the like, or remove it.")
        return
    if isinstance(model.pull, PullSection):
        check_pull(model.pull, (*path, "pull"), report)
    told = [*model.cmd, *(text for _, text in model.env), *(model.container.args + model.container.volumes if model.container else ())]
    if model.cmd and not any(place in word for word in told for place in STORED):
        report.add((*path, "cmd"), "has no ${MODEL_PATH}, so the engine cannot be told where its model lies. Add it, or remove model.")


def check_pull(pull: PullSection, path: Path, report: Report) -> None:
    """Files that a fetch reads are there, and are what they should be."""
    for key, file, what, marks in (
        ("tls_ca", pull.tls_ca, "certificates (PEM)", (b"-----BEGIN CERTIFICATE-----", b"-----BEGIN TRUSTED CERTIFICATE-----")),
        ("verify_key", pull.verify_key, "one public key (PEM)", (b"-----BEGIN PUBLIC KEY-----", b"-----BEGIN RSA PUBLIC KEY-----")),
    ):
        if file is None:
            continue
        try:
            with open(file, "rb") as opened:
                held = opened.read(PEM_BYTES_MAX)
        except OSError as exc:
            report.add((*path, key), f"{quoted(file)} cannot be read ({exc.strerror}). Name a file of {what}.")
            continue
        if not any(mark in held for mark in marks):
            report.add((*path, key), f"{quoted(file)} holds none. Name a file of {what}.")


def _check_devices(model: ModelSection, devices: Mapping[str, object], path: Path, report: Report) -> None:
    for name in model.device:
        if name not in devices and not DEVICE_IDS_KNOWN.fullmatch(name):
            report.add(
                (*path, "device"), f"{quoted(name)} is not a device.{did_you_mean(name, [*devices, 'any'])} Declare it under devices."
            )
    if model.device and model.devices_count > len(model.device):
        said = f"{model.devices_count} devices are wanted, but device names {len(model.device)}."
        report.add((*path, "devices_count"), f"{said} Name more devices, or write device: any.")


def check_ports(models: Mapping[str, ModelSection], report: Report) -> None:
    """Two models on one fixed port can never both run."""
    taken: dict[tuple[str, int], str] = {}
    for model_id, model in models.items():
        if model.proxy is None or PORT in model.proxy:
            continue
        parts = urlsplit(model.proxy)
        host = parts.hostname or ""
        at = ("localhost" if host in _LOOPBACK else host, parts.port or 80)
        if at in taken:
            what = f"port clash: {parts.port or 80} on {host} is also the port of model {quoted(taken[at])}."
            report.add(("models", model_id, "proxy"), f"{what} Use ${{PORT}}, or another port.")
        taken.setdefault(at, model_id)


def check_devices(top: ConfigFile, report: Report) -> None:
    for device_id, device in top.devices.items():
        path: Path = ("devices", device_id)
        if device_id == "any" or not _DEVICE_ID.fullmatch(device_id):
            report.add(path, f"{quoted(device_id)} cannot name a device. Use gpu0, gpu1, ram, or letters, digits, _ . and -.")
        elif device.probe == "none" and device.memory is None:
            report.add(path, "is not measured (probe: none), so its size must be told. Add memory: 24GiB or the like.")
        elif device.probe == "auto" and device.uuid is None and not DEVICE_IDS_KNOWN.fullmatch(device_id):
            report.add(
                path,
                f"{quoted(device_id)} is no GPU that can be found. Name it gpu0 or ram, add its uuid, or write probe: none and memory.",
            )
        if device.memory is not None and device.headroom is not None and device.headroom >= device.memory:
            report.add((*path, "headroom"), f"{device.headroom} MiB of headroom leave nothing of {device.memory} MiB. Make it smaller.")


def groups_of(top: ConfigFile) -> tuple[Mapping[str, GroupSection], Path]:
    """The groups and where they stand: at the top level, or where newer llama-swap files keep them."""
    nested = top.routing.router.settings.groups
    return (nested, ("routing", "router", "settings", "groups")) if nested and not top.groups else (top.groups, ("groups",))


def check_references(top: ConfigFile, names: Mapping[str, str], report: Report, far: Mapping[str, str]) -> None:
    """Groups, preload and default_model name models that exist.  `far`: names that peers serve, which some may name as well."""
    if top.groups and top.routing.router.settings.groups:
        report.add(("routing", "router", "settings", "groups"), "groups also stand at the top level. Keep them in one place.")
    groups, base = groups_of(top)
    _check_groups(groups, base, names, report)
    for index, name in enumerate(top.hooks.on_startup.preload):
        _check_known(name, ("hooks", "on_startup", "preload", index), names, report)
    if top.default_model is not None:
        _check_known(top.default_model, ("default_model",), {**far, **names}, report)
    _check_keys(top.apiKeys, {**far, **names}, report)


def _check_keys(keys: Sequence[KeySection], names: Mapping[str, str], report: Report) -> None:
    """Each key and each name once, no name that gives a key away, and models that exist."""
    secret: dict[str, tuple[int, bool]] = {}  # key -> where it stands first, and whether as plain text
    named: dict[str, int] = {}
    for position, each in enumerate(keys, start=1):
        path: Path = ("apiKeys", position - 1)
        is_plain = each == KeySection(key=each.key)
        first, first_plain = secret.setdefault(each.key, (position, is_plain))
        if first != position:
            if not (is_plain and first_plain):  # llama-swap takes a text twice
                report.add((*path, "key"), f"key {position} is the same as key {first}. Give each its own.")
            continue
        name = key_name(each, position)
        if named.setdefault(name, position) != position:
            report.add((*path, "name"), f"key {position} has the same name as key {named[name]}. Choose another name.")
        for index, model in enumerate(each.models or ()):
            if model in names:
                continue
            if not is_pattern(model):
                _check_known(model, (*path, "models", index), names, report)
            elif not any(fnmatchcase(known, model) for known in names):
                report.warn((*path, "models", index), f"{quoted(model)} matches no model, so it allows nothing.")
    telling = [key for key in secret if len(key) >= SECRET_CHARS_MIN]
    for position, each in enumerate(keys, start=1):
        if each.name is not None and (each.name in secret or any(key in each.name for key in telling)):
            message = f"the name of key {position} holds a key, and names are shown. Choose another name."
            report.add(("apiKeys", position - 1, "name"), message)


def _check_known(name: str, path: Path, names: Mapping[str, str], report: Report) -> bool:
    if name in names:
        return True
    report.add(path, f"{quoted(name)} is not a model.{did_you_mean(name, names)}")
    return False


def _check_groups(groups: Mapping[str, GroupSection], base: Path, names: Mapping[str, str], report: Report) -> None:
    group_of: dict[str, str] = {}
    for group_id, group in groups.items():
        for index, member in enumerate(group.members):
            path = (*base, group_id, "members", index)
            if not _check_known(member, path, names, report):
                continue
            model_id = names[member]
            if model_id in group_of:
                whose = "this group" if group_of[model_id] == group_id else f"group {quoted(group_of[model_id])}"
                report.add(path, f"{quoted(member)} is already in {whose}. A model can be in one group only.")
            group_of[model_id] = group_id
