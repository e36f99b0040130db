"""What the server has to do with the store: where models lie, which of them are held, which are absent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.config.model import Config, ModelConfig, PullConfig
from greenroom.engines.container import TRANSPORT
from greenroom.host.docks import BoxError, Docks
from greenroom.host.logs import LogRing
from greenroom.host.supervisor import Supervisor
from greenroom.store.facts import Progress, Reference, Stored, StoreError
from greenroom.store.library import Library
from greenroom.store.resolve import fit, resolve

from .fetching import Files, Image, Needed

if TYPE_CHECKING:
    from greenroom.store.pull import Options

log = logging.getLogger("greenroom")


class Storeroom:
    """Models of the configuration that come from the store; while they are served nobody removes them.

    And images of containers that are not here: a start that pulled one would hold its room for as long as that takes.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.docks: Docks | None = None
        self.supervisor: Supervisor | None = None
        self.ring_of: Callable[[str], LogRing] = LogRing  # model -> its log, in which a pull of its image is seen
        self.images: frozenset[Image] = frozenset()  # known not to be here
        self.absent: Mapping[str, Needed] = {}
        self._stored: Mapping[str, Stored] = {}
        self._sought: Mapping[str, Reference] = {}  # models of the store that are not here, also those that must not be fetched
        self._models: Mapping[str, ModelConfig] = {}
        self._held: dict[str, contextlib.ExitStack] = {}  # digest -> what keeps it

    def resolve(self, config: Config) -> Config:
        """The configuration with places of models that are here."""
        found = resolve(config, self.library)
        self._stored, self._sought = found.stored, {**found.absent, **found.forbidden}
        self._models = {model.id: model for model in config.models if model.reference}
        absent: dict[str, Needed] = {id: Files(reference, self._models[id].pull_options) for id, reference in found.absent.items()}
        models = tuple(self._with_image(model, absent) for model in found.config.models)
        self.absent = absent
        return replace(found.config, models=models) if models != found.config.models else found.config

    def _with_image(self, model: ModelConfig, absent: dict[str, Needed]) -> ModelConfig:
        image = image_of(model)
        if image is None or image not in self.images or model.misconfigured:
            return model
        absent[model.id] = image
        return replace(model, misconfigured=f"its image {image} is not here yet: the first request fetches it")

    async def look(self, config: Config) -> bool:
        """Ask runtimes for the images of `config`; True when something else is known now."""
        if self.docks is None:
            return False
        wanted = sorted({image for model in config.models if (image := image_of(model)) is not None}, key=str)
        lacking = await asyncio.gather(*(self.docks.lacks(image.runtime, image.name) for image in wanted))
        before, self.images = self.images, frozenset(image for image, lacks in zip(wanted, lacking, strict=True) if lacks)
        return self.images != before

    def changed(self, model: str) -> bool:
        """Whether it has come or gone since: `greenroom pull` does not tell us, nor does a disk."""
        known = self._stored.get(model)
        reference = known.reference if known is not None else self._sought.get(model)
        return reference is not None and self._is_here(self._models[model], reference) != (known is not None)

    def _is_here(self, model: ModelConfig, reference: Reference) -> bool:
        try:
            fit(model, reference, self.library)
        except StoreError:
            return False
        return True

    def hold(self) -> None:
        """Keep what is served now, let go of what was served before."""
        wanted = {stored.digest: stored for stored in self._stored.values()}
        for digest in [digest for digest in self._held if digest not in wanted]:
            self._held.pop(digest).close()
        for digest, stored in wanted.items():
            if digest not in self._held:
                stack = contextlib.ExitStack()
                try:
                    stack.enter_context(self.library.using(stored))
                except StoreError as fault:
                    log.warning("%s is served, and may be removed meanwhile: %s", stored.reference, fault)
                    continue
                self._held[digest] = stack

    async def pull(self, needed: Needed, progress: Callable[[Progress], None]) -> None:
        """Fetch one model, or one image.  Raises StoreError."""
        if isinstance(needed, Image):
            await self._pull_image(needed)
            return
        from greenroom.store.pull import Puller  # a server that fetches nothing needs none of it

        await Puller(self.library, options_of(needed.options)).pull(needed.reference, progress)

    async def _pull_image(self, image: Image) -> None:
        assert self.docks is not None, "only runtimes tell of images"
        model = next((model for model, needed in self.absent.items() if needed == image), None)
        ring = self.ring_of(model) if model is not None else LogRing(str(image))
        try:
            await self.docks.pull(image.runtime, image.name, image.limit_s, ring, supervisor=self.supervisor)
        except BoxError as fault:
            raise StoreError(str(fault)) from fault
        self.images -= {image}

    def close(self) -> None:
        for stack in self._held.values():
            stack.close()
        self._held.clear()


def options_of(said: PullConfig) -> Options:
    """What a configuration says of a fetch, and the environment."""
    from greenroom.store.pull import Options

    options = Options(
        offline=said.offline,
        platform=said.platform,
        verify_key=Path(said.verify_key) if said.verify_key is not None else None,
        bytes_max=said.size_max_bytes,
        plain_http=said.plain_http,
        tls_verify=said.tls_verify,
        tls_ca=Path(said.tls_ca) if said.tls_ca is not None else None,
        allowed=said.allow_host,
    )
    return options.from_environment()


def image_of(model: ModelConfig) -> Image | None:
    """The image that its first start would have to fetch, if it is not here."""
    container = model.container
    if container is None or container.pull != "missing" or TRANSPORT.match(container.image):
        return None
    return Image(container.runtime, container.image, container.pull_s_max)
