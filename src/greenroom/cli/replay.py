"""`greenroom replay`: what was recorded, exactly once more; or how it would have gone under other settings."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli import client, past, text

if TYPE_CHECKING:
    from greenroom.planner.figures import Figures
    from greenroom.planner.replay import Exactly, Scene, Trial

HEADERS = ("", "REQUESTS", "MEAN", "P50", "P95", "P99", "WORST", "SWITCHES", "STARTS", "WAKES", "SWAPS", "REGRET", "REFUSED")
RIGHT = frozenset(range(1, len(HEADERS)))
TRACE_BYTES_MAX = 64 << 20


@click.command()
@past.past_options("1h")
@click.option("--set", "changes", multiple=True, metavar="PATH=VALUE", help="Another setting: device.gpu0.memory=48GiB, models.a.ttl=60 …")
@click.option(
    "--policy", type=click.Choice(["greenroom", "fifo"]), default="greenroom", show_default=True, help="fifo: strict order of arrival."
)
@click.option("--trace", type=click.Path(), metavar="FILE", help="Arrivals from a CSV: time,model[,service_s[,client]].")
@click.option("--exact", is_flag=True, help="All that is recorded must come out the same (the default without other options).")
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
def replay(
    since: float,
    state_dir: str | None,
    ledger: str | None,
    changes: tuple[str, ...],
    policy: str,
    trace: str | None,
    exact: bool,
    as_json: bool,
) -> None:
    """Play what was recorded again: exactly, or with other settings, another policy, other arrivals.

    Exit code 1: an exact replay came out differently.
    """
    other = bool(changes or trace or policy != "greenroom")
    if exact and other:
        raise click.UsageError("--exact replays under the recorded settings: leave out --set, --policy and --trace.")
    with past.told():
        if not other:
            same(past.open_past(state_dir, ledger), as_json)
            return
        trials, looked_at = compared(since, state_dir, ledger, changes, policy, trace)
    if as_json:
        client.print_json([{"name": name, **figures.plain()} for name, figures in trials])
    else:
        click.echo("\n".join([*text.table(HEADERS, [row(name, figures) for name, figures in trials], RIGHT), *looked_at]))


# ---------------------------------------------------------------------------------------------------------- exactly


def same(ledger: Any, as_json: bool) -> None:
    from greenroom.planner.replay import exactly

    found = exactly(ledger.runs())
    if as_json:
        client.print_json(plain(found))
    else:
        click.echo("\n".join(verdict(found)))
    if found.difference is not None:
        sys.exit(1)


def plain(found: Exactly) -> dict[str, Any]:
    from greenroom.ledger import codec

    told: dict[str, Any] = {
        "events": found.events,
        "admissions": found.admissions,
        "swaps": found.swaps,
        "runs": found.runs,
        "cut": found.cut,
        "skipped": dict(found.skipped),
        "until": found.until,
        "difference": None,
    }
    if (other := found.difference) is not None:
        told["difference"] = {
            "number": other.number,
            "at": other.row.at,
            "event": dict(other.row.event),
            "recorded": codec.plain_actions(other.recorded),
            "now": codec.plain_actions(other.now),
            "fault": other.fault,
        }
    return told


def verdict(found: Exactly) -> list[str]:
    seen = f"{text.count(found.events, 'event')} of {text.count(found.runs, 'run')}"
    did = f"{text.count(found.admissions, 'admission')}, {text.count(found.swaps, 'swap')} (starts and wakes)"
    unread = [f"{count} of kind {text.safe(kind)} could not be read." for kind, count in found.skipped.items()]
    are = "is" if found.cut == 1 else "are"
    unread += [f"{text.count(found.cut, 'run')} {are} not kept from the beginning; what needs it was left out."] if found.cut else []
    unread += [read_until(found.until)] if found.until is not None else []
    if (other := found.difference) is None:
        return [f"The same to the last action: {seen}, {did}.", *unread]
    lines = [f"It came out differently at event {other.number:,} ({text.safe(other.row.kind)} {text.safe(other.row.model)}), after {seen}."]
    if other.fault:
        return [*lines, f"  the scheduler broke: {text.safe(other.fault)}", *unread]
    lines += [f"  recorded  {text.safe(str(action))}" for action in other.recorded if action not in other.now]
    lines += [f"  now       {text.safe(str(action))}" for action in other.now if action not in other.recorded]
    return [*lines, *unread]


def read_until(at: float) -> str:
    return f"Read up to {text.clock(at, time.time())}: a running server writes what happens a moment later."


# ---------------------------------------------------------------------------------------------------------- what if


def compared(
    since: float, state_dir: str | None, ledger: str | None, changes: tuple[str, ...], policy: str, trace: str | None
) -> tuple[list[tuple[str, Figures]], list[str]]:
    """What was recorded (where it was), the same settings replayed, and the others; and what the figures rest on."""
    from greenroom.planner.figures import figures_of
    from greenroom.planner.replay import scene_of, tried

    recorded: list[tuple[str, Figures]] = []
    looked_at: list[str] = []
    if trace is not None:
        scene = traced(trace, state_dir, ledger)
    else:
        seen = past.read(state_dir, ledger, since)
        recorded = [("recorded", figures_of(seen.requests, seen.transitions, seen.within))]
        looked_at = ["", past.looked_at(seen.within, len(seen.requests))]
        scene = scene_of(seen.setup, seen.requests, seen.transitions, seen.within)
    trials: list[Trial] = [tried(scene, name="trace" if trace is not None else "", keep=False)]
    if changes or policy != "greenroom":
        trials.append(tried(scene, changes, policy=policy, keep=False))
    return [*recorded, *((trial.name, trial.figures) for trial in trials)], looked_at


def traced(trace: str, state_dir: str | None, ledger: str | None) -> Scene:
    """Under the settings of the ledger, where there is one; else every model takes a device of its own size."""
    from greenroom.planner.replay import scene_of_trace, setup_of_trace

    try:
        with open(trace, "rb") as file:
            read = file.read(TRACE_BYTES_MAX + 1)
        arrivals = read.decode()
    except (OSError, UnicodeDecodeError) as fault:
        raise client.Fault(f"{text.safe(trace)} cannot be read: {getattr(fault, 'strerror', None) or fault}") from fault
    if len(read) > TRACE_BYTES_MAX:
        raise client.Fault(f"{text.safe(trace)} is larger than {TRACE_BYTES_MAX // 2**20} MiB; cut it")
    given = state_dir is not None or ledger is not None or past.ledger_path(None, None).is_file()
    setup = past.open_past(state_dir, ledger).setup() if given else setup_of_trace(arrivals)
    return scene_of_trace(setup, arrivals)


def row(name: str, one: Figures) -> tuple[str, ...]:
    waits = (one.mean_s, one.p50_s, one.p95_s, one.p99_s, one.worst_s)
    counts = (one.switches, one.starts, one.wakes)
    return (
        text.cut(text.safe(name), 60),
        str(one.requests),
        *(text.duration(seconds) for seconds in waits),
        *map(str, counts),
        f"{one.swap_share:.0%}",
        str(one.regret),
        str(one.refused),
    )
