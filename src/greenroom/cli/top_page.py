"""The page of `greenroom top`: lines for a status, as wide and as long as the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from greenroom.cli import events, ps, text

if TYPE_CHECKING:
    from rich.text import Text

Json = dict[str, Any]

WIDTH_LEAST = 40
WIDE = 120  # from here on with measured sizes, speeds and stages
NAME_CELLS = (14, 40)  # of a model's name, at least and at most
DEVICE_CELLS_MAX = 16
BAR_CELLS_MAX = 90
SENTENCES_MAX = 12
REASON_LINES_MAX = 2
MIB = 1 << 20
FULL, ASCII = "█▓▒░·", "#+x.-"  # measured, reserved, outside, free, headroom
BAR_STYLES = ("green", "cyan", "magenta", "dim", "dim")
BAR_WORDS = ("measured", "reserved", "outside", "free", "headroom")

UP = frozenset({"ready", "draining", "starting", "waking", "going_to_sleep", "stopping"})
STATE_STYLES = {"ready": "green", "draining": "yellow", "asleep": "blue", "failed": "red", "stopped": "dim"}
SEVERITY_STYLES = {"bad": "bold red", "warn": "yellow"}


@dataclass(slots=True)
class Part:
    """A part of the page; entries beyond what fits are counted instead of shown."""

    title: str
    entries: list[tuple[int, list[Text]]]  # how many each stands for, and its lines
    least: int  # lines that stay as long as anything does
    head: Text | None = None
    newest_last: bool = False
    shown: int = 0  # lines

    @property
    def length(self) -> int:
        return sum(len(rows) for _, rows in self.entries)

    @property
    def height(self) -> int:
        return self.shown + 2 + (self.head is not None) if self.shown else 0  # with its title, and a blank line before it

    def rows(self, ascii: bool) -> list[Text]:
        from rich.text import Text

        every = [row for _, rows in self.entries for row in rows]
        if len(every) <= self.shown:
            return every
        if self.newest_last:
            newest: list[Text] = []
            for _, rows in reversed(self.entries):
                if len(newest) + len(rows) > self.shown:
                    break
                newest = [*rows, *newest]
            return newest
        kept: list[Text] = []
        left = sum(count for count, _ in self.entries)
        for count, rows in self.entries:
            if len(kept) + len(rows) > self.shown - 1:
                break
            kept += rows
            left -= count
        return [*kept, Text(f"  {'...' if ascii else '…'} and {left} more", style="dim")]


def page(
    status: Json,
    sentences: Sequence[Json],
    *,
    width: int,
    now_unix_s: float,
    height: int | None = None,
    ascii: bool = False,
    lost: str = "",
    url: str = "",
) -> list[Text]:
    """`height` None: everything; `lost`: why nothing new is told."""
    from rich.text import Text

    width = max(WIDTH_LEAST, width)
    models = status["models"]
    lines = head(status, now_unix_s, width, lost, url)
    lines += device_lines(status["devices"], models, width, ascii)
    parts = [
        queue_part(status, width, ascii),
        stage_part([one for one in models if one["state"] in UP], width, ascii),
        asleep_part([one for one in models if one["state"] == "asleep"], width, ascii),
        trouble_part([one for one in models if is_troubled(one)], width),
        fetch_part([one for one in models if one.get("fetch")], width),
        peer_part(status.get("peers") or (), width),
        home_part([one for one in models if one["state"] == "stopped" and not is_troubled(one) and not one.get("fetch")], width, ascii),
        sentence_part(sentences, now_unix_s, width),
    ]
    shrink(parts, None if height is None else height - len(lines))
    for part in parts:
        if part.shown:
            lines += [Text(""), Text(part.title, style="bold"), *([part.head] if part.head is not None else []), *part.rows(ascii)]
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines if height is None else lines[:height]


def singly(rows: Sequence[Text]) -> list[tuple[int, list[Text]]]:
    return [(1, [row]) for row in rows]


def shrink(parts: Sequence[Part], height: int | None) -> None:
    """Gives each part its rows; where there is no room for all, the last parts give first."""
    for part in parts:
        part.shown = part.length
    if height is None:
        return
    for keeps_least in (True, False):
        for part in reversed(parts):
            over = sum(one.height for one in parts) - height
            if over <= 0:
                return
            floor = min(part.length, part.least) if keeps_least else 0
            part.shown = max(floor, part.shown - over)
            if part.shown < min(2, part.length):  # nothing but how many there are
                part.shown = 0


# ------------------------------------------------------------------ the head


def head(status: Json, now_unix_s: float, width: int, lost: str, url: str) -> list[Text]:
    from rich.text import Text

    models, queue = status["models"], status["queue"]
    up = sum(one["state"] in UP for one in models)
    asleep = sum(one["state"] == "asleep" for one in models)
    waits = "nobody waits"
    if queue["length"]:
        verb = "waits" if queue["length"] == 1 else "wait"
        waits = f"{text.count(queue['length'], 'request')} {verb}, the oldest {text.duration(queue['oldest_s'])}"
    if late := sum(one["fetch"]["waiting"] for one in models if one.get("fetch")):
        files = f"{late} {'waits' if late == 1 else 'wait'} for files"
        waits = f"{waits}, {files}" if queue["length"] else files
    counts = f"{up} on stage, {asleep} asleep, {len(models) - up - asleep} at home; {waits}"
    name = f"greenroom {text.safe(status['version'])}, up {text.brief(status['uptime_s'])}"
    clock = text.clock(now_unix_s, now_unix_s)
    room = width - len(clock) - 2
    left = name if text.cells(name) + text.cells(counts) + 3 > room else f"{name} - {counts}"
    shown = text.cut(left, room)
    first = Text(shown + " " * (room - text.cells(shown) + 2), style="bold").append(clock, style="not bold dim")
    lines = [first]
    if left == name:
        lines.append(Text(text.cut(counts, width)))
    if lost:
        lines += [Text(one, style="bold red") for one in text.wrapped(f"{text.safe(url)}: {text.safe(lost)}; trying again", width, 2)]
    headline = (status.get("advice") or {}).get("headline")
    if headline:
        style = SEVERITY_STYLES.get(str(headline.get("severity")), "")
        lines += [Text(one, style=style) for one in text.wrapped(f"! {text.safe(str(headline['text']))}", width, 2)]
    return lines


# ------------------------------------------------------------------ devices


def device_lines(devices: Sequence[Json], models: Sequence[Json], width: int, ascii: bool) -> list[Text]:
    from rich.text import Text

    if not devices:
        return []
    ids = [text.cut(text.safe(one["id"]), DEVICE_CELLS_MAX) for one in devices]
    cells = max(map(text.cells, ids))
    figures = [figures_of(one, models) for one in devices]
    titles = ("RESERVED", "MEASURED", "OUTSIDE", "FREE", "OF")
    widths = [max(map(len, column)) for column in zip(titles, *figures, strict=True)]
    bar = max(8, min(BAR_CELLS_MAX, width - cells - 4 - sum(widths) - 2 * (len(widths) - 1)))
    legend = "  ".join(f"{mark} {word}" for mark, word in zip(ASCII if ascii else FULL, BAR_WORDS, strict=True))
    lines = [Text("")]
    if text.cells(legend) > bar:
        lines.append(Text(text.cut(f"{' ' * cells}  {legend}", width), style="dim"))
        legend = ""
    lines.append(Text(f"{' ' * cells}  {legend:<{bar}}  {row(titles, widths)}", style="dim"))
    for one, id, shown in zip(devices, ids, figures, strict=True):
        line = Text(id + " " * (cells - text.cells(id)) + "  ")
        for mark, style, count in zip(ASCII if ascii else FULL, BAR_STYLES, shares(one, models, bar), strict=True):
            line.append(mark * count, style=style)
        lines.append(line.append(f"  {row(shown, widths)}"))
        if more := about_device(one, models):
            lines.append(Text(" " * (cells + 2) + text.cut(more, width - cells - 2), style="dim"))
    return lines


def row(figures: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(one.rjust(width) for one, width in zip(figures, widths, strict=True))


def own_mib(one: Json, models: Sequence[Json]) -> int | None:
    """What greenroom's engines were measured to hold.  Of RAM they hold a part only, so theirs is summed up."""
    if one["kind"] != "ram":
        return None if one["used_mib"] is None else max(0, one["used_mib"] - one["outside_mib"])
    seen = [each["measured_by_device_mib"].get(one["id"]) for model in models for each in model["instances"]]
    known = [mib for mib in seen if mib is not None]
    return sum(known) if known else None


