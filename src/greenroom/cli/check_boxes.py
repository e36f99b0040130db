"""What `greenroom check` says of containers: which runtime and image, and whether the image is here."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from greenroom.cli import text

if TYPE_CHECKING:
    from greenroom.config.model import ModelConfig

ASK_S_MAX = 3.0  # one question; all are asked at once
ASKED_AT_ONCE_MAX = 32


@dataclass(frozen=True, slots=True)
class Box:
    """The container of one model."""

    runtime: str
    image: str
    pull: str
    image_is_here: bool | None  # None: its runtime did not say
    why: str = ""  # it did not

    @property
    def problem(self) -> str:
        if self.pull == "never" and self.image_is_here is False:
            return f"the image {self.image} is not here, and `pull: never` forbids to fetch it; `{self.runtime} pull {self.image}`"
        return ""


def boxes_of(models: Iterable[ModelConfig]) -> dict[str, Box]:
    """model -> its container.  Runtimes that are here are asked for the images."""
    containers = {model.id: model.container for model in models if model.container is not None}
    asked = sorted({(each.runtime, each.image) for each in containers.values() if shutil.which(each.runtime) is not None})
    if not containers:
        return {}
    with ThreadPoolExecutor(ASKED_AT_ONCE_MAX) as pool:
        told = dict(zip(asked, pool.map(_look, asked), strict=True))
    return {
        model: Box(each.runtime, each.image, each.pull, *told.get((each.runtime, each.image), (None, "")))
        for model, each in containers.items()
    }


def _look(asked: tuple[str, str]) -> tuple[bool | None, str]:
    from greenroom.engines.container import ABSENT, TRANSPORT, image_argv
    from greenroom.host.runtimes import run_now, silent

    runtime, image = asked
    if TRANSPORT.match(image):
        return None, ""  # the runtime's own to find
    answer = run_now(image_argv(runtime, image), ASK_S_MAX)
    if answer.code == 0:
        return True, ""
    if answer.code is not None and ABSENT.search(answer.err):
        return False, ""
    return None, silent(runtime, answer)


def line(model: str, box: Box) -> str:
    if box.image_is_here is None:
        state = f": {box.why}" if box.why else ""
    elif not box.image_is_here:
        state = ", which the first start pulls"
    else:
        state = ", which each start pulls anew" if box.pull == "always" else ", which is here"
    return text.safe(f"{model} runs in {box.runtime}, image {box.image}{state}")
