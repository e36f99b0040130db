"""The figures that engines tell of themselves, each with the name of its model: asked of engines that serve, never of sleepers.

What an engine says is taken apart and written anew: only samples that are well-formed pass, none can take one of
greenroom's own names, and time, size and number are bounded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from greenroom.core.facts import State
from greenroom.core.views import View
from greenroom.host.calls import Line, Unanswered
from greenroom.ledger.metrics import escaped
from greenroom.shell.crew import Running

ASK_S_MAX: Final = 1.0  # of each, all at once
ENGINES_MAX: Final = 64
TEXT_BYTES_MAX: Final = 512 * 1024  # of one engine
SAMPLES_MAX: Final = 5000
OWN: Final = "greenroom_"

_SAMPLE: Final = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*",?)*)\})?[ \t]+(\S{1,40})(?:[ \t]+-?\d{1,20})?', re.ASCII
)
_TYPE: Final = re.compile(r"# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) (counter|gauge|histogram|summary|untyped)", re.ASCII)
_MODEL: Final = re.compile(r'(^|,)model="')
_SUFFIXES: Final = ("_bucket", "_count", "_sum", "_total")


async def gather(view: View, running: Callable[[str], Running | None]) -> str:
    """Of all engines that are ready now, as one text; one that does not answer in time is left out."""
    wanted: list[tuple[str, Running]] = []
    for model in view.models:
        one = running(model.id) if model.state is State.READY else None
        if one is not None and one.ready and not one.stopping and not one.asleep and one.engine.metrics_call() is not None:
            wanted.append((model.id, one))
    texts = await asyncio.gather(*(_ask(one) for _, one in wanted[:ENGINES_MAX]))
    return relabelled([(model, text) for (model, _), text in zip(wanted, texts, strict=False) if text])


async def _ask(running: Running) -> str:
    call, readiness = running.engine.metrics_call(), running.engine.readiness()
    assert call is not None
    try:
        reply = await Line(running.host, running.port, readiness.base_path, readiness.headers).ask(call, ASK_S_MAX)
    except Unanswered:
        return ""
    whole = reply.body if len(reply.body) <= TEXT_BYTES_MAX else reply.body[:TEXT_BYTES_MAX].rpartition(b"\n")[0]
    return whole.decode("utf-8", "replace") if reply.ok else ""


def relabelled(told: Iterable[tuple[str, str]]) -> str:
    """Samples of several engines, grouped by metric as the format wants it, each with its `model`; theirs becomes `exported_model`."""
    types: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for model, text in told:
        label = f'model="{escaped(model)}"'
        own_types: dict[str, str] = {}
        taken = 0
        for line in text.split("\n"):
            if line.startswith("#"):
                if found := _TYPE.fullmatch(line.rstrip()):
                    own_types[found[1]] = found[2]
                continue
            found = _SAMPLE.fullmatch(line.strip())
            if found is None or found[1].startswith(OWN) or not _is_number(found[3]):
                continue
            name, labels = found[1], _MODEL.sub(r'\1exported_model="', found[2] or "").rstrip(",")
            family = _family(name, own_types)
            kind = own_types.get(family, "untyped")
            if types.setdefault(family, kind) != kind:
                continue  # another engine means something else by it
            groups.setdefault(family, []).append(f"{name}{{{label}{',' if labels else ''}{labels}}} {found[3]}\n")
            taken += 1
            if taken >= SAMPLES_MAX:
                break
    return "".join(f"# TYPE {family} {types[family]}\n{''.join(lines)}" for family, lines in groups.items())


def _family(name: str, types: dict[str, str]) -> str:
    """The metric that a sample belongs to."""
    if name in types:
        return name
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end) and name.removesuffix(end) in types), name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


__all__: Sequence[str] = ("gather", "relabelled")