def figures_of(one: Json, models: Sequence[Json]) -> tuple[str, ...]:
    free = max(0, one["capacity_mib"] - one["headroom_mib"] - one["outside_mib"] - one["reserved_mib"])
    return tuple(map(text.size, (one["reserved_mib"], own_mib(one, models), one["outside_mib"], free, one["capacity_mib"])))


def shares(one: Json, models: Sequence[Json], bar: int) -> tuple[int, ...]:
    """Cells for measured, reserved beyond it, outside, free, headroom; together the whole bar."""
    capacity = max(1, one["capacity_mib"])
    measured = min(own_mib(one, models) or 0, one["reserved_mib"])
    edges, at = [], 0
    for mib in (measured, one["reserved_mib"] - measured, one["outside_mib"]):
        at += mib
        edges.append(min(bar, round(at / capacity * bar)))
    last = bar - round(min(capacity, one["headroom_mib"]) / capacity * bar)
    edges.append(max(edges[-1], last))
    return (edges[0], edges[1] - edges[0], edges[2] - edges[1], edges[3] - edges[2], bar - edges[3])


def about_device(one: Json, models: Sequence[Json]) -> str:
    parts = []
    if one["kind"] == "ram":
        asleep = sum(model["state"] == "asleep" for model in models)
        if held := ps.sleepers_mib(list(models)):
            parts.append(f"{text.size(held)} for {text.count(asleep, 'sleeper')}")
        if one.get("available_mib") is not None:
            parts.append(f"{text.size(one['available_mib'])} can be taken")
    elif one["used_mib"] is None:
        parts.append("not measured")
    if one["headroom_mib"]:
        parts.append(f"{text.size(one['headroom_mib'])} headroom")
    if one["outside_mib"] and (by := outside_by(one)):
        parts.append(f"outside: {by}")
    if one.get("lane"):
        parts.append(f"changing: {text.safe(one['lane'])}")
    return ", ".join(parts)


