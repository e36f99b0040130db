"""What the server has to do with the store: where models lie, which of them are held, which are absent."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from greenroom.config.model import Config
from greenroom.store.facts import Reference, Stored
from greenroom.store.library import Library
from greenroom.store.resolve import resolve

from .wiring import Plan


class Storeroom:
    """Models of the configuration that come from the store; while they are served nobody removes them."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.absent: Mapping[str, Reference] = {}
        self._stored: Mapping[str, Stored] = {}
        self._held: dict[str, contextlib.ExitStack] = {}  # digest -> what keeps it

    def resolve(self, config: Config) -> Config:
        """The configuration with places of models that are here."""
        found = resolve(config, self.library)
        self.absent, self._stored = found.absent, found.stored
        return found.config

    def told(self, plan: Plan) -> Plan:
        """The plan with what absent models lack, in words for people."""
        if not self.absent:
            return plan
        lacking = {
            model: f"its model {reference} is not here yet: the first request fetches it" for model, reference in self.absent.items()
        }
        return replace(plan, missing={**plan.missing, **lacking})

    def hold(self) -> None:
        """Keep what is served now, let go of what was served before."""
        wanted = {stored.digest: stored for stored in self._stored.values()}
        for digest in [digest for digest in self._held if digest not in wanted]:
            self._held.pop(digest).close()
        for digest, stored in wanted.items():
            if digest not in self._held:
                stack = self._held[digest] = contextlib.ExitStack()
                stack.enter_context(self.library.using(stored))

    def close(self) -> None:
        for stack in self._held.values():
            stack.close()
        self._held.clear()
