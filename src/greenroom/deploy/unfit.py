"""How builders and writers say no."""

from __future__ import annotations


class Unfit(ValueError):
    """What was asked for cannot be written or does not fit: one sentence with the numbers and what to do."""


class BuildError(Unfit):
    """This cannot be deployed like that, by whatever format."""
