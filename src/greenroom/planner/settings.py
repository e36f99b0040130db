"""Settings changed by hand for a trial: `device.gpu0.memory=48GiB`, `models.a.ttl=60`, `scheduling.patience_s=2`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from greenroom.config import units
from greenroom.core.facts import Device, Model, Policy, Priority, Setup

from .faults import BadChange

MODEL_KEYS = ("memory", "ttl", "sleep_after", "sleep", "pin", "parallel", "queue_limit", "priority", "device", "on_conflict")
DEVICE_KEYS = ("memory", "headroom")
SECTIONS = {"device": "device", "devices": "device", "model": "model", "models": "model", "scheduling": "scheduling"}


def changed(setup: Setup, changes: Iterable[str]) -> Setup:
    """`setup` with each `path=value` applied, in order.  Raises BadChange."""
    for change in changes:
        path, equals, value = change.rpartition("=")  # names may hold it, values never do
        section, _, rest = path.strip().partition(".")
        kind = SECTIONS.get(section)
        if not equals or kind is None or not rest:
            raise BadChange(f"{change!r} is no change. Write device.NAME.KEY=VALUE, models.NAME.KEY=VALUE or scheduling.KEY=VALUE.")
        try:
            setup = _change(setup, kind, rest, value.strip())
        except units.UnitError as fault:
            raise BadChange(f"{path}: {fault}") from None
    return setup


def _change(setup: Setup, kind: str, rest: str, value: str) -> Setup:
    if kind == "scheduling":
        return replace(setup, policy=_policy(setup.policy, rest, value))
    name, dot, key = rest.rpartition(".")  # names may hold dots, keys never do
    if not dot:
        raise BadChange(f"{kind}.{rest} names no key: write {kind}.{rest}.memory=48GiB, for example.")
    if kind == "device":
        return _device(setup, name, _known(key, DEVICE_KEYS), value)
    wanted = setup.names().get(name)
    if wanted is None:
        raise BadChange(f"there is no model {name!r}.{_near(name, [model.id for model in setup.models])}")
    key = _known(key, MODEL_KEYS)
    return replace(setup, models=tuple(_model(setup, one, key, value) if one.id == wanted else one for one in setup.models))


def _known(key: str, keys: Iterable[str]) -> str:
    if key not in keys:
        raise BadChange(f"{key!r} cannot be tried.{_near(key, keys)} These can: {', '.join(keys)}.")
    return key


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _device(setup: Setup, name: str, key: str, value: str) -> Setup:
    """A device that is not there is added; models that may use every GPU may use it too."""
    mib = units.size_mib_down(value)
    devices = {device.id: device for device in setup.devices}
    if name in devices:
        old = devices[name]
        new = replace(old, capacity_mib=mib, total_mib=None) if key == "memory" else replace(old, headroom_mib=mib)
        return replace(setup, devices=tuple(new if device is old else device for device in setup.devices))
    if key != "memory":
        raise BadChange(f"there is no device {name!r}: give it memory first, device.{name}.memory=24GiB.")
    others = {device.id for device in setup.devices if device.kind != "ram"}
    models = tuple(replace(m, devices=(*m.devices, name)) if others and others <= set(m.devices) else m for m in setup.models)
    return replace(setup, devices=(*setup.devices, Device(name, "gpu", mib, measured=False)), models=models)


def _model(setup: Setup, model: Model, key: str, value: str) -> Model:
    match key:
        case "memory":
            mib = units.size_mib_up(value)
            return replace(model, need_mib=mib, base_mib=mib, need_floor_mib=0, need_source="declared")
        case "ttl":
            ttl_s = None if value == "auto" else units.duration_s(_number(value)) or None
            return replace(model, ttl_s=ttl_s, ttl_auto=value == "auto")
        case "sleep_after":
            return replace(model, sleep_after_s=units.duration_s(_number(value)) or None)
        case "sleep":
            if value not in ("off", "auto", "1", "2"):
                raise BadChange(f"sleep: {value!r} is none of off, auto, 1, 2.")
            return replace(model, sleep=tuple(tier for tier in model.sleep if value == "auto" or str(tier.level) == value))
        case "pin":
            return replace(model, pinned=_yes(value))
        case "parallel" | "queue_limit":
            if not value.isdecimal():
                raise BadChange(f"{key}: {value!r} is no whole number.")
            return replace(model, **{key: int(value)})  # type: ignore[arg-type]
        case "priority":
            return replace(model, priority=Priority(_known(value, [each.value for each in Priority])))
        case "device":
            names = tuple(name.strip() for name in value.split(","))
            return replace(model, devices=tuple(_known(name, [device.id for device in setup.devices]) for name in names))
        case _:
            return replace(model, on_conflict=_known(value, ("refuse", "wait")))


def _yes(value: str) -> bool:
    if value not in ("true", "false", "yes", "no"):
        raise BadChange(f"{value!r} is neither true nor false.")
    return value in ("true", "yes")


def _number(value: str) -> int | float | str:
    """A bare number of seconds, or text such as 5m."""
    try:
        return float(value)
    except ValueError:
        return value


def _policy(policy: Policy, name: str, value: str) -> Policy:
    known = {each.name: str(each.type) for each in fields(Policy)}
    _known(name, known)
    made: Any
    if value == "off" and "None" in known[name]:
        made = None
    else:
        try:
            made = units.duration_s(_number(value)) if name.endswith("_s") else float(value)
        except ValueError as fault:
            raise BadChange(f"scheduling.{name}: {value!r} is no number.") from fault
        made = int(made) if "int" in known[name] else made
    return replace(policy, **{name: made})
