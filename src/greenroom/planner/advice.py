"""Everything the planner has to say about a stretch of time, as one plain value: for the page, the API and `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from greenroom.core.facts import Setup
from greenroom.ledger.rows import RequestRow, SampleRow, TransitionRow

from .faults import CannotReplay
from .figures import Span, busy_s, figures_of, stretch, swaps_of
from .outgrown import Outgrown, outgrown
from .thrash import Thrash, follows, sentence, thrashing
from .ttl import TtlAdvice, ttl_advice

if TYPE_CHECKING:
    from .replay import Scene, Trial
    from .ways_out import Contexts

REPLAYED_MAX = 5_000  # requests, the newest ones: a way out costs about 0.2 ms a request to try
CIRCLES_MAX = 3


def advice(
    setup: Setup,
    requests: Sequence[RequestRow],
    transitions: Sequence[TransitionRow],
    samples: Sequence[SampleRow] = (),
    *,
    commands: Mapping[str, Sequence[str]] | None = None,
    contexts: Mapping[str, Contexts] | None = None,
    within: Span | None = None,
    ttl: bool = True,
    replay: bool = True,
    replayed_max: int = REPLAYED_MAX,
) -> dict[str, Any]:
    """`commands`: model -> its command line, for the changed lines; `contexts`: model -> what smaller ones free;
    `within`: the window, default all that is told; `ttl`: whether to say how long idle models should stay, too.

    Where something is wrong this takes about a second per thousand requests replayed: not for an event loop.
    """
    span = within or stretch(requests, transitions)
    swaps = swaps_of(requests, transitions)
    found = thrashing(setup, requests, transitions, span, swaps)
    scene = _scene(setup, requests[-replayed_max:], transitions, span) if replay and found and requests else None
    best_share: float | None = None
    if scene is not None:
        from .ways_out import fixed  # with the whole scheduler, which most of the time nobody needs

        checked = [fixed(one, scene, commands=commands, contexts=contexts, samples=samples) for one in found[:CIRCLES_MAX]]
        found = [*(one for one, _ in checked), *found[CIRCLES_MAX:]]
        best_share = _best_share([one for one, _ in checked], checked[0][1])
    size = outgrown(setup, requests, transitions, best_share=best_share, within=span)
    figures = figures_of(requests, transitions, span, swaps)
    pieces = ttl_advice(setup, requests, transitions, span) if ttl else []
    return {
        "seen": {"from": span[0], "to": span[1], "hours": round((span[1] - span[0]) / 3600, 3), **figures.plain()},
        "headline": headline(found, size),
        "count": count(found, pieces, size),
        "thrash": [one.plain() for one in found],
        "after": [one.plain() for one in follows(requests)],
        "swap_share": {device: round(s / max(1.0, span[1] - span[0]), 4) for device, s in busy_s(transitions, span).items()},
        "ttl": [one.plain() for one in pieces],
        "outgrown": size.plain(),
        "replayed": scene is not None,
    }


def _scene(setup: Setup, requests: Sequence[RequestRow], transitions: Sequence[TransitionRow], span: Span) -> Scene | None:
    from .replay import scene_of

    try:
        return scene_of(setup, requests, transitions, (max(span[0], requests[0].at), span[1]))
    except CannotReplay:
        return None


def _best_share(checked: Sequence[Thrash], base: Trial) -> float:
    """The least time in moves that any fix leaves on the hardware that is there, refusing nobody."""
    fixes = [fix for one in checked for fix in one.fixes if fix.kind not in ("second_gpu", "pin") and not fix.refused]
    return min([base.figures.waited_share, *(fix.moving_share for fix in fixes if fix.moving_share is not None)])


def count(found: Sequence[Thrash], ttl: Sequence[TtlAdvice], size: Outgrown) -> int:
    """How many things there are to change."""
    return len(found) + sum(one.matters for one in ttl) + (size.verdict in ("outgrown", "capacity"))


def headline(found: Sequence[Thrash], size: Outgrown) -> dict[str, str] | None:
    """The one worst thing, for the top of the page."""
    if size.verdict == "outgrown":
        return {"text": size.text, "link": "#/advice", "severity": "bad"}
    if found:
        return {"text": sentence(found[0]), "link": "#/advice", "severity": "warn"}
    if size.verdict == "capacity":
        return {"text": size.text, "link": "#/advice", "severity": "warn"}
    return None
