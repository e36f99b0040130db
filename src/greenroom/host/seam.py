"""Where a log that is read a second time goes on: lines that were read already are not shown again."""

from __future__ import annotations

from collections.abc import Sequence


class Seam:
    """Between the lines known so far and a second reading that begins somewhere among the last of them, or after.

    A line is rather shown twice than never: of several ways to join the two, the one with the shortest overlap counts.
    """

    def __init__(self, known: Sequence[str]) -> None:
        self._known = list(known)
        self._open: list[int] | None = None  # where in `known` the second reading may have begun; None: nothing was read yet
        self._held: list[str] = []
        self._joined = not self._known

    def fresh(self, lines: Sequence[str]) -> list[str]:
        """Of the next lines of the second reading those that are new."""
        for index, line in enumerate(lines):
            if self._joined:
                return [*self._release(), *lines[index:]]
            self._take(line)
        return self._release() if self._joined else []

    def _take(self, line: str) -> None:
        at = len(self._held)
        starts = range(len(self._known)) if self._open is None else self._open
        self._open = [start for start in starts if self._known[start + at] == line]
        self._held.append(line)
        if any(start + at + 1 == len(self._known) for start in self._open):
            self._joined, self._held = True, []
        elif not self._open:
            self._joined = True

    def _release(self) -> list[str]:
        held, self._held = self._held, []
        return held

    def rest(self) -> list[str]:
        """What was held back when the second reading ended."""
        return self._release()
