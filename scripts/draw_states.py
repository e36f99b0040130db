#!/usr/bin/env python3
"""Draw docs/states.md from the table of lawful moves: `python scripts/draw_states.py` writes it, `--check` compares."""

from __future__ import annotations

import sys
from pathlib import Path

from greenroom.core.facts import State
from greenroom.core.residency import FALLING, HOME, LAWFUL, RISING, SERVING

TARGET = Path(__file__).resolve().parent.parent / "docs" / "states.md"

MEANING = {
    State.STOPPED: "no process, nothing booked",
    State.STARTING: "the process runs and cannot serve yet; what it needs when ready is booked",
    State.READY: "serves",
    State.DRAINING: "takes no new request and finishes those in flight",
    State.GOING_TO_SLEEP: "on its way to sleep; still booked in full",
    State.ASLEEP: "the process lives; only what a sleeper holds is booked",
    State.WAKING: "on its way back; booked in full",
    State.STOPPING: "on its way out; booked until its process is reaped and its memory is back",
    State.FAILED: "as stopped, and backing off before the next start",
}
KINDS = {"at home": HOME, "serving": SERVING, "rising": RISING, "falling": FALLING}


def drawing() -> str:
    lines = [
        "# States of an instance",
        "",
        "Drawn by `scripts/draw_states.py` from the table in `src/greenroom/core/residency.py`; a test keeps the two alike.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> stopped",
    ]
    lines += [f"    {before} --> {after}: {why}" for before, moves in LAWFUL.items() for after, why in moves.items()]
    lines += ["```", "", "| state | kind | what it means | where it can go |", "|---|---|---|---|"]
    for state in State:
        kind = next((name for name, members in KINDS.items() if state in members), "")
        lines.append(f"| {state} | {kind} | {MEANING[state]} | {', '.join(LAWFUL[state])} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    if argv == ["--check"]:
        same = TARGET.exists() and TARGET.read_text() == drawing()
        if not same:
            print(f"{TARGET} is not what the table says; run scripts/draw_states.py", file=sys.stderr)
        return 0 if same else 1
    TARGET.write_text(drawing())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
