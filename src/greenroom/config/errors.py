"""What is wrong with a configuration, as one line each: file, line, place, sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Path: TypeAlias = tuple[str | int, ...]
"""A place in the document: keys and list positions from the top."""

PROBLEMS_MAX = 200
SHOWN_CHARS_MAX = 60
NAMES_COMPARED_MAX = 1000  # comparing is quadratic in the letters
SECRET_CHARS_MIN = 4  # shorter strings would mask half of every sentence

_BARE_KEY = re.compile(r"[^\s.\[\]\"]+")
_SECRET_NAME = re.compile(r"(?:key|token|secret|passw|credential|auth)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to put right.  `line` and `column` count from 1."""

    file: str
    line: int
    column: int
    where: str  # models.qwen3.ttl; "" for the file as a whole
    message: str

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{self.file}:{self.line}: {place}{self.message}"


class ConfigError(Exception):
    """A configuration that cannot be used; `problems` holds all that was found, by line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def one_line(text: str) -> str:
    """Control characters and line ends made visible, so that a sentence stays one line."""
    return "".join(c if c.isprintable() else (" " if c in "\t\n\r\x85\u2028\u2029" else f"\\x{ord(c):02x}") for c in text)


def quoted(value: object) -> str:
    """A value as people wrote it, short: numbers bare, text in quotes, other things by kind."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(getattr(value, "text", value))[:SHOWN_CHARS_MAX]
    if isinstance(value, str):
        text = one_line(value)
        return f'"{text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"}"'
    return kind(value)


def kind(value: object) -> str:
    """What sort of YAML value this is, with its article."""
    if value is None:
        return "empty"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    if isinstance(value, (list, tuple)):
        return "a list"
    return quoted(value)


def dotted(path: Path) -> str:
    """`models.qwen3.aliases[1]`; keys with dots or spaces in quotes."""
    out = ""
    for part in path:
        if isinstance(part, int):
            out += f"[{part}]"
            continue
        name = part if _BARE_KEY.fullmatch(part) else f'"{part}"'
        out += f".{name}" if out else name
    return one_line(out)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, or None."""
    names = list(known)
    by_plain = {_plain(each): each for each in names if _plain(each)}
    if _plain(name) in by_plain:
        return by_plain[_plain(name)]
    if len(names) > NAMES_COMPARED_MAX:
        return None
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=0.6)
    return by_plain.get(close[0], close[0]) if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean "x"?`, or what there is, or nothing."""
    names = sorted(known)
    meant = nearest(name, names)
    if meant is not None:
        return f" Did you mean {quoted(meant)}?"
    if 0 < len(names) <= 8:
        return f" Known here: {', '.join(one_line(each) for each in names)}."
    return ""


def looks_secret(name: str) -> bool:
    """Whether a variable or flag of this name probably holds a secret."""
    return _SECRET_NAME.search(name) is not None


@dataclass(slots=True)
class Report:
    """Collects problems and warnings while one file is read; secrets told to it never come out."""

    file: str
    keys: dict[Path, tuple[int, int]] = field(default_factory=dict)  # place -> line, column (from 1)
    problems: dict[tuple[int, Path, str], Problem] = field(default_factory=dict)
    paths: dict[tuple[int, Path, str], Path] = field(default_factory=dict)
    written: dict[Path, str] = field(default_factory=dict)  # place -> the synonym that was written for its last key
    above: set[Path] = field(default_factory=set)  # every place with a problem at it or below it
    warnings: dict[tuple[int, str], None] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)

    def spot(self, path: Path) -> tuple[int, int]:
        """Line and column of a place, or of the nearest place around it that was written."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.keys:
                return self.keys[path[:end]]
        return 1, 1

    def add(self, path: Path, message: str, line: int | None = None, column: int = 1) -> None:
        at, column = self.spot(path) if line is None else (line, column)
        key = (at, path, message)
        self.problems[key] = Problem(self.file, at, column, dotted(self.as_written(path)), message)
        self.paths[key] = path
        self.above.update(path[:end] for end in range(len(path) + 1))

    def warn(self, path: Path, message: str) -> None:
        line, _ = self.spot(path)
        place = f"{dotted(self.as_written(path))}: " if path else ""
        self.warnings[line, f"{self.file}:{line}: {place}{message}"] = None

    def as_written(self, path: Path) -> Path:
        """The path with the spelling people used."""
        return tuple(self.written.get(path[: end + 1], part) for end, part in enumerate(path)) if self.written else path

    def hide(self, secret: object) -> None:
        """Keep this value out of every message from now on."""
        text = str(getattr(secret, "text", secret)).strip()
        if len(text) >= SECRET_CHARS_MIN:
            self.secrets.add(text)
            if len(text) > SHOWN_CHARS_MAX:
                self.secrets.add(text[: SHOWN_CHARS_MAX - 1])  # as `quoted` cuts it

    def has(self, path: Path) -> bool:
        """Whether something at this place, or below it, was already reported."""
        return path in self.above

    def masked(self, text: str) -> str:
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, "***").replace(one_line(secret), "***")
        return text

    def _finished(self, problem: Problem) -> Problem:
        message = one_line(self.masked(problem.message))
        where = self.masked(problem.where) if problem.where.startswith("apiKeys[") else problem.where
        return Problem(one_line(problem.file), problem.line, problem.column, where, message)

    def first_by_model(self) -> dict[str, Problem]:
        """Model id -> the problem of it that stands first in the file."""
        first: dict[str, Problem] = {}
        for key, problem in sorted(self.problems.items(), key=lambda item: item[0][0]):
            path = self.paths[key]
            if len(path) > 1 and path[0] == "models":
                first.setdefault(str(path[1]), self._finished(problem))
        return first

    def sorted_problems(self) -> tuple[Problem, ...]:
        """All problems by line, each masked and one line long; at most PROBLEMS_MAX."""
        chosen = [self._finished(problem) for problem in self.problems.values()]
        chosen.sort(key=lambda p: (p.line, p.column, p.where, p.message))
        if len(chosen) > PROBLEMS_MAX:
            last = chosen[PROBLEMS_MAX - 1]
            more = Problem(last.file, last.line, last.column, "", f"{len(chosen) - PROBLEMS_MAX + 1} more problems follow.")
            chosen = [*chosen[: PROBLEMS_MAX - 1], more]
        return tuple(chosen)

    def sorted_warnings(self) -> tuple[str, ...]:
        return tuple(one_line(self.masked(text)) for _, text in sorted(self.warnings))
