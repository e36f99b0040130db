"""`greenroom thrash`: do models keep taking each other's place, what does it cost, what would end it."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

from greenroom.cli import client, past, text

EXIT_THRASHING = 3
HEADERS = ("", "WAY OUT", "SWAPS/H", "MEAN WAIT", "EFFECT")
COUNTED = ("", "WAY OUT", "SWAPS", "MEAN WAIT", "EFFECT")  # of a time too short for figures per hour
RIGHT = frozenset({2, 3})
WAY_CELLS_MAX = 90
SHOWN = ("seen", "headline", "thrash", "after", "swap_share", "outgrown", "replayed")


@click.command()
@past.past_options("1h")
@click.option("-c", "--config", "path", type=click.Path(), metavar="FILE", help="The configuration, to show changes as its lines.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def thrash(since: float, state_dir: str | None, ledger: str | None, path: str | None, as_json: bool) -> None:
    """Tell who takes turns on a device, what that costs, and what would end it.

    Every way out is tried first, by a replay of the same requests.  Exit code 3: somebody thrashes.
    """
    from greenroom.planner.advice import advice

    with past.told():
        seen = past.read(state_dir, ledger, since)
        commands, contexts = past.commands_of(path), past.contexts_of(path)
        rows = (seen.setup, seen.requests, seen.transitions, seen.samples)
        said = advice(*rows, commands=commands, contexts=contexts, within=seen.within, ttl=False)
    if as_json:
        client.print_json({name: said[name] for name in SHOWN})
    else:
        click.echo("\n".join([*page(said), past.looked_at(seen.within, len(seen.requests))]))
    if said["thrash"]:
        sys.exit(EXIT_THRASHING)


def page(said: dict[str, Any]) -> list[str]:
    if not said["thrash"]:
        return [*nobody(said), ""]
    lines: list[str] = []
    for one in said["thrash"]:
        lines += [*story(one), ""]
    return [*lines, *size(said["outgrown"])]


def nobody(said: dict[str, Any]) -> list[str]:
    shares = ", ".join(f"{share:.0%} of the time of {text.safe(device)}" for device, share in said["swap_share"].items())
    moves = f"{text.count(said['seen']['starts'], 'start')} and {text.count(said['seen']['wakes'], 'wake')}"
    lines = [f"Nobody thrashes: {moves} took {shares or 'no time'}."]
    worst = next((one for one in said["after"] if one["mean_s"] > 2 * one["others_mean_s"] + 1), None)
    if worst is not None:
        lines.append(
            f"{text.safe(worst['model'])} waits {text.duration(worst['mean_s'])} after {text.safe(worst['before'])}, "
            f"{text.duration(worst['others_mean_s'])} otherwise ({text.count(worst['count'], 'time')})."
        )
    return [*lines, *size(said["outgrown"])]


def story(one: dict[str, Any]) -> list[str]:
    lines = [text.safe(one["text"]) + "."]
    others = "the other" if len(one["pair"]) == 2 else "another of them"
    lines.append(f"  {one['slow']} of {text.count(one['slow_total'], 'slow request')} came after {others}.")
    lines.append(f"  {waited(one)}; {one['regret']} of {one['swaps']} swaps sent away what was wanted again at once.")
    if not one["fixes"]:
        return lines
    headers = HEADERS if all(fix["swaps"] is None or fix["swaps_h"] is not None for fix in one["fixes"]) else COUNTED
    lines += ["", *(f"  {line}" for line in text.table(headers, [fix_row(fix) for fix in one["fixes"]], RIGHT))]
    best = next((fix for fix in one["fixes"] if fix["suggested"]), None)
    if best is not None:
        lines += ["", "  * the suggested change:", *(f"    {text.safe(line)}" for line in best["diff"])]
        if best["changes"]:
            quoted = " ".join(f"--set {shlex.quote(change)}" for change in best["changes"])
            lines.append(f"    try it: greenroom replay {text.safe(quoted)}")
    return lines


def waited(one: dict[str, Any]) -> str:
    if one["waited_requests_h"] is None:  # too short a time for figures per hour
        return f"{text.count(one['waited_requests'], 'request')} waited {text.duration(one['waited_s'])} for it"
    return f"{one['waited_requests_h']:.0f} requests an hour waited {text.duration(one['waited_s_h'])} for it"


def fix_row(fix: dict[str, Any]) -> tuple[str, ...]:
    count = fix["swaps"] if fix["swaps_h"] is None else fix["swaps_h"]
    swaps = "-" if count is None else f"{count:.0f}"
    wait = "-" if fix["mean_wait_s"] is None else text.duration(fix["mean_wait_s"])
    return ("*" if fix["suggested"] else "", text.cut(text.safe(fix["text"]), WAY_CELLS_MAX), swaps, wait, text.safe(fix["effect"]))


def size(outgrown: dict[str, Any]) -> list[str]:
    if outgrown["verdict"] in ("unknown", "fits"):
        return []
    step = f" Next: {text.safe(outgrown['next_step'])}." if outgrown["next_step"] else ""
    return [text.safe(outgrown["text"]) + "." + step]