def outside_by(one: Json) -> str:
    names = [f"{text.safe(str(other.get('name') or ''))} ({other.get('pid')})" for other in one.get("outside_by") or ()]
    return text.shortened(names) if names else text.safe(one.get("holder") or "")


# ------------------------------------------------------------------ the queue


def queue_part(status: Json, width: int, ascii: bool) -> Part:
    from rich.text import Text

    entries: list[tuple[int, list[Text]]] = []
    for one in status["queue"].get("models") or ():
        name = text.cut(text.safe(one["model"]), name_cells(width))
        oldest_s = max((each["age_s"] for each in one["requests"]), default=0.0)
        eta = "" if one["eta_s"] is None else f", {approx(one['eta_s'], ascii)} to go"
        count = one.get("waiting", len(one["requests"]))
        line = Text(f"  {name}", style="bold").append(f"  {count} waiting for {text.duration(oldest_s)}{eta}", style="not bold")
        stages = stages_of(one, ascii)
        if stages and text.cells(line.plain) + text.cells(stages) + 2 <= width:
            line.append(f"  {stages}", style="not bold cyan")
        reason = [Text(f"    {each}") for each in text.wrapped(text.safe(one["reason"]), width - 4, REASON_LINES_MAX)]
        entries.append((1, [line, *reason]))
    return Part("QUEUE", entries, least=4)


def stages_of(one: Json, ascii: bool) -> str:
    """`gate done > drain 25 % > sleep > wake`."""
    words = []
    for stage in one["stages"]:
        fraction = stage["fraction"]
        how = "" if not fraction else " done" if fraction >= 1 else f" {fraction * 100:.0f} %"
        words.append(text.safe(stage["name"]) + how)
    return (" > " if ascii else " › ").join(words)


