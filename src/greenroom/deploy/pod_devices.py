"""The devices of a configuration as a pod has them: what its device plugin gave, counted from 0, whatever they are elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from greenroom.config.model import Config, DeviceConfig, ModelConfig
from greenroom.deploy.commands import dialect
from greenroom.deploy.unfit import Unfit
from greenroom.engines.devices import LLAMA_DEVICE, NOTHING, PIN_VARIABLES
from greenroom.engines.llama_server import DEVICE

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
    refuse_slices(((device.id, device.uuid or "") for device in gpus), mig)
    if mig:
        return _sliced(config, gpus, mig)
    names = {device.id: f"gpu{number}" for number, device in enumerate(gpus)}
    numbers = {known: str(number) for number, device in enumerate(gpus) for known in (device.uuid or "", _index(device.id)) if known}
    devices = tuple(replace(one, id=names[one.id], uuid=None) if one.id in names else one for one in config.devices)
    models, notes = [], _renamed(names)
    for model in config.models:
        renumbered, lost = _pins_in_pod(model, numbers)
        notes += lost
        models.append(replace(renumbered, devices=tuple(names.get(one, one) for one in model.devices)))
    return InPod(replace(config, devices=devices, models=tuple(models)), tuple(notes))


def refuse_slices(named: Iterable[tuple[str, str]], mig: str) -> None:
    """`named`: each device, as it is to be told, and its UUID."""
    for name, uuid in named:
        if uuid.startswith(MIG) and not mig:
            raise Unfit(
                f"{name} is a MIG slice named by its UUID ({uuid}), and a cluster hands slices out by profile: `greenroom generate kube` "
                "takes one with --mig (such as 3g.40gb), or plans them with --mode engines --share-by mig"
            )


def least_cards(config: Config) -> int:
    """So many there have to be for every index that names a card to be one."""
    words = [name.removeprefix("gpu") for model in config.models for name in model.devices]
    words += [word for model in config.models for word in dialect(model).pinned_devices()]
    return max((int(word) + 1 for word in words if word.isdecimal() and word.isascii()), default=0)


def without_pins(env: Mapping[str, str]) -> dict[str, str]:
    """Of an engine that has a pod to itself: it sees what was given to it, counted from 0."""
    return {name: value for name, value in env.items() if name not in PIN_VARIABLES}


def _sliced(config: Config, gpus: list[DeviceConfig], mig: str) -> InPod:
    """A slice's name depends on which card it is cut from, which nobody knows before: greenroom takes those that it finds."""
    gone = {device.id for device in gpus}
    kept = tuple(device for device in config.devices if device.id not in gone)
    told = f"{', '.join(sorted(gone))}: greenroom finds {mig} slices instead, as large as they are, and any model may go to any."
    models, notes = [], [told] if gone else []
    for model in config.models:
        free, lost = _pins_in_pod(model, None)
        notes += lost
        models.append(replace(free, devices=tuple(one for one in model.devices if one not in gone)))
    return InPod(replace(config, devices=kept, models=tuple(models)), tuple(notes), len(gone))


def _renamed(names: Mapping[str, str]) -> list[str]:
    changed = [f"{old} is {new}" for old, new in names.items() if old != new]
    return [f"In a pod devices are counted from 0: {', '.join(changed)}."] if changed else []


def _index(name: str) -> str:
    found = GPU.fullmatch(name)
    return found[1] if found else ""


def _pins_in_pod(model: ModelConfig, numbers: Mapping[str, str] | None) -> tuple[ModelConfig, list[str]]:
    """What pins it by hand, in its variables and in its command, by the pod's numbers; and what is to be said.

    `numbers`: a card's UUID, or its number on the host -> its number in the pod; None = no pin means anything there.
    """
    env = [(name, _value(name, value, numbers)) for name, value in model.env]
    argv: list[str | None] = []
    for before, word in zip(("", *model.argv), model.argv, strict=False):
        name, equals, value = word.partition("=")
        if equals and name in (*PIN_VARIABLES, *DEVICE):
            found = _value(name, value, numbers)
            argv.append(None if found is None else f"{name}={found}")
        else:
            argv.append(_value(before, word, numbers) or word if before in DEVICE else word)
    gone = [name for name, value in env if value is None]
    gone += [word.partition("=")[0] for word, kept in zip(model.argv, argv, strict=True) if kept is None]
    notes = [f"{model.id}: {name} names a device of another host and is left out; greenroom chooses one." for name in gone]
    if any(" " in word and name in word for word in model.argv for name in PIN_VARIABLES):
        notes.append(f"{model.id}: the script in its `cmd` names devices, which a pod counts from 0: look whether they are those.")
    kept_env = tuple((name, value) for name, value in env if value is not None)
    return replace(model, env=kept_env, argv=tuple(word for word in argv if word is not None)), notes


def _value(name: str, value: str, numbers: Mapping[str, str] | None) -> str | None:
    """What pins cards, by their numbers in the pod; None = it names one that is not there.  Anything else stays."""
    words = [word.strip() for word in value.split(",")]
    if name in DEVICE:
        cards = [LLAMA_DEVICE.match(word) for word in words]
        if numbers is None or not all(cards):
            return value
        return ",".join(f"{word[: card.start(1)]}{numbers.get(card[1], card[1])}" for word, card in zip(words, cards, strict=True) if card)
    if name not in PIN_VARIABLES or all(word in NOTHING or word == "all" for word in words):
        return value
    if numbers is not None and all(word in numbers for word in words):
        return ",".join(numbers[word] for word in words)
    is_foreign = numbers is None or any(word in numbers or word.startswith(("GPU-", MIG)) for word in words)
    return None if is_foreign else value
