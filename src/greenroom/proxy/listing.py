"""The list of models, as OpenAI's clients and llama-swap's users know it.  Listing never starts anything."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import msgspec

from greenroom.proxy.admission import Admissions, Catalog, ModelRoute

_LOADED = frozenset({"ready", "draining", "peer"})


def _entry(name: str, route: ModelRoute, catalog: Catalog, admissions: Admissions) -> dict[str, Any]:
    state = str(admissions.state_of(route.id))
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": catalog.created,
        "owned_by": route.owner,
        "status": {"value": "loaded" if state in _LOADED else "unloaded", "state": state},
    }
    if route.name:
        entry["name"] = route.name
    if route.description:
        entry["description"] = route.description
    if route.metadata:
        entry["meta"] = {"llamaswap": dict(route.metadata)}  # where llama-swap's clients look for it
    return entry


def models_body(catalog: Catalog, admissions: Admissions, only: Set[str] | None = None) -> bytes:
    """`GET /v1/models`: every listed model (of `only`), sorted by id; aliases too when so configured."""
    named = [(route.id, route) for route in catalog.models.values() if not route.unlisted and (only is None or route.id in only)]
    if catalog.include_aliases_in_list:
        named += [(alias, route) for _, route in tuple(named) for alias in route.aliases]
    named.sort(key=lambda pair: pair[0])
    entries = [_entry(name, route, catalog, admissions) for name, route in named]
    return msgspec.json.encode({"object": "list", "data": entries})


def model_body(catalog: Catalog, admissions: Admissions, name: str) -> bytes | None:
    """`GET /v1/models/{name}` for an id or alias, unlisted ones too; None: there is no such model."""
    model = catalog.names.get(name)
    if model is None:
        return None
    return msgspec.json.encode(_entry(name, catalog.models[model], catalog, admissions))
