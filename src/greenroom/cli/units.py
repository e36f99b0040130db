"""Options whose values are written as in the configuration."""

from __future__ import annotations

from typing import Any

import click

from greenroom.cli import text


class AsConfigured(click.ParamType[Any]):
    """Read by the function `read` of config.units, which is imported when there is something to read."""

    def __init__(self, name: str, read: str) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from greenroom.config import units

        try:
            return getattr(units, self._read)(value)
        except units.UnitError as fault:
            self.fail(text.safe(str(fault)), param, ctx)
