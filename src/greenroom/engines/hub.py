"""What servers of models from a hub have in common: vLLM and SGLang share flags, and the way they start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from greenroom.engines.generic import Generic


class HubServer(Generic):
    """A PyTorch server that loads a model by its folder or its name on a hub, and measures its device while it starts."""

    underscores: ClassVar[bool] = True
    port_flags: ClassVar[tuple[str, ...]] = ("--port",)
    host_flags: ClassVar[tuple[str, ...]] = ("--host",)
    canary_extras: ClassVar[Mapping[str, Any]] = {"ignore_eos": True}

    def lone_start(self) -> bool:
        return True

    def fetches_from(self) -> str:
        return self.named_on_hub()

    def times(self) -> tuple[float, float]:
        return 60.0, 3.0

    def served_name(self) -> str | None:
        return self.flags.value("--served-model-name") or self.model_name()

    def hub_folder(self) -> str | None:
        return self.flags.value("--download-dir")

    def hub_revision(self) -> str | None:
        return self.flags.value("--revision")
