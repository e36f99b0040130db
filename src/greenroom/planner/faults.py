"""What a planner refuses."""

from __future__ import annotations


class CannotReplay(ValueError):
    """What was recorded is not enough, or not readable; one sentence."""


class BadChange(ValueError):
    """A change that cannot be made, in one sentence."""
