"""The one way in which a writer says no."""

from __future__ import annotations


class Unfit(ValueError):
    """What was asked for cannot be written or does not fit: one sentence with the numbers and what to do."""
