"""Validation results in our own words: every error type the schema can raise becomes one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .errors import Path, Report, did_you_mean, kind, nearest, quoted
from .schema import ConfigFile, ModelSection, Section

_HINTS = {
    "command": "cmd",
    "cmd_stop": "cmdStop",
    "args": "cmd",
    "model": "cmd",
    "gpu": "device",
    "gpus": "device",
    "vram": "memory",
    "alias": "aliases",
    "timeout": "start_timeout",
    "concurrency": "parallel",
    "max_concurrency": "parallel",
    "health": "checkEndpoint",
    "port": "startPort",
    "api_key": "apiKeys",
    "preload": "hooks.on_startup.preload",
    "tensor_parallel": "devices_count",
    "sleep_level": "sleep",
    "sleep_mode": "sleep",
    "wake_up": "wake",
    "url": "path",
    "route": "path",
    "endpoint": "path",
    "json": "body",
    "payload": "body",
    "is_sleeping": "asleep",
}
_SYNONYMS = ("start_timeout", "stop_timeout")


def report_errors(error: ValidationError, base: Path, schema: type[BaseModel], report: Report) -> set[Path]:
    """Add one problem an error; returns the places, below `base`, that must go for the rest to be valid."""
    bad: set[Path] = set()
    for each in error.errors(include_url=False):
        loc = each["loc"]
        bad.add(loc[:-1] if each["type"] == "missing" and len(loc) > 1 else loc)
        path = (*base, *loc)
        if not report.has(path):
            report.add(path, _sentence(each, loc, schema))
    return bad


def _sentence(error: ErrorDetails, loc: Path, schema: type[BaseModel]) -> str:
    match error["type"]:
        case "extra_forbidden":
            return _unknown_key(str(loc[-1]), known_keys(schema, loc[:-1]), schema, len(loc) == 1)
        case "missing":
            return "is missing. Add it."
        case "value_error":
            return str(error["ctx"]["error"])
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"is {kind(error['input'])}, not a mapping. Write `key: value` lines under it."
        case _:
            return f"{quoted(error['input'])} is not accepted here. See docs/config.md."


def _unknown_key(key: str, known: Iterable[str], schema: type[BaseModel], at_top: bool) -> str:
    names = set(known)
    is_model = schema is ModelSection
    if at_top and is_model:
        names |= set(_SYNONYMS)
    sentence = f"{quoted(key)} is not a key greenroom knows here."
    habit = nearest(key, _HINTS) if nearest(key, names) is None else None
    hint = _HINTS.get(key) or _HINTS.get(habit or "")
    if hint is not None and hint.split(".")[0] in names:
        return f"{sentence} Did you mean {quoted(hint)}?"
    if nearest(key, names) is None and at_top:
        elsewhere = ConfigFile.model_fields if is_model else ModelSection.model_fields
        if key in elsewhere:
            return f"{sentence} It belongs {'at the top level' if is_model else 'under a model'}."
    return f"{sentence}{did_you_mean(key, names)}"


def known_keys(schema: type[BaseModel], loc: Path) -> tuple[str, ...]:
    """The keys a section at this place may have."""
    here: type[Section] | None = schema if issubclass(schema, Section) else None
    is_free_key = False  # the next part is a name people chose: models.<id>
    for part in loc:
        if isinstance(part, int):
            continue  # an item of a list is a section like the others
        if is_free_key:
            is_free_key = False
            continue
        field = here.model_fields.get(str(part)) if here is not None else None
        if field is None:
            return ()
        here = _section_of(field.annotation)
        is_free_key = get_origin(field.annotation) is dict
    return tuple(here.model_fields) if here is not None else ()


def _section_of(annotation: Any) -> type[Section] | None:
    """The section in `X`, `X | None` or `dict[str, X]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for inner in get_args(annotation):
        found = _section_of(inner)
        if found is not None:
            return found
    return None
