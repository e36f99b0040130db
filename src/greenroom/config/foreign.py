"""Keys of llama-swap that greenroom refuses, each with its reason, and those that are taken but have no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Path, Report

Predicate = Callable[[object], bool]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A key of llama-swap that means nothing, or cannot be done, here."""

    place: tuple[str, ...]  # `*` stands for any name
    sentence: str
    harmless: Predicate = lambda value: value is None  # values under which it asks for nothing


def _off(value: object) -> bool:
    return value is None or value is False or value == 0 or value == "" or value == {} or value == []


REFUSED: tuple[Foreign, ...] = (
    Foreign(
        ("matrix",), "llama-swap's matrix is not supported. Give models a memory size: greenroom co-loads whatever fits the budget.", _off
    ),
    Foreign(
        ("routing", "router", "settings", "matrix"),
        "llama-swap's matrix is not supported. Give models a memory size: greenroom co-loads whatever fits the budget.",
        _off,
    ),
    Foreign(
        ("routing", "router", "use"),
        "only the group router exists here. Remove this line and give models a memory size; greenroom co-loads whatever fits.",
        lambda value: value != "matrix",
    ),
    Foreign(("selectors",), "llama-swap's selectors are not supported. Name a model or an alias in requests.", _off),
    Foreign(("profiles",), "llama-swap's profiles are not supported. Use aliases, and reload the file to change them.", _off),
    Foreign(("captureBuffer",), "greenroom records no requests or answers. Remove this key, or set it to 0.", _off),
    Foreign(("sendLoadingState",), "greenroom does not write into answers; it sends SSE comments (keepalive). Remove this key.", _off),
    Foreign(
        ("models", "*", "sendLoadingState"),
        "greenroom does not write into answers; it sends SSE comments (keepalive). Remove this key.",
        _off,
    ),
    Foreign(("logTimeFormat",), "the time format of the log cannot be chosen. Remove this key.", _off),
    Foreign(
        ("routing", "scheduler", "settings"),
        "greenroom orders its queue by waiting time and by each model's `priority`. Remove this key and set models.<id>.priority.",
        lambda value: _off(value) or (isinstance(value, Mapping) and all(_no_priority(item) for item in value.values())),
    ),
)


def _no_priority(value: object) -> bool:
    return _off(value) or (isinstance(value, Mapping) and all(_off(item) for item in value.values()))


NO_EFFECT: tuple[Foreign, ...] = (
    Foreign(("logRequests",), "has no effect: requests are never logged whole."),
    Foreign(("metricsMaxInMemory",), "has no effect: figures are kept in the state directory."),
    Foreign(("store",), "has no effect: figures are kept in the state directory (--state-dir)."),
    Foreign(("ui",), "has no effect."),
    Foreign(("performance",), "has no effect: memory is always sampled."),
    Foreign(("models", "*", "capabilities"), "has no effect: the model list does not show capabilities. Use metadata."),
    Foreign(("models", "*", "timeouts"), "has no effect: use start_timeout, stall_timeout and busy_timeout."),
    Foreign(("models", "*", "compat"), "has no effect: a silent WebSocket never keeps a model loaded for long."),
)

SYNONYMS: Mapping[str, str] = {"start_timeout": "healthCheckTimeout", "stop_timeout": "unloadTimeout"}  # of a model
FILTER_SYNONYMS: Mapping[str, str] = {"strip_params": "stripParams"}
PEER_FILTER_SYNONYMS: Mapping[str, str] = {**FILTER_SYNONYMS, "set_params": "setParams"}


def matches(place: tuple[str, ...], path: Path) -> bool:
    """Whether a path is this place; `*` in the place stands for any name."""
    return len(place) == len(path) and all(want in ("*", part) for want, part in zip(place, path, strict=True))


def sort_out(section: Mapping[str, Any], path: Path, report: Report) -> dict[str, Any]:
    """A copy of one section without llama-swap's foreign keys (each reported) and with its synonyms resolved.

    Empty values (`ttl:`) count as not written, as llama-swap takes them.
    """
    out: dict[str, Any] = {}
    for key, value in section.items():
        here = (*path, key)
        if value is None and path in (("devices",), ("groups",)):
            value = {}  # a name with nothing under it is still a device
        if _is_foreign(here, value, report) or value is None:
            continue
        if isinstance(value, Mapping) and _may_hold_foreign(here):
            value = sort_out(value, here, report)
        out[key] = value
    return out


def _is_foreign(here: Path, value: object, report: Report) -> bool:
    for refused in REFUSED:
        if matches(refused.place, here):
            if refused.harmless(value):
                return refused.place[-1] != "use"  # `use: group` is checked by the schema
            report.add(here, refused.sentence)
            return True
    for idle in NO_EFFECT:
        if matches(idle.place, here):
            if not idle.harmless(value):
                report.warn(here, idle.sentence)
            return True
    return False


def _may_hold_foreign(here: Path) -> bool:
    """Below these, a missing value is a value of its own (metadata, parameters): nothing is touched."""
    return here[0] in ("routing", "hooks", "upstream", "groups", "devices")


def rename(section: dict[str, Any], synonyms: Mapping[str, str], path: Path, report: Report) -> dict[str, Any]:
    """Synonyms replaced by the key they stand for; both at once is a problem."""
    for synonym, key in synonyms.items():
        if synonym not in section:
            continue
        if key in section:
            report.add((*path, synonym), f"says the same as {key}. Keep one of them.")
        report.keys[(*path, key)] = report.spot((*path, synonym))
        report.written[(*path, key)] = synonym
        section[key] = section.pop(synonym)
    return section
