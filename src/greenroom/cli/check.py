"""`greenroom check FILE`: is the configuration right, what does each model need, and does it all fit at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli import check_boxes, check_sleep, client, text

if TYPE_CHECKING:
    from greenroom.config.model import Config, DeviceConfig, ModelConfig
    from greenroom.engines.base import DeviceRef

EXIT_FAILED = 1
MODEL_CELLS_MAX = 40


@dataclass(frozen=True, slots=True)
class ModelNeed:
    id: str
    engine: str
    candidates: tuple[str, ...]  # declared devices it may be on
    devices_count: int
    memory_mib: int | None  # per device
    host_mib: int
    source: str  # declared | flags | estimated | unknown
    detail: str
    problem: str  # why it can never start, or ""
    line: int = 0  # of its entry in the file
    sleep: check_sleep.Naps = field(default_factory=check_sleep.Naps)
    container: check_boxes.Box | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """Where everything would be if all models were resident at once."""

    used_mib: dict[str, int]  # device -> MiB
    homes: dict[str, tuple[str, ...]]  # model -> devices
    homeless: dict[str, int]  # model -> MiB missing, on the device where least is missing


@dataclass(frozen=True, slots=True)
class Trouble:
    """What `--json` lists under `problems`, in a file that can be read and in one that cannot."""

    file: str
    line: int  # from 1
    column: int  # from 1; 0 = the whole entry
    where: str  # models.qwen3.ttl; "" for the file as a whole
    message: str


class ConfigFault(click.ClickException):
    """A wrong configuration: one line each on standard error, exit code 2."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(map(text.safe, problems)))

    def show(self, file: Any = None) -> None:
        click.echo(self.message, err=True)


@contextmanager
def explained() -> Iterator[None]:
    """Turns a ConfigError into its lines."""
    from greenroom.config.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        raise ConfigFault([str(problem) for problem in error.problems]) from None


@click.command()
@click.argument("path", metavar="FILE", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="What was found, as JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of the configuration, for editors, and exit.")
@click.option("--lenient", is_flag=True, help="As `serve --lenient`: a bad model is named, the others are checked.")
def check(path: str | None, as_json: bool, schema: bool, lenient: bool) -> None:
    """Check a configuration file, what each model needs and what fits together."""
    if schema:
        from greenroom.config.schema import json_schema

        client.print_json(json_schema())
        return
    if path is None:
        raise click.UsageError("give the FILE to check, or --schema")
    with explained_as_json(path) if as_json else explained():
        config = on_this_machine(loaded(path, lenient), lenient)
    config, absent = at_home(config)
    boxes = check_boxes.boxes_of(config.models)
    needs = [boxed(need_of(model, config.devices, absent.get(model.id, "")), boxes.get(model.id)) for model in config.models]
    rooms = rooms_of(config.devices)
    problems = problems_of(needs, rooms)
    placed = place([one for one in needs if one.id not in problems], rooms)
    crowded = check_sleep.crowding([one for one in needs if one.id not in problems], config.devices, placed)
    if crowded:
        config = replace(config, warnings=(*config.warnings, crowded))
    if as_json:
        client.print_json(as_value(config, needs, rooms, placed, problems))
    else:
        click.echo("\n".join(page(config, needs, rooms, placed, problems)))
    if problems:
        raise click.exceptions.Exit(EXIT_FAILED)


@contextmanager
def explained_as_json(path: str) -> Iterator[None]:
    """Prints a ConfigError as the object that `check --json` always prints; exit code 2."""
    from greenroom.config.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        problems = [asdict(Trouble(one.file, one.line, one.column, one.where, one.message)) for one in error.problems]
        client.print_json(
            {"path": path, "warnings": [], "problems": problems, "models": [], "devices": [], "fits_together": None, "peers": []}
        )
        raise click.exceptions.Exit(ConfigFault.exit_code) from None


def loaded(path: str, lenient: bool) -> Config:
    from greenroom.config.load import load_config
    from greenroom.proxy.limits import Limits

    return load_config(path, strict=not lenient, limit_names=[one.name for one in fields(Limits)])


def on_this_machine(config: Config, lenient: bool) -> Config:
    """As `serve` takes it here: devices that are not on this machine are an error, or with `lenient` that of the models that need them."""
    booked = {"ram", *(one.id for one in config.devices if one.size.memory_mib is not None)}
    if booked.issuperset(one.id for one in config.devices) and all(booked.issuperset(model.devices) for model in config.models):
        return config  # nobody has to look for a card
    from greenroom.host.gpus import here
    from greenroom.serve import wiring

    return wiring.on_this_machine(config, here(), strict=not lenient)


# ---------------------------------------------------------------------------------------------------------- what it needs


def at_home(config: Config) -> tuple[Config, dict[str, str]]:
    """The configuration with places of models that are in the store; and those that are not, with their references."""
    if not any(model.reference for model in config.models):
        return config, {}
    from greenroom.store.library import Library
    from greenroom.store.resolve import resolve

    found = resolve(config, Library())
    return found.config, {model: str(reference) for model, reference in found.absent.items()}


