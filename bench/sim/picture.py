"""Grouped bars as a small SVG that reads on light and on dark pages alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH = 860
LEFT = 210
RIGHT = 90
BAR = 11
BAR_GAP = 3
GROUP_GAP = 16
TOP = 86
LONGEST = 2.0  # longer bars are broken off here

# Mid tones: enough contrast on white and on near-black.
COLOURS = ("#8a8f98", "#c28b3c", "#5b8fc7", "#2f9e6e", "#a26bc4")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.t { font-size: 16px; font-weight: 600 }
.g { font-weight: 600 }
.v { font-size: 10px; fill: #57606a }
.a { stroke: #8c959f; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .v { fill: #9da7b1 }
  .a { stroke: #6e7681 }
}
"""


@dataclass(frozen=True, slots=True)
class Bar:
    series: str
    value: float
    label: str


def write_bars(path: Path, title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(bars(title, groups), encoding="utf-8")


def bars(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """An SVG document; the line marks 1."""
    series = list(dict.fromkeys(bar.series for _, group in groups for bar in group))
    colour = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(series)}
    scale = (WIDTH - LEFT - RIGHT) / LONGEST
    parts, y = [f'<text class="t" x="16" y="28">{escape(title)}</text>', *_legend(series, colour)], float(TOP)
    for name, group in groups:
        middle = y + len(group) * (BAR + BAR_GAP) / 2 + 3
        parts.append(f'<text class="g" x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(name)}</text>')
        for bar in group:
            length = max(1.0, min(bar.value, LONGEST) * scale)
            parts.append(f'<rect x="{LEFT}" y="{y:.0f}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour[bar.series]}"/>')
            label = bar.label + (f" (× {bar.value:.3g})" if bar.value > LONGEST else "")
            parts.append(f'<text class="v" x="{LEFT + length + 5:.1f}" y="{y + BAR - 2:.0f}">{escape(label)}</text>')
            y += BAR + BAR_GAP
        y += GROUP_GAP
    parts.append(f'<line class="a" x1="{LEFT + scale:.1f}" x2="{LEFT + scale:.1f}" y1="{TOP - 6}" y2="{y - GROUP_GAP:.0f}"/>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _legend(series: Sequence[str], colour: dict[str, str]) -> list[str]:
    parts, x = [], 16.0
    for name in series:
        parts.append(f'<rect x="{x:.0f}" y="46" width="12" height="12" rx="2" fill="{colour[name]}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="56">{escape(name)}</text>')
        x += 40 + 6.6 * len(name)
    return parts
