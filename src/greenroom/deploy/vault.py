"""Secrets of a set: which values must never be written, and the key each of them has instead."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(slots=True)
class Vault:
    """Value -> key.  Keys are names of variables; the same value keeps its key, and a key never means two values."""

    keys: dict[str, str] = field(default_factory=dict)
    reserved: frozenset[str] = frozenset()  # names that are everybody's: no secret of one has them

    def key(self, value: str, *wanted: str) -> str:
        """The key of a value: the first of the names wanted that is free, else the last one with a number."""
        if value in self.keys:
            return self.keys[value]
        taken = {*self.keys.values(), *self.reserved}
        names = [variable_name(name) for name in wanted]
        name = next((name for name in names if name not in taken), "")
        number = 2
        while not name:
            candidate = f"{names[-1]}_{number}"
            name, number = ("" if candidate in taken else candidate), number + 1
        self.keys[value] = name
        return name


def variable_name(text: str) -> str:
    """Letters, digits and `_`, capitals, not beginning with a digit."""
    name = re.sub(r"[^A-Z0-9]+", "_", text.upper()).strip("_")
    return name if name and not name[0].isdigit() else f"S_{name}".rstrip("_")
