"""The list of models."""

from __future__ import annotations

import json

import pytest

from greenroom.proxy.admission import Catalog, ModelRoute, Ticket, Waiter, Wish
from greenroom.proxy.listing import model_body, models_body


class StillAdmissions:
    """Knows states; starting anything is a failed test."""

    def __init__(self, **states: str) -> None:
        self.states = states

    def ask(self, wish: Wish, waiter: Waiter) -> Ticket:
        raise AssertionError("listing must not ask for a model")

    def is_ready(self, model: str) -> bool:
        return self.states.get(model) == "ready"

    def state_of(self, model: str) -> str:
        return self.states.get(model, "stopped")


MODELS = (
    ModelRoute("zeta", aliases=("z", "alpha"), name="Zeta", description="last", metadata={"family": "greek", "size": 7}),
    ModelRoute("beta"),
    ModelRoute("secret", aliases=("s",), unlisted=True),
    ModelRoute("org/name:tag"),
)
NAMES = {**{model.id: model.id for model in MODELS}, **{alias: model.id for model in MODELS for alias in model.aliases}}
CATALOG = Catalog(models={model.id: model for model in MODELS}, names=NAMES, created=1_700_000_000)
WITH_ALIASES = Catalog(models=CATALOG.models, names=NAMES, created=1, include_aliases_in_list=True)


def test_the_list_is_sorted_and_hides_the_unlisted() -> None:
    """OpenAI's shape, nothing started."""
    got = json.loads(models_body(CATALOG, StillAdmissions()))

    assert got["object"] == "list"
    assert [entry["id"] for entry in got["data"]] == ["beta", "org/name:tag", "zeta"]
    assert got["data"][0] == {
        "id": "beta",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "greenroom",
        "status": {"value": "unloaded", "state": "stopped"},
    }


def test_names_descriptions_and_metadata_are_told_where_there_are_any() -> None:
    """As llama-swap's clients expect them."""
    entry = json.loads(models_body(CATALOG, StillAdmissions()))["data"][2]

    assert (entry["name"], entry["description"]) == ("Zeta", "last")
    assert entry["meta"] == {"llamaswap": {"family": "greek", "size": 7}}


def test_aliases_are_listed_when_configured_but_not_those_of_the_unlisted() -> None:
    """Each alias is an entry of its own, in its place."""
    got = json.loads(models_body(WITH_ALIASES, StillAdmissions()))

    assert [entry["id"] for entry in got["data"]] == ["alpha", "beta", "org/name:tag", "z", "zeta"]


@pytest.mark.parametrize(
    ("state", "value"),
    [
        ("ready", "loaded"), ("draining", "loaded"), ("stopped", "unloaded"), ("starting", "unloaded"), ("asleep", "unloaded"),
        ("waking", "unloaded"), ("going_to_sleep", "unloaded"), ("stopping", "unloaded"), ("failed", "unloaded"),
    ],
)  # fmt: skip
def test_status_says_whether_a_model_is_loaded(state: str, value: str) -> None:
    """`value` as llama-swap has it, `state` in our words."""
    entry = json.loads(model_body(CATALOG, StillAdmissions(beta=state), "beta") or b"")

    assert entry["status"] == {"value": value, "state": state}


@pytest.mark.parametrize("name", ["zeta", "z", "secret", "s", "org/name:tag"])
def test_one_model_is_found_by_id_and_alias(name: str) -> None:
    """Unlisted ones too; it is called as it was asked for."""
    assert json.loads(model_body(CATALOG, StillAdmissions(), name) or b"")["id"] == name


def test_an_unknown_model_has_no_body() -> None:
    """The caller answers 404."""
    assert model_body(CATALOG, StillAdmissions(), "nobody") is None


def test_an_empty_catalog_lists_nothing() -> None:
    """Still a list."""
    assert json.loads(models_body(Catalog({}, {}), StillAdmissions())) == {"object": "list", "data": []}
