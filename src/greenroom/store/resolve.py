"""From a configuration whose models name references to one that names places in the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from greenroom.config import secrets
from greenroom.config.model import Config, ModelConfig

from .facts import Damaged, NotFound, Reference, Stored, StoreError
from .library import Library
from .references import SIGNED, parse

PATH_MACRO, FOLDER_MACRO = "${MODEL_PATH}", "${MODEL_DIR}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """`config`: with places filled in where the model is here."""

    config: Config
    absent: Mapping[str, Reference] = field(default_factory=dict)  # model id -> what the first request may fetch
    stored: Mapping[str, Stored] = field(default_factory=dict)  # model id -> what it is made of
    forbidden: Mapping[str, Reference] = field(default_factory=dict)  # model id -> what is not here and must not be fetched


def resolve(config: Config, library: Library) -> Resolved:
    """Reads the store, asks nobody else.  A model that can never start as it stands is `misconfigured`, with the reason."""
    if not any(model.reference for model in config.models):
        return Resolved(config)
    absent: dict[str, Reference] = {}
    stored: dict[str, Stored] = {}
    forbidden: dict[str, Reference] = {}
    models = tuple(_resolved(model, library, absent, stored, forbidden) for model in config.models)
    return Resolved(replace(config, models=models), absent, stored, forbidden)


def _resolved(
    model: ModelConfig, library: Library, absent: dict[str, Reference], stored: dict[str, Stored], forbidden: dict[str, Reference]
) -> ModelConfig:
    if not model.reference or model.misconfigured:
        return model
    try:
        reference = parse(model.reference)
    except StoreError as fault:
        return replace(model, misconfigured=str(fault))
    try:
        found = stored[model.id] = fit(model, reference, library)
        return placed(model, found)
    except (NotFound, Damaged) as fault:  # a fetch mends either
        if model.pull == "never":
            forbidden[model.id] = reference
            return replace(model, misconfigured=f"{fault}; pull: never forbids to fetch it")
        absent[model.id] = reference
        return replace(model, misconfigured=f"its model {secrets.masked(str(reference))} is not here yet: the first request fetches it")
    except StoreError as fault:
        return replace(model, misconfigured=str(fault))


def fit(model: ModelConfig, reference: Reference, library: Library) -> Stored:
    """What may be served as this model.  Raises NotFound or Damaged where a fetch helps, StoreError where none does."""
    key = model.pull_options.verify_key
    if key is not None and reference.scheme not in SIGNED:
        raise StoreError(f"its model {reference} cannot be signed, and verify_key asks for it: only models in registries are")
    stored = library.ready(reference)
    if key is not None:
        from .signatures import read_key  # most models need none

        name = read_key(Path(key)).name
        if stored.signed_by != name:
            raise NotFound(f"{reference} is here, but not known to be signed by {name}")
    return stored


def placed(model: ModelConfig, stored: Stored) -> ModelConfig:
    """The model with the place of its files in its command, its environment and its container's mounts."""
    path, folder = str(stored.entry), str(stored.folder)

    def fill(text: str) -> str:
        return text.replace(PATH_MACRO, path).replace(FOLDER_MACRO, folder)

    container = model.container
    if container is not None:
        container = replace(container, args=tuple(map(fill, container.args)), volumes=tuple(map(fill, container.volumes)))
    env = tuple((name, fill(value)) for name, value in model.env)
    return replace(model, argv=tuple(map(fill, model.argv)), env=env, container=container, model_folder=folder)
