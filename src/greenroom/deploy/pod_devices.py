"""The devices of a configuration as a pod has them: what its device plugin gave, counted from 0, whatever they are elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from greenroom.config.model import Config, DeviceConfig, ModelConfig
from greenroom.deploy.unfit import Unfit
from greenroom.engines.devices import PIN_VARIABLES

GPU: re.Pattern[str] = re.compile(r"gpu(\d+)")
MIG = "MIG-"


@dataclass(frozen=True, slots=True)
class InPod:
    """`slices`: how many MIG slices take the place of declared devices."""

    config: Config
    notes: tuple[str, ...] = ()
    slices: int = 0


def in_pod(config: Config, mig: str) -> InPod:
    """Raises Unfit for slices named by UUID without their profile, `mig`: nothing else can be asked for in a cluster."""
    gpus = [device for device in config.devices if device.id != "ram" and (device.size.probe != "none" or GPU.fullmatch(device.id))]
    refuse_slices({device.id: device.uuid or "" for device in gpus}, mig)
    if mig:
        return _sliced(config, gpus, mig)
    names = {device.id: f"gpu{number}" for number, device in enumerate(gpus)}
    numbers = {known: str(number) for number, device in enumerate(gpus) for known in (device.uuid or "", _index(device.id)) if known}
    devices = tuple(replace(one, id=names[one.id], uuid=None) if one.id in names else one for one in config.devices)
    models, notes = [], _renamed(names)
    for model in config.models:
        env, lost = _env_in_pod(model, numbers)
        notes += [f"{model.id}: {name} names a device of another host and is left out; greenroom chooses one." for name in lost]
        models.append(replace(model, devices=tuple(names.get(one, one) for one in model.devices), env=env))
    return InPod(replace(config, devices=devices, models=tuple(models)), tuple(notes))


def refuse_slices(uuids: Mapping[str, str], mig: str) -> None:
    """`uuids`: what is named -> its UUID."""
    for name, uuid in uuids.items():
        if uuid.startswith(MIG) and not mig:
            raise Unfit(
                f"{name} is a MIG slice named by its UUID ({uuid}), and a cluster hands slices out by profile: "
                "name it with --mig (such as 3g.40gb), or plan them with --mode engines --share-by mig"
            )


def least_cards(config: Config) -> int:
    """So many there have to be for every index that names a card to be one."""
    words = [name.removeprefix("gpu") for model in config.models for name in model.devices]
    words += [word for model in config.models for name, value in model.env if name in PIN_VARIABLES for word in value.split(",")]
    return max((int(word) + 1 for word in words if word.isdecimal() and word.isascii()), default=0)


def without_pins(env: Mapping[str, str]) -> dict[str, str]:
    """Of an engine that has a pod to itself: it sees what was given to it, counted from 0."""
    return {name: value for name, value in env.items() if name not in PIN_VARIABLES}


def _sliced(config: Config, gpus: list[DeviceConfig], mig: str) -> InPod:
    """A slice's name depends on which card it is cut from, which nobody knows before: greenroom takes those that it finds."""
    gone = {device.id for device in gpus}
    models = tuple(replace(model, devices=tuple(one for one in model.devices if one not in gone)) for model in config.models)
    kept = tuple(device for device in config.devices if device.id not in gone)
    notes = (f"{', '.join(sorted(gone))}: greenroom finds {mig} slices instead, as large as they are, and any model may go to any.",)
    return InPod(replace(config, devices=kept, models=models), notes if gone else (), len(gone))


def _renamed(names: Mapping[str, str]) -> list[str]:
    changed = [f"{old} is {new}" for old, new in names.items() if old != new]
    return [f"In a pod devices are counted from 0: {', '.join(changed)}."] if changed else []


def _index(name: str) -> str:
    found = GPU.fullmatch(name)
    return found[1] if found else ""


def _env_in_pod(model: ModelConfig, numbers: Mapping[str, str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Its variables, and those that had to go."""
    kept, lost = [], []
    for name, value in model.env:
        words = [word.strip() for word in value.split(",")]
        if name not in PIN_VARIABLES or not any(word in numbers or word.startswith(("GPU-", MIG)) for word in words):
            kept.append((name, value))
        elif all(word in numbers for word in words):
            kept.append((name, ",".join(numbers[word] for word in words)))
        else:
            lost.append(name)
    return tuple(kept), lost