def approx(seconds: float, ascii: bool) -> str:
    return f"{'about' if ascii else '≈'} {text.brief(seconds)}"


# ------------------------------------------------------------------ models


def name_cells(width: int) -> int:
    return max(NAME_CELLS[0], min(NAME_CELLS[1], width // 4))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, states: Sequence[str], right: frozenset[int]) -> list[Text]:
    """Its head and its lines; the column at 1 is the state, and the last is cut to what is left."""
    from rich.text import Text

    made = []
    for number, line in enumerate(text.table(headers, rows, right)):
        shown = Text("  " + text.cut(line, width - 2), style="dim" if number == 0 else "")
        if number:
            state = states[number - 1]
            begin = line.find(text.state(state), len(rows[number - 1][0]))
            if begin >= 0:
                shown.stylize(STATE_STYLES.get(state, "cyan"), begin + 2, begin + 2 + len(text.state(state)))
        made.append(shown)
    return made


def stage_part(models: Sequence[Json], width: int, ascii: bool) -> Part:
    wide, rows, states = width >= WIDE, [], []
    for model in models:
        for one in model["instances"]:
            slots = f"{one['in_flight']}/{model['parallel']}" if model.get("parallel") else str(one["in_flight"])
            figures = (slots, str(model["queued"]), text.size(one["reserved_mib"]))
            more = (text.size(one["measured_mib"]), rate(model), ",".join(text.safe(id) for id in one["devices"]) or "-") if wide else ()
            name = text.cut(text.safe(model["id"]), name_cells(width))
            rows.append((name, text.state(one["state"], one["level"]), *figures, *more, doing(model, one, ascii)))
            states.append(one["state"])
    if not rows:
        return Part("ON STAGE", [], 0)
    headers = ("MODEL", "STATE", "BUSY", "QUEUED", "RESERVED", *(("MEASURED", "RATE", "ON") if wide else ()), "")
    made = table(headers, rows, width, states, frozenset({2, 3, 4, *((5, 6) if wide else ())}))
    return Part("ON STAGE", singly(made[1:]), least=6, head=made[0])


def rate(model: Json) -> str:
    told = model.get("rate")
    return f"{told['value']:.3g} {text.safe(told['unit'])}" if told else "-"


def doing(model: Json, one: Json, ascii: bool) -> str:
    """What happens with it, or is going to."""
    note = text.safe(model.get("note") or "")
    parts = ["" if note and one["state"] == "draining" else ps.next_of(model, one, ascii)]
    if one["idle_s"] is not None and one["state"] == "ready":
        parts.insert(0, f"idle {text.brief(one['idle_s'])}")
    if turn := model.get("quantum"):
        parts.append(f"turn {text.brief(turn['served_s'])} of {text.brief(turn['owed_s'])}")
    if note and note != "pinned":
        parts.append(note)
    return ", ".join(filter(None, parts))


def asleep_part(models: Sequence[Json], width: int, ascii: bool) -> Part:
    wide, rows, states = width >= WIDE, [], []
    for model in models:
        for one in model["instances"]:
            ram = text.size(one["ram_mib"] or one["host_mib"] or None)
            on = ",".join(text.safe(id) for id in one["devices"]) or "-"
            more = (on, f"for {text.brief(one['since_s'])}") if wide else ()
            name = text.cut(text.safe(model["id"]), name_cells(width))
            figures = (str(model["queued"]), text.size(one["reserved_mib"]), ram)
            rows.append((name, text.state(one["state"], one["level"]), *figures, *more, doing(model, one, ascii)))
            states.append(one["state"])
    if not rows:
        return Part("ASLEEP", [], 0)
    headers = ("MODEL", "STATE", "QUEUED", "HOLDS", "RAM", *(("ON", "SINCE") if wide else ()), "")
    made = table(headers, rows, width, states, frozenset({2, 3, 4}))
    return Part("ASLEEP", singly(made[1:]), least=4, head=made[0])


def is_troubled(model: Json) -> bool:
    return model["state"] == "failed" or bool(
        model["state"] == "stopped" and (model["blocked"] or model["quarantined"] or model.get("failing"))
    )


def trouble_part(models: Sequence[Json], width: int) -> Part:
    from rich.text import Text

    rows = []
    for model in models:
        name = text.cut(text.safe(model["id"]), name_cells(width))
        rows.append(Text(text.cut(f"  {name}  {ps.next_of_absent(model) or 'out of memory too often'}", width), style="red"))
    return Part("IN TROUBLE", singly(rows), least=2)


def fetch_part(models: Sequence[Json], width: int) -> Part:
    """Models whose files are on their way, those that somebody waits for first."""
    from rich.text import Text

    rows = []
    for model in sorted(models, key=lambda one: -one["fetch"]["waiting"]):
        name = text.cut(text.safe(model["id"]), name_cells(width))
        rows.append(Text(text.cut(f"  {name}  {fetch_words(model['fetch'])}", width), style="cyan"))
    return Part("FETCHING", singly(rows), least=2)


def fetch_words(fetch: Json) -> str:
    """`fetching, 34 %, about 12 s, 3 waiting, 2.5 GiB of 7.2 GiB, 393 MiB/s`: what matters most comes first"""
    parts = ["waits for its turn" if fetch["stage"] == "queued" else ps.fetched(fetch)]
    if fetch["waiting"]:
        parts.append(f"{fetch['waiting']} waiting")
    if fetch["total_bytes"]:
        parts.append(f"{text.size(fetch['done_bytes'] / MIB)} of {text.size(fetch['total_bytes'] / MIB)}")
    if fetch["bytes_per_s"]:
        parts.append(f"{text.size(fetch['bytes_per_s'] / MIB)}/s")
    return ", ".join(parts)


def peer_part(peers: Sequence[Json], width: int) -> Part:
    from rich.text import Text

    rows = []
    for one in sorted(peers, key=lambda one: bool(one["healthy"])):  # who is down is not folded away first
        name = text.cut(text.safe(one["id"]), name_cells(width))
        if one["healthy"]:
            models = text.shortened([text.safe(model) for model in one["models"]])
            line = f"  {name}  up for {text.brief(one['since_s'])}, {one['in_flight']} in flight: {models}"
        else:
            line = f"  {name}  DOWN for {text.brief(one['since_s'])}: {text.safe(one['last_error']) or 'no answer'}"
        rows.append(Text(text.cut(line, width), style="" if one["healthy"] else "red"))
    return Part(f"PEERS ({len(peers)})", singly(rows), least=2)


def home_part(models: Sequence[Json], width: int, ascii: bool) -> Part:
    """Names in lines, with the time that a start takes; those that somebody waits for first."""
    from rich.text import Text

    lines: list[tuple[int, str]] = []
    for model in sorted(models, key=lambda one: -one["queued"]):
        name = text.cut(text.safe(model["id"]), name_cells(width))
        up = " (not here yet)" if model.get("absent") else f" {approx(max(1.0, model['up_s']), ascii)}" if model.get("up_s") else ""
        word = f"{name}{up}" + (f" ({model['queued']} waiting)" if model["queued"] else "")
        count, line = lines[-1] if lines else (0, "")
        if count and text.cells(line) + text.cells(word) + 4 <= width:
            lines[-1] = (count + 1, f"{line}, {word}")
        else:
            if count:
                lines[-1] = (count, f"{line},")
            lines.append((1, f"  {word}"))
    return Part(f"AT HOME ({len(models)})", [(count, [Text(line, style="dim")]) for count, line in lines], least=2)


# ------------------------------------------------------------------ sentences


def sentence_part(sentences: Sequence[Json], now_unix_s: float, width: int) -> Part:
    from rich.text import Text

    entries = []
    for one in list(sentences)[-SENTENCES_MAX:]:
        style = events.STYLES.get(str(one.get("level")), "")
        first, *rest = text.wrapped(events.sentence(one, now_unix_s), width - 2, 1 if width >= WIDE else 2)
        rows = [f"  {first}", *(f"            {text.cut(line, width - 12)}" for line in rest)]
        entries.append((1, [Text(line, style=style) for line in rows]))
    return Part("JUST NOW", entries, least=3, newest_last=True)
