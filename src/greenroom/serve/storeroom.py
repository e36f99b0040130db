"""What the server has to do with the store: where models lie, which of them are held, which are absent."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

from greenroom.config.model import Config
from greenroom.store.facts import Progress, Reference, Stored, StoreError
from greenroom.store.library import Library
from greenroom.store.resolve import resolve

log = logging.getLogger("greenroom")


class Storeroom:
    """Models of the configuration that come from the store; while they are served nobody removes them."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.absent: Mapping[str, Reference] = {}
        self._stored: Mapping[str, Stored] = {}
        self._forbidden: Mapping[str, Reference] = {}
        self._held: dict[str, contextlib.ExitStack] = {}  # digest -> what keeps it

    def resolve(self, config: Config) -> Config:
        """The configuration with places of models that are here."""
        found = resolve(config, self.library)
        self.absent, self._stored, self._forbidden = found.absent, found.stored, found.forbidden
        return found.config

    def changed(self, model: str) -> bool:
        """Whether it has come or gone since: `greenroom pull` does not tell us, nor does a disk."""
        known = self._stored.get(model)
        reference = known.reference if known is not None else self.absent.get(model) or self._forbidden.get(model)
        return reference is not None and self._is_here(reference) != (known is not None)

    def _is_here(self, reference: Reference) -> bool:
        try:
            self.library.ready(reference)
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

    async def pull(self, reference: Reference, progress: Callable[[Progress], None]) -> None:
        """Fetch one model.  Raises StoreError."""
        from greenroom.store.pull import Options, Puller  # a server that fetches nothing needs none of it

        await Puller(self.library, Options().from_environment()).pull(reference, progress)

    def close(self) -> None:
        for stack in self._held.values():
            stack.close()
        self._held.clear()
