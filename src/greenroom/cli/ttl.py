"""`greenroom ttl`: how long idle models should stay, from their own gaps."""

from __future__ import annotations

from typing import Any

import click

from greenroom.cli import client, past, text

HEADERS = ("TTL", "COLD STARTS", "A DAY", "GIB-HOURS A DAY", "")
RIGHT = frozenset({1, 2, 3})
BAR_CELLS = 30


@click.command()
@click.argument("models", nargs=-1)
@past.past_options("24h")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def ttl(models: tuple[str, ...], since: float, state_dir: str | None, ledger: str | None, as_json: bool) -> None:
    """Show the idle gaps of MODELS (default: all), and what each ttl would have cost."""
    from greenroom.planner.ttl import ttl_advice

    with past.told():
        seen = past.read(state_dir, ledger, since)
        said = [one.plain() for one in ttl_advice(seen.setup, seen.requests, seen.transitions, seen.within)]
    called = seen.setup.names()
    models = tuple(dict.fromkeys(called.get(name, name) for name in models))
    known = {one["model"] for one in said}
    pinned = {model.id for model in seen.setup.models if model.pinned}
    if held := [name for name in models if name in pinned]:
        raise client.Fault(f"{text.safe(held[0])} is pinned: it is never stopped, whatever its ttl")
    if missing := [name for name in models if name not in known]:
        others = f"known are {text.shortened(sorted(known))}" if known else "nor was any other; look further back (--since 7d)"
        raise client.Fault(f"{text.safe(missing[0])} was not asked for in that time; {others}")
    said = [one for one in said if not models or one["model"] in models]
    if as_json:
        client.print_json({"seen": {"from": seen.within[0], "to": seen.within[1]}, "ttl": said})
        return
    lines: list[str] = []
    for one in said:
        lines += [*page(one, ascii=text.is_ascii_terminal()), ""]
    click.echo("\n".join([*lines, past.looked_at(seen.within, len(seen.requests))]))


def page(one: dict[str, Any], *, ascii: bool = False) -> list[str]:
    name = text.safe(one["model"])
    if not one["enough"]:
        return [f"{name}: {text.safe(one['why'])}."]
    now = "auto" if one["now_auto"] else "never stops" if one["now_s"] is None else text.duration(one["now_s"])
    lines = [f"{name}: ttl {text.duration(one['suggested_s'])} (now: {now}). {text.safe(one['why']).capitalize()}."]
    most = max(gap["n"] for gap in one["bins"])
    for gap in one["bins"]:
        stays = gap["from_s"] < one["suggested_s"]
        drawn = text.bar(gap["n"] / most, BAR_CELLS, ascii=ascii)[1:-1].rstrip("." if ascii else "░")
        lines.append(f"  {text.brief(gap['from_s']):>7} {drawn:<{BAR_CELLS}} {gap['n']:>5}{'' if stays else '  would end in a start'}")
    rows = [
        (text.safe(row["ttl"]), str(row["cold_starts"]), f"{row['cold_starts_day']:.1f}", f"{row['gib_hours_day']:.1f}", row["remark"])
        for row in one["table"]
    ]
    return [*lines, *(f"  {line}" for line in text.table(HEADERS, rows, RIGHT))]