def need_of(model: ModelConfig, devices: Sequence[DeviceConfig], absent: str = "") -> ModelNeed:
    """`absent`: the reference of a model whose files are not here yet."""
    from greenroom.config import secrets
    from greenroom.engines.detect import describe

    if absent:
        model = replace(model, misconfigured="")
    engine = describe(model)
    candidates = candidates_of(model, devices)
    estimate = engine.estimate([device_ref(one) for one in devices if one.id in candidates])
    declared = model.memory_mib is not None
    return ModelNeed(
        id=model.id,
        engine=engine.kind,
        candidates=candidates,
        devices_count=model.devices_count,
        memory_mib=model.memory_mib if declared else estimate.device_mib,
        host_mib=model.host_memory_mib if model.host_memory_mib is not None else estimate.host_mib,
        source="declared" if declared else estimate.source,
        detail=f"{secrets.masked(absent)} is not here yet: the first request fetches it" if absent else estimate.detail,
        problem="" if absent else model.misconfigured or engine.missing(),
        line=model.line,
        sleep=check_sleep.naps_of(model, engine, estimate),
    )


def boxed(need: ModelNeed, box: check_boxes.Box | None) -> ModelNeed:
    return need if box is None else replace(need, container=box, problem=need.problem or box.problem)


def candidates_of(model: ModelConfig, devices: Sequence[DeviceConfig]) -> tuple[str, ...]:
    """Its own list; for `any`, every declared device but ram, or ram when that is all there is."""
    if model.devices and model.devices != ("any",):
        return model.devices
    others = tuple(one.id for one in devices if kind_of(one) != "ram")
    return others or tuple(one.id for one in devices)


def kind_of(device: DeviceConfig) -> str:
    if device.id == "ram":
        return "ram"
    return "declared" if device.size.probe == "none" else "gpu"


def device_ref(device: DeviceConfig) -> DeviceRef:
    from greenroom.engines.base import DeviceRef

    return DeviceRef(device.id, kind_of(device), uuid=device.uuid or "", total_mib=device.size.memory_mib or 0)


def rooms_of(devices: Sequence[DeviceConfig]) -> dict[str, int]:
    """device -> MiB that may be planned with; devices whose size is only known when measured are left out."""
    return {one.id: one.size.memory_mib - (one.size.headroom_mib or 0) for one in devices if one.size.memory_mib is not None}


# --------------------------------------------------------------------------------------------------------- does it fit


def place(needs: Sequence[ModelNeed], rooms: dict[str, int]) -> Placed:
    """The largest first, each on its emptiest devices; an answer for people, not the scheduler's own decision."""
    used = dict.fromkeys(rooms, 0)
    homes: dict[str, tuple[str, ...]] = {}
    homeless: dict[str, int] = {}
    known = [one for one in needs if one.memory_mib is not None and any(id in rooms for id in one.candidates)]
    for one in sorted(known, key=lambda one: -(one.memory_mib or 0)):
        chosen = sorted((id for id in one.candidates if id in rooms), key=lambda id: used[id] - rooms[id])[: one.devices_count]
        missing = max(used[id] + (one.memory_mib or 0) - rooms[id] for id in chosen)
        if missing > 0:
            homeless[one.id] = missing
            continue
        homes[one.id] = tuple(chosen)
        for id in chosen:
            used[id] += one.memory_mib or 0
        if "ram" in rooms and "ram" not in chosen:
            used["ram"] += one.host_mib
    return Placed(used, homes, homeless)


def problems_of(needs: Sequence[ModelNeed], rooms: dict[str, int]) -> dict[str, str]:
    """What will fail whenever it is asked for: model -> a sentence that names it."""
    return {one.id: named(one.id, why) for one in needs if (why := one.problem or never_fits(one, rooms))}


def named(id: str, why: str) -> str:
    """`why` with the model's name in front, unless it already begins with it."""
    return why if why.startswith((f"{id}: ", f"{id} ", f"models.{id}")) else f"{id}: {why}"


def never_fits(need: ModelNeed, rooms: dict[str, int]) -> str:
    if need.memory_mib is None or not need.candidates or not all(id in rooms for id in need.candidates):
        return ""
    able = [id for id in need.candidates if rooms[id] >= need.memory_mib]
    if len(able) >= need.devices_count:
        return ""
    most = max(rooms[id] for id in need.candidates)
    if able:
        return f"it needs {text.count(need.devices_count, 'device')} with {text.size(need.memory_mib)} each and {len(able)} can give that"
    return f"it needs {text.size(need.memory_mib)} and at most {text.size(most)} can ever be free on {', '.join(need.candidates)}"


def together(needs: Sequence[ModelNeed], placed: Placed) -> bool | None:
    """Whether all can be resident at once; None when a need or a device's size is not known."""
    if placed.homeless:
        return False
    return True if all(one.id in placed.homes for one in needs) else None


# -------------------------------------------------------------------------------------------------------------- the words


