"""`greenroom ps`: what is resident, what it holds, what happens next."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import click

from greenroom.cli import client, text

HEADERS = ("MODEL", "STATE", "DEVICE", "RESERVED", "MEASURED", "RAM", "IN-FLIGHT", "QUEUED", "IDLE", "NEXT")
RIGHT = frozenset({3, 4, 5, 6, 7, 8})
MODEL_CELLS_MAX = 40
ERROR_CELLS_MAX = 80
BAR_CELLS = 10
DEVICE_BAR_CELLS = 24
WATCH_S_DEFAULT = 1.0

NO_SLEEP = " !"  # behind the state of a model that stops although its engine can sleep; the reason stands below the table

MOVING = frozenset({"starting", "waking", "going_to_sleep", "stopping"})


@click.command()
@client.server_options
@click.option("--json", "as_json", is_flag=True, help="The whole status as JSON.")
@click.option("--watch", is_flag=True, help="Keep showing it until Ctrl-C.")
@click.option(
    "--every",
    "every_s",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 3600),
    default=WATCH_S_DEFAULT,
    show_default=True,
    help="Seconds between looks.",
)
def ps(server: client.Server, as_json: bool, watch: bool, every_s: float) -> None:
    """List models, what they hold and what happens next."""
    client.run(show(server, as_json, every_s if watch else None))


async def show(server: client.Server, as_json: bool, every_s: float | None) -> None:
    async with client.Client(server) as asked:
        if every_s is not None and not as_json and sys.stdout.isatty():
            await show_live(asked, every_s)
            return
        while True:
            status = await asked.get("/api/status")
            if as_json:
                client.print_json(status)
            else:
                click.echo("\n".join(page(status, ascii=text.is_ascii_terminal())))
            if every_s is None:
                return
            await asyncio.sleep(every_s)
            click.echo()


async def show_live(asked: client.Client, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop", redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            lines = page(await asked.get("/api/status"), ascii=text.is_ascii_terminal())
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            await asyncio.sleep(every_s)


def page(status: dict[str, Any], *, ascii: bool = False) -> list[str]:
    """The lines of `ps` for a status."""
    lines = text.table(HEADERS, [row for model in status["models"] for row in rows(model, ascii)], RIGHT)
    if reasons := [no_sleep(model) for model in status["models"] if is_sleep_off(model)]:
        lines += ["", *reasons]
    if status["devices"]:
        lines += ["", *device_lines(status["devices"], sleepers_mib(status["models"]), ascii)]
    if status["queue"]["length"]:
        waits = "request waits" if status["queue"]["length"] == 1 else "requests wait, the oldest"
        lines += ["", f"{status['queue']['length']} {waits} for {text.duration(status['queue']['oldest_s'])}"]
    if peers := status.get("peers"):
        lines += ["", *map(peer_line, peers)]
    return lines


def peer_line(one: dict[str, Any]) -> str:
    """`peer big-box  https://10.0.0.5:8443  up for 3 h, 2 in flight, 140 requests (1 failed): llama-70b, org/model-a`"""
    failed = f" ({one['failures']} failed)" if one["failures"] else ""
    asked = text.count(one["requests"], "request") + failed
    state = f"{'up' if one['healthy'] else 'DOWN'} for {text.duration(one['since_s'])}"
    why = "" if one["healthy"] else f"; {text.cut(text.safe(one['last_error']), ERROR_CELLS_MAX)}"
    models = text.shortened([text.safe(name) for name in one["models"]])
    return f"peer {text.safe(one['id'])}  {text.safe(one['proxy'])}  {state}, {one['in_flight']} in flight, {asked}: {models}{why}"


def rows(model: dict[str, Any], ascii: bool) -> Iterator[tuple[str, ...]]:
    """One row per instance; a model without one has a row as well."""
    name, mark = text.cut(text.safe(model["id"]), MODEL_CELLS_MAX), NO_SLEEP if is_sleep_off(model) else ""
    if not model["instances"]:
        yield (name, text.state(model["state"]) + mark, "-", "-", "-", "-", "-", str(model["queued"]), "-", next_of_absent(model))
    for one in model["instances"]:
        yield (
            name,
            text.state(one["state"], one["level"]) + mark,
            ",".join(text.safe(id) for id in one["devices"]) or "-",
            text.size(one["reserved_mib"]),
            text.size(one["measured_mib"]),
            text.size(one["ram_mib"] or one["host_mib"] or None),
            str(one["in_flight"]),
            str(model["queued"]),
            text.brief(one["idle_s"]),
            next_of(model, one, ascii),
        )


def is_sleep_off(model: dict[str, Any]) -> bool:
    """Whether its engine can sleep and was found not to do it well."""
    return bool(model["sleep"]["off"] and model["sleep"]["costs"])


def no_sleep(model: dict[str, Any]) -> str:
    return f"! {text.safe(model['id'])} stops instead of sleeping: {text.safe(model['sleep']['off'])}"


def sleepers_mib(models: list[dict[str, Any]]) -> int:
    """Host RAM that is held for models asleep."""
    return sum(one["ram_mib"] for model in models for one in model["instances"] if one["state"] == "asleep")


def next_of_absent(model: dict[str, Any]) -> str:
    if model["state"] == "failed":
        return backing_off(model)
    if model.get("absent"):
        fetch = model.get("fetch")
        said = not_fetched(model) if fetch is None and model.get("fetch_error") else fetched(fetch)
        waiting = f", {fetch['waiting']} waiting" if fetch is not None and fetch["waiting"] else ""
        return f"{'pinned, ' if model.get('pinned') else ''}{said}{waiting}"
    if model.get("blocked"):
        return blocked(model)
    if model["queued"]:
        return "waits for room" + ("" if model.get("eta_s") is None else f", {text.about(model['eta_s'])}")
    if model.get("failing"):
        return f"{failed(model)}; on request"
    up_s = model.get("up_s")
    return f"on request, about {text.brief(max(1.0, up_s))}" if up_s else ""


def not_fetched(model: dict[str, Any]) -> str:
    return f"could not be fetched: {text.cut(text.safe(model['fetch_error']), ERROR_CELLS_MAX)}"


def fetched(fetch: dict[str, Any] | None) -> str:
    """`fetching, 34 %, about 12 s`"""
    if fetch is None:
        return "its files are fetched on request"
    share = f", {fetch['done_bytes'] / fetch['total_bytes']:.0%}" if fetch["total_bytes"] else ""
    return f"fetching{share}" + ("" if fetch["eta_s"] is None else f", {text.about(fetch['eta_s'])}")


def blocked(model: dict[str, Any]) -> str:
    """`cannot start: the model file /m/x.gguf does not exist`: the name stands in the first column already."""
    why = model["blocked"].removeprefix(f"{model['id']}: ").removeprefix(f"{model['id']} ")
    return f"cannot start: {text.cut(text.safe(why), ERROR_CELLS_MAX)}"


def failed(model: dict[str, Any]) -> str:
    """`failed 3 times, last: out of memory while loading`: of one that is not known to be well again."""
    count = model["failures"]
    why = f"{', last' if count > 1 else ''}: {text.cut(text.safe(model['last_error']), ERROR_CELLS_MAX)}" if model["last_error"] else ""
    return f"failed {'once' if count == 1 else f'{count} times'}{why}"


def backing_off(model: dict[str, Any]) -> str:
    why = text.cut(text.safe(model["last_error"]), ERROR_CELLS_MAX) if model["last_error"] else ""
    left_s = model.get("backoff_s") or 0.0
    when = f"tries again in {text.brief(left_s)}" if left_s else "tries again when asked"
    return f"{when}: {why}" if why else when


def next_of(model: dict[str, Any], one: dict[str, Any], ascii: bool) -> str:
    state = one["state"]
    if state in MOVING:
        return text.loading(one["since_s"], one.get("expected_s"), BAR_CELLS, ascii=ascii)
    if state == "draining":
        return f"leaves after {text.count(one['in_flight'], 'request')}"
    if state in ("stopped", "failed"):
        return next_of_absent({**model, "state": state})
    steps = (wakes(model) if state == "asleep" else "", "stays (pinned)" if model["pinned"] else ladder(model, one, ascii))
    return ", ".join(filter(None, steps))


def wakes(model: dict[str, Any]) -> str:
    """How long its next request would wait, making room for it as well."""
    if model["queued"]:
        return next_of_absent(model)
    return "" if model.get("eta_s") is None else f"wakes in about {text.duration(model['eta_s'])}"


def ladder(model: dict[str, Any], one: dict[str, Any], ascii: bool = False) -> str:
    """When an idle model sleeps or stops by itself."""
    is_ready = one["state"] == "ready"
    auto = f"ttl: {auto_ttl(model, ascii)}" if model.get("ttl_auto") and is_ready else ""
    if one["idle_s"] is None:
        return auto
    steps = [("stops", model.get("ttl_auto_s") if auto else model.get("ttl_s"))]
    if is_ready and model["sleep"]["levels"]:
        steps.append(("sleeps", model.get("sleep_after_s")))
    due = sorted((after_s - one["idle_s"], word) for word, after_s in steps if after_s is not None and (after_s or auto))
    if not due:
        return auto
    left_s, word = due[0]
    if auto and word == "stops" and left_s <= 0:
        return f"stops when its room is wanted, {auto}"
    said = f"{word} in {text.brief(max(0.0, left_s))}"
    return f"{said}, {auto}" if auto else said


def auto_ttl(model: dict[str, Any], ascii: bool) -> str:
    """`auto (≈ 9 min)`: how long it would stay idle, as things are."""
    stay_s = model.get("ttl_auto_s")
    return "auto" if stay_s is None else f"auto ({'about' if ascii else '≈'} {text.brief(stay_s)})"


def device_lines(devices: list[dict[str, Any]], asleep_mib: int, ascii: bool) -> list[str]:
    width = max(text.cells(text.safe(one["id"])) for one in devices)
    return [device_line(one, width, asleep_mib if one["kind"] == "ram" else 0, ascii) for one in devices]


def device_line(one: dict[str, Any], width: int, asleep_mib: int, ascii: bool) -> str:
    id = text.safe(one["id"])
    room_mib = max(1, one["capacity_mib"] - one["headroom_mib"])
    drawn = text.bar(one["reserved_mib"] / room_mib, DEVICE_BAR_CELLS, ascii=ascii)
    asleep = f" ({text.size(asleep_mib)} for sleepers)" if asleep_mib else ""
    parts = [f"{text.size(one['reserved_mib'])} of {text.size(room_mib)} reserved{asleep}"]
    if one["kind"] == "ram":
        parts.append(f"{text.size(free_mib(one, room_mib))} free")
    if one["used_mib"] is not None:
        parts.append(f"{text.size(one['used_mib'])} used{' by all programs' if one['kind'] == 'ram' else ''}")
    if one["outside_mib"]:
        holder = f" ({text.safe(one['holder'])})" if one.get("holder") else ""
        parts.append(f"{text.size(one['outside_mib'])} by others{holder}")
    if one.get("name"):
        parts.append(text.safe(one["name"]))
    return f"{id}{' ' * (width - text.cells(id))}  {drawn} {', '.join(parts)}"


def free_mib(ram: dict[str, Any], room_mib: int) -> int:
    """What a sleeper's copy may take: not booked, and really there."""
    free: int = room_mib - ram["outside_mib"] - ram["reserved_mib"]
    available_mib: int | None = ram.get("available_mib")
    return max(0, free if available_mib is None else min(free, available_mib))
