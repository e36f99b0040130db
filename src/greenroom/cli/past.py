"""Commands that read what is kept of the past, whether a server runs or not."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli import text
from greenroom.cli.client import Fault

if TYPE_CHECKING:
    from greenroom.planner.past import Past, Stretch


class Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from greenroom.config import units

        if isinstance(value, float):
            return value
        try:
            seconds = units.duration_s(float(value) if str(value).replace(".", "", 1).isdigit() else value)
        except units.UnitError as fault:
            self.fail(str(fault), param, ctx)
        if seconds <= 0:
            self.fail(f"{value!r} is no time at all.", param, ctx)
        return seconds


def past_options(since: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds --since, --state-dir and --ledger."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--ledger", type=click.Path(), metavar="FILE", help="A ledger file, in place of the one in the state directory."),
            click.option("--state-dir", type=click.Path(), metavar="DIR", help="The state directory of the server."),
            click.option("--since", type=Duration(), default=since, show_default=True, metavar="TIME", help="How far to look back."),
        ):
            command = option(command)
        return command

    return add


def ledger_path(state_dir: str | None, ledger: str | None) -> Path:
    from greenroom.ledger.schema import FILE

    if ledger is not None:
        return Path(ledger)
    base = Path(state_dir) if state_dir else Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "greenroom"
    return base / FILE


def open_past(state_dir: str | None, ledger: str | None) -> Past:
    from greenroom.planner.past import Past

    return Past.at(ledger_path(state_dir, ledger))


@contextmanager
def told() -> Iterator[None]:
    """What cannot be replayed ends the command with its sentence."""
    from greenroom.planner.faults import BadChange, CannotReplay

    try:
        yield
    except BadChange as fault:
        raise click.UsageError(str(fault)) from fault
    except CannotReplay as fault:
        raise Fault(text.safe(str(fault))) from fault


def read(state_dir: str | None, ledger: str | None, seconds: float) -> Stretch:
    was_on = gc.isenabled()
    gc.disable()  # rows form no circles; to look for some while they become hundreds of thousands takes longer than to read them
    try:
        return open_past(state_dir, ledger).stretch(seconds, time.time())
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def commands_of(path: str | None) -> Mapping[str, Sequence[str]]:
    """Model -> its command, from a configuration file."""
    if path is None:
        return {}
    from greenroom.cli.check import explained
    from greenroom.config.load import load_config

    with explained():
        return {model.id: model.argv for model in load_config(path).models}


def contexts_of(path: str | None) -> dict[str, Sequence[tuple[int, int]]]:
    """Model -> what smaller contexts would free, where its files tell."""
    if path is None:
        return {}
    from greenroom.cli.check import candidates_of, device_ref, explained
    from greenroom.config.load import load_config
    from greenroom.engines.detect import describe

    with explained():
        config = load_config(path)
    refs = {one.id: device_ref(one) for one in config.devices}
    homes = {model.id: [refs[id] for id in candidates_of(model, config.devices) if id in refs] for model in config.models}
    return {model.id: found for model in config.models if (found := describe(model).contexts(homes[model.id]))}


def looked_at(within: tuple[float, float], requests: int) -> str:
    now = time.time()
    span = text.duration(within[1] - within[0])
    return f"Looked at {text.count(requests, 'request')} in {span}, until {text.clock(within[1], now)}."