def page(config: Config, needs: Sequence[ModelNeed], rooms: dict[str, int], placed: Placed, problems: Mapping[str, str]) -> list[str]:
    path = text.safe(config.path)
    # What lenient reading found wrong in a model is a warning too, with its exact line; told once, below.
    told = {id: one for id, why in problems.items() for one in config.warnings if one.endswith(why)}
    lines = [f"warning: {text.safe(one)}" for one in config.warnings if one not in told.values()]
    lines.append(f"{path}: {text.count(len(needs), 'model')}, {outcome(len(needs), len(problems))}")
    if needs:
        rows = [row(one, one.id in problems) for one in needs]
        lines += ["", *text.table(("MODEL", "ENGINE", "DEVICE", "MEMORY", "SLEEP", "HOW WE KNOW"), rows, frozenset({3})), ""]
        slept = list(check_sleep.lines([one for one in needs if one.id not in problems]))
        lines += [*slept, ""] if slept else []
        boxes = [check_boxes.line(one.id, one.container) for one in needs if one.container is not None and one.id not in problems]
        lines += [*boxes, ""] if boxes else []
    lines += device_lines(rooms, placed)
    if len(problems) < len(needs) or not needs:
        able = [one for one in needs if one.id not in problems]
        if needs or not config.peers:
            lines.append(verdict(able, rooms, placed) if not problems else f"Of the others: {verdict(able, rooms, placed)}")
    lines += peer_lines(config)
    if problems:
        broken = [one for one in needs if one.id in problems]
        lines += ["", *(text.safe(told.get(one.id) or f"{config.path}:{one.line}: {problems[one.id]}") for one in broken)]
    return lines


def peer_lines(config: Config) -> list[str]:
    """Named, not called."""
    return [
        f"peer {text.safe(peer.id)}  {text.safe(peer.url)}{'' if peer.key else ', no key'}"
        + f"{', overflow' if peer.overflow else ', preferred' if peer.prefer else ''}: "
        + text.shortened([text.safe(here if here == there else f"{here} ({there})") for here, there in peer.models])
        for peer in config.peers
    ]


def outcome(models: int, broken: int) -> str:
    if not broken:
        return "no errors"
    return f"{broken} of them cannot start" if models > 1 else "it cannot start"


def row(need: ModelNeed, is_broken: bool) -> tuple[str, ...]:
    memory = "unknown" if need.memory_mib is None else text.size(need.memory_mib)
    times = f"{need.devices_count} x " if need.devices_count > 1 else ""
    how = need.source if not need.detail or need.source == "declared" else f"{need.source}: {need.detail}"
    if is_broken:
        how = "cannot start, see below"
    elif need.source == "unknown" and need.detail:
        how = need.detail
    where = ",".join(map(text.safe, need.candidates)) or "any"
    name, sleep = text.cut(text.safe(need.id), MODEL_CELLS_MAX), "-" if is_broken else check_sleep.cell(need)
    return (name, text.safe(need.engine), where, times + memory, sleep, text.safe(how))


def device_lines(rooms: dict[str, int], placed: Placed) -> list[str]:
    width = max((text.cells(text.safe(id)) for id in rooms), default=0)
    drawn = [(text.safe(id), placed.used_mib[id], room) for id, room in rooms.items()]
    ascii = text.is_ascii_terminal()
    return [
        f"{id}{' ' * (width - text.cells(id))}  {text.bar(used / max(1, room), 24, ascii=ascii)} {text.size(used)} of {text.size(room)}"
        for id, used, room in drawn
    ]


def verdict(needs: Sequence[ModelNeed], rooms: dict[str, int], placed: Placed) -> str:
    match together(needs, placed):
        case True:
            return "All fit together." if needs else "There is nothing to serve: `models` is empty."
        case False:
            worst = text.shortened([f"{text.safe(id)} lacks {text.size(mib)}" for id, mib in placed.homeless.items()])
            return f"Not all fit together ({worst}): they take turns as requests arrive."
    if not rooms:
        return "No device with a size is declared: what fits is measured when greenroom starts."
    unknown = text.shortened([text.safe(one.id) for one in needs if one.id not in placed.homes])
    return f"Whether all fit together shows when they have run: nothing is known yet of {unknown}."


def as_value(
    config: Config, needs: Sequence[ModelNeed], rooms: dict[str, int], placed: Placed, problems: Mapping[str, str]
) -> dict[str, Any]:
    able = [one for one in needs if one.id not in problems]
    return {
        "path": config.path,
        "warnings": list(config.warnings),
        "problems": [asdict(trouble(config.path, one, problems[one.id])) for one in needs if one.id in problems],
        "models": [{**asdict(one), "placed_on": placed.homes.get(one.id)} for one in needs],
        "devices": [{"id": id, "room_mib": room, "used_mib": placed.used_mib[id]} for id, room in rooms.items()],
        "fits_together": together(able, placed),  # of those that can start
        "peers": [{"id": peer.id, "proxy": peer.url, "models": [here for here, _ in peer.models]} for peer in config.peers],
    }


def trouble(path: str, need: ModelNeed, message: str) -> Trouble:
    return Trouble(path, need.line, 0, f"models.{need.id}", message)
